"""Block names: repeated modules are found however a model holds them, and planned the same way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.analysis.block_names import block_names
from autopar.capture import capture


class Block(nn.Module):
    """Two products and what is between them, in one residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


class Listed(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(64) for _ in range(4)), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.log_softmax(self.head(x), dim=-1).mean()


class Numbered(nn.Module):
    """The same blocks in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3, self.block4 = (Block(64) for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block4(self.block3(self.block2(self.block1(x))))
        return functional.log_softmax(self.head(x), dim=-1).mean()


class Stages(nn.Module):
    """Lists in a list: stages of two widths, with two blocks each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleDict({"blocks": nn.Sequential(Block(w), Block(w))}) for w in (32, 64))
        self.widen = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.stages
        return second["blocks"](self.widen(first["blocks"](x)))


class Groups(Listed):
    """The same blocks in a list of two lists, as in networks for super-resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*self.blocks[place : place + 2]) for place in (0, 2))


class Experts(nn.Module):
    """One layer of a list, with equal experts side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList(Block(16) for _ in range(3))})])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.layers[0]["experts"]]).sum(0)


class Towers(nn.Module):
    """Two equal towers side by side, each of them a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(Block(16), Block(16)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.towers[0](x) + self.towers[1](y)


class Widths(nn.Module):
    """Attributes of one stem whose widths differ, as the halves of a U-Net do."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.widen, self.down2 = Block(16), nn.Linear(16, 32), Block(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down2(self.widen(self.down1(x)))


@pytest.mark.parametrize(
    "model, inputs, blocks",
    [
        (Listed(), 1, ["blocks.0", "blocks.1", "blocks.2", "blocks.3", ""]),
        (Numbered(), 1, ["block1", "block2", "block3", "block4", ""]),
        (Stages(), 1, ["stages.0.blocks.0", "stages.0.blocks.1", "", "stages.1.blocks.0", "stages.1.blocks.1"]),
        (Groups(), 1, ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", ""]),
        (Experts(), 1, ["layers.0", ""]),
        (Towers(), 2, ["towers.0.0", "towers.0.1", "towers.1.0", "towers.1.1", ""]),
        (Widths(), 1, ["down1", "", "down2"]),
        (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), 1, ["0", "1", "2"]),
    ],
    ids=["list", "attributes", "stages", "groups", "experts", "towers", "widths", "single layers"],
)
def test_blocks_are_found_in_lists_attributes_and_lists_of_lists(model: nn.Module, inputs: int, blocks: list[str]) -> None:
    width = next(model.parameters()).shape[-1]
    program = capture(model, tuple(torch.randn(4, width) for _ in range(inputs))).program
    names = block_names(program)
    assert list(dict.fromkeys(names.of(op.name) for op in program.ops)) == blocks


@pytest.mark.parametrize("options", [{}, {"recompute": "blocks"}, {"strategy": "fsdp"}], ids=str)
@pytest.mark.parametrize("other", [Numbered(), Groups()], ids=["attributes", "groups"])
def test_a_network_has_one_price_however_its_blocks_are_held(other: nn.Module, options: dict[str, str]) -> None:
    batch = torch.randn(64, 64)
    listed, found = (autopar.plan(model, batch, (2, 2), device="h100", **options) for model in (Listed(), other))
    assert found.step_time == pytest.approx(listed.step_time)
    assert found.peak_memory == pytest.approx(listed.peak_memory)
    assert len(found.recompute) == len(listed.recompute)


@pytest.mark.parametrize("other", [Numbered(), Groups()], ids=["attributes", "groups"])
def test_a_budget_that_needs_recomputation_is_kept_as_in_a_list(other: nn.Module) -> None:
    batch = torch.randn(4096, 64)
    budget = 0.45 * autopar.plan(Listed(), batch, (1,), device="h100").peak_memory
    listed, found = (autopar.plan(model, batch, (1,), device="h100", budget=budget) for model in (Listed(), other))
    assert found.step_time == pytest.approx(listed.step_time)
    assert found.recompute

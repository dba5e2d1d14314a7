"""Repeated blocks: members are alike, everything is in one class, and nothing is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.analysis.analysis import analyse
from autopar.analysis.repeated_blocks import fold
from autopar.analysis.signatures import signature
from autopar.capture import Captured, capture
from autopar.ir.mesh import Mesh
from autopar.ir.program import OUTPUT
from autopar.ir.training_step import TrainingStep
from tests.support import planning

Model = Callable[[], Captured]
MODELS: dict[str, Model] = {
    "layers": partial(planning.layers, 64, 32, 32, 32, 32),
    "llama": partial(planning.llama, 8, 32, 128, depth=4),
    "gpt2": partial(planning.gpt2, 8, 32, 64, depth=3),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_everything_is_in_one_class_and_the_members_are_alike(model: Model, repeated: bool) -> None:
    program = model().program
    classes = fold(program, repeated=repeated)
    names = [*(op.name for op in program.ops), *(OUTPUT + o.path for o in program.outputs)]
    names += [v.name for v in program.given]
    assert Counter(member for members in classes.members.values() for member in members) == Counter(names)
    for name, members in classes.members.items():
        assert members[0] == name
        assert all(classes.of[member] == name for member in members)
        if name in program.op:
            assert len({signature(program.op[member], program.values) for member in members}) == 1
    if not repeated:
        assert all(len(members) == 1 for members in classes.members.values())


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_use_of_every_value_is_in_its_class(model: Model) -> None:
    program = model().program
    classes = fold(program)
    assert Counter(m for v in classes.values for m in v.members) == Counter(list(program.values))
    uses: dict[str, Counter[tuple[str, int]]] = {name: Counter() for name in program.values}
    for op in program.ops:
        for position, operand in enumerate(op.operands):
            uses[operand][classes.of[op.name], position] += 1
    for output in program.outputs:
        uses[output.value][classes.of[OUTPUT + output.path], 0] += 1
    for value in classes.values:
        for member in value.members:
            assert Counter(value.consumers) == uses[member]
            producer = program.producer.get(member)
            assert value.producer == classes.of[member if producer is None else producer.name]


def test_equal_blocks_are_one_class() -> None:
    classes = fold(MODELS["llama"]().program)
    weight = "model.layers.{}.mlp.up_proj.weight"
    assert classes.members[weight.format(0)] == tuple(weight.format(i) for i in range(4))


def test_single_layers_in_a_row_stay_apart() -> None:
    """Each of a row of linear layers must be free to choose its side of a pair."""
    classes = fold(MODELS["layers"]().program)
    assert all(len(members) == 1 for members in classes.members.values())


def test_what_is_said_to_be_apart_is_apart() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    classes = fold(MODELS["llama"]().program, apart=lambda value: "other" if value == name else "")
    assert classes.members[name] == (name,)
    assert len(classes.members["model.layers.0.mlp.up_proj.weight"]) == 3


def test_the_values_between_blocks_are_grouped_by_all_their_consumers() -> None:
    """What the last block makes is read by the final norm, not by a block: a group of its own."""
    program = MODELS["llama"]().program
    groups = [
        len(v.members) for v in fold(program).values if v.example.startswith("model.layers.0") and "down_proj:" in v.example
    ]
    assert sum(groups) == 4


class Gated(nn.Module):
    """A layer that takes its input in two halves, between norms over which no split passes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = x.chunk(2, dim=-1)
        return functional.relu(self.norm(x + self.down(self.up(value * gate))))


def test_the_last_of_equal_layers_has_the_layouts_of_the_others_though_nobody_halves_its_result() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Gated(), Gated(), nn.Linear(16, 4))
    captured = capture(model, torch.randn(4, 16))
    analysis = analyse(TrainingStep(program=captured.program), Mesh.of(2))
    last = next(op for op in captured.program.ops if op.name == "2:relu#0")
    assert analysis.classes.of[last.name] == "1:relu#0"
    assert analysis.blocks[last.results[0].name] == ((1,), (1, 2))
    assert autopar.plan(model, torch.randn(4, 16), (2,), device="h100").step_time > 0


class Stochastic(nn.Module):
    """A layer that drops elements at a rate of its own, and its whole residual for some rows (G. Huang et al., "Deep Networks
    with Stochastic Depth", 2016), where rates rise from layer to layer."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.kept = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(rate), 1 - rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.floor(self.kept + torch.rand(x.shape[0], 1))
        return x + self.drop(self.down(functional.relu(self.up(x)))) / self.kept * rows


def test_layers_that_differ_in_how_much_they_drop_are_one_class() -> None:
    model = nn.Sequential(*(Stochastic(rate) for rate in (0.0, 0.1, 0.2, 0.3)))
    classes = fold(capture(model, torch.randn(4, 16)).program)
    assert classes.members["1.up.weight"] == ("1.up.weight", "2.up.weight", "3.up.weight")
    assert classes.members["0.up.weight"] == ("0.up.weight",), "what drops nothing draws nothing"

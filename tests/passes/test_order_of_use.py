"""Programs do not depend on a process's iteration order of string sets."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.ir.program import Program
from autopar.passes import normalise
from tests.capture import interpreter

X = torch.linspace(-1.0, 1.0, 32).view(4, 8)


class Rotary(nn.Module):
    """A table for each kind of attention, as transformers has them."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        for number, kind in enumerate(kinds):
            self.register_buffer(f"{kind}_frequencies", torch.linspace(0.1, 1.0 + number, 8), persistent=False)

    def forward(self, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[0], device=x.device)[:, None] * getattr(self, f"{kind}_frequencies")
        return angles.cos(), angles.sin()


class Layers(nn.Module):
    """Layers of two kinds, of which forward makes the tables in the order of its words."""

    kinds = ("sliding", "full", "chunked")

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.rotary = words, Rotary(self.kinds)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in self.kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = {kind: self.rotary(x, kind) for kind in self.words}
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            cos, sin = tables[kind]
            x = x + layer(x * cos) * sin
        return x


def program_of(model: nn.Module) -> Program:
    return normalise(capture(model, X).program)


def test_tables_have_one_order_whatever_that_of_the_words() -> None:
    orders = list(itertools.permutations(Layers.kinds))
    programs = [program_of(Layers(words)) for words in orders]
    assert len({program.structure for program in programs}) == 1
    first = programs[0].op["rotary:mul#0"]
    assert "rotary.sliding_frequencies" in first.operands, "the first layer takes it"
    for words in orders[2::3]:
        interpreter.check(Layers(words), X)
    assert autopar.verify(Layers(orders[-1]), X, mesh=2).ok


class Masked(nn.Module):
    """Attention of three kinds, of which forward makes the masks by functions of their own, with something unused beside."""

    kinds = ("sliding", "full", "chunked")

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = words
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in self.kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        place = torch.arange(x.shape[0], device=x.device)
        make = {
            "full": lambda: place[:, None] >= place,
            "sliding": lambda: (place[:, None] >= place) & (place[:, None] - 2 < place),
            "chunked": lambda: place[:, None] // 2 == place // 2,
        }
        masks = {}
        for kind in self.words:
            masks[kind] = make[kind]()
            _ = x * 2 if kind == "full" else x
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = x + (layer(x) @ x.T).masked_fill(~masks[kind], 0.0) @ x
        return x


def test_masks_have_one_order_whatever_that_of_the_words() -> None:
    orders = list(itertools.permutations(Masked.kinds))
    programs = [program_of(Masked(words)) for words in orders]
    assert len({program.hash for program in programs}) == 1
    for words in orders[2::3]:
        interpreter.check(Masked(words), X)


class Twice(nn.Module):
    """A module that is called twice, and then in a third way: in an order that matters, or with numbers drawn between."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5 if drops else 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.part(x)
        return self.part(first + 1) - self.part(first)


@pytest.mark.parametrize("drops", [False, True])
def test_calls_that_need_each_other_stay_where_they_are(drops: bool) -> None:
    model = Twice(drops=drops)
    program = program_of(model)
    assert [op.name for op in program.ops if op.name.startswith("part.0")] == [f"part.0:linear#{n}" for n in range(3)]
    if not drops:
        interpreter.check(model, X)


SCRIPT = """
import warnings
warnings.simplefilter("ignore")
import torch, transformers
from autopar.capture import capture
from autopar.passes import normalise
config = transformers.Gemma3TextConfig(
    num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64,
    vocab_size=128, sliding_window=8, layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
)
tokens = torch.randint(128, (4, 32))
print(*set(config.layer_types))
captured = capture(transformers.Gemma3ForCausalLM(config), {"input_ids": tokens, "labels": tokens})
print(normalise(captured.program).hash)
"""


def test_processes_have_one_program_of_a_model_of_transformers() -> None:
    """By these seeds the words "sliding_attention" and "full_attention" have both orders."""
    found, orders = set(), set()
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        *order, program = ran.stdout.split()
        found.add(program)
        orders.add(tuple(order))
    assert len(orders) == 2
    assert len(found) == 1

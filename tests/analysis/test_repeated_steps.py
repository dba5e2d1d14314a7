"""Repeated steps: a loop in `forward` is planned as one step with a count, at the same price as unrolled."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.analysis.analysis import analyse
from autopar.analysis.repeated_blocks import fold
from autopar.analysis.repeated_steps import repeated_steps
from autopar.analysis.signatures import signature
from autopar.cost_models.optimizers import OPTIMIZERS
from autopar.formulation.formulate import formulate
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.planning.optimize import solved
from autopar.planning.planner import Options, read_program
from autopar.runtime.threaded_ranks import ThreadedRanks
from benchmarks import loops
from tests.fuzz.trial import Setting, check
from tests.support import planning
from tests.support.table import mesh

LOOPS: dict[str, Callable[[int], nn.Module]] = {"scan": loops.scan, "rwkv": loops.rwkv, "cell": loops.cell, "rnn": loops.rnn}
each_loop = pytest.mark.parametrize("loop", LOOPS)


def words(batch: int, length: int = 4) -> dict[str, torch.Tensor]:
    return {"words": torch.randint(loops.WORDS, (batch, length)), "next_words": torch.randint(loops.WORDS, (batch, length))}


@functools.cache
def program(loop: str, length: int) -> Program:
    with torch.device("meta"):
        return read_program(LOOPS[loop](8), words(4, length)).program


class Custom(nn.Module):
    """Whatever a function computes of weights and an input."""

    def __init__(self, function: Callable[[nn.ParameterList, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(4, 4) for _ in range(6))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.weights, x).sum()


def steps_of(function: Callable[[nn.ParameterList, torch.Tensor], torch.Tensor]) -> Counter[str]:
    """How many later steps each op of a first step has."""
    with torch.device("meta"):
        captured = read_program(Custom(function), torch.rand(4, 4)).program
    return Counter(repeated_steps(captured).values())


def repeat(times: int, step: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i in range(times):
        x = step(x, i)
    return x


@pytest.mark.one_in(2)
@each_loop
def test_a_longer_loop_is_no_larger_problem(loop: str) -> None:
    def size(length: int) -> tuple[int, int]:
        on = mesh((2, 2))
        classes = fold(program(loop, length))
        problem = formulate(analyse(TrainingStep(program=program(loop, length)), on), on, OPTIMIZERS["adamw"]).problem
        return len(classes.members), sum(len(edge.seconds) * len(edge.consumers) for edge in problem.edges)

    assert size(6) == size(10)


@pytest.mark.one_in(2)
@each_loop
def test_steps_that_share_their_choices_cost_as_little_as_steps_that_choose_each_for_itself(loop: str) -> None:
    step, on, options = TrainingStep(program=program(loop, 4)), mesh((2,)), Options()
    shared, alone = (solved(analyse(step, on, repeated=repeated), on, options) for repeated in (True, False))
    assert shared.solution.seconds == pytest.approx(alone.solution.seconds, rel=1e-3)
    assert len(shared.formulated.problem.choices) < len(alone.formulated.problem.choices)


@each_loop
def test_members_are_alike_and_every_use_is_in_its_class(loop: str) -> None:
    found = program(loop, 5)
    classes = fold(found)
    uses: dict[str, set[tuple[str, int]]] = {name: set() for name in found.values}
    for op in found.ops:
        assert signature(op, found.values) == signature(found.op[classes.of[op.name]], found.values)
        for position, operand in enumerate(op.operands):
            uses[operand].add(classes.end(op.name, position))
    for value in classes.values:
        for member in value.members:
            assert uses[member] - {("output:0", 0)} == set(value.consumers) - {("output:0", 0)}


@pytest.mark.one_in(2)
@each_loop
@pytest.mark.filterwarnings("ignore")
def test_the_planned_loop_and_random_plans_compute_what_the_module_computes(loop: str) -> None:
    with ThreadedRanks() as world:
        assert check(lambda: LOOPS[loop](8), words, Setting(plans=("auto", 0)), world).equal == 2


def test_a_loop_that_ends_within_a_step_or_does_more_at_first_is_found() -> None:
    def function(w: nn.ParameterList, x: torch.Tensor) -> torch.Tensor:
        x = x @ w[1]
        for i in range(6):
            x = torch.relu(x @ w[0])
            if i < 5:
                x = x.sin()
        return x

    assert set(steps_of(function).values()) == {4, 5}


def test_a_loop_within_a_step_of_a_loop_is_found() -> None:
    def inner(x: torch.Tensor, _: int) -> torch.Tensor:
        return repeat(4, lambda y, _: y.sin(), x.cos())

    later = sum(steps_of(lambda w, x: repeat(4, inner, x)).values())
    assert 4 * 5 - later == 4  # the first cosine and its sines, the others and theirs


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x @ w[0] @ w[1] @ w[2] @ w[3] @ w[4] @ w[5],
        lambda w, x: repeat(6, lambda y, i: torch.relu(y @ w[i]), x),
        lambda w, x: ((x * w[0]) * (x * w[1])) * (x * w[2]),
        lambda w, x: torch.relu(x @ w[0]) + torch.relu((x + 1) @ w[0]),
        lambda w, x: repeat(3, lambda y, i: torch.cat([y, x]), x),
        lambda w, x: torch.stack([part.view(4, 2, 2).transpose(0, 1) for part in (x @ x.repeat(1, 3)).chunk(3, -1)]),
    ],
    ids=["other weights", "other weights in a loop", "no chain", "twice", "that grow", "three parts"],
)
def test_what_is_no_loop_of_equal_steps_is_not_folded(
    function: Callable[[nn.ParameterList, torch.Tensor], torch.Tensor],
) -> None:
    assert not steps_of(function)


def test_layers_called_again_and_again_share_their_choices() -> None:
    """ALBERT runs one layer several times."""
    layer = planning.Layers((8, 8, 8))

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layer.layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                for one in self.layers:
                    x = torch.relu(one(x))
            return x.sum()

    captured = read_program(Shared(), torch.rand(4, 8)).program
    calls = {name: len(names) for name, names in fold(captured).members.items() if name in captured.op}
    assert sorted(calls.values()) == [1, 1, 3, 4, 4, 4]  # the first product of all has an operand without a gradient

"""Stages in sequence equal the program, in value and gradient; values that cross a cut, are recomputed, or are shared."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping

import pytest
import torch
from torch import nn

from autopar.analysis.weights import casts as casts_of
from autopar.capture import capture
from autopar.errors import ConstraintError
from autopar.ir.program import Program
from autopar.passes import normalise
from autopar.passes.no_dropout import without_dropout
from autopar.passes.stage_regions import fine_starts, made_again, stage_starts
from autopar.passes.stages import Stage, cut, shared_parameters
from autopar.passes.to_float64 import promote
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from autopar.verify.reference import differentiated_sum
from examples.zoo_models import make
from tests.capture import interpreter
from tests.passes.programs import targets
from tests.support.golden import Golden

Tensors = dict[str, torch.Tensor]
MODELS = "gpt2 bert t5 vit whisper mixtral mamba2 resnet unet clip recommender".split()


@functools.cache
def example(name: str) -> tuple[Program, Tensors]:
    """A model's program in float64 without dropout, and what it is given."""
    model, sample = make(name)
    captured = read_program(model, sample)
    inputs = captured.signature.bind((), sample)
    model.double()
    made = promote(without_dropout(captured.program))
    tensors = interpreter.held(made, model)
    for value, tensor in zip(made.inputs, inputs, strict=True):
        tensors[value.name] = tensor.to(value.dtype)
    return made, tensors


def fresh(program: Program, tensors: Tensors) -> Tensors:
    """Leaves of their own for what a program is given; only those with a gradient require one."""
    return {
        v.name: tensors[v.name].detach().clone().requires_grad_(v.requires_grad) for v in program.given if v.name in tensors
    }


def gradients(given: Tensors) -> Tensors:
    return {name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}


def whole(program: Program, tensors: Tensors) -> tuple[list[torch.Tensor], Tensors]:
    """The outputs of a program, and the gradients of what it is given."""
    given = fresh(program, tensors)
    outputs = interpreter.run(program, given)
    loss = differentiated_sum(outputs)
    assert loss is not None
    loss.backward()
    return outputs, gradients(given)


def in_sequence(stages: tuple[Stage, ...], tensors: Tensors) -> tuple[list[torch.Tensor], Tensors]:
    """The outputs of the last stage, and gradients added up over stages; what crosses is detached, its gradient sent back."""
    sent: Tensors = {}
    ran: list[tuple[Stage, Tensors, list[torch.Tensor]]] = []
    for stage in stages:
        assert set(stage.received) == set(sent)
        given = fresh(stage.program, tensors | sent)
        outputs = interpreter.run(stage.program, given)
        ran.append((stage, given, outputs))
        sent = {name: tensor.detach() for name, tensor in zip(stage.sent, outputs, strict=False)}
    loss = differentiated_sum(ran[-1][2])
    assert loss is not None
    loss.backward()
    total: Tensors = {}
    back: Mapping[str, torch.Tensor] = {}
    for stage, given, outputs in reversed(ran):
        pairs = [(tensor, back[name]) for name, tensor in zip(stage.sent, outputs, strict=False) if name in back]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
        found = gradients(given)
        back = {name: found.pop(name) for name in stage.received if name in found}
        for name, gradient in found.items():
            total[name] = total[name] + gradient if name in total else gradient
    return ran[-1][2], total


def every_number_of_stages(count: int) -> Iterator[list[int]]:
    """Even cuts into every number of stages, and uneven ones into two."""
    found = [[place * count // stages for place in range(stages)] for stages in range(1, count + 1)]
    found += [[0, place] for place in range(1, count)]
    yield from (list(starts) for starts in dict.fromkeys(map(tuple, found)))


def count_of(made: Program) -> int:
    return len(stage_starts(made))


def regions_of(made: Program, numbers: Iterable[int]) -> list[int]:
    """The first ops of these regions."""
    return [stage_starts(made)[number] for number in numbers]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_stages_in_sequence_are_the_program(name: str) -> None:
    made, tensors = example(name)
    outputs, expected = whole(made, tensors)
    assert count_of(made) >= 2
    for starts in every_number_of_stages(count_of(made)):
        stages = cut(made, regions_of(made, starts))
        found, total = in_sequence(stages, tensors)
        torch.testing.assert_close(found, outputs, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(total, expected, atol=1e-12, rtol=1e-12)
        for stage, following in itertools.pairwise(stages):
            assert stage.sent == following.received
        again = made_again(made)
        ran = [op.name for stage in stages for op in stage.program.ops if op.name not in again]
        assert ran == [op.name for op in made.ops if op.name not in again]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_cut_into_itself_by_no_cut(name: str) -> None:
    made, _ = example(name)
    (stage,) = cut(made, [0])
    assert targets(stage.program) == targets(made)
    assert stage.program.outputs == made.outputs
    assert not stage.received
    assert not stage.sent


CROSSING = {"gpt2": (1, 1), "bert": (1, 1), "vit": (1, 1), "resnet": (1, 2), "mamba2": (1, 1), "whisper": (1, 2), "t5": (1, 3)}


@pytest.mark.parametrize("name", CROSSING)
def test_few_values_cross_each_cut(name: str) -> None:
    """The stream of a transformer and nothing beside it; of T5 and Whisper the encoder's output and positions too.

    A block of ResNet that makes more channels of its input adds that to them in the end.
    """
    made, _ = example(name)
    counts = [len(stage.sent) for stage in cut(made, stage_starts(made))[:-1]]
    assert (min(counts), max(counts)) == CROSSING[name]


@pytest.mark.parametrize("name, uses", [("gpt2", 2), ("t5", 3), ("vit", 0)])
def test_a_tied_parameter_is_stored_by_each_stage_that_reads_it(name: str, uses: int) -> None:
    made, _ = example(name)
    shared = shared_parameters(cut(made, stage_starts(made)))
    assert max(map(len, shared.values()), default=0) == uses


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_stages_of_a_model_are_the_golden_ones(name: str, golden: Golden) -> None:
    model, sample = make(name)
    made = read_program(model, sample).program
    stages = cut(made, regions_of(made, [0, count_of(made) // 3, 2 * count_of(made) // 3]))
    texts = [f"stage {n}\n{stage.program}\n" for n, stage in enumerate(stages)]
    golden.check(f"stages_{name}.txt", "\n".join([*texts, f"shared {shared_parameters(stages)}\n"]))


class Block(nn.Module):
    """Two products with masks between them, and perhaps a norm."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), norm or nn.Identity()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x) * mask * drawn))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Two blocks with a mask that is computed and one that is drawn, the same in both."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(norm) for _ in range(2))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        mask, drawn = (t != 0).to(x.dtype)[:, None], torch.rand(8)
        for layer in self.layers:
            x = layer(x, mask, drawn)
        return x.square().sum()


def blocks(norm: nn.Module | None = None) -> Program:
    return normalise(capture(Blocks(norm), (torch.randn(4, 6), torch.arange(4))).program)


def test_masks_are_made_again_and_what_is_drawn_is_sent() -> None:
    made = blocks()
    first, second = cut(made, regions_of(made, [0, 1]))
    assert [name.split(":")[-1] for name in first.sent] == ["rand#0", "linear#0"]
    assert "ne.Scalar" in targets(first.program)
    assert "ne.Scalar" in targets(second.program)
    assert "rand.default" in targets(first.program)
    assert "rand.default" not in targets(second.program)
    assert [value.name for value in second.program.inputs] == ["t", *first.sent]


def test_a_weight_is_cast_by_each_stage_that_reads_it() -> None:
    model, sample = make("gpt2")
    made = read_program(model, sample, Options(precision="bf16-mixed")).program
    stages = cut(made, stage_starts(made))
    casts = ["transformer.wte.weight" in [op.operands[0] for op in stage.program.ops if casts_of(op)] for stage in stages]
    assert casts == [True, *[False] * (len(stages) - 2), True]
    assert all(len(stage.sent) == 1 for stage in stages[:-1])


def test_a_buffer_that_two_stages_write_is_refused_and_no_region_begins_between() -> None:
    made = blocks(nn.BatchNorm1d(6))
    second = next(place for place, op in enumerate(made.ops) if op.module.startswith("layers.1"))
    assert not any(made.ops[place].module.startswith("layers.1") for place in fine_starts(made))
    cut(made, [0])
    with pytest.raises(ConstraintError, match="is written by one stage of the pipeline and read by another"):
        cut(made, [0, second])


def test_starts_that_are_not_are_refused() -> None:
    made, _ = example("gpt2")
    count = len(made.ops)
    for starts in ([], [1], [0, 0], [0, 2, 1], [0, count], [-1, 0]):
        with pytest.raises(ConstraintError, match="the stages of a pipeline cannot begin with operators"):
            cut(made, starts)

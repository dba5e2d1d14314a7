"""Buckets: every weight is in one, none is too large, blocks stay apart where weights move, and every step is sent once."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.analysis.weight_buckets import LIMIT, SPARE, weight_buckets
from autopar.analysis.weights import copies
from autopar.capture import Captured, capture
from autopar.ir.conversion import Conversion
from autopar.ir.layout import I, Layout, P, R, split
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.operators import fit
from autopar.plan.assignment_text import resolve
from autopar.plan.options import Options
from autopar.search_space.buckets import Bucket, bucketed
from autopar.verify.testing import random_plan_of
from tests.support import models, planning
from tests.support.planning import NETWORK, NVLINK, mesh

Model = Callable[[], Captured]
MODELS: dict[str, Model] = {
    "layers": partial(planning.layers, 64, *[2048] * 8, 8192, 2048),
    "llama": partial(planning.llama, 8, 32, 128, depth=4),
    "tied llama": partial(planning.llama, 8, 32, 128, depth=2, tied=True),
    "gpt2": partial(planning.gpt2, 8, 32, 64, depth=3),
    "wide gpt2": partial(planning.gpt2, 1, 64, 4096),
}
Route = tuple[Conversion, ...]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_parameter_that_is_read_is_in_one_bundle_in_the_order_of_first_use(model: Model, moved: bool) -> None:
    program = model().program
    weights = {p.value.name for p in program.parameters}
    read = dict.fromkeys(name for op in program.ops for name in op.operands if name in weights)
    assert [name for names in weight_buckets(program, moved=moved) for name in names] == list(read)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_bundle_outside_of_blocks_is_full_or_the_last_one_and_never_too_large(model: Model, moved: bool) -> None:
    program = model().program
    for names, after in itertools.pairwise([*weight_buckets(program, moved=moved), ()]):
        sizes = [program.values[name].bytes for name in names]
        if not moved or not re.search(r"\.\d+\.", names[0]):
            assert sum(sizes) <= max(LIMIT, *sizes) * (1 + SPARE)
        if not moved and after:
            assert sum(sizes) + program.values[after[0]].bytes > LIMIT


class Stage(nn.Module):
    """A block with a linear layer of 32 MiB and its bias; `inside` blocks in it; `extra` weights that its siblings may lack."""

    def __init__(self, width: int, inside: int = 0, extra: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Stage(width) for _ in range(inside))
        self.scale = nn.Parameter(torch.ones(width)) if extra else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x).relu() * self.scale
        for block in self.blocks:
            x = block(x)
        return x


class Stack(nn.Module):
    """Stages one after the other, each on as much of the features as it takes."""

    def __init__(self, *stages: Callable[[], Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(make() for make in stages)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x[:, : stage.fc.in_features])
        return x.sum()


WIDE, HALF = 2896, 1448  # 32 and 8 MiB of float32
STACKS = {
    "one block is not like the others": ([partial(Stage, WIDE, extra=True), *[partial(Stage, WIDE)] * 2], [3, 2, 2]),
    "blocks in stages that are alike": ([partial(Stage, WIDE, 2)] * 2, [6, 6]),
    "blocks in stages that differ": ([partial(Stage, WIDE), partial(Stage, HALF, 2)], [2, 2, 2, 2]),
    "no two blocks alike": ([partial(Stage, WIDE), partial(Stage, HALF), partial(Stage, HALF, 1)], [2, 6]),
}


@pytest.mark.parametrize("stages, expected", STACKS.values(), ids=STACKS)
def test_the_weights_of_a_block_are_one_bundle_of_any_size_and_biases_go_with_their_weights(
    stages: list[Callable[[], Stage]], expected: list[int]
) -> None:
    """A block is a child of the outermost container of which two children have the same weights."""
    with torch.device("meta"):
        program = capture(Stack(*stages), torch.zeros(2, WIDE)).program
    assert [len(names) for names in weight_buckets(program, moved=True)] == expected


def test_blocks_share_a_bundle_unless_their_weights_move() -> None:
    program = MODELS["llama"]().program
    apart = weight_buckets(program, moved=True)
    blocks = [tuple(dict.fromkeys(name.rpartition(".layers.")[2].partition(".")[0] for name in names)) for names in apart]
    assert blocks == [("model",), ("0",), ("1",), ("2",), ("3",), ("model", "lm_head")]
    assert weight_buckets(program, moved=False) == (tuple(itertools.chain(*apart)),)


def test_copies_of_weights_travel_together_apart_from_what_stays_wide() -> None:
    program = models.captured("gpt2", "bf16-mixed").program
    cast = copies(program)
    apart = weight_buckets(program, moved=True)
    assert {len({name in cast for name in names}) for names in apart} == {1}
    first = next(names for names in apart if cast.get(names[0]) == "transformer.h.0.attn.c_attn.bias")
    assert len(first) == 8, "a weight and a bias of each of the four products of a block"


def test_layers_of_8_mib_are_alone_where_they_move_and_three_in_a_bundle_where_not() -> None:
    program = MODELS["layers"]().program
    assert [len(names) for names in weight_buckets(program, moved=True)] == [1] * 9
    assert [len(names) for names in weight_buckets(program, moved=False)] == [3, 3, 1, 1, 1]


class Mixed(nn.Module):
    """Two types, and a weight that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.zeros(4, 4)) for _ in range(4))
        self.a.requires_grad_(False)
        self.c.data = self.c.data.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(F.linear(F.linear(x, self.a), self.b).double(), self.c).float(), self.d).sum()


@pytest.mark.parametrize("moved", [False, True])
def test_what_differs_in_type_or_in_having_a_gradient_is_apart(moved: bool) -> None:
    program = capture(Mixed(), torch.zeros(2, 4)).program
    assert weight_buckets(program, moved=moved) == (("a",), ("b", "d"), ("c",))


def routes_of(model: str, strategy: str, seed: int) -> tuple[Program, dict[str, Route], frozenset[tuple[str, Conversion]]]:
    """The routes of the weights in a plan on two axes, and the steps that run again."""
    captured, on = MODELS[model](), mesh((2, 4), NETWORK, NVLINK)
    options = Options(strategy=strategy)
    made = random_plan_of if strategy == "random" else lambda *_: planning.plan(captured, on, strategy=strategy)
    plan = made(captured, on, seed, options)
    program = captured.program
    assignment = resolve(plan, TrainingStep(program=program), {op.name: fit(op, program.values) for op in program.ops})
    weights = {p.value.name for p in program.parameters}
    return program, {name: route for name, route in assignment.routes.items() if name in weights}, assignment.recompute.steps


def path(route: Route, step: Conversion) -> list[Conversion]:
    """A step and those that lead to it, the last one first."""
    before = next((other for other in route if other.target == step.source), None)
    return [step, *(path(route, before) if before else ())]


PLANS = [(strategy, 0) for strategy in ("auto", "ddp", "fsdp", "megatron")] + [("random", seed) for seed in range(3)]


def sends(step: Conversion) -> bool:
    """Whether a step is one that weights share a message for."""
    there, back = step.primitives
    return there == "all_gather" or back in ("all_reduce", "reduce_scatter")


def level_of(name: str, step: Conversion, found: Sequence[Bucket]) -> int:
    """The level at which a weight makes a step."""
    (level,) = (one.level for one in found if (name, step) in one.steps)
    return level


@pytest.mark.one_in(8)
@pytest.mark.parametrize("strategy, seed", PLANS)
@pytest.mark.parametrize("model", ["llama", "gpt2", "layers"])
def test_every_step_of_every_weight_travels_once_with_others_of_its_kind_level_and_bundle(
    model: str, strategy: str, seed: int
) -> None:
    program, routes, recompute = routes_of(model, strategy, seed)
    found = bucketed(program, routes, recompute)
    assert Counter(pair for one in found for pair in one.steps) == Counter((n, s) for n, route in routes.items() for s in route)
    kinds = []
    for one in found:
        ways = {any(s.primitives[0] != "identity" for s in path(routes[name], step)) for name, step in one.steps}
        assert len(ways) == 1
        (moved,) = ways
        (number,) = {
            i for i, names in enumerate(weight_buckets(program, moved=moved)) for name, _ in one.steps if name in names
        }
        assert {(s.axis, s.primitives) for _, s in one.steps} == {(one.axis, one.primitives)}
        (kept,) = {pair not in recompute for pair in one.steps}
        turns = set[int]()
        for name, step in one.steps:
            way = [*reversed(path(routes[name], step))]
            *before, last = (turn.axis for turn in way)
            in_turn = not moved and [*before, last] == sorted({*before, last})
            levels = [level_of(name, turn, found) for turn in way]
            assert one.level == last if in_turn else levels == sorted({*levels})
            turns.add(-1 if in_turn else sum(map(sends, way)))
        if any(sends(step) for _, step in one.steps):
            (messages,) = turns  # as many for each weight, or all in the order of axes
            kinds.append((moved, number, messages, one.axis, one.primitives, kept))
        else:
            assert len(one.steps) == 1, "what shares no message is alone"
    assert len(set(kinds)) == len(kinds), "what could travel together does"


def test_weights_meet_though_one_is_cut_before_it_is_gathered_and_another_one_after() -> None:
    program = MODELS["llama"]().program
    first, second, *_ = next(names for names in weight_buckets(program, moved=True) if len(names) > 1)
    part = split(0, 1)

    def way(*layouts: Layout) -> Route:
        changed = [next(axis for axis in (0, 1) if one[axis] != other[axis]) for one, other in itertools.pairwise(layouts)]
        steps = zip(changed, layouts[:-1], layouts[1:], strict=True)
        return tuple(Conversion(axis=axis, source=source, target=target) for axis, source, target in steps)

    routes = {first: way((part, I), (R, I), (R, P)), second: way((part, I), (part, P), (R, P))}
    found = bucketed(program, routes, frozenset())
    assert [[name for name, _ in one.steps] for one in found if one.primitives[0] == "all_gather"] == [[first, second]]
    for name, route in routes.items():
        levels = [level_of(name, step, found) for step in route]
        assert levels == sorted({*levels})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("strategy, seed", PLANS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_bundles_come_in_the_order_of_first_use_and_level(model: str, strategy: str, seed: int) -> None:
    program, routes, recompute = routes_of(model, strategy, seed)
    first = {name: place for place, name in enumerate(itertools.chain(*weight_buckets(program, moved=True)))}
    order = [(first[one.steps[0][0]], one.level) for one in bucketed(program, routes, recompute)]
    assert order == sorted(order)
    for one in bucketed(program, routes, recompute):
        places = [first[name] for name, _ in one.steps]
        assert places == sorted(places)

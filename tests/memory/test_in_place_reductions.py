"""All-reduces of tensor parallelism write to their input if nothing else needs it, and only then."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.memory.in_place_reductions import reduced_in_place
from autopar.plan.options import Options
from autopar.plan.resolved import read_plan
from autopar.planning.planner import connected_mesh, read_program
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.search_space.assignment import RecomputeChoice
from autopar.verify.testing import random_plan

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """Three layers, and what is made of them."""

    def __init__(self, form: Forward) -> None:
        super().__init__()
        self.whole, self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(self, x).square().sum()


PARTIAL = {"first.weight": "S(1)", "first:linear#0": "P"}
SPLIT = {"whole.weight": "I", "whole:linear#0": "I", "first.weight": "S(0)", "first:linear#0": "S(1)"}
VIEWS = {":reshape#0": "P", ":t#0": "P"}
CASES: dict[str, tuple[Forward, Mapping[str, str], set[str]]] = {
    "product": (lambda m, x: m.first(x).relu(), PARTIAL, {"first:linear#0"}),
    "view": (lambda m, x: m.first(x).view(2, 2, 8).relu(), PARTIAL, {":reshape#0"}),
    "read twice": (lambda m, x: (y := m.first(x)).relu() + y * 2, PARTIAL | {":mul#0": "P"}, set()),
    "viewed twice": (lambda m, x: (y := m.first(x)).view(32).relu() + y.t().relu().reshape(32), PARTIAL | VIEWS, set()),
    "gradient": (lambda m, x: m.first(m.whole(x)), SPLIT, {"whole:linear#0"}),
    "gradient of a view": (lambda m, x: m.first(m.whole(x)[:2]), SPLIT | {":slice#0": "R"}, {"whole:linear#0"}),
    "two products": (
        lambda m, x: m.first(y := m.whole(x)) + m.second(y),
        SPLIT | {"second.weight": "S(0)", "second:linear#0": "S(1)"},
        {"whole:linear#0"},
    ),
    "not by a product": (
        lambda m, x: m.first(y := m.whole(x)) + torch.cat([y[:, :4], y[:, 4:]], 1),
        SPLIT | {":cat#0": "R"},
        set(),
    ),
}


class Reductions(TorchDispatchMode):
    """Counts the all-reduces that run: those in place, and those into another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
def test_what_is_reduced_in_place_is_what_nothing_else_knows(case: str) -> None:
    form, constraints, expected = CASES[case]
    model, x = Layers(form), torch.randn(4, 8)
    plan = autopar.plan(model, (x,), (2,), device="h100", constraints=constraints)
    resolved = read_plan(plan, read_program(model, (x,)).program, connected_mesh(plan.mesh, Options(device="h100")))
    found = reduced_in_place(resolved.program, resolved.assignment, resolved.analysis.fits)
    assert {name for name, _ in found} == expected


@pytest.mark.parametrize("case", ["product", "view"])
def test_what_runs_again_or_lies_on_the_host_is_not_reduced_in_place(case: str) -> None:
    form, constraints, expected = CASES[case]
    model, x = Layers(form), torch.randn(4, 8)
    plan = autopar.plan(model, (x,), (2,), device="h100", constraints=constraints, recompute="none")
    resolved = read_plan(plan, read_program(model, (x,)).program, connected_mesh(plan.mesh, Options(device="h100")))
    (name,) = expected
    (step,), product = resolved.assignment.routes[name], "first:linear#0"  # whose memory a view has too
    layout = resolved.assignment.produced(product, resolved.program)
    choices = RecomputeChoice(ops=frozenset([product])), RecomputeChoice(steps=frozenset([(name, step)]))
    for recompute in (*choices, RecomputeChoice(offload=frozenset([(product, layout)]))):
        chosen = replace(resolved.assignment, recompute=recompute)
        assert not reduced_in_place(resolved.program, chosen, resolved.analysis.fits)


def test_the_sum_over_one_axis_that_runs_again_is_not_written_to_by_the_sum_over_another() -> None:
    """The backward would make the first sum again, in the place of both."""
    model, x = Layers(lambda m, x: m.first(x).relu()), torch.randn(4, 8)
    constraints = {"first.weight": "S(1), S(1)", "first:linear#0": "P, P"}
    plan = autopar.plan(model, (x,), (2, 2), device="h100", constraints=constraints, recompute="none")
    resolved = read_plan(plan, read_program(model, (x,)).program, connected_mesh(plan.mesh, Options(device="h100")))
    name, route = "first:linear#0", resolved.assignment.routes["first:linear#0"]
    first, second = (step for step in route if step.primitives[0] == "all_reduce")
    for again, expected in ((), {(name, first), (name, second)}), ((first,), set()), ((second,), {(name, first)}):
        recompute = RecomputeChoice(steps=frozenset((name, step) for step in again))
        chosen = replace(resolved.assignment, recompute=recompute)
        assert reduced_in_place(resolved.program, chosen, resolved.analysis.fits) == expected


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(self.first(x), dim=1).sum()


def test_numbers_are_those_of_the_plain_module_where_one_of_two_sums_runs_again() -> None:
    model, x = Norms(), torch.randn(4, 8)
    plan = random_plan(model, (x,), (2, 2), 195)
    resolved = read_plan(plan, read_program(model, (x,)).program, connected_mesh(plan.mesh, Options(device="h100")))
    route = resolved.assignment.routes["first:linear#0"]
    again = [("first:linear#0", step) in resolved.assignment.recompute.steps for step in route]
    assert ([step.primitives[0] for step in route], again) == (["all_reduce", "all_reduce"], [True, False])
    assert autopar.verify(model, (x,), (2, 2), plan=plan).ok


def trained(case: str) -> Counter[str]:
    """Loss and gradients beside those of the plain module; the operators of the parallel one's step."""
    form, constraints, _ = CASES[case]
    torch.manual_seed(0)
    model, x = Layers(form).double(), torch.randn(4, 8, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(model), x, (2,), device="h100", constraints=constraints)
    with Reductions() as seen:
        loss = parallel(x)
        loss.backward()
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for name, weight in model.named_parameters():
        gradient = parallel.get_parameter(name).grad
        if weight.grad is not None:
            torch.testing.assert_close(full_tensor(gradient), weight.grad, rtol=1e-12, atol=1e-12)
    return seen.counts


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_plain_module(pool: WorkerPool, case: str) -> None:
    for counts in pool.run(f"{__name__}:trained", case, ranks=2, keep=True):
        assert isinstance(counts, Counter)
        assert bool(counts["_c10d_functional::all_reduce_"]) == bool(CASES[case][2])

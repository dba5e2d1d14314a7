"""Every operator of the rule table has a price, and its saved tensors are known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autopar.analysis.saved_tensors import saved
from autopar.cost_models import catalog
from autopar.cost_models.compute import pricer
from autopar.ir.layout import local_shape
from autopar.ir.program import Op, Value
from autopar.operators import RULES, fit, row_of, view_of
from autopar.operators.call import Call
from autopar.operators.checking.execution_check import trials
from tests.operators.drawing import differentiable
from tests.operators.examples import EXAMPLES, calls


def trained(target: str) -> Iterator[tuple[Op, dict[str, Value]]]:
    """The examples of an operator, as ops that need a gradient where they can have one."""
    for op, values in calls(target):
        grad = any(values[name].requires_grad for name in op.operands)
        results = (replace(r, requires_grad=grad and differentiable(r)) for r in op.results)
        yield replace(op, results=tuple(results)), values


@pytest.mark.parametrize("target", sorted(EXAMPLES))
def test_the_forward_reads_its_operands_and_writes_its_results(target: str) -> None:
    """Bytes of real tensors; a view moves nothing, and of what an op picks from it reads as much as it picks."""
    for example in EXAMPLES[target]:
        op, values, tensors = example.build(target)
        if view_of(op, values):
            continue
        picked = [tensors[op.operands[p]] for p in Call.of(op, values).positions(row_of(op).picks)]
        results = sum(result.bytes for result in op.results)
        moved = sum(tensors[name].nbytes for name in op.operands) + results
        moved += sum(results - tensor.nbytes for tensor in picked)
        shapes = [values[name].shape for name in op.operands], [result.shape for result in op.results]
        work = pricer(op, values, catalog.device("h100")).forward(*shapes)
        assert (work.bytes, work.kernels) == (moved, 1)


@pytest.mark.parametrize("target", sorted(EXAMPLES))
def test_a_part_of_an_op_costs_and_keeps_no_more_than_the_whole(target: str) -> None:
    device = catalog.device("h100")
    for op, values in trained(target):
        fitted = fit(op, values)
        assert fitted is not None
        price, kept = pricer(op, values, device), saved(op, values)
        operands, results = [values[name].shape for name in op.operands], [result.shape for result in op.results]
        whole = price(operands, results)
        assert math.isfinite(whole)
        for trial in trials(fitted):
            inside, outside = trial.layouts(fitted)
            held = [local_shape(shape, layout, trial.sizes) for shape, layout in zip(operands, inside, strict=True)]
            made = [local_shape(shape, layout, trial.sizes) for shape, layout in zip(results, outside, strict=True)]
            assert 0 <= price(held, made) <= whole
            if not view_of(op, values):  # of a view that repeats elements, each rank may have a part that repeats none
                assert math.prod(trial.sizes) * price(held, made) >= whole * (1 - 1e-9), "parts that do less than the whole"
            assert 0 <= kept.local_internal(held, made) <= kept.internal_bytes


@pytest.mark.parametrize("target", sorted(target for target, rule in RULES.items() if rule.hands_on))
def test_a_gradient_is_handed_on_as_autograd_hands_it_on(target: str) -> None:
    for op, values in trained(target):
        call = Call.of(op, values)
        said = {p for name in RULES[target].hands_on for p in call.positions(name)}
        alike = {p for p, value in enumerate(call.operands) if value.shape == op.results[0].shape}
        if call.arguments.get("alpha", 1) == 1:
            assert said & alike == set(saved(op, values).through) & alike

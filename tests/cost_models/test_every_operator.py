"""Every operator of the rule table has a price, and it is known what autograd keeps of it."""

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
from autopar.operators import fit
from autopar.operators.checking.execution_check import trials
from tests.operators.drawing import differentiable
from tests.operators.examples import EXAMPLES


def trained(target: str) -> Iterator[tuple[Op, dict[str, Value]]]:
    """The examples of an operator, as ops that need a gradient where they can have one."""
    for example in EXAMPLES[target]:
        op, values, _ = example.build(target)
        grad = any(values[name].requires_grad for name in op.operands)
        results = (replace(r, requires_grad=grad and differentiable(r)) for r in op.results)
        yield replace(op, results=tuple(results)), values


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
            assert 0 <= kept.local_internal(held, made) <= kept.internal_bytes

"""Replacements for random numbers are split like the draws, and are possible draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.ir.program import Program
from autopar.operators import fit, row_of
from autopar.operators.certain_draws import certain_classes
from autopar.operators.checking.execution_check import check
from autopar.passes.no_dropout import DRAWS, without_dropout
from tests.operators.examples import EXAMPLES, Example

DRAWING = [
    (target, example)
    for target, examples in sorted(EXAMPLES.items())
    for example in examples
    if row_of(example.build(target)[0]).kind in DRAWS and target != "aten.randperm.default"  # which is never split
]


@pytest.mark.parametrize("target, example", DRAWING, ids=[target for target, _ in DRAWING])
def test_the_constant_in_the_place_of_a_draw_has_its_factors(target: str, example: Example) -> None:
    op, values, tensors = example.build(target)
    program = Program(ops=(op,), inputs=tuple(values[name] for name in op.operands), parameters=(), buffers=(), outputs=())
    (certain,) = without_dropout(program).ops
    before, after = fit(op, values), fit(certain, values)
    assert before
    assert after
    assert replace(before, random=False) == replace(after, linear=before.linear)
    check(certain, values, tensors)


@pytest.mark.parametrize("weights", [[0.0, 2.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [[0.0, 0.0, 0.0, 3.0], [1.0, 0.0, 2.0, 0.0]]])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_certain_classes_are_legal_and_differ_as_long_as_there_are_others(weights: list[object], number: int) -> None:
    given = torch.tensor(weights)
    found = certain_classes(given, number)
    assert found.shape == (*given.shape[:-1], number)
    assert bool((given.gather(-1, found) > 0).all())
    for row, positive in zip(found.reshape(-1, number).tolist(), (given > 0).sum(-1).reshape(-1).tolist(), strict=True):
        assert len(set(row)) == min(number, positive)

"""Checks a second law of rules, with unequal parts: one third of a factor and the rest, joined, give the whole.

A wrong rule that holds for halves by accident (a mean in place of a sum, say) fails here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.errors import RuleError
from autopar.operators.checking.execution_check import agree
from autopar.operators.checking.sample_call import Example
from autopar.operators.rule import Dims, OpSharding

SHARES = (0.7, 0.3)  # how an operand that is added once is divided between the parts


def joins_unevenly(example: Example, fitted: OpSharding, *, averages: bool) -> bool:
    """Whether every splittable factor that is outermost in all its dims can be split into unequal parts."""
    return all(
        _joins(example, fitted, number, averages)
        for number, factor in enumerate(fitted.factors)
        if not factor.whole and factor.size > 2 and _outermost(fitted, number)
    )


def _outermost(fitted: OpSharding, factor: int) -> bool:
    dims = [dim for tensor in (*fitted.operands, *fitted.results) for dim in tensor if factor in dim]
    return all(dim[0] == factor for dim in dims)


def _joins(example: Example, fitted: OpSharding, factor: int, averages: bool) -> bool:
    size = fitted.factors[factor].size
    first = max(1, size // 3)
    runs = []
    for start, count, share in zip((0, first), (first, size - first), SHARES, strict=True):
        given = [
            _part(tensor, dims, factor, size, start, count, share if i in fitted.added and factor in fitted.summed else 1.0)
            for i, (tensor, dims) in enumerate(zip(example.tensors.values(), fitted.operands, strict=True))
        ]
        try:
            runs.append(example.on(given).results)
        except RuleError:
            return False
    weights = [first / size, 1 - first / size] if averages else [1.0, 1.0]
    pieces = zip(*runs, strict=True)
    return all(
        agree(_whole(pair, dims, factor, weights), expected, example.tensors.values())
        for pair, dims, expected in zip(pieces, fitted.results, example.results, strict=True)
    )


def _place(dims: Dims, factor: int) -> int | None:
    return next((d for d, dim in enumerate(dims) if factor in dim), None)


def _part(tensor: torch.Tensor, dims: Dims, factor: int, size: int, start: int, count: int, share: float) -> torch.Tensor:
    place = _place(dims, factor)
    if place is None:
        return tensor if share == 1.0 else tensor * share
    step = tensor.shape[place] // size
    return tensor.narrow(place, start * step, count * step).clone()


def _whole(pair: Sequence[torch.Tensor], dims: Dims, factor: int, weights: Sequence[float]) -> torch.Tensor:
    """The parts joined along the factor, or added; the first part alone if neither is possible."""
    place = _place(dims, factor)
    one, two = pair
    if place is None:
        if one.shape != two.shape:
            return one
        return one + two if weights[0] == 1.0 else one * weights[0] + two * weights[1]
    rests = [(*x.shape[:place], *x.shape[place + 1 :]) for x in pair]
    return torch.cat([one, two], place) if rests[0] == rests[1] and one.ndim > place else one


__all__ = ["joins_unevenly"]

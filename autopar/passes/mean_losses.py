"""Mean losses become sums divided by a count, so that they can be split exactly."""

from __future__ import annotations

import torch

from autopar.ir.builder import Rewriter
from autopar.ir.program import Argument, Op, Program, Ref, elements
from autopar.ir.schema import bound, packed
from autopar.ir.shape_inference import broadcast
from autopar.operators import row_of
from autopar.operators.facts import Mean

_MEAN, _SUM = 1, 2  # torch.nn._reduction's numbers


def means(program: Program) -> Program:
    """Replace a mean by a sum, divided by the number (or weight) of targets that are not ignored, or by a constant count.

        l = cross_entropy_loss(x, t)      s = cross_entropy_loss(x, t, reduction=sum)
                                          n = to(sum(ne(t, -100)), float)
                                   ->     l = div(s, n)
        l = mse_loss(x, y)                l = div(mse_loss(x, y, reduction=sum), 128)

    The formula is that of torch.nn.functional; if every target is ignored, the result is 0/0, NaN, as in torch.
    """
    rewriter = Rewriter(program)
    for op in program.ops:
        if row_of(op).mean and bound(op)["reduction"] == _MEAN:
            _divided(op, program, rewriter)
        else:
            rewriter.keep(op)
    return rewriter.finish()


def _divided(op: Op, program: Program, rewriter: Rewriter) -> None:
    named, result = bound(op), op.results[0]
    scores, target = named["self"], named["target"]
    assert isinstance(scores, Ref)
    assert isinstance(target, Ref)
    now: dict[str, Argument] = {name: rewriter.new(argument) for name, argument in named.items()}
    if result.dtype is torch.float16:  # a sum of more than 65504 would overflow where the mean does not
        for name, argument in now.items():
            if isinstance(argument, Ref) and rewriter.values[argument.name].dtype is torch.float16:
                now[name] = rewriter.beside(op, "aten.to.dtype", (argument, torch.float32))
    args, kwargs = packed(op.target, now | {"reduction": _SUM})
    total = rewriter.beside(op, op.target, args, kwargs)
    shapes = program.values[scores.name].shape, program.values[target.name].shape
    count: Argument
    if row_of(op).mean is Mean.ELEMENTS:
        count = elements(broadcast(*shapes))
    elif program.values[target.name].dtype.is_floating_point:  # probabilities: the mean is over the batch
        count = elements(shapes[0]) // shapes[0][1 if len(shapes[0]) > 1 else 0]
    else:
        count = _counted(op, now, rewriter)
    mean = rewriter.beside(op, "aten.div.Tensor", (total, count))
    if rewriter.values[mean.name].dtype != result.dtype:
        mean = rewriter.beside(op, "aten.to.dtype", (mean, result.dtype))
    rewriter.forward(op.name, mean)


def _counted(op: Op, now: dict[str, Argument], rewriter: Rewriter) -> Ref:
    """The number, or total weight, of the targets that are not ignored; in float32 at least, so that counts are exact."""
    target, weight = now["target"], now["weight"]
    counted = rewriter.beside(op, "aten.ne.Scalar", (target, now["ignore_index"]))
    if weight is not None:
        safe = rewriter.beside(op, "aten.where.ScalarOther", (counted, target, 0))
        each = rewriter.beside(op, "aten.index.Tensor", (weight, (safe,)))
        counted = rewriter.beside(op, "aten.where.ScalarOther", (counted, each, 0))
    count = rewriter.beside(op, "aten.sum.default", (counted,))
    wanted = torch.promote_types(op.results[0].dtype, torch.float32)
    return count if rewriter.values[count.name].dtype == wanted else rewriter.beside(op, "aten.to.dtype", (count, wanted))

"""Rewrites indexing in which each sample picks its own rows, `x[arange(n), i]`, as a gather: the batch can be split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from autopar.ir.builder import Rewriter, kinds
from autopar.ir.layout import Shape
from autopar.ir.program import Op, Program, Ref
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact
from autopar.passes.index_analysis import facts


def gathered(program: Program) -> Program:
    """Replace an index by a gather where all indices but one are coordinates of the result, in order.

        x: float32[8, 6, 4]                     x: float32[8, 6, 4]
        a = arange(8)                           j = where(lt(i, 0), add(i, 6), i)           unless i >= 0 is known
        y = index(x, [a, i])          ->        k = expand(reshape(j, [8, 1, 1]), [8, 1, 4])
                                                y = reshape(gather(x, 1, k), [8, 4])

    In an index all indexed dims must be whole on a device; in a gather only the one that is picked from.
    """
    known = facts(program)
    rewriter = Rewriter(program)
    for op in program.ops:
        source, refs = op.args[0] if op.args else None, _indices(op, program)
        sizes = program.values[source.name].shape if isinstance(source, Ref) else ()
        dim = _picked_from(refs, sizes, op.results[0].shape, known)
        if dim is None or not isinstance(source, Ref):
            rewriter.keep(op)
        else:
            _gather(op, source, refs, dim, known, rewriter)
    return rewriter.finish()


def _indices(op: Op, program: Program) -> tuple[Ref, ...]:
    """The indices of an index of several first dims, each by integers; empty if it is another op."""
    indices = op.args[1] if op.target == "aten.index.Tensor" else ()
    found = tuple(index for index in indices if isinstance(index, Ref)) if isinstance(indices, tuple) else ()
    integers = all(program.values[ref.name].dtype in (torch.int32, torch.int64) for ref in found)
    return found if integers and len(found) > 1 and found == indices else ()


def _picked_from(refs: Sequence[Ref], sizes: Shape, result: Shape, known: Mapping[str, Fact]) -> int | None:
    """The dim of the source that one index picks from, while the others are coordinates; None if there is none such."""
    picks = len(result) - len(sizes) + 1  # dims of the result that stand in the place of that one
    for dim in range(len(refs)):
        places = [(k, k if k < dim else k - 1 + picks) for k in range(len(refs)) if k != dim]
        rank = len(refs) - 1 + picks
        if picks >= 0 and all(result[at] == sizes[k] and _is_coordinate(known.get(refs[k].name), at, rank) for k, at in places):
            return dim
    return None


def _is_coordinate(fact: Fact | None, at: int, rank: int) -> bool:
    """Whether a fact, broadcast to `rank` dims, says that a value is the coordinate of one of them."""
    if not isinstance(fact, Affine) or fact.base != 0:
        return False
    return (*[0] * (rank - len(fact.scale)), *fact.scale) == tuple(int(d == at) for d in range(rank))


def _gather(op: Op, source: Ref, refs: Sequence[Ref], dim: int, known: Mapping[str, Fact], rewriter: Rewriter) -> None:
    """Emit the gather of an index."""
    values, result = rewriter.old.values, op.results[0].shape
    sizes, fact = values[source.name].shape, known.get(refs[dim].name)
    index = rewriter.new(refs[dim])
    if values[refs[dim].name].dtype is not torch.int64:
        index = rewriter.beside(op, "aten.to.dtype", (index, torch.int64))
    if not isinstance(fact, Affine) or affine.bounds(fact, values[refs[dim].name].shape)[0] < 0:
        behind = rewriter.beside(op, "aten.lt.Scalar", (index, 0))
        index = rewriter.beside(
            op, "aten.where.self", (behind, rewriter.beside(op, "aten.add.Tensor", (index, sizes[dim])), index)
        )
    picks = len(result) - len(sizes) + 1
    indexed = result[: len(refs) - 1 + picks]
    if values[refs[dim].name].shape != indexed:
        index = rewriter.beside(op, "aten.expand.default", (index, indexed))
    shape = (*sizes[:dim], math.prod(result[dim : dim + picks]), *sizes[dim + 1 :])
    inner = len(sizes) - len(refs)
    index = rewriter.beside(op, "aten.reshape.default", (index, (*shape[: len(refs)], *[1] * inner)))
    if inner:
        index = rewriter.beside(op, "aten.expand.default", (index, shape))
    made = rewriter.beside(op, "aten.gather.default", (rewriter.new(source), dim, index))
    rewriter.put(op, "aten.reshape.default", (made, result), (), kinds(op))

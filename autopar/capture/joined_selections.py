"""Selected rows that are concatenated, and scattered by indices that are such rows themselves, like the edges of a graph.

ones(count)                                            one number in all rows
edges = cat([edges[:, first != second], loops], 1)     the rows of both, selected where the mask is true or a loop stands
x.scatter_add(0, index, rows)                          rows that are not selected are zeros
x.scatter_reduce(0, index, rows, "amax")               rows that are not selected go to an extra place, which is cut off
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autopar.capture.selection import Selection, symbolic
from autopar.ir.program import Argument, Ref, aten, refs
from autopar.ir.schema import packed
from autopar.operators import rule_of

if TYPE_CHECKING:
    from autopar.capture.selected_ops import Named, SelectedOp


def filled(op: SelectedOp, target: str, named: Named) -> tuple[Ref, ...] | None:
    """A constant tensor with as many rows as are selected; None for other nodes."""
    rule = rule_of(target)
    if rule is None or rule.fills is None:
        return None
    (found,) = op.emit(target, *packed(target, named))
    if rows := next(op.traced()):
        op.selections.held[found.name] = rows
    return (found,)


def joined(op: SelectedOp, args: tuple[Argument, ...]) -> tuple[Ref, ...] | None:
    """The concatenation of tensors along the dim that holds the rows of selections; None for any other node.

    Raises CaptureError if different parts, or the same in another order, have as many rows: nothing tells them apart.
    """
    found, selections = op.node.meta.get("val"), op.selections
    if str(op.node.target) != "aten.cat.default" or not isinstance(found, torch.Tensor):
        return None
    parts, dim = list(refs(args[0])), args[1] if len(args) > 1 else 0
    assert isinstance(dim, int)
    dim %= found.dim()
    held = [selections.held.get(part.name, {}) for part in parts]
    if not any(dim in rows for rows in held):
        return None
    others = {frozenset((at, id(selection)) for at, selection in rows.items() if at != dim) for rows in held}
    if len(others) > 1 or any(rows[dim].empty for rows in held if dim in rows):
        raise op.mixing()
    made = tuple(rows[dim] if dim in rows else op.shape(part)[dim] for rows, part in zip(held, parts, strict=True))
    number = op.symbol(dim)
    if number not in selections.known:
        mask = op.one("aten.cat.default", tuple(_mask(op, one) for one in made))
        selections.learn(number, mask, mask, (0,))
        selections.joined[number] = made
    if selections.joined.get(number) != made:
        raise op.mixing()
    result = op.one("aten.cat.default", tuple(parts), dim)
    selections.held[result.name] = {**held[0], dim: selections.known[number]}
    return (result,)


def _mask(op: SelectedOp, part: Selection | int) -> Ref:
    if isinstance(part, Selection):
        return part.mask
    return op.one("aten.ones.default", (part,), dtype=torch.bool, device=torch.device("meta"))


def scattered(op: SelectedOp, target: str, named: Named) -> tuple[Ref, ...] | None:
    """A tensor without rows, after rows were scattered into it by an index with the same rows; None for other nodes."""
    held, x, index, rows = op.selections.held, named.get("self"), named.get("index"), named.get("src")
    if symbolic(op.node) or not (isinstance(x, Ref) and isinstance(index, Ref) and isinstance(rows, Ref)):
        return None
    dim = named["dim"]
    assert isinstance(dim, int)
    dim %= len(op.shape(x))
    if x.name in held or list(held.get(index.name, ())) != [dim] or held.get(rows.name) != held[index.name]:
        return None
    if aten(target) == "scatter_add":
        return op.emit(target, *packed(target, named | {"index": op.ones(index), "src": op.zeros(rows)}))
    size = op.shape(x)[dim]
    wider = op.one("aten.cat.default", (x, op.one("aten.slice.Tensor", x, dim, 0, 1)), dim)
    apart = {"self": wider, "index": op.masked(index, size), "src": op.zeros(rows)}
    return (op.one("aten.slice.Tensor", op.emit(target, *packed(target, named | apart))[0], dim, 0, size),)


__all__ = ["filled", "joined", "scattered"]

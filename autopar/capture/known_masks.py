"""Selection by masks that depend only on sizes: they are known during tracing, so the selection has a shape.

    logits[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)      the elements off the diagonal, by their indices
    rows, columns = torch.where(torch.ones(n, n).triu(1) > 0)

The graph finds the indices by a stable sort of the mask; written out as numbers, they would make the graph as long as they are
many. Rows that are assigned through any mask, x[mask] = rows, are scattered.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Count = Callable[[torch.Tensor], int | None]  # counts the true values of a mask; None where not known
SELECTING = (torch.Tensor.masked_select, torch.masked_select)
_ALL = slice(None)
LOCATING = (torch.Tensor.nonzero, torch.nonzero, torch.Tensor.argwhere, torch.argwhere, torch.where)


def located(func: object, args: tuple[object, ...], count: Count) -> tuple[object, ...]:
    """The arguments of a function, with known masks in the index of a tensor replaced by the indices where they are true."""
    if func is not torch.Tensor.__getitem__:
        return args
    x, index = args
    parts = index if isinstance(index, tuple) else (index,)
    found: list[object] = []
    for part in parts:
        places = true_places(part, count) if isinstance(part, torch.Tensor) and part.dtype is torch.bool else None
        found += (part,) if places is None else places
    return x, tuple(found) if len(found) > 1 or isinstance(index, tuple) else found[0]


def selected(func: object, args: tuple[object, ...], kwargs: dict[str, object], count: Count) -> object:
    """The result of a function in `SELECTING` or `LOCATING` for a known mask; None for others."""
    if (func not in SELECTING and func not in LOCATING) or (func is torch.where and len(args) + len(kwargs) > 1):
        return None
    named = dict(zip(("input", "mask"), args, strict=False)) | kwargs
    x = named.get("input", named.get("condition"))
    mask = named.get("mask") if func in SELECTING else x
    if not isinstance(x, torch.Tensor) or not isinstance(mask, torch.Tensor) or count(mask) is None:
        return None
    if func in SELECTING:
        shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
        places = true_places(mask.expand(shape), count)
        return None if places is None else x.expand(shape)[places]
    places = true_places(x if x.dtype is torch.bool else x != 0, count)
    if places is None or func is torch.where or named.get("as_tuple"):
        return places
    return torch.stack(places, 1)


def put(func: object, args: tuple[object, ...]) -> bool:
    """Execute `x[mask] = rows` as `x.copy_(x.masked_scatter(mask, rows))` and return True; False for any other call."""
    if func is not torch.Tensor.__setitem__:
        return False
    x, index, rows = args
    mask, *more = index if isinstance(index, tuple) and index else (index,)
    if not isinstance(mask, torch.Tensor) or not isinstance(x, torch.Tensor) or not isinstance(rows, torch.Tensor):
        return False
    others = x.shape[mask.dim() :]
    single = isinstance(rows.shape[0], int) and rows.shape[0] == 1 if rows.dim() else True
    if mask.dtype is not torch.bool or not mask.dim() or any(one not in (..., _ALL) for one in more):
        return False
    if single or rows.dim() != 1 + len(others):  # one row for all places
        return False
    spread = rows.to(x.dtype).expand(rows.shape[0], *others)
    for _ in others:
        mask = mask.unsqueeze(-1)
    x.copy_(x.masked_scatter(mask, spread))
    return True


def true_places(mask: torch.Tensor, count: Count) -> tuple[torch.Tensor, ...] | None:
    """The indices where a mask is true, one tensor for each of its dims; None if their number is not known."""
    if not mask.dim() or (number := count(mask)) is None:
        return None
    at, found = torch.sort(mask.reshape(-1), stable=True, descending=True).indices[:number], list[torch.Tensor]()
    for size in reversed(mask.shape):
        found.append(at % size)
        at = at // size
    return tuple(reversed(found))

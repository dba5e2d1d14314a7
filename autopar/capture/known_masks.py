"""Selection by masks that depend only on sizes: they are known during tracing, so the selection has a shape.

    logits[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)      what is off the diagonal, by its places
    rows, columns = torch.where(torch.ones(n, n).triu(1) > 0)

The graph sorts the mask for its places, in their order: as numbers they would make it as long as there are. Rows that are put
where any mask is true, x[mask] = rows, are scattered there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Count = Callable[[torch.Tensor], int | None]  # of the true values of a mask; None where it is not known
SELECTING = (torch.Tensor.masked_select, torch.masked_select)
_ALL = slice(None)
LOCATING = (torch.Tensor.nonzero, torch.nonzero, torch.Tensor.argwhere, torch.argwhere, torch.where)


def located(func: object, args: tuple[object, ...], count: Count) -> tuple[object, ...]:
    """The arguments of a function; an index of a tensor has the places where masks that are known are true, in their place."""
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
    """What a function in `SELECTING` or `LOCATING` returns for a mask that is known; None for others."""
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
    """Write `x[mask] = rows` as `x.copy_(x.masked_scatter(mask, rows))`, and say so; False for any other call."""
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
    if single or rows.dim() != 1 + len(others):  # the same for every place
        return False
    spread = rows.to(x.dtype).expand(rows.shape[0], *others)
    for _ in others:
        mask = mask.unsqueeze(-1)
    x.copy_(x.masked_scatter(mask, spread))
    return True


def true_places(mask: torch.Tensor, count: Count) -> tuple[torch.Tensor, ...] | None:
    """Where a mask is true, an index for each of its dims."""
    if not mask.dim() or (number := count(mask)) is None:
        return None
    at, found = torch.sort(mask.reshape(-1), stable=True, descending=True).indices[:number], list[torch.Tensor]()
    for size in reversed(mask.shape):
        found.append(at % size)
        at = at // size
    return tuple(reversed(found))

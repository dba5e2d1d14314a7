"""Results whose length depends on numbers that are known during tracing.

    torch.repeat_interleave(x, repeats)      x at the repeated indices: x[[0, 0, 1]] for [2, 1]
    torch.unique_consecutive(x)              x where it differs from before: x[[0, 2]] for [5, 5, 6]; and its counts, [2, 1]

The graph computes the indices, by comparing with the running sum of the counts, or by a sort.
"""

from __future__ import annotations

import torch

from autopar.capture.known_masks import Count, true_places

_REPEATING = (torch.repeat_interleave, torch.Tensor.repeat_interleave)
_DISTINCT = (torch.unique_consecutive, torch.Tensor.unique_consecutive, torch.unique, torch.Tensor.unique)
_SORTED = (torch.unique, torch.Tensor.unique)


def as_long_as_known(
    func: object, args: tuple[object, ...], kwargs: dict[str, object], count: Count, total: Count
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """The result of a function whose length is decided by known numbers; None for others, and where they are not known.

    `count` returns the number of true values in a mask, `total` the sum of integers; None if not known.
    """
    if func in _REPEATING:
        return _repeated(args, kwargs, total)
    more = {name for name, value in kwargs.items() if name != "sorted" and value is not False and value is not None}
    if func in _DISTINCT and len(args) == 1 and more <= {"return_counts"} and isinstance(x := args[0], torch.Tensor):
        flat = x.reshape(-1)
        found = _distinct(torch.sort(flat).values if func in _SORTED and len(flat) else flat, count)
        return found if found is None or more else found[0]
    return None


def _repeated(args: tuple[object, ...], kwargs: dict[str, object], total: Count) -> torch.Tensor | None:
    named = dict(zip(("input", "repeats", "dim"), args, strict=False)) | kwargs
    x, repeats, dim, length = (named.get(name) for name in ("input", "repeats", "dim", "output_size"))
    if "repeats" not in named:  # called with the counts alone: the indices
        x, repeats = None, x
    if not isinstance(repeats, torch.Tensor) or repeats.is_floating_point():
        return None
    if isinstance(x, torch.Tensor):
        x, dim = (x.reshape(-1), 0) if not isinstance(dim, int) else (x, dim)
        repeats = repeats.expand(x.shape[dim]) if repeats.numel() == 1 else repeats
    length = total(repeats) if length is None else length
    if not isinstance(length, int):
        return None
    found = torch.arange(length, device=repeats.device).unsqueeze(1).ge(repeats.cumsum(0)).sum(1)
    return x.index_select(dim, found) if isinstance(x, torch.Tensor) and isinstance(dim, int) else found


def _distinct(x: torch.Tensor, count: Count) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A 1-d tensor without elements that equal the one before, and the length of each run of equal elements."""
    if len(x) < 2:
        return x, torch.ones_like(x, dtype=torch.int64)
    other = torch.cat([torch.ones(1, dtype=torch.bool, device=x.device), x[1:] != x[:-1]])
    found = true_places(other, count)
    if found is None:
        return None
    (places,) = found
    return x[places], torch.cat([places[1:], torch.full((1,), len(x), device=x.device)]) - places


__all__ = ["as_long_as_known"]

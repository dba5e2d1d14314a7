"""Functionalization: turns in-place writes into values, by versions of shared storages.

A tensor of the traced graph is a handle. Handles that are views of one another share a storage. A write replaces the value of
the root of the storage and raises its version; a view that is read later finds its version stale and is computed again.

    y = x[:, 1:]            y = slice(x, 1, 1)
    y.copy_(z)       ->     x' = slice_scatter(x, z, 1, 1)
    use(x)                  use(x')
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from autopar.capture.equal_masks import node_of
from autopar.ir.program import Argument, Ref, Value, aten
from autopar.operators import rule_of
from autopar.operators.facts import OpKind

Emit = Callable[[str, tuple[Argument, ...]], Ref]
_SAME = (OpKind.SAME, OpKind.CAST, OpKind.DROPOUT, OpKind.EXPAND)  # where the shape stays


@dataclass(slots=True)
class Storage:
    """Memory that one or several tensors view; `owner` names the input, parameter or buffer that it belongs to, if any."""

    owner: str = ""
    version: int = 0


@dataclass(slots=True, kw_only=True)
class View:
    """A tensor as a view of another: result `index` of `target(parent, *rest)`, whose results have these shapes."""

    parent: Handle
    target: str
    rest: tuple[Argument, ...]
    index: int
    shapes: tuple[tuple[int, ...], ...]
    take: Callable[[Ref], Ref]


@dataclass(slots=True, kw_only=True)
class Handle:
    """A tensor of the traced graph: the value it had when its storage had version `seen`."""

    ref: Ref
    storage: Storage = field(default_factory=Storage)
    view: View | None = None
    seen: int = 0


Held = Handle | tuple["Held", ...] | Argument  # what a node of the traced graph maps to


def replaced(held: Held, old: Handle, new: Handle) -> Held:
    """What a node maps to, with one tensor replaced by another."""
    if isinstance(held, tuple):
        return tuple(replaced(part, old, new) for part in held)
    return new if held is old else held


def upwards(handle: Handle) -> Iterator[Handle]:
    """A tensor, the tensor that it is a view of, and so on up to the root."""
    yield handle
    if handle.view is not None:
        yield from upwards(handle.view.parent)


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data` while tracing: the tensor detached, and twice if it has a gradient; an untraced tensor stays as it is,
    since torch.export fails on constants of which nothing is used."""
    if tensor.requires_grad:
        return tensor.detach().detach()
    return tensor if node_of(tensor) is None else tensor.detach()


def detached(handle: Handle) -> int:
    """How often a tensor was detached from the one that it shares memory with: see `data_of`."""
    return sum(one.view is not None and aten(one.view.target) == "detach" for one in upwards(handle))


def read(handle: Handle) -> Ref:
    """The current value of a tensor; a stale view is recomputed."""
    if handle.seen != handle.storage.version and handle.view is not None:
        handle.ref = handle.view.take(read(handle.view.parent))
        handle.seen = handle.storage.version
    return handle.ref


def straight_through(new: Ref, old: Ref, emit: Emit) -> Ref:
    """One tensor's values with another's gradient: autograd's view of a write that it does not see."""
    nothing = emit("aten.sub.Tensor", (old, emit("aten.detach.default", (old,))))  # zeros, but NaN for infinities
    return emit("aten.add.Tensor", (new, emit("aten.nan_to_num.default", (nothing,))))


def write(handle: Handle, new: Ref, emit: Emit, value: Callable[[Ref], Value]) -> None:
    """Assign a new value to a tensor, and so to every tensor that aliases it; an alias with a gradient keeps it if this tensor
    has none.

    Raises LookupError for a view whose inverse is not known.
    """
    if handle.view is None:
        handle.storage.version += 1
    else:
        parent = handle.view.parent
        old, unheard = read(parent), not value(handle.ref).requires_grad
        whole = scatter(handle.view, old, new, emit, value)
        if unheard and value(old).requires_grad:
            whole = emit("aten.detach.default", (whole,)) if value(whole).requires_grad else whole
            whole = straight_through(whole, old, emit)
        write(parent, whole, emit, value)
    handle.ref = new
    handle.seen = handle.storage.version


def scatter(view: View, parent: Ref, new: Ref, emit: Emit, value: Callable[[Ref], Value]) -> Ref:
    """The parent of a view after the value `new` was written to the view."""
    name, rule = aten(view.target), rule_of(view.target)
    kind = rule.kind if rule else None
    whole = value(parent).shape
    match name, view.rest:
        case (("slice" | "select" | "diagonal"), rest) if value(new).dtype.is_complex:
            return _complex(name, parent, new, rest, emit, len(whole))
        case (("slice" | "select" | "diagonal"), rest):
            return emit(f"aten.{name}_scatter.default", (parent, new, *rest))
        case (("transpose" | "t" | "swapaxes" | "swapdims"), rest):
            return emit(view.target, (new, *rest))
        case "permute", (tuple() as order,):
            dims = [dim % len(whole) for dim in order if isinstance(dim, int)]
            return emit(view.target, (new, tuple(dims.index(dim) for dim in range(len(dims)))))
        case "unbind", rest:
            return emit("aten.select_scatter.default", (parent, new, rest[0] if rest else 0, view.index))
        case (("split" | "chunk" | "split_with_sizes" | "tensor_split"), rest):
            dim = rest[1] if len(rest) > 1 and isinstance(rest[1], int) else 0
            start = sum(shape[dim] for shape in view.shapes[: view.index])
            return emit("aten.slice_scatter.default", (parent, new, dim, start, start + view.shapes[view.index][dim]))
        case "detach", _:
            return emit(view.target, (new,))
        case _ if name == "unsqueeze" or kind is OpKind.RESHAPE:
            return emit("aten.reshape.default", (new, whole))
        case _ if kind in _SAME and value(new).shape == whole:
            return new
    raise LookupError(name or view.target)


def _complex(name: str, parent: Ref, new: Ref, rest: tuple[Argument, ...], emit: Emit, rank: int) -> Ref:
    """Write a part of a complex tensor through real views, since torch cannot differentiate the complex scatter.

    The views end with a dim for the real and imaginary parts, so dims counted from the end shift by one.
    """
    dims = 2 if name == "diagonal" else 1
    first = 1 if name == "diagonal" else 0  # the diagonal's offset comes before its dims
    rest = tuple(
        dim % rank if isinstance(dim, int) and first <= place < first + dims else dim for place, dim in enumerate(rest)
    )
    real, part = (emit("aten.view_as_real.default", (one,)) for one in (parent, new))
    return emit("aten.view_as_complex.default", (emit(f"aten.{name}_scatter.default", (real, part, *rest)),))

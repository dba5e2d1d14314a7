"""Stored parameters and buffers: DTensors on one mesh, distributed from rank 0 shard by shard; plain tensors if none is split.

Fused optimizers cannot mix DTensors with plain tensors, and run faster on plain ones.

    I, H, D  Replicate(); for H the local tensor is in host memory, for D in a file on disk
    S(d)     Shard(d), or _StridedShard(d, split_factor=blocks) where the axis does not cut the dim in mesh order or cuts blocks

torch applies the placements of a DTensor in mesh order, so the blocks of an axis are counted in the tensor that is already
split by the earlier axes and not yet by the later ones.

A padded parameter is stored without its padding, in memory with room for the padding after the last row: the program's padded
parameter is then a view, not a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard  # the only placement for nested and blocked splits

from autopar.errors import LayoutError
from autopar.ir.layout import AWAY, I, Layout, away, blocks, chunk, each_split, place, shard, split, storable, take
from autopar.runtime import checkpoint, whole_weights
from autopar.runtime.collectives import PRIMITIVES, SplitPosition
from autopar.runtime.disk import note_writes, on_disk, seal, zeros_beside
from autopar.runtime.host_memory import moved
from autopar.runtime.lost_ranks import exchanging
from autopar.runtime.world import Axis, Context

STORED = "the distribution of rank 0's tensors"
_WITH_PADDING: WeakSet[torch.UntypedStorage] = WeakSet()  # memory that has room for padding, filled with zeros


def placements(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Placement, ...]:
    """The DTensor placements of a stored layout (states I and S), one per mesh axis."""
    if not storable(layout, shape, sizes):
        raise LayoutError(f"a tensor of shape {shape} cannot be stored as {layout} on a mesh of sizes {sizes}")
    found: list[Placement] = []
    for axis, state in enumerate(layout):
        later = range(axis + 1, len(sizes))
        match blocks(layout, axis, shape, sizes, present=later) if state.kind == "S" else 0:
            case 0:
                found.append(Replicate())
            case 1:
                found.append(Shard(state.dim))
            case left:
                found.append(_StridedShard(state.dim, split_factor=left))
    return tuple(found)


def layout_of(stored: DTensor) -> Layout:
    """The layout of a stored tensor: the inverse of `placements`."""
    states = [I] * stored.device_mesh.ndim
    for dim, size in enumerate(stored.shape):
        indices = torch.arange(size)  # of the dim, held by ranks with coordinate 0 on the axes so far
        for axis, placement in enumerate(stored.placements):
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
                left = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
                parts = stored.device_mesh.size(axis)
                step = chunk(len(indices), left * parts)
                states[axis] = split(dim, int(indices[step] - indices[0]) if step < len(indices) else step)
                indices = take(indices, 0, left, parts, 0)
    return tuple(states)


def to_dtensor(part: torch.Tensor, shape: tuple[int, ...], layout: Layout, context: Context) -> torch.Tensor:
    """The DTensor with this local tensor, detached from its graph; the local tensor itself on a mesh of one device."""
    if context.device_mesh is None:
        return part
    whole_weights.install()
    strides = torch.empty(shape, device="meta").stride()
    places = placements(layout, shape, context.mesh.sizes)
    if away(layout) and part.device.type not in ("meta", context.device_mesh.device_type):  # `from_local` would move it
        meta = TensorMeta(shape=torch.Size(shape), stride=strides, dtype=part.dtype)
        return DTensor(part, DTensorSpec(context.device_mesh, places, meta), requires_grad=False)  # type: ignore[no-untyped-call]
    if any(isinstance(place, _StridedShard) for place in places):
        checkpoint.install()
    return DTensor.from_local(
        part,
        context.device_mesh,
        places,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def to_local(stored: torch.Tensor, padded_shape: Sequence[int] | None = None) -> torch.Tensor:
    """The local tensor of a parameter or buffer; its gradient becomes a DTensor of the same placements.

    With a `padded_shape` zeros are appended up to that shape. The target of a `call_function` node of emitted code.
    """
    if not torch.compiler.is_compiling():
        own = stored._local_tensor if isinstance(stored, DTensor) else stored
        if padded_shape is not None:
            _allocate_padding(own, padded_shape)
        if own is not stored:
            note_writes(own, stored._version)
    part = stored.to_local(grad_placements=stored.placements) if isinstance(stored, DTensor) else stored
    return part if padded_shape is None else _Padded.apply(part, padded_shape)  # type: ignore[no-untyped-call]


def drop_padding(part: torch.Tensor, dim: int, size: int, axis: Axis | None = None) -> torch.Tensor:
    """The local tensor without padding, where `size` is the dim's global size and `axis` the mesh axis that splits it.

    The target of a `call_function` node of emitted code.
    """
    length = part.shape[dim]
    before = axis.index * length if axis else 0
    return part.narrow(dim, 0, min(max(size - before, 0), length))


class _Part(Protocol):
    shape: torch.Size


class _Padded(torch.autograd.Function):
    """A local tensor with padding: a view if its memory has room for it, else a copy. The gradient loses its padding."""

    @staticmethod
    def forward(ctx: _Part, part: torch.Tensor, padded_shape: Sequence[int]) -> torch.Tensor:
        ctx.shape = part.shape
        if not torch.compiler.is_compiling() and _has_padding_after(part, padded_shape):
            return part.as_strided(padded_shape, part.stride())
        return _pad_end(part, padded_shape) if part.shape != torch.Size(padded_shape) else part.view_as(part)

    @staticmethod
    def backward(ctx: _Part, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        for dim, size in enumerate(ctx.shape):
            gradient = gradient.narrow(dim, 0, size)
        return gradient, None


def _pad_end(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor, with zeros appended in every dim up to this shape."""
    more = [length - size for length, size in zip(shape, tensor.shape, strict=True)]
    return nn.functional.pad(tensor, [after for rest in reversed(more) for after in (0, rest)]) if any(more) else tensor


def _has_padding_after(part: torch.Tensor, padded_shape: Sequence[int]) -> bool:
    """Whether a tensor is the start of memory that was allocated for the padded shape, and not of a user's larger tensor."""
    memory = part.untyped_storage()
    room = memory in _WITH_PADDING and memory.nbytes() == math.prod(padded_shape) * part.itemsize
    return room and not part.storage_offset() and part.is_contiguous() and part.shape[1:] == torch.Size(padded_shape[1:])


def _allocate_padding(part: torch.Tensor, padded_shape: Sequence[int]) -> None:
    """Move a tensor to memory with room for its padding, if only the first dim is padded and it is not there already."""
    if part.shape[1:] == torch.Size(padded_shape[1:]) and not part.is_meta and not _has_padding_after(part, padded_shape):
        with torch.no_grad():
            memory = zeros_beside(part, padded_shape) if on_disk(part) else part.new_zeros(tuple(padded_shape))
            memory[: len(part)].copy_(part)
            part.data = memory[: len(part)]
        if on_disk(part):
            seal(part)
        _WITH_PADDING.add(part.untyped_storage())


def local_part_like(tensor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global tensor, split like a stored tensor of the same shape."""
    if not isinstance(stored, DTensor):
        return tensor
    where = stored.device_mesh.get_coordinate()
    assert where is not None, "every rank is in the mesh"
    return shard(tensor, layout_of(stored), tuple(stored.device_mesh.shape), tuple(where))


def given_like(tensor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """A loaded tensor in the form of a stored one: a whole one is cut on this rank, any other form or shape is unchanged."""
    if not isinstance(stored, DTensor) or isinstance(tensor, DTensor) or tensor.shape != stored.shape:
        return tensor
    part = local_part_like(tensor, stored).to(stored.device).contiguous()
    mesh, places = stored.device_mesh, stored.placements
    return DTensor.from_local(part, mesh, places, run_check=False, shape=stored.shape, stride=stored.stride())


def in_parts(held: object) -> bool:
    """Whether this is a tensor of which each rank stores a part, or a copy, as the plan says."""
    return isinstance(held, DTensor)


def of_another_rank(held: object) -> bool:
    """Whether a loaded object is a DTensor whose local part another rank saved: `torch.load` keeps that rank's place."""
    if not isinstance(held, DTensor):
        return False
    if not dist.is_initialized():
        return held.device_mesh.size() > 1
    own = (held.device_mesh.mesh == dist.get_rank()).nonzero()
    return held.device_mesh.get_coordinate() != tuple(own[0].tolist()) if len(own) else True


def stored_as(kept: DTensor, stored: DTensor) -> DTensor:
    """A tensor of a parameter's shape, stored like the parameter; unless it already is, all ranks call this: it all-gathers."""
    if (kept.device_mesh, kept.placements) == (stored.device_mesh, stored.placements) or kept.shape != stored.shape:
        return kept
    moved = with_own_storage(given_like(full_tensor(kept), stored))
    assert isinstance(moved, DTensor)
    return moved


def with_own_storage(stored: torch.Tensor) -> torch.Tensor:
    """The local part in storage of its own, if it is a view of a larger tensor."""
    if not isinstance(stored, DTensor):
        return stored
    local = stored.to_local()
    if local.untyped_storage().nbytes() <= local.nbytes:
        return stored
    mesh, places = stored.device_mesh, stored.placements
    return DTensor.from_local(local.clone(), mesh, places, run_check=False, shape=stored.shape, stride=stored.stride())


def tensor_by_name(entries: Mapping[str, nn.Module | torch.Tensor], path: str) -> torch.Tensor:
    """The parameter or buffer of this dotted name; `entries` has the modules or tensors of the first level, by name.

    Needed for names that are not valid Python attributes. The target of a `call_function` node of emitted code.
    """
    first, _, rest = path.partition(".")
    found = entries[first]
    if isinstance(found, torch.Tensor):
        return found
    inner: dict[str, nn.Module | torch.Tensor | None] = {**found._modules, **found._parameters, **found._buffers}
    return tensor_by_name({name: one for name, one in inner.items() if one is not None}, rest)


def full_tensor(stored: torch.Tensor) -> torch.Tensor:
    """The global tensor on every rank; all ranks of the mesh call it, as it all-gathers."""
    if not isinstance(stored, DTensor):
        return stored
    layout, mesh = layout_of(stored), stored.device_mesh
    tensor: torch.Tensor = stored.to_local().detach().to(mesh.device_type)  # it may be on the host
    sizes, shape = tuple(mesh.shape), tuple(stored.shape)
    for number in reversed(range(mesh.ndim)):
        if layout[number].kind == "S" and sizes[number] > 1:
            group = str(mesh.get_group(number).group_name)
            axis = Axis(name=str(number), size=sizes[number], index=mesh.get_local_rank(number), group=group)
            left = blocks(layout, number, shape, sizes, present=range(number + 1, mesh.ndim))
            dim = layout[number].dim
            if shape[dim] % sizes[number]:
                tensor = _pad_end(tensor, [layout[number].stride if d == dim else n for d, n in enumerate(tensor.shape)])
            tensor = PRIMITIVES["all_gather"](tensor, axis, SplitPosition(layout[number].dim, left))
    return tensor[tuple(map(slice, shape))]


def all_unsharded(layouts: Iterable[Layout]) -> bool:
    """Whether no layout is split on any axis; parameters are then stored as plain tensors."""
    return all(state in (I, *AWAY) for layout in layouts for state in layout)


def all_plain(stored: Iterable[torch.Tensor]) -> bool:
    """Whether the stored tensors are plain, as they are if nothing in the model is split."""
    return not any(isinstance(tensor, DTensor) for tensor in stored)


def with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor cast to a dtype; a parameter stays a parameter."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.detach().to(dtype)
    return nn.Parameter(cast, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast


def store(
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    context: Context,
    empty: Sequence[bool] | None = None,
) -> dict[str, torch.Tensor]:
    """Distribute global tensors by name: every rank gets its shard of rank 0's value.

    All ranks call it, with tensors of equal shapes in the same order; values on ranks other than 0 are ignored and may be on
    meta. Tensors on meta on rank 0 stay on meta. No split tensor is sent whole: its chunks are scattered along the axes that
    split it, then broadcast along the others. Parameters stay parameters and keep `requires_grad`; names that share a tensor
    share the stored one (in the first name's layout). `layouts` has the layouts of all tensors of the model, and
    `empty` says which of them are on meta on rank 0, if all ranks know that.
    """
    unsharded = all_unsharded(layouts.values())
    if empty is None:
        box = [[tensor.is_meta for tensor in tensors.values()]]
        if context.device_mesh is not None:
            with exchanging(STORED):
                dist.broadcast_object_list(box, src=0, device=context.device)
        empty = box[0]
    made: dict[int, torch.Tensor] = {}
    for (name, tensor), meta in zip(tensors.items(), empty, strict=True):
        if id(tensor) not in made:
            part = _meta_part(tensor, layouts[name], context) if meta else _scatter(tensor, layouts[name], context)
            part = moved(part, place(layouts[name]), context.disk)
            made[id(tensor)] = stored_like(tensor, part, None if unsharded else layouts[name], context)
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def stored_like(tensor: torch.Tensor, part: torch.Tensor, layout: Layout | None, context: Context) -> torch.Tensor:
    """The stored form of `tensor`, given its local part: a parameter if it is one, a plain tensor if `layout` is None."""
    found = part if layout is None else to_dtensor(part, tuple(tensor.shape), layout, context)
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _meta_part(tensor: torch.Tensor, layout: Layout, context: Context) -> torch.Tensor:
    part = shard(tensor.to("meta"), layout, context.mesh.sizes, context.coordinates)
    return torch.empty_like(part, memory_format=torch.contiguous_format)


def _scatter(tensor: torch.Tensor, layout: Layout, context: Context) -> torch.Tensor:
    """This rank's shard of rank 0's tensor, distributed axis by axis, splitting axes first.

    Before each axis, the ranks with coordinate 0 on it and on all later axes hold their shard with respect to the earlier
    axes. Uneven chunks are sent with padding, in memory that keeps room for it.
    """
    sizes, here = context.mesh.sizes, context.coordinates
    if context.device_mesh is None:  # the only rank, or ranks as threads, each of which has the whole tensor
        only = shard(tensor.detach(), layout, sizes, here)
        return only.to(context.device, copy=True, memory_format=torch.contiguous_format)
    order = sorted(range(len(sizes)), key=lambda axis: layout[axis].kind != "S")
    shape = _even_shape(tuple(tensor.shape), layout, sizes)
    part = list(shape)
    held = None if any(here) else _pad_end(tensor.detach(), shape)
    for turn, axis in enumerate(order):
        later, state, pieces = order[turn + 1 :], layout[axis], None
        if state.kind == "S":
            part[state.dim] //= sizes[axis]
        if any(here[other] for other in later):
            continue
        if held is not None and state.kind == "S":
            left = blocks(layout, axis, shape, sizes, present=later)
            pieces = [take(held, state.dim, left, sizes[axis], index) for index in range(sizes[axis])]
        elif held is not None:
            pieces = [held]
        held = _send_shards(pieces, state.kind == "S", torch.empty(part, dtype=tensor.dtype, device="meta"), axis, context)
    assert held is not None
    shared = held.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    held = held.to(context.device, copy=shared, memory_format=torch.contiguous_format)
    true = shard(tensor.to("meta"), layout, sizes, here).shape
    return held[tuple(map(slice, true))].contiguous()


def _even_shape(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with unevenly split dims padded so that all chunks are equal."""
    chunked = {state.dim: state.stride * sizes[a] for a, state in each_split(layout) if shape[state.dim] % sizes[a]}
    return tuple(chunked.get(dim, size) for dim, size in enumerate(shape))


def _send_shards(
    pieces: list[torch.Tensor] | None, split: bool, like: torch.Tensor, axis: int, context: Context
) -> torch.Tensor:
    """Scatter the pieces (if `split`), or broadcast the only one, from the first rank of an axis; no other rank has them."""
    if context.device_mesh is None or context.mesh.sizes[axis] == 1:
        assert pieces is not None
        return pieces[0]
    group = context.device_mesh.get_group(axis)
    if split:
        got = torch.empty_like(like, device=context.device)
        sent = pieces and [_as_bytes(piece.to(context.device).contiguous()) for piece in pieces]
        with exchanging(STORED):
            dist.scatter(_as_bytes(got), sent, group=group, group_src=0)
        return got
    got = pieces[0].to(context.device).clone() if pieces else torch.empty_like(like, device=context.device)
    got = got.contiguous()
    with exchanging(STORED):
        dist.broadcast(_as_bytes(got), group=group, group_src=0)
    return got


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view as bytes: backends need not support the dtype."""
    return tensor.reshape(-1).view(torch.uint8)

"""Stored parameters and buffers: DTensors on one mesh, filled from rank 0 shard by shard; plain tensors if none is split.

Optimizers cannot mix the two kinds, and cost less on plain tensors.

    I        Replicate()
    S(d)     Shard(d), or _StridedShard(d, split_factor=blocks) where the axis does not cut the dim in mesh order or cuts blocks

torch applies the placements of a DTensor in mesh order, so the blocks of an axis are counted in the tensor from which the
earlier axes' digits are gone while the later ones are still there.

A padded parameter is stored without its padding, in chunks, as the beginning of memory that has room for it: then nothing is
copied where the program takes it with padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # the only placement for nested and blocked splits

from autopar.errors import LayoutError
from autopar.ir.layout import I, Layout, blocks, chunk, each_split, shard, split, storable, take
from autopar.runtime import checkpoint
from autopar.runtime.collectives import PRIMITIVES, StoragePlace
from autopar.runtime.world import Axis, Context


def placements(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Placement, ...]:
    """The DTensor placements of a stored layout (states I and S), one per mesh axis."""
    if not storable(layout, shape, sizes):
        raise LayoutError(f"a tensor of shape {shape} cannot be stored as {layout} on a mesh of sizes {sizes}")
    found: list[Placement] = []
    for axis, state in enumerate(layout):
        later = range(axis + 1, len(sizes))
        left = blocks(layout, axis, shape, sizes, present=later) if state.kind == "S" else 0
        found.append(
            Replicate() if not left else Shard(state.dim) if left == 1 else _StridedShard(state.dim, split_factor=left)
        )
    return tuple(found)


def layout_of(stored: DTensor) -> Layout:
    """The layout of a stored tensor: the inverse of `placements`."""
    states = [I] * stored.device_mesh.ndim
    for dim, size in enumerate(stored.shape):
        held = torch.arange(size)  # of the dim, by ranks with coordinate 0 on the axes so far
        for axis, placement in enumerate(stored.placements):
            if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
                left = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
                parts = stored.device_mesh.size(axis)
                step = chunk(len(held), left * parts)
                states[axis] = split(dim, int(held[step] - held[0]) if step < len(held) else step)
                held = take(held, 0, left, parts, 0)
    return tuple(states)


def wrap(part: torch.Tensor, shape: tuple[int, ...], layout: Layout, context: Context) -> torch.Tensor:
    """The DTensor whose part on this rank is `part`; the part itself on a mesh of one device. No gradient flows through."""
    if context.device_mesh is None:
        return part
    strides = torch.empty(shape, device="meta").stride()
    places = placements(layout, shape, context.mesh.sizes)
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


def local(stored: torch.Tensor, room: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's part of a stored tensor; its gradient flows back as a DTensor of the same placements.

    With `room` it is followed by zeros up to this shape. The target of a `call_function` node of the emitted graph.
    """
    if room is not None and not torch.compiler.is_compiling():
        _make_room(stored._local_tensor if isinstance(stored, DTensor) else stored, room)
    part = stored.to_local(grad_placements=stored.placements) if isinstance(stored, DTensor) else stored
    return part if room is None else _Padded.apply(part, room)  # type: ignore[no-untyped-call]


def beginning(part: torch.Tensor, dim: int, size: int, axis: Axis | None = None) -> torch.Tensor:
    """Of the first `size` elements of a padded dim those that lie here, in the chunk of an axis or whole.

    The target of a `call_function` node of the emitted graph.
    """
    length = part.shape[dim]
    before = axis.index * length if axis else 0
    return part.narrow(dim, 0, min(max(size - before, 0), length))


class _Part(Protocol):
    shape: torch.Size


class _Padded(torch.autograd.Function):
    """A part with its padding: the same memory where there is room, a copy elsewhere. The gradient's padding is dropped."""

    @staticmethod
    def forward(ctx: _Part, part: torch.Tensor, room: Sequence[int]) -> torch.Tensor:
        ctx.shape = part.shape
        if not torch.compiler.is_compiling() and _has_room(part, room):
            return part.as_strided(room, part.stride())
        return _lengthened(part, room) if part.shape != torch.Size(room) else part.view_as(part)

    @staticmethod
    def backward(ctx: _Part, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        for dim, size in enumerate(ctx.shape):
            gradient = gradient.narrow(dim, 0, size)
        return gradient, None


def _lengthened(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor, with zeros after it in every dim, in this shape; itself if it has that shape."""
    more = [length - size for length, size in zip(shape, tensor.shape, strict=True)]
    return nn.functional.pad(tensor, [after for rest in reversed(more) for after in (0, rest)]) if any(more) else tensor


def _has_room(part: torch.Tensor, room: Sequence[int]) -> bool:
    """Whether a part is the beginning of memory that was made for this shape."""
    memory = part.untyped_storage().nbytes() == math.prod(room) * part.itemsize
    return memory and not part.storage_offset() and part.is_contiguous() and part.shape[1:] == torch.Size(room[1:])


def _make_room(part: torch.Tensor, room: Sequence[int]) -> None:
    """Move a part to memory that has room for its padding, if this follows its last row and the memory is another one."""
    if part.shape[1:] == torch.Size(room[1:]) and not part.is_meta and not _has_room(part, room):
        with torch.no_grad():
            memory = part.new_zeros(tuple(room))
            memory[: len(part)].copy_(part)
            part.data = memory[: len(part)]


def part_like(tensor: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, cut as a stored one of its shape is."""
    if not isinstance(stored, DTensor):
        return tensor
    where = stored.device_mesh.get_coordinate()
    assert where is not None, "every rank is in the mesh"
    return shard(tensor, layout_of(stored), tuple(stored.device_mesh.shape), tuple(where))


def named(held: Mapping[str, nn.Module | torch.Tensor], path: str) -> torch.Tensor:
    """What stands under a dotted name, `held` being what has names on the first level; its attributes may hide it.

    The target of a `call_function` node of the emitted graph.
    """
    first, _, rest = path.partition(".")
    found = held[first]
    if isinstance(found, torch.Tensor):
        return found
    inner: dict[str, nn.Module | torch.Tensor | None] = {**found._modules, **found._parameters, **found._buffers}
    return named({name: one for name, one in inner.items() if one is not None}, rest)


def whole(stored: torch.Tensor) -> torch.Tensor:
    """The whole of a stored tensor on every rank (a collective)."""
    if not isinstance(stored, DTensor):
        return stored
    layout, mesh = layout_of(stored), stored.device_mesh
    tensor: torch.Tensor = stored.to_local().detach()
    sizes, shape = tuple(mesh.shape), tuple(stored.shape)
    for place in reversed(range(mesh.ndim)):
        if layout[place].kind == "S" and sizes[place] > 1:
            group = str(mesh.get_group(place).group_name)
            axis = Axis(name=str(place), size=sizes[place], index=mesh.get_local_rank(place), group=group)
            left = blocks(layout, place, shape, sizes, present=range(place + 1, mesh.ndim))
            dim = layout[place].dim
            if shape[dim] % sizes[place]:
                tensor = _lengthened(tensor, [layout[place].stride if d == dim else n for d, n in enumerate(tensor.shape)])
            tensor = PRIMITIVES["all_gather"](tensor, axis, StoragePlace(layout[place].dim, left))
    return tensor[tuple(map(slice, shape))]


def plain(layouts: Iterable[Layout]) -> bool:
    """Whether tensors of these stored layouts are kept as plain tensors: if none is split over any axis."""
    return all(state == I for layout in layouts for state in layout)


def typed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in the dtype in which a program has it; a parameter stays one."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.detach().to(dtype)
    return nn.Parameter(cast, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast


def store(tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], context: Context) -> dict[str, torch.Tensor]:
    """Store whole tensors by name: every rank gets its shard of what rank 0 holds.

    Ranks give tensors of equal shapes, in the same order; only rank 0's values count, those of others may differ or be on
    meta. What is on meta on rank 0 is stored on meta. Where a layout is split nothing whole is sent: an axis that splits gets
    its chunks, one that does not gets a copy of what its first rank holds. A parameter stays one and keeps `requires_grad`;
    names that share a tensor share the stored one (in the first name's layout). `layouts` are those of the whole model.
    """
    whole = plain(layouts.values())
    empty = [[tensor.is_meta for tensor in tensors.values()]]
    if context.device_mesh is not None:
        dist.broadcast_object_list(empty, src=0, device=context.device)
    made: dict[int, torch.Tensor] = {}
    for (name, tensor), meta in zip(tensors.items(), empty[0], strict=True):
        if id(tensor) not in made:
            part = _meta_part(tensor, layouts[name], context) if meta else _scattered(tensor, layouts[name], context)
            made[id(tensor)] = stored_like(tensor, part, None if whole else layouts[name], context)
    return {name: made[id(tensor)] for name, tensor in tensors.items()}


def stored_like(tensor: torch.Tensor, part: torch.Tensor, layout: Layout | None, context: Context) -> torch.Tensor:
    """What stores `tensor`, given this rank's part: a parameter if it is one; a plain tensor without a layout."""
    found = part if layout is None else wrap(part, tuple(tensor.shape), layout, context)
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _meta_part(tensor: torch.Tensor, layout: Layout, context: Context) -> torch.Tensor:
    part = shard(tensor.to("meta"), layout, context.mesh.sizes, context.coordinates)
    return torch.empty_like(part, memory_format=torch.contiguous_format)


def _scattered(tensor: torch.Tensor, layout: Layout, context: Context) -> torch.Tensor:
    """This rank's shard of rank 0's tensor, axis by axis, splitting axes first.

    When an axis has its turn, the ranks with coordinate 0 on it and on all later ones hold what the earlier ones left. Chunks
    are sent with padding, and keep the memory of it.
    """
    sizes, here = context.mesh.sizes, context.coordinates
    order = sorted(range(len(sizes)), key=lambda axis: layout[axis].kind != "S")
    shape = _evened(tuple(tensor.shape), layout, sizes)
    part = list(shape)
    held = None if any(here) else _lengthened(tensor.detach(), shape)
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
        held = _sent(pieces, state.kind == "S", torch.empty(part, dtype=tensor.dtype, device="meta"), axis, context)
    assert held is not None
    shared = held.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    held = held.to(context.device, copy=shared, memory_format=torch.contiguous_format)
    true = shard(tensor.to("meta"), layout, sizes, here).shape
    return held[tuple(map(slice, true))].contiguous()


def _evened(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the dims that are split in chunks made long enough for equal ones."""
    chunked = {state.dim: state.stride * sizes[a] for a, state in each_split(layout) if shape[state.dim] % sizes[a]}
    return tuple(chunked.get(dim, size) for dim, size in enumerate(shape))


def _sent(pieces: list[torch.Tensor] | None, split: bool, like: torch.Tensor, axis: int, context: Context) -> torch.Tensor:
    """The first rank of an axis, which alone has `pieces`, sends each rank its own, or all of them the only one."""
    if context.device_mesh is None or context.mesh.sizes[axis] == 1:
        assert pieces is not None
        return pieces[0]
    group = context.device_mesh.get_group(axis)
    if split:
        got = torch.empty_like(like, device=context.device)
        sent = pieces and [_bytes(piece.to(context.device).contiguous()) for piece in pieces]
        dist.scatter(_bytes(got), sent, group=group, group_src=0)
        return got
    got = pieces[0].to(context.device).clone() if pieces else torch.empty_like(like, device=context.device)
    got = got.contiguous()
    dist.broadcast(_bytes(got), group=group, group_src=0)
    return got


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: a backend need not know the type, and nothing is computed."""
    return tensor.reshape(-1).view(torch.uint8)

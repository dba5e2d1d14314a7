"""Stored parameters and buffers: DTensors on one mesh, filled from rank 0 shard by shard; plain tensors if none is split.

Optimizers cannot mix the two kinds, and cost less on plain tensors.

    I        Replicate()
    S(d)     Shard(d), or _StridedShard(d, split_factor=blocks) where the axis does not cut the dim in mesh order or cuts blocks

torch applies the placements of a DTensor in mesh order, so the blocks of an axis are counted in the tensor from which the
earlier axes' digits are gone while the later ones are still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # the only placement for nested and blocked splits

from autopar.errors import LayoutError
from autopar.layout import I, Layout, blocks, local_shape, shard, split, storable, take
from autopar.runtime import checkpoint
from autopar.runtime.collectives import PRIMITIVES, Place
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
                step = len(held) // (left * parts)
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


def local(stored: torch.Tensor) -> torch.Tensor:
    """This rank's part of a stored tensor; its gradient flows back as a DTensor of the same placements.

    The target of a `call_function` node of the emitted graph.
    """
    return stored.to_local(grad_placements=stored.placements) if isinstance(stored, DTensor) else stored


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
            tensor = PRIMITIVES["all_gather"](tensor, axis, Place(layout[place].dim, left))
    return tensor


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
    return torch.empty(local_shape(tuple(tensor.shape), layout, context.mesh.sizes), dtype=tensor.dtype, device="meta")


def _scattered(tensor: torch.Tensor, layout: Layout, context: Context) -> torch.Tensor:
    """This rank's shard of rank 0's tensor, axis by axis, splitting axes first.

    When an axis has its turn, the ranks with coordinate 0 on it and on all later ones hold what the earlier ones left.
    """
    shape, sizes, here = tuple(tensor.shape), context.mesh.sizes, context.coordinates
    order = sorted(range(len(sizes)), key=lambda axis: layout[axis].kind != "S")
    part = list(shape)
    held = None if any(here) else tensor.detach()
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
    return held.to(context.device, copy=shared, memory_format=torch.contiguous_format)


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

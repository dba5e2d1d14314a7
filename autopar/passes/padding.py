"""Padding: lengthens dims that the mesh does not divide, or that misalign matrix products, without changing results.

    parameter wte [101, 8]                         parameter wte [104, 8]      stored as [101, 8]
    x = embedding(wte, words)             ->       x = embedding(wte, where(words < 101, words, -1))
    y = linear(x, wte)                             y = linear(x, wte, [0, ..., 0, -inf, -inf, -inf])
    l = cross_entropy_loss(y, targets)             l = cross_entropy_loss(y, targets)
    output logits = y                              output logits = y           returned as [.., 101]

Dims that are padded together form a group (`padding_groups`). If it is a whole dim of a parameter, the parameter has its true
shape only outside of the program: in storage, in checkpoints and for optimizers; so have outputs. If it is a part of a dim, as
six heads of width 8 are of 48 rows, the program itself pads the parameter:

    q = linear(x, wq)                     ->       w = reshape(constant_pad_nd(reshape(wq, [6, 8, 16]), ...), [64, 16])
    h = reshape(q, [4, 6, 8])                      q = linear(x, w)
    a = attention(h, ...)                          h = reshape(q, [4, 8, 8])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import torch

from autopar.analysis.fits import fit_of
from autopar.analysis.padding_groups import GroupFinder, PaddedDim, PaddingGroup
from autopar.analysis.padding_values import embeds
from autopar.errors import LayoutError
from autopar.ir.builder import Keywords, Rewriter
from autopar.ir.kernel_rates import ALIGNMENT
from autopar.ir.layout import Shape, chunk
from autopar.ir.mesh import Mesh
from autopar.ir.program import Argument, Op, Program, Ref
from autopar.ir.shape_inference import Kind
from autopar.ir.training_step import TrainingStep
from autopar.operators import localise, row_of
from autopar.operators.facts import OpKind
from autopar.operators.flops import contraction

Rooms = Mapping[str, Shape]  # the shapes of padded values: of every group one, and every parameter of which it is a whole dim
MOST = 1 / 3  # of a dim: more padding is more than what a few devices can win
HEADS = -3  # which dim of attention's result they are
HALF = 2  # bytes of an element in half precision


class PaddingExtent(Enum):
    """How much of a program is padded: nothing, the whole dims of parameters that products in half precision read, where the
    device multiplies aligned matrices faster, those that the mesh does not divide, or heads that are parts of dims too.

    Parts of a split dim are stored as torch splits it; to be aligned too, they would have to be longer than that.
    """

    NONE = "none"
    ALIGNED = "whole dims in half precision"
    DIMS = "whole dims"
    PARTS = "parts of dims"

    def rooms(self, program: Program, mesh: Mesh) -> Rooms:
        """The padded shapes on a mesh, for its device."""
        if self is PaddingExtent.ALIGNED:
            aligns = mesh.device is not None and mesh.device.aligns
            return rooms(program, (ALIGNMENT // HALF,), multiplied=True) if aligns else {}
        return {} if self is PaddingExtent.NONE else rooms(program, mesh.sizes, parts=self is PaddingExtent.PARTS)


def rooms(program: Program, sizes: Sequence[int], *, parts: bool = False, multiplied: bool = False) -> dict[str, Shape]:
    """The shapes in which every whole dim of a parameter that can be padded has room for equal parts (`longer`).

    With `parts` also those of attention, whose heads are parts of dims: then parameters are padded in every step. With
    `multiplied` only dims of matrix products in half precision.
    """
    walk, found, seen = GroupFinder(program), dict[str, Shape](), set[tuple[str, int]]()
    taken = set[str]()  # the computed values of groups: each may be padded in one dim
    for name, dim in _seeds(program, parts):
        size = program.values[name].shape[dim]
        room = longer(size, sizes)
        if room == size or (name, dim) in seen:
            continue
        places = walk.places(name, dim)
        seen.update((other, place.dim) for other, place in places.items() if place.all)
        if multiplied and not any(_halves(op) for other in places for op in walk.meets[other]):
            continue
        group = walk.strand(places, size)
        if group and taken.isdisjoint(computed := places.keys() & program.producer.keys()):
            taken |= computed
            for other in (name, *(stored for stored in places.keys() - computed if places[stored].all)):
                shape = found.get(other, program.values[other].shape)
                found[other] = _with(shape, {places[other].dim: room})
    return {name: found[name] for name in program.values if name in found}


def _halves(op: Op) -> bool:
    """Whether an op multiplies matrices in half precision as stored in memory."""
    return row_of(op).flops is contraction and op.results[0].dtype.itemsize == HALF


def _seeds(program: Program, parts: bool) -> Iterator[tuple[str, int]]:
    """The dims (value, dim) from which padding groups are searched."""
    for value in (p.value for p in program.parameters if p.used):
        yield from ((value.name, dim) for dim in range(len(value.shape)))
    for op in program.ops if parts else ():
        if row_of(op).kind is OpKind.ATTENTION and len(op.results[0].shape) > -HEADS:
            yield op.results[0].name, len(op.results[0].shape) + HEADS


def longer(size: int, sizes: Sequence[int]) -> int:
    """The length at which a dim has equal parts on an axis that does not divide it, and on those that do: the largest one
    within `MOST`.

    The dim's own size where there is none.

    >>> longer(101, (2, 4)), longer(8, (3, 4)), longer(9, (8,)), longer(97, (13, 1024))
    (104, 8, 9, 104)
    """
    rooms = (chunk(size, axis) * axis for axis in sizes if size % axis)
    kept = [axis for axis in sizes if size % axis == 0]
    return max((room for room in rooms if room - size <= MOST * size and not any(room % axis for axis in kept)), default=size)


def padded(step: TrainingStep, rooms: Rooms) -> TrainingStep:
    """The step with these values of its program, and all dims tied to them, padded.

    Raises LayoutError for one that cannot be padded like this.
    """
    if not rooms:
        return step
    program = step.program
    groups = list(_groups(program, rooms))
    held = {p.value.name for p in program.parameters}
    lengths: dict[str, dict[int, int]] = {}  # of padded dims
    late: dict[str, list[tuple[PaddedDim, int, int]]] = {}  # parameters that the program pads itself
    for group, room in groups:
        for name, place in group.places.items():
            if name in held and not place.all:
                late.setdefault(name, []).append((place, group.size, room))
            else:
                lengths.setdefault(name, {})[place.dim] = place.left * room * place.right
    shapes = {name: _with(program.values[name].shape, found) for name, found in lengths.items()}
    parameters = tuple(
        replace(p, value=replace(p.value, shape=shapes.get(p.value.name, p.value.shape))) for p in program.parameters
    )
    rewriter = Rewriter(replace(program, parameters=parameters))
    masked = {name for group, _ in groups for name in group.masked}
    for op in program.ops:
        for name in dict.fromkeys(op.operands):
            for place, size, room in late.pop(name, ()):
                shapes[name] = _lengthen(op, name, shapes.get(name, program.values[name].shape), place, size, room, rewriter)
        _grow(op, program, shapes, op.name in masked, rewriter)
    made = rewriter.finish()
    outputs = {o.value: program.values[old.value].shape for o, old in zip(made.outputs, program.outputs, strict=True)}
    true = {name: program.values[name].shape for name in (*rooms, *(held & lengths.keys()))}
    true |= {name: shape for name, shape in outputs.items() if made.values[name].shape != shape}
    true |= step.unpadded
    return replace(step, program=made, padding=tuple((name, true[name]) for name in made.values if name in true))


def _groups(program: Program, rooms: Rooms) -> Iterator[tuple[PaddingGroup, int]]:
    """The groups that begin at these values, and how long they are with padding."""
    walk, seen = GroupFinder(program), dict[tuple[str, int], int]()
    for name, shape in rooms.items():
        for dim, (size, room) in enumerate(zip(program.values[name].shape, shape, strict=True)):
            if size == room or seen.get((name, dim)) == room:
                continue
            group = walk.strand(walk.places(name, dim), size)
            if group is None or size > room:
                raise LayoutError(f"dim {dim} of {name} cannot be padded", shape=program.values[name].shape, room=shape)
            seen |= {(other, place.dim): place.left * room * place.right for other, place in group.places.items()}
            yield group, room


def _with(shape: Shape, lengths: Mapping[int, int]) -> Shape:
    return tuple(lengths.get(dim, size) for dim, size in enumerate(shape))


def _lengthen(op: Op, name: str, shape: Shape, place: PaddedDim, size: int, room: int, rewriter: Rewriter) -> Shape:
    """Pad a parameter in a part of a dim before an op that reads it; its shape from there on."""
    before, after = shape[: place.dim], shape[place.dim + 1 :]
    amounts = (0, 0) * (len(after) + 1) + (0, room - size)
    longer = (*before, place.left * room * place.right, *after)
    apart = _beside(op, "reshape", (rewriter.new(Ref(name)), (*before, place.left, size, place.right, *after)), rewriter)
    grown = _beside(op, "constant_pad_nd", (apart, amounts), rewriter)
    rewriter.forward(name, _beside(op, "reshape", (grown, longer), rewriter))
    return longer


def _grow(op: Op, program: Program, shapes: Mapping[str, Shape], masked: bool, rewriter: Rewriter) -> None:
    """The op on padded operands."""
    values = [Kind(shapes.get(r.name, r.shape), r.dtype, r.requires_grad) for r in op.results]
    several = len(values) > 1 or op.results[0].name != op.name
    args, kwargs = op.args, op.kwargs
    fitted = fit_of(program, op.name) if shapes.keys() & {r.name for r in op.results} else None
    if fitted:
        inside = [shapes.get(name, program.values[name].shape) for name in op.operands]
        parts = [2] * len(fitted.factors)  # as where the factors are split: the shapes are not those of the program
        args, kwargs = localise(op, fitted, inside, [kind.shape for kind in values], parts)
    args, kwargs = tuple(map(rewriter.new, args)), tuple((name, rewriter.new(argument)) for name, argument in kwargs)
    if masked:
        args = (*args[:2], _mask(op, args[2] if len(args) > 2 else None, values[0], rewriter))
    if embeds(op):
        args = (args[0], _within(op, program, shapes, rewriter), *args[2:])
    rewriter.put(op, op.target, args, kwargs, tuple(values) if several else values[0])


def _within(op: Op, program: Program, shapes: Mapping[str, Shape], rewriter: Rewriter) -> Argument:
    """The indices of an embedding: -1 for those of its table's padding, which it refuses as the original one refuses them."""
    table, ids = op.operands[0], rewriter.new(op.args[1])
    true = program.values[table].shape[0]
    if shapes.get(table, (true,))[0] == true:
        return ids
    below = _beside(op, "lt", (ids, true), rewriter, form="Scalar")
    return _beside(op, "where", (below, ids, -1), rewriter, form="ScalarOther")


def _mask(op: Op, bias: Argument, scores: Kind, rewriter: Rewriter) -> Ref:
    """The bias of a linear layer whose scores are minus infinity in the padding."""
    true, room = op.results[0].shape[-1], scores.shape[-1]
    kind: Keywords = (("dtype", scores.dtype), ("device", torch.device("meta")))
    zeros = _beside(op, "full", ((true,), 0.0), rewriter, kind)
    mask = _beside(op, "cat", ((zeros, _beside(op, "full", ((room - true,), -torch.inf), rewriter, kind)),), rewriter)
    return _beside(op, "add", (bias, mask), rewriter, form="Tensor") if isinstance(bias, Ref) else mask


def _beside(
    op: Op, name: str, args: tuple[Argument, ...], rewriter: Rewriter, kwargs: Keywords = (), form: str = "default"
) -> Ref:
    """An additional op next to `op`, in its own module, so that the model's ops keep their names."""
    module = f"{op.module}.padding".lstrip(".")
    (ref,) = rewriter.emit(f"aten.{name}.{form}", args, kwargs, module=module, source=op.source)
    return ref


__all__ = ["PaddingExtent", "Rooms", "longer", "padded", "rooms"]

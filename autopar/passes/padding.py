"""Padding: a dim that the mesh does not divide is made longer throughout the program, and what is true comes out the same.

    parameter wte [101, 8]                         parameter wte [104, 8]      stored as [101, 8]
    x = embedding(wte, words)             ->       x = embedding(wte, words)
    y = linear(x, wte)                             y = linear(x, wte, [0, ..., 0, -inf, -inf, -inf])
    l = cross_entropy_loss(y, targets)             l = cross_entropy_loss(y, targets)
    output logits = y                              output logits = y           returned as [.., 101]

A dim is padded with all that it is tied to by the rules of operators: together they are a *strand*. It begins at parameters,
whose padding is zero, and ends where nothing sees the padding (`contents`): in sums over it, at a loss, or at an output.
Parameters and outputs have their true shapes outside of the program, in storage, checkpoints and for optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.errors import LayoutError
from autopar.ir import Op, Parameter, Program, Ref, Value
from autopar.layout import chunk
from autopar.passes.builder import Keywords, Rewriter
from autopar.passes.contents import ZERO, Content, content, scores
from autopar.passes.infer import Kind
from autopar.rules import Fitted, fit

Rooms = Mapping[str, tuple[int, ...]]  # the shape of each padded parameter
MOST = 1 / 4  # of a dim: more padding is more than what a few devices can win
SHAPED = ("aten.reshape.default", "aten.expand.default")  # ops that are told the shape of their result


@dataclass(frozen=True, slots=True, kw_only=True)
class Strand:
    """The dims that are padded together: one of each of these values; the linear layers of `masked` make scores."""

    places: Mapping[str, int]
    masked: frozenset[str]


def rooms(program: Program, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters in which every dim that can be padded has room for equal parts (`longer`)."""
    walk, found, seen = _Walk(program), dict[str, tuple[int, ...]](), set[tuple[str, int]]()
    taken = set[str]()  # the computed values of strands: each may be padded in one dim
    for value in (p.value for p in program.parameters if p.used):
        for dim, size in enumerate(value.shape):
            room = longer(size, sizes)
            if room == size or (value.name, dim) in seen:
                continue
            places = walk.places(value.name, dim)
            seen.update(places.items())
            strand = walk.strand(places)
            if strand and taken.isdisjoint(computed := places.keys() & program.producer.keys()):
                taken |= computed
                for name in places.keys() - computed:
                    shape = found.get(name, program.values[name].shape)
                    found[name] = _with(shape, {places[name]: room})
    return {p.value.name: found[p.value.name] for p in program.parameters if p.value.name in found}


def longer(size: int, sizes: Sequence[int]) -> int:
    """The length at which a dim has equal parts on the largest axis that does not divide it, and still on those that do.

    The dim's own size where that takes much padding.

    >>> longer(101, (2, 4)), longer(8, (3, 4)), longer(9, (8,))
    (104, 8, 9)
    """
    room = max((chunk(size, axis) * axis for axis in sizes if size % axis), default=size)
    apart = any(room % axis for axis in sizes if size % axis == 0)
    return size if apart or room - size > MOST * size else room


def padded(program: Program, rooms: Rooms) -> Program:
    """The program with these parameters, and all that is tied to them, padded.

    Raises LayoutError for one that cannot be padded so.
    """
    if not rooms:
        return program
    walk, grown, masked = _Walk(program), dict[str, dict[int, int]](), set[str]()
    for name, room in rooms.items():
        for dim, (size, length) in enumerate(zip(program.values[name].shape, room, strict=True)):
            if size == length or grown.get(name, {}).get(dim) == length:
                continue
            strand = walk.strand(walk.places(name, dim))
            if strand is None:
                raise LayoutError(f"dim {dim} of {name} cannot be padded", shape=program.values[name].shape, room=room)
            for other, place in strand.places.items():
                grown.setdefault(other, {})[place] = length
            masked |= strand.masked
    parameters = tuple(_roomy(p, grown[p.value.name]) if p.value.name in grown else p for p in program.parameters)
    rewriter = Rewriter(replace(program, parameters=parameters))
    for op in program.ops:
        _grow(op, grown, op.name in masked, rewriter)
    made = rewriter.finish()
    outputs = (
        replace(o, true=program.values[old.value].shape) if old.value in grown else o
        for o, old in zip(made.outputs, program.outputs, strict=True)
    )
    return replace(made, outputs=tuple(outputs))


def _with(shape: tuple[int, ...], lengths: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(lengths.get(dim, size) for dim, size in enumerate(shape))


def _roomy(parameter: Parameter, lengths: Mapping[int, int]) -> Parameter:
    value = parameter.value
    return replace(parameter, value=replace(value, shape=_with(value.shape, lengths)), true=value.shape)


def _grow(op: Op, grown: Mapping[str, Mapping[int, int]], masked: bool, rewriter: Rewriter) -> None:
    """The op on padded operands."""
    found = [_kind(result, grown.get(result.name, {})) for result in op.results]
    several = len(found) > 1 or op.results[0].name != op.name
    args = tuple(map(rewriter.new, op.args))
    if op.target in SHAPED:
        args = (args[0], found[0].shape)
    if masked:
        args = (*args[:2], _mask(op, args[2] if len(args) > 2 else None, found[0], rewriter))
    kwargs = tuple((name, rewriter.new(argument)) for name, argument in op.kwargs)
    rewriter.put(op, op.target, args, kwargs, tuple(found) if several else found[0])


def _kind(value: Value, lengths: Mapping[int, int]) -> Kind:
    return Kind(_with(value.shape, lengths), value.dtype, value.requires_grad)


def _mask(op: Op, bias: object, scores: Kind, rewriter: Rewriter) -> Ref:
    """The bias of a linear layer whose scores are minus infinity in the padding."""
    true, room = op.results[0].shape[-1], scores.shape[-1]
    kind: Keywords = (("dtype", scores.dtype), ("device", torch.device("meta")))
    parts = tuple(
        rewriter.beside(op, "aten.full.default", ((length,), fill), kind)
        for length, fill in ((true, 0.0), (room - true, -torch.inf))
    )
    mask = rewriter.beside(op, "aten.cat.default", (parts,))
    return rewriter.beside(op, "aten.add.Tensor", (bias, mask)) if isinstance(bias, Ref) else mask


class _Walk:
    """Finds strands along the rules of a program's ops."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = {op.name: i for i, op in enumerate(program.ops)}
        self.meets: dict[str, list[Op]] = {name: [] for name in program.values}  # the ops that read or make each value
        for op in program.ops:
            for name in dict.fromkeys((*op.operands, *(result.name for result in op.results))):
                self.meets[name].append(op)
        self.fit = functools.cache(lambda name: fit(program.op[name], program.values))

    def places(self, name: str, dim: int) -> dict[str, int]:
        """The dims that are tied to one, as far as each is all of a factor; those of a strand, if they are one."""
        found, waiting = {name: dim}, [name]
        while waiting:
            for op in self.meets[waiting.pop()]:
                for other, place in self._tied(op, found):
                    if other not in found:
                        found[other] = place
                        waiting.append(other)
        return found

    def strand(self, places: Mapping[str, int]) -> Strand | None:
        """These dims as a strand, None if they are none: what is true would change."""
        parameters = {parameter.value.name for parameter in self.program.parameters}
        if not all(name in parameters or name in self.program.producer for name in places):
            return None
        names = {op.name for name in places for op in self.meets[name]}
        ops = [self.program.op[name] for name in sorted(names, key=self.place.__getitem__)]
        factors = {op.name: self._factor(op, places) for op in ops}
        for masked in (False, True):
            held = self._contents(ops, factors, places, masked)
            if held is not None:
                made = (op.name for op in ops if masked and scores(op, [held.get(name) for name in op.operands]))
                return Strand(places=places, masked=frozenset(made))
        return None

    def _contents(
        self, ops: Sequence[Op], factors: Mapping[str, int | None], places: Mapping[str, int], masked: bool
    ) -> dict[str, Content] | None:
        """What stands in the padding of every value; None if it reaches what is true."""
        held = {name: ZERO for name in places if name not in self.program.producer}
        for op in ops:
            factor, fitted = factors[op.name], self.fit(op.name)
            if factor is None or fitted is None:
                return None
            found = content(op, fitted, factor, [held.get(name) for name in op.operands], masked=masked)
            if found is None:
                return None
            held.update((result.name, found) for result in op.results if result.name in places)
        return held

    def _factor(self, op: Op, places: Mapping[str, int]) -> int | None:
        """The factor of an op that is padded; None if there are several, or if it is only a part of a dim."""
        fitted = self.fit(op.name)
        found = {dims[places[name]] for name, dims in _tensors(op, fitted) if name in places} if fitted else set()
        factor = found.pop() if len(found) == 1 else ()
        tied = all(
            [dim for dim, parts in enumerate(dims) if set(parts) & set(factor)] == ([places[name]] if name in places else [])
            for name, dims in _tensors(op, fitted)
        )
        return factor[0] if len(factor) == 1 and tied else None

    def _tied(self, op: Op, places: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """The dims of an op's tensors that have a factor in common with these."""
        tensors = list(_tensors(op, self.fit(op.name)))
        factors = {f for name, dims in tensors if name in places for f in dims[places[name]]}
        for name, dims in tensors:
            for dim, parts in enumerate(dims):
                if factors & set(parts):
                    yield name, dim


def _tensors(op: Op, fitted: Fitted | None) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Every operand and result with the factors of its dims."""
    if fitted:
        yield from zip(op.operands, fitted.operands, strict=True)
        yield from zip((result.name for result in op.results), fitted.results, strict=True)


__all__ = ["Rooms", "padded", "rooms"]

"""Values that are known during tracing: of tensors made from sizes, constants, and buffers that may decide control flow.

    mask = torch.ones(x.shape[:2], device=x.device)
    if (mask > 0).any():                               ->   True

They are the same in every call on inputs of these sizes, so a branch that they decide is not a branch; every call checks that
buffers which decided one are unchanged.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture import source_location
from autopar.capture.equal_masks import node_of, slot_of
from autopar.capture.nodes import draws, memory

ASKING = (torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__)
READING = (*ASKING, torch.Tensor.tolist)
_T = TypeVar("_T")
LIMIT = 2**22  # elements of a tensor that is computed to learn a number


class KnownValues:
    """The known values in one tracing: those made of numbers, and of the buffers among `held` whose values are given by name.

    `decided` has the buffers that were read, each with a line that read it.
    """

    def __init__(self, held: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        nodes = {name: node_of(held[name]) for name in values if name in held}
        self._given = {node: (name, values[name]) for name, node in nodes.items() if node is not None}
        self.decided: dict[str, str] = {}

    def number(self, func: Callable[..., object], tensor: object, frame: FrameType) -> object:
        """The result of a function in `READING` on a traced tensor whose values are known; None for any other tensor."""
        known = self._value(tensor) if isinstance(tensor, torch.Tensor) else None
        if known is None or not isinstance(tensor, torch.Tensor):
            return None
        self._sources_of(tensor, frame)()
        return untraced(lambda: func(known))

    def by_sizes(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a traced tensor follow from sizes and constants alone."""
        node = node_of(tensor)
        return node is None or all(map(_knowable, _sources(node)))

    def true_values(self, mask: torch.Tensor, frame: FrameType) -> int | None:
        """The number of true, or nonzero, values in a traced mask, if known."""
        return self._counted(mask, torch.count_nonzero, frame)

    def total(self, counts: torch.Tensor, frame: FrameType) -> int | None:
        """The sum of a traced tensor of integers, if known."""
        return self._counted(counts, torch.sum, frame)

    def _counted(self, tensor: torch.Tensor, count: Callable[[torch.Tensor], torch.Tensor], frame: FrameType) -> int | None:
        known = self._value(tensor)
        if known is None:
            return None
        self._sources_of(tensor, frame)()
        return untraced(lambda: int(count(known)))

    def reading(
        self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], frame: FrameType
    ) -> object:
        """The result of a torch function that may read the numbers of operands with known values: torch.zeros(n).

        The tracer is told of them for this call only, since they may be written afterwards.
        """
        known = [(leaf, slot_of(leaf), self._value(leaf)) for leaf in _leaves((args, kwargs)) if _number(leaf)]
        read = [(leaf, slot, value) for leaf, slot, value in known if slot is not None and value is not None]
        if not read:
            return func(*args, **kwargs)
        for leaf, slot, value in read:
            slot.constant = Readable(value, self._sources_of(leaf, frame))
        try:
            result = func(*args, **kwargs)
        finally:
            for _, slot, _ in read:
                slot.constant = None
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (made := slot_of(leaf)) is not None:
                made.constant = None
        return result

    def _sources_of(self, tensor: torch.Tensor, frame: FrameType) -> Callable[[], None]:
        """A callback that records which buffers a tensor is computed from, to be called when it is read."""
        node = node_of(tensor)
        names = [self._given[one][0] for one in (_sources(node) if node else ()) if one in self._given]
        at = source_location.of_frame(frame) if names else ""  # not later: a frame would keep the model and its tensors alive
        return lambda: self.decided.update(dict.fromkeys(names, at))

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The current values of a traced tensor, if known."""
        node = node_of(tensor)
        if node is None or not all(one in self._given or _knowable(one) for one in _sources(node)):
            return None
        return untraced(lambda: self._computed(node.graph).get(node))

    def _computed(self, graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
        """All known values in the graph, including the effect of the writes traced so far."""
        known = {node: value.clone() for node, (_, value) in self._given.items()}

        def operand(node: fx.Node) -> torch.Tensor:
            shown = node.meta["val"]
            return known[node] if node in known else torch.empty(tuple(shown.shape), dtype=shown.dtype)

        for node in graph.nodes:
            inputs = () if _shaped(node) else node.all_input_nodes
            if _knowable(node) and all(one in known for one in inputs):
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
                args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
                known[node] = node.target(*args, **kwargs)
            elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                _forget(known, node)
        return known


class Readable(torch.Tensor):
    """A tensor that reports when it is read."""

    tell: Callable[[], None]

    @staticmethod
    def __new__(cls, value: torch.Tensor, tell: Callable[[], None]) -> Readable:
        made = torch.Tensor._make_subclass(cls, value)
        made.tell = tell
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if torch.Tag.data_dependent_output in func.tags:
            args[0].tell()
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def _number(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a leaf is a tensor of one integer or truth value."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.is_complex():
        return False
    return all(isinstance(size, int) and size == 1 for size in leaf.shape)


def _leaves(arguments: object) -> Iterator[object]:
    """The leaves of arguments, including those in slices."""
    for leaf in pytree.tree_leaves(arguments):
        yield from (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)


def untraced(ask: Callable[[], _T]) -> _T | None:
    """The result of a function run in a separate thread, where nothing is traced; None if it raises."""
    found: list[_T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(ask())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def computed_from(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Whether a traced tensor is computed from the values of any of the others, or from random numbers."""
    node = node_of(tensor)
    sources = _sources(node) if node is not None else set()
    return not sources.isdisjoint(map(node_of, others)) or any(map(draws, sources))


def _sources(node: fx.Node) -> set[fx.Node]:
    """The nodes that a value is computed from, including its own."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += looked_at(one)
    return found


def looked_at(node: fx.Node) -> list[fx.Node]:
    """The operands whose values a node reads."""
    return [] if _shaped(node) else node.all_input_nodes[: 1 if _as_other(node) else None]


def _knowable(node: fx.Node) -> bool:
    """Whether a node always gives the same values for the same operands; `empty` counts, as nothing reads it unwritten."""
    target, shape = node.target, getattr(node.meta.get("val"), "shape", ())
    if node.op != "call_function" or not all(isinstance(size, int) for size in shape) or math.prod(shape) > LIMIT:
        return False
    return target is operator.getitem or (isinstance(target, torch._ops.OpOverload) and not draws(node))


def _as_other(node: fx.Node) -> bool:
    """Whether an operator reads only the shape, the dtype and the device of its second tensor."""
    return re.search(r"type_as|(expand|view|reshape)_as|\bto\.other", str(node.target)) is not None


def _shaped(node: fx.Node) -> bool:
    """Whether an operator reads only the shape and the dtype of its tensor: ones_like, new_zeros, ..."""
    return re.search(r"(ones|zeros|full)_like|new_(ones|zeros|full)\b", str(node.target)) is not None


def _forget(known: dict[fx.Node, torch.Tensor], writer: fx.Node) -> None:
    """Drop the values that lie in memory that an operator writes."""
    written = {memory(place) for place in _written(writer)}
    for node in [one for one in known if memory(one) in written]:
        del known[node]


def _written(writer: fx.Node) -> Iterator[fx.Node]:
    """The operands that an operator writes into."""
    assert isinstance(writer.target, torch._ops.OpOverload)
    for place, formal in enumerate(writer.target._schema.arguments):
        given = writer.kwargs.get(formal.name, writer.args[place] if place < len(writer.args) else None)
        if formal.is_write:
            yield from (one for one in pytree.tree_leaves(given) if isinstance(one, fx.Node))


__all__ = ["ASKING", "READING", "KnownValues", "looked_at", "untraced"]

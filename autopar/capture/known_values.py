"""Numbers that are known while a model is traced: those of tensors that are made from sizes and other numbers alone.

    mask = torch.ones(x.shape[:2], device=x.device)
    if (mask > 0).any():                               ->   True

They are the same in every call on inputs of these sizes, so a branch that they decide is no branch.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from collections.abc import Callable, Iterator
from typing import TypeGuard, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.equal_masks import node_of, slot_of

ASKING = (torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__)
_T = TypeVar("_T")
LIMIT = 2**22  # elements of a tensor that is computed in order to know a number


def number(func: Callable[..., object], tensor: object) -> bool | int | float | None:
    """What a function in `ASKING` says of a traced tensor whose values are known; None for any other."""
    known = _value(tensor) if isinstance(tensor, torch.Tensor) else None
    return None if known is None else _untraced(lambda: func(known))  # type: ignore[return-value]


def reading(func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The result of a function of torch, which may read the numbers of operands whose values are known: torch.zeros(n).

    The tracer hears of them for this call only, since they may be written afterwards.
    """
    known = [(slot_of(leaf), _value(leaf)) for leaf in _leaves((args, kwargs)) if _number(leaf)]
    read = [(slot, value) for slot, value in known if slot is not None and value is not None]
    if not read:
        return func(*args, **kwargs)
    for slot, value in read:
        slot.constant = value
    try:
        result = func(*args, **kwargs)
    finally:
        for slot, _ in read:
            slot.constant = None
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and (made := slot_of(leaf)) is not None:
            made.constant = None
    return result


def _number(leaf: object) -> TypeGuard[torch.Tensor]:
    """Whether a leaf is one integer or truth value as a tensor."""
    if not isinstance(leaf, torch.Tensor) or leaf.is_floating_point() or leaf.is_complex():
        return False
    return all(isinstance(size, int) and size == 1 for size in leaf.shape)


def _leaves(arguments: object) -> Iterator[object]:
    """The leaves of arguments, in slices too."""
    for leaf in pytree.tree_leaves(arguments):
        yield from (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a traced tensor, if they are known now."""
    node = node_of(tensor)
    if node is None or not _made_of_numbers(node):
        return None
    return _untraced(lambda: _computed(node.graph).get(node))


def _untraced(ask: Callable[[], _T]) -> _T | None:
    """What a function returns in a thread of its own, where nothing is traced; None if it raises."""
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0] if found else None


def _made_of_numbers(node: fx.Node) -> bool:
    """Whether nothing that a value is computed from is given from outside, drawn or too large."""
    return all(_knowable(one) for one in _sources(node))


def _sources(node: fx.Node) -> set[fx.Node]:
    """The nodes that a value is computed from, and itself."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [] if _shaped(one) else one.all_input_nodes
    return found


def _knowable(node: fx.Node) -> bool:
    """Whether a node has the same values whenever its operands have."""
    target, shape = node.target, getattr(node.meta.get("val"), "shape", ())
    if node.op != "call_function" or math.prod(shape) > LIMIT:
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return torch.Tag.nondeterministic_seeded not in target.tags and "empty" not in str(target)


def _shaped(node: fx.Node) -> bool:
    """Whether an operator looks at nothing but the shape and the dtype of its tensor: ones_like, new_zeros, ..."""
    return re.search(r"(ones|zeros|full)_like|new_(ones|zeros|full)\b", str(node.target)) is not None


def _computed(graph: fx.Graph) -> dict[fx.Node, torch.Tensor]:
    """The values of all nodes that are made of numbers, after what has been traced so far has written into them."""
    known: dict[fx.Node, torch.Tensor] = {}

    def operand(node: fx.Node) -> torch.Tensor:
        shown = node.meta["val"]
        return known[node] if node in known else torch.empty(tuple(shown.shape), dtype=shown.dtype)

    for node in graph.nodes:
        inputs = () if _shaped(node) else node.all_input_nodes
        if _knowable(node) and all(one in known for one in inputs):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), operand)
            args, kwargs = torch.utils._pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
            known[node] = node.target(*args, **kwargs)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            _forget(known, node)
    return known


def _forget(known: dict[fx.Node, torch.Tensor], writer: fx.Node) -> None:
    """Drop what lies in the same memory as anything from which an operator that writes computes."""
    written = {_memory(known[one]) for one in _sources(writer) if one in known and isinstance(known[one], torch.Tensor)}
    for node in [one for one, value in known.items() if isinstance(value, torch.Tensor) and _memory(value) in written]:
        del known[node]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


__all__ = ["ASKING", "number", "reading"]

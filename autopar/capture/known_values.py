"""Numbers that are known while a model is traced: those of tensors that are made from sizes and other numbers alone.

    mask = torch.ones(x.shape[:2], device=x.device)
    if (mask > 0).any():                               ->   True

They are the same in every call on inputs of these sizes, so a branch that they decide is no branch.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable

import torch
from torch import fx

from autopar.capture.equal_masks import node_of, pure

ASKING = (torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__)
LIMIT = 2**22  # elements of a tensor that is computed in order to know a number


def number(func: Callable[..., object], tensor: object) -> bool | int | float | None:
    """What a function in `ASKING` says of a traced tensor whose values are known; None for any other.

    In a thread of its own, where nothing is traced.
    """
    node = node_of(tensor) if isinstance(tensor, torch.Tensor) else None
    cone = _cone(node) if node is not None else None
    if cone is None or _written(cone):
        return None
    found: list[bool | int | float] = []
    thread = threading.Thread(target=lambda: found.append(func(_computed(cone))))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    return found[0] if found else None


def _cone(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that a value is computed from, in order; None if one is given from outside, drawn, too large or no operator."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        shape = getattr(one.meta.get("val"), "shape", ())
        if one.op != "call_function" or not pure(one.target) or "empty" in str(one.target) or math.prod(shape) > LIMIT:
            return None
        found[one] = None
        waiting += [] if _shaped(one) else one.all_input_nodes
    return sorted(found)


def _shaped(node: fx.Node) -> bool:
    """Whether an operator looks at nothing but the shape and the dtype of its tensor: ones_like, new_zeros, ..."""
    return re.search(r"(ones|zeros|full)_like|new_(ones|zeros|full)\b", str(node.target)) is not None


def _written(cone: list[fx.Node]) -> bool:
    """Whether an operator writes into one of these values, or into what is computed from one, of which it may be a view."""
    inside = set(cone)
    return any(_ancestors(one) & inside for one in cone[0].graph.nodes if one.op == "call_function" and _mutable(one.target))


def _mutable(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += one.all_input_nodes
    return found


def _computed(cone: list[fx.Node]) -> torch.Tensor:
    """The value of the last node."""
    values: dict[fx.Node, torch.Tensor] = {}

    def real(leaf: object) -> object:
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def operand(node: fx.Node) -> torch.Tensor:
        shown = node.meta["val"]
        return values[node] if node in values else torch.empty(tuple(shown.shape), dtype=shown.dtype)

    for node in cone:
        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        args, kwargs = torch.utils._pytree.tree_map(real, (args, dict(kwargs)))
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return values[cone[-1]]


__all__ = ["ASKING", "number"]

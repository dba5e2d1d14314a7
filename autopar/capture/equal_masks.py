"""Identifies masks that are computed alike during tracing, so that their selections have the same number of rows.

y = x[labels != -100]                    m = labels != -100
t = labels[labels != -100]       ->      y, t = x[m], labels[m]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx.experimental import proxy_tensor

from autopar.operators import rule_of
from autopar.operators.facts import OpKind


@dataclass(slots=True)
class Masks:
    """The masks that have selected something so far, with the nodes that made them; and those whose places were asked for."""

    seen: list[tuple[torch.Tensor, fx.Node, int]] = field(default_factory=list)
    located: list[tuple[tuple[torch.Tensor, ...], torch.Tensor, int]] = field(default_factory=list)

    def note(self, mask: object, places: object) -> None:
        """Remember the indices where a mask is true: torch.where(mask)."""
        if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and isinstance(places, tuple):
            self.located.append((places, mask, mask._version))

    def behind(self, index: object) -> object:
        """The mask that an index lists the true places of, if it was not written since: x[torch.where(mask)] is x[mask]."""
        parts = index if isinstance(index, tuple) else (index,)
        for places, mask, version in self.located:
            same = len(parts) == len(places) and all(part is place for part, place in zip(parts, places, strict=True))
            if same and mask._version == version:
                return mask
        return index

    def flat(self, x: object, index: object) -> tuple[object, object] | None:
        """A tensor with its first dims flattened, and the flat form of the mask that has selected something before; else None.

        x[mask], after z[mask.view(-1)]        ->       x.view(-1, d)[mask.view(-1)]
        """
        node = node_of(index) if isinstance(index, torch.Tensor) and index.dtype is torch.bool and index.dim() > 1 else None
        if node is None or not isinstance(x, torch.Tensor) or not isinstance(index, torch.Tensor) or not x.is_contiguous():
            return None
        for mask, made, version in self.seen:
            rule, whole = rule_of(str(made.target)), made.args[0] if made.args else None
            flat = mask.dim() == 1 and rule is not None and rule.kind is OpKind.RESHAPE
            if flat and mask._version == version and whole is node:
                return x.view(-1, *x.shape[index.dim() :]), mask
        return None

    def first_alike(self, index: object) -> object:
        """The first mask that was computed in the same way and not written since; anything else is returned unchanged."""
        if isinstance(index, tuple):
            return tuple(map(self.first_alike, index))
        node = node_of(index) if isinstance(index, torch.Tensor) and index.dtype is torch.bool else None
        if node is None or not isinstance(index, torch.Tensor):
            return index
        for mask, made, version in self.seen:
            if mask._version == version and mask.shape == index.shape and _alike(made, node) and not any(_writes_after(made)):
                return mask
        self.seen.append((index, node, index._version))
        return index


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node of the traced graph that made a tensor."""
    slot = slot_of(tensor)
    return slot.proxy.node if slot is not None else None


def slot_of(tensor: torch.Tensor) -> proxy_tensor._ProxyTensor | None:
    """The tracer's slot for a tensor."""
    mode = proxy_tensor.get_proxy_mode()
    return proxy_tensor.get_proxy_slot(tensor, mode.tracer, None) if mode is not None else None


def constant_of(node: fx.Node) -> torch.Tensor | None:
    """The constant tensor that a node of the traced graph stands for; None if it is not a constant."""
    mode = proxy_tensor.get_proxy_mode()
    root = getattr(mode.tracer, "root", None) if mode is not None and node.op == "get_attr" else None
    found = getattr(root, str(node.target), None)
    return found if isinstance(found, torch.Tensor) else None


def _writes_after(node: fx.Node) -> Iterator[bool]:
    """For each node traced after this one, whether it writes in place."""
    for one in reversed(node.graph.nodes):
        if one is node:
            return
        yield isinstance(one.target, torch._ops.OpOverload) and one.target._schema.is_mutable


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are computed by the same pure operators from the same inputs, up to the names of nodes."""
    pairs: list[tuple[object, object]] = [(one, other)]
    seen: set[tuple[fx.Node, fx.Node]] = set()
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
            pairs += zip(a, b, strict=True)
        elif isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b:
            if a.op != "call_function" or a.target is not b.target or a.kwargs != b.kwargs or not pure(a.target):
                return False
            if (a, b) not in seen:
                seen.add((a, b))
                pairs.append((a.args, b.args))
        elif a is not b and (type(a) is not type(b) or a != b):
            return False
    return True


def pure(target: object) -> bool:
    """Whether an operator always gives the same results for the same operands."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags

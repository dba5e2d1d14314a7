"""Emits an operator of the exported graph into a program, under the region (no_grad, autocast, ...) that contains it.

with torch.no_grad(): y = f(x)          x1 = detach(x); y = f(x1)
with autocast(bfloat16): y = x @ w      x1, w1 = to(x, bfloat16), to(w, bfloat16); y = x1 @ w1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.capture import autocast, nodes, traced_losses
from autopar.errors import CaptureError
from autopar.ir.builder import Builder, Keywords
from autopar.ir.program import Argument, Ref, refs, substitute
from autopar.ir.shape_inference import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The context of a subgraph: whether gradients are enabled, and the dtype of autocast, if enabled."""

    grad: bool = True
    cast: torch.dtype | None = None


@dataclass(slots=True, kw_only=True)
class Emission:
    """Appends ops to a program; each value is detached, or cast to a dtype, only once."""

    builder: Builder
    detached: dict[str, Ref] = field(default_factory=dict)
    casts: dict[tuple[str, torch.dtype], Ref] = field(default_factory=dict)

    def emit(
        self, node: fx.Node, target: str, args: tuple[Argument, ...], kwargs: Keywords, region: Region
    ) -> tuple[tuple[Ref, ...], bool]:
        """Append the op of `node`, detaching operands in a no_grad region; returns its results, and whether they are a list.

        Even in such a region, a tensor that an operator returns unchanged keeps its gradient.
        """
        if not region.grad and target == str(node.target) and isinstance(args[0], Ref) and nodes.returns_operand(node):
            return (args[0],), False
        if region.cast is not None:
            args, kwargs = self.cast(target, args, kwargs, region.cast, node)
        if not region.grad:
            args, kwargs = self.cut(args, kwargs, node)
        found = self.found(node, target, args, kwargs)
        if target != "aten.detach.default" and not any(
            k.requires_grad for k in (found if isinstance(found, tuple) else (found,))
        ):
            args, kwargs = self.cut(args, kwargs, node)
        at = {"module": nodes.module(node), "source": nodes.source(node)}
        results = self.builder.emit(target, args, kwargs, **at, results=found)
        if target == "aten.detach.default" and isinstance(args[0], Ref):
            self.detached.setdefault(args[0].name, results[0])
        return results, isinstance(found, tuple)

    def found(self, node: fx.Node, target: str, args: tuple[Argument, ...], kwargs: Keywords) -> Kind | tuple[Kind, ...]:
        """The kinds of an op's results: from running it on meta tensors, or from the trace if it has no meta kernel."""
        try:
            return self.builder.infer(target, args, kwargs)
        except Exception:
            if target != traced_losses.meant(node.target):  # the trace has the in-place op
                raise
            grad = any(self.builder.values[ref.name].requires_grad for ref in refs((*args, *(a for _, a in kwargs))))
            traced = node.meta.get("val")
            if isinstance(traced, torch.Tensor):
                return nodes.traced_kind(traced, grad)
            if isinstance(traced, (list, tuple)) and all(isinstance(tensor, torch.Tensor) for tensor in traced):
                return tuple(nodes.traced_kind(tensor, grad) for tensor in traced)
            raise CaptureError(
                f"{target} returns something other than tensors", at=nodes.source(node), fix="leave it out of forward"
            ) from None

    def cut(self, args: tuple[Argument, ...], kwargs: Keywords, node: fx.Node) -> tuple[tuple[Argument, ...], Keywords]:
        """The arguments with every value that requires grad detached."""

        def change(leaf: Argument) -> Argument:
            if not isinstance(leaf, Ref) or not self.builder.values[leaf.name].requires_grad:
                return leaf
            if leaf.name not in self.detached:
                (ref,) = self.builder.emit("aten.detach.default", (leaf,), module=nodes.module(node), source=nodes.source(node))
                self.detached[leaf.name] = ref
            return self.detached[leaf.name]

        return tuple(substitute(a, change) for a in args), tuple((name, substitute(a, change)) for name, a in kwargs)

    def cast(
        self, target: str, args: tuple[Argument, ...], kwargs: Keywords, lower: torch.dtype, node: fx.Node
    ) -> tuple[tuple[Argument, ...], Keywords]:
        """The arguments as autocast casts them for this op."""
        operands = [self.builder.values[ref.name].dtype for ref in refs((*args, *(a for _, a in kwargs)))]
        wanted = autocast.operand_dtype(target, operands, lower)
        if wanted is None:
            return args, kwargs

        def change(leaf: Argument) -> Argument:
            if not isinstance(leaf, Ref) or not autocast.castable(self.builder.values[leaf.name].dtype, wanted):
                return leaf
            key = (leaf.name, wanted)
            if key not in self.casts:
                (ref,) = self.builder.emit(
                    "aten.to.dtype", (leaf, wanted), module=nodes.module(node), source=nodes.source(node)
                )
                self.casts[key] = ref
            return self.casts[key]

        return tuple(substitute(a, change) for a in args), tuple((name, substitute(a, change)) for name, a in kwargs)

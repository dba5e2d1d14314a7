"""Which `autograd.Function` may be traced through its forward: one whose gradient is autograd's of it, by numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import Function, FunctionCtx
from torch.utils import _pytree as pytree

_SCALES = (1e-3, 1.0, 1e3)  # of operands and of incoming gradients: a clamp shows in one of them
_LIMIT = 2**22  # elements of the operands
_NEAR = 1e-9  # of the largest element of a result or a gradient


def by_autograd(function: type[Function], args: Sequence[object]) -> bool:
    """Whether a function has the results and gradients of its forward under autograd, for random operands of these shapes.

    In a thread of its own, where nothing is traced. False for one that cannot be run so.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if sum(tensor.numel() for tensor in tensors) > _LIMIT:
        return False
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(_equal(function, args)))
    thread.start()
    thread.join()
    return found == [True]


def _equal(function: type[Function], args: Sequence[object]) -> bool:
    """Compare for integers that are all 0, and, where the function takes those, all 1: a mask of zeros hides everything."""
    try:
        if not _alike(function, args, 0):
            return False
    except Exception:  # whatever a function of someone else's raises
        return False
    try:
        return _alike(function, args, 1)
    except Exception:  # there may be no place 1
        return True


def _alike(function: type[Function], args: Sequence[object], integer: int) -> bool:
    """Whether results and gradients are the same with these integers, at every scale."""
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (value, expected)
        for scale in _SCALES
        for size in _SCALES
        for given in [_operands(args, scale, integer, generator)]
        for value, expected in zip(
            _results(function, given, size, applied=True), _results(function, given, size, applied=False), strict=True
        )
    ]
    return all(
        torch.allclose(value, expected, rtol=_NEAR, atol=_NEAR * _largest(expected), equal_nan=True)
        and value.requires_grad == expected.requires_grad
        for value, expected in pairs
    )


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite element: a gradient with rounded constants, or with terms that cancel, differs by parts of it."""
    found = tensor.detach()[tensor.isfinite()].abs()
    return float(found.max()) if found.numel() else 0.0


def _operands(args: Sequence[object], scale: float, integer: int, generator: torch.Generator) -> list[object]:
    """Random tensors in double precision for those that are floating, of one integer for others."""

    def real(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return torch.full(leaf.shape, integer, dtype=leaf.dtype)
        drawn = torch.randn(leaf.shape, dtype=torch.float64, generator=generator) * scale
        return drawn.requires_grad_(leaf.requires_grad)

    return list(pytree.tree_map_only(torch.Tensor, real, list(args)))


def _results(function: Any, given: list[object], scale: float, *, applied: bool) -> Iterator[torch.Tensor]:
    """The results of a function, applied or only its forward, and the gradients of its operands."""
    if applied:
        out = function.apply(*given)
    elif function.setup_context is not Function.setup_context:
        out = function.forward(*given)
    else:
        out = function.forward(FunctionCtx(), *given)
    results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    wanted = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    yield from results
    differentiable = [result for result in results if result.requires_grad]
    incoming = [torch.linspace(-scale, scale, one.numel(), dtype=one.dtype).reshape(one.shape) for one in differentiable]
    if differentiable:
        yield from torch.autograd.grad(differentiable, wanted, incoming, allow_unused=True, materialize_grads=True)

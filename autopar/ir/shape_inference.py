"""Infers what an operator returns by running the operator itself on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.ir.program import Argument, Ref, Static, Value, overload


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of a tensor that are known before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def kind(value: Value) -> Kind:
    """The value without its name."""
    return Kind(value.shape, value.dtype, value.requires_grad)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that these broadcast to; raises RuntimeError if they do not."""
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def infer(
    target: str, args: tuple[Argument, ...], kwargs: tuple[tuple[str, Argument], ...], lookup: Callable[[str], Value]
) -> Kind | tuple[Kind, ...]:
    """Shapes, dtypes and `requires_grad` of the results: the op is run on meta tensors under autograd.

    A tuple if the op returns several tensors. Raises whatever the op raises.
    """
    with torch.inference_mode(False), torch.enable_grad():
        positional = [_meta(argument, lookup) for argument in args]
        named = {name: _meta(argument, lookup) for name, argument in kwargs}
        found: object = overload(target)(*positional, **named)
    if isinstance(found, torch.Tensor):
        return _kind_of(found)
    if isinstance(found, (tuple, list)) and all(isinstance(tensor, torch.Tensor) for tensor in found):
        return tuple(_kind_of(tensor) for tensor in found)
    raise TypeError(f"{target} returns {type(found).__name__}, not tensors")


def _kind_of(tensor: torch.Tensor) -> Kind:
    return Kind(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _meta(argument: Argument, lookup: Callable[[str], Value]) -> object:
    if isinstance(argument, tuple):
        return [_meta(part, lookup) for part in argument]
    if isinstance(argument, Ref):
        value = lookup(argument.name)
        return _tensor(value)
    return _on_meta(argument)


def _tensor(value: Value) -> torch.Tensor:
    """A meta tensor; if it requires grad, it is not a leaf, since leaves refuse in-place operators."""
    tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.empty_like(tensor).requires_grad_().view_as(tensor) if value.requires_grad else tensor


def _on_meta(static: Static) -> Static:
    return torch.device("meta") if isinstance(static, torch.device) else static

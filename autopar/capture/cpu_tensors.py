"""Tensors that forward makes on the CPU, or has from elsewhere, while its parameters and inputs are on the meta device.

    x * torch.Tensor([1, 2])             made of numbers, by the class of tensors: a literal
    x[torch.LongTensor([0, 2])]
    x + torch.zeros(4, device="cpu")     made by an operator: moved, which a program has no need of
    y.type(x.type())                     "torch.FloatTensor" is the type of x
    (x - MEAN) / STD                     globals of a file, or what a closure knows: literals, if they are few numbers

Where parameters are on the CPU such a forward runs as it is, and elsewhere if it moves these tensors itself. Each becomes a
tensor of the meta device once, for all of its uses: what one writes into it the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.capture.equal_masks import constant_of, node_of
from autopar.capture.known_values import untraced
from autopar.capture.literals import ELEMENTS_LIMIT, literal, spelt_out
from autopar.errors import CaptureError

_LIFTING = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # of a new tensor


class CpuTensors:
    """The tensors of one trace that are on the CPU, or were made before it; `constants` has the latter."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by its id: a tensor, which is kept, and what it is
        self.constants: list[torch.Tensor] = []

    def moved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, elsewhere: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function of torch with tensors of the meta device; `elsewhere` says whether also for constants."""
        leaves = (leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor))
        own = [leaf for leaf in leaves if not leaf.is_meta and (elsewhere or node_of(leaf) is not None)]
        if not own:
            return args, kwargs
        found = {id(leaf): self._move(leaf) for leaf in own}
        moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda one: found.get(id(one), one), (args, kwargs))
        return moved

    def refuse_written(self, at: str) -> None:
        """Raise CaptureError if forward has written a constant, which the next call of a graph would not know."""
        if any(self._moved[id(one)][1]._version for one in self.constants):
            fix = "register it as a buffer: register_buffer(name, tensor, persistent=False)"
            raise CaptureError("forward writes a tensor that it has from elsewhere than its modules", at=at, fix=fix)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor, self._on_meta(tensor)
        return self._moved[id(tensor)][1]

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if node_of(tensor) is not None:
            numbers = _numbers(tensor)
            return tensor.to("meta") if numbers is None else _literal(numbers, tensor)
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.numel() > ELEMENTS_LIMIT:
            return tensor
        if not spelt_out(numbers := untraced(tensor.tolist)):
            return tensor
        self.constants.append(tensor)
        return _literal(numbers, tensor)


def type_of_the_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """`x.type()` as it is on the CPU: no type has the name that it has on the meta device."""

    def type_(x: torch.Tensor, *rest: object, **named: object) -> object:
        found = original(x, *rest, **named)
        return found.replace("torch.meta.", "torch.") if isinstance(found, str) else found

    return type_


def _literal(numbers: object, tensor: torch.Tensor) -> torch.Tensor:
    made = literal(torch.tensor)(numbers, dtype=tensor.dtype)
    return made if made.shape == tensor.shape else made.reshape(tensor.shape)  # of no elements


def _numbers(tensor: torch.Tensor) -> object:
    """The numbers that a tensor is made of; None if it is not made of numbers, or of too many."""
    node = node_of(tensor)
    if node is None or node.target not in _LIFTING or tensor.numel() > ELEMENTS_LIMIT:
        return None
    held = constant_of(node.all_input_nodes[0])
    return None if held is None else untraced(held.tolist)


__all__ = ["CpuTensors", "type_of_the_cpu"]

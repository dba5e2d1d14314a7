"""Tensors that forward makes on the CPU, while its parameters and inputs are on the meta device.

    x * torch.Tensor([1, 2])             made of numbers, by the class of tensors: a literal
    x[torch.LongTensor([0, 2])]
    x + torch.zeros(4, device="cpu")     made by an operator: moved, which a program has no need of
    y.type(x.type())                     "torch.FloatTensor" is the type of x

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
from autopar.capture.literals import ELEMENTS_LIMIT, literal


class CpuTensors:
    """The tensors of one trace that are on the CPU."""

    def __init__(self) -> None:
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by its id: a tensor, which is kept, and what it is

    def moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a function of torch with tensors of the meta device."""
        found = {id(leaf): self._move(leaf) for leaf in pytree.arg_tree_leaves(*args, **kwargs) if _on_the_cpu(leaf)}
        if not found:
            return args, kwargs
        moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda one: found.get(id(one), one), (args, kwargs))
        return moved

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = tensor, _on_meta(tensor)
        return self._moved[id(tensor)][1]


def type_of_the_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """`x.type()` as it is on the CPU: no type has the name that it has on the meta device."""

    def type_(x: torch.Tensor, *rest: object, **named: object) -> object:
        found = original(x, *rest, **named)
        return found.replace("torch.meta.", "torch.") if isinstance(found, str) else found

    return type_


def _on_the_cpu(leaf: object) -> bool:
    """Whether a leaf is a traced tensor of the CPU: what is not traced is kept from elsewhere, and refused."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and node_of(leaf) is not None


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    numbers = _numbers(tensor)
    if numbers is None:
        return tensor.to("meta")
    made = literal(torch.tensor)(numbers, dtype=tensor.dtype)
    return made if made.shape == tensor.shape else made.reshape(tensor.shape)  # of no elements


def _numbers(tensor: torch.Tensor) -> object:
    """The numbers that a tensor is made of; None if it is not made of numbers, or of too many."""
    node = node_of(tensor)
    if node is None or node.op != "call_function" or tensor.numel() > ELEMENTS_LIMIT or len(node.all_input_nodes) != 1:
        return None
    held = constant_of(node.all_input_nodes[0])
    return None if held is None else untraced(held.tolist)


__all__ = ["CpuTensors", "type_of_the_cpu"]

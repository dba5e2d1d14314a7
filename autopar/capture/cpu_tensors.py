"""Tensors that forward creates on the CPU or gets from outside, while its parameters and inputs are on the meta device.

    x * torch.Tensor([1, 2])             made of numbers, by a tensor class: a literal
    x[torch.LongTensor([0, 2])]
    x + torch.zeros(4, device="cpu")     made by an operator: moved, which a program need not do
    y.type(x.type())                     "torch.FloatTensor" is the type of x
    (x - MEAN) / STD                     globals of a file, or closed over: literals, if they are few numbers

With parameters on the CPU such a forward runs unchanged; on other devices only if it moves these tensors itself. Each is turned
into a meta tensor once, shared by all of its uses: a write by one is seen by the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture import source_location
from autopar.capture.equal_masks import constant_of, node_of
from autopar.capture.known_values import untraced
from autopar.capture.literals import ELEMENTS_LIMIT, literal, spelt_out
from autopar.errors import CaptureError

_DEVICES = re.compile(r"at least two devices|two different devices|on the same device")  # in torch's errors about operands
_REGISTER = (
    "register it, an nn.Parameter in an attribute of a module or an nn.ParameterList, a module in an attribute or an "
    "nn.ModuleList; not in a list, a global or a weakref"
)
_LIFTING = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # of a new tensor


class CpuTensors:
    """The tensors of one trace that are on the CPU, or were created before it.

    Of those created before it, `constants` has those that became literals, and `trained` those that have a gradient.
    """

    def __init__(self) -> None:
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id: a tensor, kept alive, and its replacement
        self.constants: list[torch.Tensor] = []
        self.trained: dict[int, torch.Tensor] = {}  # by id
        self._elsewhere: list[torch.Tensor] = []  # operands of the last call that were not moved

    def moved(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, elsewhere: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a torch function, moved to the meta device; `elsewhere` says whether constants are moved too."""
        leaves = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, torch.Tensor)]
        self.trained |= {id(leaf): leaf for leaf in leaves if leaf.requires_grad and node_of(leaf) is None}
        own = [leaf for leaf in leaves if not leaf.is_meta and (elsewhere or node_of(leaf) is not None)]
        if not own:
            self._elsewhere = [] if elsewhere else self._elsewhere
            return args, kwargs
        found = {id(leaf): self._move(leaf) for leaf in own}
        self._elsewhere = [leaf for leaf in found.values() if not leaf.is_meta and node_of(leaf) is None]
        moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda one: found.get(id(one), one), (args, kwargs))
        return moved

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context in which an error about operands on two devices is raised as one that says what one of them is."""
        try:
            yield
        except Exception as error:
            if self._elsewhere and _DEVICES.search(str(error)):
                raise _unregistered(self._elsewhere[0], source_location.from_error(error)) from error
            raise

    def refuse_written(self, at: str) -> None:
        """Raise CaptureError if forward has written to a constant: a graph would lose the change before its next call."""
        if any(self._moved[id(one)][1]._version for one in self.constants):
            fix = "register it as a buffer: register_buffer(name, tensor, persistent=False)"
            raise CaptureError("forward writes a tensor that is not in a module", at=at, fix=fix)

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
    """`x.type()` as on the CPU: on the meta device, types have other names."""

    def type_(x: torch.Tensor, *rest: object, **named: object) -> object:
        found = original(x, *rest, **named)
        return found.replace("torch.meta.", "torch.") if isinstance(found, str) else found

    return type_


def asked_of_the_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """A query about a device type, answered for the CPU if it is `meta`, which `x.device.type` becomes while tracing."""

    def asked(*device_type: str, **named: str) -> object:
        given = ("cpu" if device == "meta" else device for device in device_type)
        return original(*given, **{name: "cpu" if device == "meta" else device for name, device in named.items()})

    return asked


def _unregistered(tensor: torch.Tensor, at: str) -> CaptureError:
    """The error for a tensor that is neither an argument of forward nor in a module."""
    said = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not tensor.requires_grad:
        what = f"forward uses a tensor that is neither an argument nor in a module: {said}"
        return CaptureError(what, at=at, fix="register it as a buffer: register_buffer(name, tensor, persistent=False)")
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor with a gradient"
    return CaptureError(f"forward uses a {kind} that is not in a module: {said}", at=at, fix=_REGISTER)


def not_contained(constant: object, trained: Sequence[torch.Tensor], at: str) -> CaptureError:
    """The error for a tensor that torch turned into a graph constant: perhaps one with a gradient from outside the trace."""
    for tensor in trained:
        if isinstance(constant, torch.Tensor) and (tensor.data_ptr(), tensor.shape) == (constant.data_ptr(), constant.shape):
            return _unregistered(tensor, at)
    what = "forward uses a tensor that the graph cannot contain: one made of numbers there, or one that is not in a module"
    return CaptureError(what, at=at, fix="register it as a buffer, so that it can be placed on the devices")


def _literal(numbers: object, tensor: torch.Tensor) -> torch.Tensor:
    made = literal(torch.tensor)(numbers, dtype=tensor.dtype)
    return made if made.shape == tensor.shape else made.reshape(tensor.shape)  # without elements


def _numbers(tensor: torch.Tensor) -> object:
    """The numbers that a tensor was made of; None if it was not made of numbers, or of too many."""
    node = node_of(tensor)
    if node is None or node.target not in _LIFTING or tensor.numel() > ELEMENTS_LIMIT:
        return None
    held = constant_of(node.all_input_nodes[0])
    return None if held is None else untraced(held.tolist)


__all__ = ["CpuTensors", "asked_of_the_cpu", "not_contained", "type_of_the_cpu"]

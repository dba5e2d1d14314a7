"""Tensors that a forward has of the call before: in attributes of modules, and in the lists, dicts and objects there.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)       reads what it replaces: every call of a graph would have the first mean
    self.before = x                                     read by the next call, where it was None: seen in a second one
    self.scale = self.scale.to(x.device)                the same tensor
    self.aux_loss = loss                                only written

Buffers are none of these: a graph writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.python_state import MOST_ELEMENTS, MOST_NESTED, OF_TORCH
from autopar.errors import CaptureError

Replace = Callable[[torch.Tensor], object]
_COPYING = frozenset({
    torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.float, torch.Tensor.double, torch.Tensor.half,
    torch.Tensor.bfloat16, torch.Tensor.type_as, torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.detach,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor that a module holds as plain Python value: in an attribute, or in a container or object there."""

    tensor: torch.Tensor
    put: Replace  # another one in its place


def held_tensors(model: nn.Module) -> Mapping[str, HeldTensor]:
    """The tensors that the modules of a model hold beside parameters and buffers, by dotted name."""
    return {
        name: HeldTensor(tensor=tensor, put=_putting(module, attribute, value, put))
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in OF_TORCH
        for name, tensor, put in _tensors(value, f"{path}.{attribute}".strip("."))
    }


def _putting(module: nn.Module, attribute: str, value: object, put: Replace | None) -> Replace:
    """Put a tensor into the attribute of a module, or into the value there, which torch.export may have replaced by a copy."""

    def placed(tensor: torch.Tensor) -> None:
        if put is not None:
            put(tensor)
        setattr(module, attribute, tensor if put is None else value)

    return placed


def _tensors(
    value: object, name: str, put: Replace | None = None, depth: int = MOST_NESTED
) -> Iterator[tuple[str, torch.Tensor, Replace | None]]:
    """The tensors in a value, each with its name, and with what puts another one in its place in a container or an object."""
    if isinstance(value, torch.Tensor):
        yield name, value, put
        return
    parts: list[tuple[str, object, Replace]] = []
    if isinstance(value, list):
        parts = [(f"[{place}]", part, partial(value.__setitem__, place)) for place, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [(f"[{key!r}]", part, partial(value.__setitem__, key)) for key, part in value.items()]
    elif not (isinstance(value, nn.Module | type) or callable(value)):
        inside = getattr(value, "__dict__", {})
        parts = [(f".{key}", part, partial(setattr, value, key)) for key, part in inside.items()]
    if depth and len(parts) <= MOST_ELEMENTS:
        for label, part, own in parts:
            yield from _tensors(part, name + label, own, depth - 1)


class CarriedTensors:
    """What a forward reads of the tensors that modules hold, and puts in their places: what it has of the call before.

    A tensor that is moved, cast or copied is the same one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._before = model, held_tensors(model)
        self._names = {id(held.tensor): name for name, held in self._before.items()}
        self._copies: dict[int, torch.Tensor] = {}  # by id, kept alive
        self._read: set[str] = set()

    def notice(self, function: object, args: tuple[object, ...], result: object) -> None:
        """Take note of a function that is called; one that gives no tensor asks for sizes and the like."""
        if not self._names:
            return
        named = {self._names.get(id(leaf), "") for leaf in pytree.tree_leaves(args)} - {""}
        if _writes(function) and id(args[0]) in self._copies:
            self._names.pop(id(args[0]), None)  # it is a copy no longer
        if function in _COPYING and isinstance(result, torch.Tensor) and len(named) == 1:
            self._copies[id(result)] = result
            self._names.setdefault(id(result), *named)
        elif _writes(function) or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._read |= named

    def made(self) -> Mapping[str, HeldTensor]:
        """The tensors in places where there was none, when forward has ended.

        Raises CaptureError for a tensor that it has read, and replaced by what the next call is to read.
        """
        now = held_tensors(self.model)
        replaced = (name for name in sorted(self._read) if name in now and self._names.get(id(now[name].tensor)) != name)
        if name := next(replaced, ""):
            raise CarriedTensorError(
                f"forward reads {name} and sets it, which the graph would have as it was in the first step",
                fix="register it as a buffer: register_buffer(name, tensor, persistent=False), of its shape from the beginning",
            )
        return {name: held for name, held in now.items() if name not in self._before}


def _writes(function: object) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


class CarriedTensorError(CaptureError):
    """A forward has a tensor of the call before."""

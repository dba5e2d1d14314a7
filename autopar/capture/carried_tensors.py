"""Tensors that forward carries from one call to the next: in attributes of modules and elsewhere in Python, and in the lists,
dicts and objects there.

    self.mean = 0.9 * self.mean + 0.1 * x.mean(0)       reads what it replaces: every call of a graph would have the first mean
    self.before = x                                     read by the next call, where it was None: seen in a second one
    if self.mean is None: self.mean = x.mean(0)         read by all others, of the first x: seen in a second one
    if self.table is None: self.table = torch.arange(9) the same in every call
    self.scale = self.scale.to(x.device)                the same tensor
    self.aux_loss = loss                                only written

Buffers do not count: a graph writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.cached_functions import refuse_varying
from autopar.capture.held_tensors import HeldTensor, held_tensors
from autopar.capture.known_values import computed_from
from autopar.capture.python_state import CarriedTensorError

_COPYING = frozenset({
    torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.float, torch.Tensor.double, torch.Tensor.half,
    torch.Tensor.bfloat16, torch.Tensor.type_as, torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.detach,
})  # fmt: skip


class CarriedTensors:
    """Tracks which of the tensors held by modules forward reads, and which it replaces: those carried between calls.

    A tensor that was moved, cast or copied counts as the same one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._before = model, held_tensors(model, outside=True)
        self.read: set[str] = set()  # names of those that forward computes with
        self._names = {id(held.tensor): name for name, held in self._before.items()}
        self._copies: dict[int, torch.Tensor] = {}  # by id, kept alive

    def notice(self, function: object, args: tuple[object, ...], result: object) -> None:
        """Record a function call; one that returns no tensor only asks for sizes and the like."""
        if not self._names:
            return
        named = {self._names.get(id(leaf), "") for leaf in pytree.tree_leaves(args)} - {""}
        if _writes(function) and id(args[0]) in self._copies:
            self._names.pop(id(args[0]), None)  # no longer a copy
        if function in _COPYING and isinstance(result, torch.Tensor) and len(named) == 1:
            self._copies[id(result)] = result
            self._names.setdefault(id(result), *named)
        elif _writes(function) or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self.read |= named

    def made(self, given: Iterable[object]) -> Mapping[str, HeldTensor]:
        """The tensors that forward has stored, once it has ended; `given` are its arguments.

        Raises CaptureError for a tensor that forward read and then replaced by one that the next call would read.
        """
        now = held_tensors(self.model, outside=True)
        replaced = (name for name in sorted(self.read) if name in now and self._names.get(id(now[name].tensor)) != name)
        if name := next(replaced, ""):
            raise CarriedTensorError(
                f"forward reads {name} and sets it, which the graph would have as it was in the first step",
                fix="register it as a buffer: register_buffer(name, tensor, persistent=False), of its shape from the beginning",
            )
        varying = [leaf for leaf in (*given, *self.model.parameters()) if isinstance(leaf, torch.Tensor)]
        refuse_varying(self.model, varying)
        new = {name: held for name, held in now.items() if self._names.get(id(held.tensor)) != name}
        return {name: replace(held, varies=computed_from(held.tensor, varying)) for name, held in new.items()}


def _writes(function: object) -> bool:
    """Whether a function writes into its first argument."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))

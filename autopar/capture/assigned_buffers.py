"""Turns buffers that forward replaces, `self.mean = 0.9 * self.mean + 0.1 * x.mean(0)`, into writes at its end.

torch.export supports this for the outermost module only, and only when an attribute is set. Until the end of forward, aliases
read earlier keep the old values, and later reads see the new tensor, as in eager mode.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.equal_masks import node_of
from autopar.capture.nodes import memory_of, source
from autopar.errors import CaptureError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A buffer of a module, as it was before forward."""

    module: nn.Module
    path: str
    name: str
    tensor: torch.Tensor

    @property
    def now(self) -> object:
        """The value that the module has there now."""
        return self.module._buffers.get(self.name)


class AssignedBuffers:
    """The buffers of a model before a call."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            _Slot(module=module, path=f"{path}.{name}".strip("."), name=name, tensor=tensor)
            for path, module in model.named_modules()
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]

    def write(self) -> None:
        """After a call, write each value that replaced a buffer into the buffer itself.

        Raises CaptureError if it is not a tensor of the same kind, or if another module still holds the old buffer.
        """
        assigned = [slot for slot in self._slots if slot.now is not slot.tensor]
        held, before = Counter(id(slot.tensor) for slot in self._slots), [slot.tensor for slot in assigned]
        new = [_written(slot, before, shared=held[id(slot.tensor)] > 1) for slot in assigned]
        for slot, tensor in zip(assigned, new, strict=True):
            slot.module._buffers[slot.name] = slot.tensor
            slot.tensor.copy_(tensor)


def _written(slot: _Slot, before: list[torch.Tensor], *, shared: bool) -> torch.Tensor:
    """The value to write into a buffer; a copy if it shares memory with a buffer in `before`, which is written too."""
    now, said = slot.now, f"forward replaces the buffer {slot.path}"
    fix = "write into it: buffer.copy_(...), or keep what changes so outside of buffers"
    if not isinstance(now, torch.Tensor):
        raise CaptureError(f"{said} by {now}", fix=fix)
    node = node_of(now)
    at = source(node) if node is not None else ""
    if (now.shape, now.dtype) != (slot.tensor.shape, slot.tensor.dtype):
        kinds = [f"{str(one.dtype).removeprefix('torch.')} of shape {tuple(one.shape)}" for one in (slot.tensor, now)]
        raise CaptureError(f"{said}, {kinds[0]}, by {kinds[1]}", at=at, fix=fix)
    if now.requires_grad:
        raise CaptureError(f"{said} by what has a gradient", at=at, fix="compute it under torch.no_grad(), or detach it")
    if shared:
        raise CaptureError(f"{said}, which another module keeps as it was", at=at, fix=fix)
    return now.clone() if memory_of(now) in map(memory_of, before) else now


__all__ = ["AssignedBuffers"]

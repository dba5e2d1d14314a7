"""Tensors of a model that overlap others in memory without being the same: writing to one changes both.

self.register_buffer("teacher", self.layer.weight.data)      changes with the optimizer
self.latest = self.queue[0]                                  changes when forward writes into the queue

In a graph, each is a separate tensor. So they are refused if one of them changes; tables that are only read may share memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import CaptureError
from autopar.ir.program import Program
from autopar.operators import writes

_Named = tuple[str, torch.Tensor]
_ELSEWHERE = "a tensor that is not in a module"


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The tensors of a model by name, some of which may overlap."""

    held: tuple[_Named, ...] = ()

    @staticmethod
    def of(held: Sequence[_Named], *, frozen: bool) -> SharedMemory:
        """The tensors of a model. Raises CaptureError if two trained ones overlap; with `frozen` none counts as trained."""
        first: dict[int, _Named] = {}  # of the names of a tensor, the one that programs use
        for name, tensor in held:
            first.setdefault(id(tensor), (name, tensor))
        for group in _overlapping(first.values()):
            trained = [name for name, tensor in group if tensor.requires_grad and tensor.is_leaf and not frozen]
            if len(trained) > 1:
                fix = "hold one parameter, and take the view of it in forward"
                what = "are parameters that share memory without being the same"
                raise CaptureError(f"{trained[0]} and {trained[1]} {what}", fix=fix)
        return SharedMemory(tuple(first.values()))

    def refuse_changed(self, program: Program, constants: Iterable[torch.Tensor] = ()) -> None:
        """Raise CaptureError if a tensor that is trained or written shares memory with another one that the program reads or
        the state dict contains, or with a constant of the program."""
        held = {one.value.name: one for one in (*program.parameters, *program.buffers)}
        written = {name for op in program.ops for name in writes(op)}
        for group in _overlapping((*self.held, *((_ELSEWHERE, one) for one in constants))):
            names = [name for name, _ in group]
            known = [held[name] for name in names if name in held]
            for one in known:
                name, trained = one.value.name, one.value.requires_grad
                others = [other.value.name for other in known if other is not one and (other.used or other.persistent)]
                others += [_ELSEWHERE] * (_ELSEWHERE in names)
                if others and (trained or name in written):
                    raise CaptureError(
                        f"{others[0]} lies in the memory of {name}, which {'is trained' if trained else 'forward writes'}",
                        fix="clone() it if it is to stay as it is, or take it in forward: a view, or weight.detach()",
                    )


def _overlapping(held: Iterable[_Named]) -> Iterator[list[_Named]]:
    """The tensors whose extents in memory overlap, in groups of two or more."""
    spans = sorted(
        (tensor.data_ptr(), place, tensor.data_ptr() + _extent(tensor), name, tensor)
        for place, (name, tensor) in enumerate(held)
        if not tensor.is_meta and tensor.numel()
    )
    group, end = list[_Named](), 0
    for start, _, stop, name, tensor in spans:
        if start >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append((name, tensor))
        end = max(end, stop)
    if len(group) > 1:
        yield group


def _extent(tensor: torch.Tensor) -> int:
    """The bytes from the first element of a tensor to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


__all__ = ["SharedMemory"]

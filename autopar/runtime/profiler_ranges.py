"""Ranges that `torch.profiler` shows beside ATen events: an operator's module, or a collective and its mesh axis.

They cost one check per call while no profiler runs, and nothing under torch.compile.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.profiler import record_function

PREFIX = "autopar: "


def profiling() -> bool:
    """Whether a profiler would record a range now."""
    return not torch.compiler.is_compiling() and torch._C._autograd._profiler_enabled()


def named_range(name: str) -> AbstractContextManager[object]:
    """A range of this name; enter it only if `profiling()`."""
    return record_function(PREFIX + name)


class BackwardRange:
    """A range around the backward of an autograd node, from when its gradients arrive until it has passed on its own."""

    def __init__(self, name: str) -> None:
        self._name = PREFIX + name
        self._open: list[record_function] = []

    def around(self, tensor: torch.Tensor) -> None:
        """Put the range around the node that made a tensor, if the tensor has one."""
        node = tensor.grad_fn
        if node is not None:
            node.register_prehook(self._enter)
            node.register_hook(self._exit)

    def _enter(self, gradients: object) -> None:
        if torch._C._autograd._profiler_enabled():  # the profiler may have covered only the forward
            self._open.append(record_function(self._name).__enter__())  # type: ignore[no-untyped-call]

    def _exit(self, inputs: object, outputs: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


__all__ = ["PREFIX", "BackwardRange", "named_range", "profiling"]

"""Ranges that `torch.profiler` shows beside ATen's events: the module that an operator is of, the collective and its mesh axis.

They cost a question per call while no profiler runs, and nothing where torch.compile traces.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.profiler import record_function

PREFIX = "autopar: "


def profiling() -> bool:
    """Whether a profiler would see a range now."""
    return not torch.compiler.is_compiling() and torch._C._autograd._profiler_enabled()


def named_range(name: str) -> AbstractContextManager[object]:
    """A range of this name, to be entered where `profiling()`."""
    return record_function(PREFIX + name)


class BackwardRange:
    """A range around the backward of an autograd node: from the arrival of its gradients until it has passed on its own."""

    def __init__(self, name: str) -> None:
        self._name = PREFIX + name
        self._open: list[record_function] = []

    def around(self, tensor: torch.Tensor) -> None:
        """Have the range of the node that made a tensor, if that has a gradient."""
        node = tensor.grad_fn
        if node is not None:
            node.register_prehook(self._enter)
            node.register_hook(self._exit)

    def _enter(self, gradients: object) -> None:
        if torch._C._autograd._profiler_enabled():  # perhaps only the forward was profiled
            self._open.append(record_function(self._name).__enter__())  # type: ignore[no-untyped-call]

    def _exit(self, inputs: object, outputs: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


__all__ = ["PREFIX", "BackwardRange", "named_range", "profiling"]

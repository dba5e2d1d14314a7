"""Tensors in host memory: copies from the device and back.

On CUDA both copies run on a stream of their own, to and from pinned memory: the copy to the host overlaps with what the device
computes next, the copy back is waited for. On a CPU they are plain copies.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence

import torch

from autopar.runtime.memory_tracker import other_device

# Who is told of copies between memories: called with "fetch", "stow", "read" or "write" and the bytes of a bucket.
listener = contextvars.ContextVar[Callable[[str, int], None] | None]("listener", default=None)


def tell(kind: str, copied: Sequence[torch.Tensor]) -> None:
    """Tell who listens of a copy of these tensors."""
    told = listener.get()
    if told is not None:
        told(kind, sum(tensor.nbytes for tensor in copied))


class OffloadedTensor:
    """A copy of a tensor in host memory, which is freed with this object."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device, pinned = x.device, x.is_cuda
        with torch.no_grad(), other_device():
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned)
            if not pinned:
                self._host.copy_(x)
                return
            stream = copy_stream(x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                self._host.copy_(x, non_blocking=True)
            x.record_stream(stream)

    def fetch(self) -> torch.Tensor:
        """A copy on the device, in new memory."""
        with torch.no_grad():
            fetched = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            if not fetched.is_cuda:
                with other_device():
                    return fetched.copy_(self._host)
            stream, current = copy_stream(self._device), torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                fetched.copy_(self._host, non_blocking=True)
            current.wait_stream(stream)
            fetched.record_stream(stream)
            return fetched


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies between this device and host memory."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

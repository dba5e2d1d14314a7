"""Memory of the host that holds what a device does not: copies there and back.

From CUDA they run on a stream of their own, into pinned memory: the copy there beside what the device computes next, the one
back while it waits. Elsewhere they are plain copies.
"""

from __future__ import annotations

import functools

import torch

from autopar.runtime.memory_tracker import elsewhere


class OffloadedTensor:
    """The bytes of a tensor, held by the host until the object ends."""

    def __init__(self, x: torch.Tensor) -> None:
        self._device, pinned = x.device, x.is_cuda
        with torch.no_grad(), elsewhere():
            self._bytes = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned)
            if not pinned:
                self._bytes.copy_(x)
                return
            stream = _stream(x.device)
            stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(stream):
                self._bytes.copy_(x, non_blocking=True)
            x.record_stream(stream)

    def fetch(self) -> torch.Tensor:
        """The bytes on the device."""
        with torch.no_grad():
            found = torch.empty(self._bytes.shape, dtype=self._bytes.dtype, device=self._device)
            if not found.is_cuda:
                with elsewhere():
                    return found.copy_(self._bytes)
            stream, current = _stream(self._device), torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                found.copy_(self._bytes, non_blocking=True)
            current.wait_stream(stream)
            found.record_stream(stream)
            return found


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies of a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

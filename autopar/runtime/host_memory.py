"""Weights that the host or the disk stores: copies to the device for a bucket of them, and of gradients back to the host.

On CUDA the host's tensors are pinned, and both copies run on a separate stream: they overlap with computation. On a CPU, which
stands for a device with simulated memory, they are plain copies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.ir.layout import D, H, State
from autopar.runtime.disk import folder_of, start_read, to_disk, wait_read
from autopar.runtime.disk_steps import install
from autopar.runtime.memory_tracker import other_device
from autopar.runtime.offload import copy_stream, tell
from autopar.runtime.rematerialize.recompute import Tensors


def on_host(part: torch.Tensor) -> torch.Tensor:
    """A tensor of the device in the host's memory, pinned if the device is CUDA; itself on a CPU or on meta."""
    return part.cpu().pin_memory() if part.is_cuda else part


def moved(part: torch.Tensor, place: State, folder: str) -> torch.Tensor:
    """A tensor of the device on the host (H), or on the disk (D) in this folder; itself if the place is neither."""
    if place == D:
        install()
        return to_disk(part, folder_of(folder))
    return on_host(part) if place == H else part


def device_of(stored: torch.Tensor) -> torch.device:
    """The device for which the host stores a tensor: pinned memory is for this process's CUDA device."""
    pinned = torch.cuda.is_available() and stored.is_pinned()
    return torch.device("cuda", torch.cuda.current_device()) if pinned else stored.device


def start_copies(primitive: str, weights: Tensors) -> tuple[torch.Tensor, ...]:
    """Issue the copies of weights to the device: "fetch" from the host, or "read" from the disk."""
    return start_read(weights) if primitive == "read" else start_fetch(weights)


def wait_copies(primitive: str, copied: Tensors) -> None:
    """Make later computation on the device wait for issued copies."""
    wait_read(copied) if primitive == "read" else wait_fetch(copied)


def start_fetch(weights: Tensors) -> tuple[torch.Tensor, ...]:
    """Issue the copies of weights from the host; the results are valid after `wait_fetch`."""
    tell("fetch", weights)
    device = device_of(weights[0])
    fetched = [torch.empty_like(weight, device=device, requires_grad=False) for weight in weights]
    if not fetched[0].is_cuda:
        for new, weight in zip(fetched, weights, strict=True):
            new.copy_(weight.detach())
        return tuple(fetched)
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the memory may still be read by what was there before
    with torch.cuda.stream(stream):
        for new, weight in zip(fetched, weights, strict=True):
            new.copy_(weight.detach(), non_blocking=True)
    return tuple(fetched)


def wait_fetch(fetched: Tensors) -> None:
    """Make later computation on the device wait for issued copies."""
    for device in {tensor.device for tensor in fetched if tensor.is_cuda}:
        torch.cuda.current_stream(device).wait_stream(copy_stream(device))
    for tensor in fetched:
        if tensor.is_cuda:
            tensor.record_stream(copy_stream(tensor.device))


def start_stow(gradients: Tensors, dtype: torch.dtype) -> Iterable[torch.Tensor]:
    """Issue the copies of gradients to the host, in this dtype; they may be read after `wait_stow`."""
    tell("stow", gradients)
    for gradient in gradients:
        with other_device():
            kept = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=gradient.is_cuda)
            if not gradient.is_cuda:
                yield kept.copy_(gradient).to(dtype)
                continue
        stream = copy_stream(gradient.device)
        stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(stream):
            kept.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)
        yield kept if dtype == gradient.dtype else _after_copy(kept, stream).to(dtype)


def wait_stow() -> None:
    """Wait until all gradients are on the host: the optimizer, and autograd where it adds them up, read them there."""
    if torch.cuda.is_available():
        copy_stream(torch.device("cuda", torch.cuda.current_device())).synchronize()


def _after_copy(kept: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    stream.synchronize()
    return kept


__all__ = ["moved", "start_copies", "start_stow", "wait_copies", "wait_stow"]

"""One draw of random numbers: from a seed of its own, after which the caller's generator is as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


def seed_from(key: Sequence[object]) -> int:
    """A seed, 0 <= seed < 2**63: a hash of what tells one draw from another."""
    return int.from_bytes(hashlib.sha256(repr(tuple(key)).encode()).digest()[:8], "big") >> 1


def drawn(operator: Callable[..., torch.Tensor], seed: int, /, *args: object, **kwargs: object) -> torch.Tensor:
    """`operator(*args, **kwargs)`, drawing from a seed: the same numbers whenever it is called."""
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    with drawing(seed, device):
        return operator(*args, **kwargs)


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generator of a device, and restore its state afterwards."""
    if device.type == "meta":
        yield
        return
    generator = _generator(device)
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _generator(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator

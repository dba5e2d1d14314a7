"""Random operators of a parallel model: ranks that hold the same values draw alike, ranks that hold different parts do not.

A draw is seeded by (seed of the model, number of the call, number of the operator, this rank's coordinates on the axes that
split the operator). The caller's own random state is neither used nor changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from autopar.runtime.world import Axis, Context


class RngState:
    """The random numbers of one parallel model; emitted code passes it to `seeded`, `ParallelModule` calls `advance`.

    `seed` is equal on all ranks (`agreed_seed`). Two calls of the model draw differently; a model made anew with the same seed
    repeats them.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.call = 0

    def advance(self) -> None:
        """Begin a new call of the model."""
        self.call += 1

    def of(self, index: int, axes: Sequence[Axis]) -> int:
        """The seed of operator number `index` on this rank, 0 <= seed < 2**63."""
        key = (self.seed, self.call, index, *((axis.name, axis.index) for axis in axes))
        return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1

    def __deepcopy__(self, memo: dict[int, object]) -> RngState:
        copied = RngState(self.seed)
        copied.call = self.call
        return copied


def agreed_seed(context: Context) -> int:
    """A seed drawn by rank 0 from its torch generator (so that `torch.manual_seed` fixes it), known to all ranks."""
    drawn = torch.randint(2**62, (1,), dtype=torch.int64)
    if context.device_mesh is not None:
        drawn = drawn.to(context.device)
        dist.broadcast(drawn, src=0)
    return int(drawn)


def seeded(
    operator: Callable[..., torch.Tensor], draws: RngState, index: int, axes: Sequence[Axis], /, *args: object, **kwargs: object
) -> torch.Tensor:
    """`operator(*args, **kwargs)` drawn from the seed of operator `index`; `axes` are those on which it is split.

    The target of a `call_function` node: `seeded(torch.ops.aten.dropout.default, self.draws, 3, [dp], x, 0.1, self.training)`.
    """
    device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), torch.device("cpu"))
    with drawing(draws.of(index, axes), device):
        return operator(*args, **kwargs)


def rate(probability: float, training: bool) -> float:
    """The dropout probability of an operator that has no `training` flag of its own (scaled_dot_product_attention)."""
    return probability if training else 0.0


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from a seed on this device, and give its generator back as it was."""
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
    """The generator that operators on this device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator

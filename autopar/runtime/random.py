"""Random operators of a parallel model: replicated results are equal on all ranks, split ones are independent.

Each operator draws from its own seed, a hash of the model's seed, the call number, the operator number and this rank's
coordinates on the mesh axes that split the operator. The caller's generators are restored afterwards.

A call that may be repeated (`torch.utils.checkpoint` around the model) is identified by the state of torch's generator, which
checkpoint restores before the repetition:

    y = checkpoint(parallel, x)     call 7: remembers the generator's state, then draws one number from it
    z = parallel(x)                 call 8, outside of a checkpoint: draws nothing from the generator
    y.sum().backward()              the generator is in the state in which call 7 began: call 7 again, with the same masks
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils import checkpoint

from autopar.errors import InputError
from autopar.runtime.drawing import drawn, seed_from
from autopar.runtime.lost_ranks import exchanging
from autopar.runtime.traced_random import traced
from autopar.runtime.world import Axis, Context

KEPT = 2**14  # the most repeatable calls remembered: as many as may lie between a forward and its backward


class RngState:
    """The random state of one parallel model: its seed, equal on all ranks (`agreed_seed`), and the number of calls so far.

    Two calls of the model draw different numbers; another model with the same seed repeats them. It is a `Stateful` of
    torch.distributed.checkpoint, saved and loaded in place: a run that resumes under the same plan draws the numbers that it
    would have drawn without the interruption.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.call = 0
        self.numbers = torch.tensor(
            [seed, 0], device="cpu"
        )  # both, as compiled code takes them: a number would be a constant of it
        self._begun: dict[bytes, int] = {}  # state of torch's generator when a call began -> its number
        self._repeatable = False  # whether the current call may be repeated

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def advance(self, calls: int = 1, *, draws: bool = True) -> None:
        """Start the next call of the model, or skip ahead by `calls`; `draws` says whether its program draws at all."""
        self.call += calls
        self.numbers = torch.tensor([self.seed, self.call], device="cpu")
        if draws and self._repeatable:
            torch.rand((), device="cpu")  # so that the next call begins in a different state

    @contextmanager
    def repeatable(self, training: bool) -> Iterator[None]:
        """Enter around a call: repeatable calls draw the same if torch's generator is in the same state, as in plain torch."""
        if not _may_be_made_again(training):
            yield
            return
        state = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).digest()
        latest, self._repeatable = self.call, True
        self.call = self._begun.setdefault(state, latest)
        if len(self._begun) > KEPT:
            del self._begun[next(iter(self._begun))]
        try:
            yield
        finally:
            self.call, self._repeatable = max(self.call, latest), False

    def seed_of(self, index: int, axes: Sequence[Axis]) -> int:
        """The seed of operator number `index` on this rank, 0 <= seed < 2**63."""
        return seed_from((self.seed, self.call, index, *((axis.name, axis.index) for axis in axes)))

    def state_dict(self) -> dict[str, int]:
        """The seed, and the number of calls."""
        return {"seed": self.seed, "call": self.call}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a saved state; for anything else raises InputError and leaves this state unchanged."""
        found = [state.get(name) for name in ("seed", "call")] if isinstance(state, Mapping) else []
        numbers = [number for number in found if isinstance(number, int) and not isinstance(number, bool) and number >= 0]
        if len(numbers) < 2:
            raise InputError(
                "not the random state of a parallel model", given=repr(state)[:80], fix="what state_dict() returned"
            )
        self.seed, self.call = numbers

    def __deepcopy__(self, memo: dict[int, object]) -> RngState:
        copied = RngState(self.seed)
        copied.call = self.call
        return copied


def _may_be_made_again(training: bool) -> bool:
    """Whether a forward runs under `torch.utils.checkpoint`, for the first or the second time, as far as can be detected.

    The first run records no graph, or has saved tensor hooks; the second runs inside a backward.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    unrecorded = training and not torch.is_grad_enabled()
    return hooked or unrecorded or torch._C._current_graph_task_id() != -1


def saves_for_checkpoint() -> bool:
    """Whether a non-reentrant `torch.utils.checkpoint` drops what autograd saves now and recomputes it."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


def agreed_seed(context: Context) -> int:
    """A seed drawn by rank 0 from its torch generator (so that `torch.manual_seed` fixes it), known to all ranks."""
    drawn = torch.randint(2**62, (1,), dtype=torch.int64)
    if context.device_mesh is not None:
        drawn = drawn.to(context.device)
        with exchanging("the seed of rank 0"):
            dist.broadcast(drawn, src=0)
    return int(drawn)


def seeded(
    operator: Callable[..., torch.Tensor], state: RngState, index: int, axes: Sequence[Axis], /, *args: object, **kwargs: object
) -> torch.Tensor | Sequence[torch.Tensor]:
    """`operator(*args, **kwargs)`, drawing from the seed of random operator `index`, which is split on `axes`.

    The target of a `call_function` node: `seeded(torch.ops.aten.dropout.default, rng_state, 3, [dp], x, 0.1, training)`.
    """
    if torch.compiler.is_compiling():
        return traced(operator, state.numbers, index, axes, *args, **kwargs)
    return drawn(operator, state.seed_of(index, axes), *args, **kwargs)


def dropout_rate(probability: float, training: bool) -> float:
    """The dropout probability of an operator that has no `training` flag of its own (scaled_dot_product_attention)."""
    return probability if training else 0.0

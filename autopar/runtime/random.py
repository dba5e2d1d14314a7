"""Random operators of a parallel model: replicated results are equal on all ranks, split ones are independent.

Each operator draws from its own seed, a hash of (seed of the model, number of the call, number of the operator, this rank's
coordinates on the mesh axes that split the operator). The caller's generators are restored afterwards.

A call that may be made a second time (`torch.utils.checkpoint` around the model) takes its number from the state of torch's
generator, which the second one finds as the first did:

    y = checkpoint(parallel, x)     call 7, which began in this state of the generator; it draws one number from it
    z = parallel(x)                 call 8, of a plain loop: nothing is drawn from the generator
    y.sum().backward()              the generator is as it was when call 7 began: call 7 once more, with the same masks
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
from autopar.runtime.traced_random import traced
from autopar.runtime.world import Axis, Context

KEPT = 2**14  # calls that may be made again, at most: as many as are between a forward and its backward


class RngState:
    """The random state of one parallel model: its seed, equal on all ranks (`agreed_seed`), and the number of calls so far.

    Two calls of the model draw different numbers; another model with the same seed repeats them. Stateful, as
    torch.distributed.checkpoint calls what it saves and loads in place: a run that resumes under the same plan draws what it
    would have drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.call = 0
        self.numbers = torch.tensor(
            [seed, 0], device="cpu"
        )  # both, as compiled code takes them: a number would be a constant of it
        self._begun: dict[bytes, int] = {}  # how many calls were before, by the state of torch's generator where one began
        self._repeatable = False  # whether the present call may be made again

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def advance(self, calls: int = 1, *, draws: bool = True) -> None:
        """Start the next call of the model, or count as many; `draws` says whether its program draws at all."""
        self.call += calls
        self.numbers = torch.tensor([self.seed, self.call], device="cpu")
        if draws and self._repeatable:
            torch.rand((), device="cpu")  # so that the next call begins in another state

    @contextmanager
    def repeatable(self, training: bool) -> Iterator[None]:
        """Around a call: two that may be made again draw the same if torch's generator is in the same state, as by torch."""
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
        """Go on from a saved state; raises InputError for anything else, and leaves this one as it is."""
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
    """Whether a forward is one of `torch.utils.checkpoint`, or its second run, as far as that can be told.

    A first one records nothing, or has hooks on what it saves; a second one runs in a backward.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    unrecorded = training and not torch.is_grad_enabled()
    return hooked or unrecorded or torch._C._current_graph_task_id() != -1


def saves_for_checkpoint() -> bool:
    """Whether what autograd saves now goes to a `torch.utils.checkpoint` that is not reentrant, and is computed again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == checkpoint.__name__


def agreed_seed(context: Context) -> int:
    """A seed drawn by rank 0 from its torch generator (so that `torch.manual_seed` fixes it), known to all ranks."""
    drawn = torch.randint(2**62, (1,), dtype=torch.int64)
    if context.device_mesh is not None:
        drawn = drawn.to(context.device)
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

"""Random operators of a parallel model: replicated results are equal on all ranks, split ones are independent.

Each operator draws from its own seed, a hash of (seed of the model, number of the call, number of the operator, this rank's
coordinates on the mesh axes that split the operator). The caller's generators are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.drawing import drawn, seed_from
from autopar.runtime.traced_random import traced
from autopar.runtime.world import Axis, Context


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def advance(self) -> None:
        """Start the next call of the model."""
        self.call += 1
        self.numbers = torch.tensor([self.seed, self.call], device="cpu")

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

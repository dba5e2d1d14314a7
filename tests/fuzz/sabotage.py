"""Rules made wrong, one at a time, to see that fuzzing finds them.

python -m tests.fuzz.sabotage        a line per wrong rule: the failure that it led to, or NOTHING; exit code 1 for that
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest import mock

import torch

from autopar.operators import RULES, OpSharding, registry
from autopar.operators.call import Call
from autopar.runtime import collectives
from autopar.runtime.world import Axis
from tests.fuzz.rounds import Round

GRAPHS = 60  # of a round, at most


@contextmanager
def wrong(target: str, change: Callable[[OpSharding], OpSharding]) -> Iterator[None]:
    """An operator of which the rule says something else."""
    rule = RULES[target]

    def shapes(call: Call) -> OpSharding | None:
        fitted = rule.fit(call)
        return fitted and change(fitted)

    with mock.patch.dict(registry.REGISTERED, {target: replace(rule, shapes=shapes, linear=())}):
        yield


def linear(fitted: OpSharding) -> OpSharding:
    """The result is the sum over ranks where the first operand is."""
    return replace(fitted, linear=(frozenset({0}),))


def separable(fitted: OpSharding) -> OpSharding:
    """Every dim may be split, whatever the operator does along it."""
    return replace(fitted, factors=tuple(replace(factor, whole=False) for factor in fitted.factors))


@contextmanager
def deaf() -> Iterator[None]:
    """An all-reduce that sends nothing."""

    def own(x: torch.Tensor, axis: Axis, position: collectives.SplitPosition) -> torch.Tensor:
        return x.clone()

    with mock.patch.dict(collectives.PRIMITIVES, {"all_reduce": own}):
        yield


SABOTAGE: Mapping[str, Callable[[], AbstractContextManager[None]]] = {
    "a power is called linear": lambda: wrong("aten.pow.Tensor_Scalar", linear),
    "a ReLU is called linear": lambda: wrong("aten.relu.default", linear),
    "a cumulative sum may be split along its dim": lambda: wrong("aten.cumsum.default", separable),
    "a log-softmax may be split along its dim": lambda: wrong("aten.log_softmax.int", separable),
    "an all-reduce that sends nothing": deaf,
}


def found(name: str, seed: int = 0) -> str:
    """How a round fails under a sabotage; empty if it does not."""
    with SABOTAGE[name]():
        one = Round(seed=seed, graphs=GRAPHS, shrinks=False)
        one.run()
    return one.failure


def main() -> int:
    """Print what each sabotage led to; returns the exit code."""
    failures = {name: found(name) for name in SABOTAGE}
    for name, failure in failures.items():
        print(f"{name}: {failure.partition(chr(10))[0] or 'NOTHING'}")
    return 0 if all(failures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

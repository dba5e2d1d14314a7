"""Distributed forms made wrong, one at a time, to see that the law notices.

    python -m tests.operators.sabotage_forms            every change of every form; exit code 1 if nothing catches one
    python -m tests.operators.sabotage_forms --every 3  of the changes of each form the first, the fourth, ...

A form is told wrongly what it splits, or in which state operands come and results go; or its ranks do not hear each other, or
every one takes itself for the first. Changes that say something true are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TypeVar
from unittest import mock

import torch
import transformers.integrations.moe  # noqa: F401  (an operator)

from autopar.errors import RuleError
from autopar.ir.program import Op, Value
from autopar.operators import OpSharding, ParallelForm, Rule, fit, rule_of
from autopar.operators.checking.execution_check import Ranks, check, distributed_trials
from autopar.runtime import attention, losses, norms, parallel_ops, recurrent, row_dispatch
from autopar.runtime.threaded_ranks import ranks
from autopar.runtime.world import Axis
from tests.operators.drawing import Ends, ex, t
from tests.operators.examples import EXAMPLES

T = TypeVar("T")
Built = tuple[Op, dict[str, Value], dict[str, torch.Tensor]]
Change = tuple[str, ParallelForm, Ranks]  # in words, the form, and what runs its ranks
STATES = {"R": "I", "I": "R", "P": "I"}
# Forms whose ranks use their index, beside communicating.
PLACED = (
    "vocab_parallel_embedding",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_nll_loss",
    "query_parallel_attention",
    "grouped_query_attention",
)
# Wrong sizes abort the process: in kernels, or in what gloo receives.
TRUSTING = ("query_parallel_attention", "ring_attention", "expert_parallel_grouped_mm")
CALLS = EXAMPLES | {"transformers.grouped_mm_fallback.default": [ex(t(12, 5), t(4, 5, 6), Ends((4,), torch.int64, 12))]}
TRUE = {
    ("group_norm_channels", "splits ...0 for c"),  # planes in place of channels
    ("all_to_all_rows", "does not split v"),  # the first rank has all rows, and sends them
}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Mutant:
    """A form that was made wrong, on a call for which it serves."""

    target: str
    form: str
    what: str
    wrong: ParallelForm
    built: Built
    ranks: Ranks

    def caught(self) -> str:
        """What the law says of it; empty if nothing."""
        try:
            check(*self.built, rule=replace(_rule(self.target), distributed=(self.wrong,)), ranks=self.ranks)
        except RuleError as error:
            return f"{error.details.get('trial', error.what)}: {error.details.get('where', '')}"
        except Exception as error:  # the sizes make no sense at all
            return f"{type(error).__name__}: {error}"
        return ""


def mutants() -> Iterator[Mutant]:
    """Every mutant of every form."""
    seen = set()
    for target, examples in sorted(CALLS.items()):
        for form in _rule(target).distributed:
            built = next((made for made in (example.build(target) for example in examples) if _serves(form, made)), None)
            if built and form not in seen:
                seen.add(form)
                for what, wrong, run in _changes(form, _rule(target), *built[:2]):
                    if (form.name, what) not in TRUE:
                        yield Mutant(target=target, form=form.name, what=what, wrong=wrong, built=built, ranks=run)


def _rule(target: str) -> Rule:
    rule = rule_of(target)
    assert rule is not None
    return rule


def _serves(form: ParallelForm, built: Built) -> bool:
    fitted = fit(*built[:2], rule=replace(_rule(built[0].target), distributed=(form,)))
    return fitted is not None and any(distributed_trials(fitted))


def _changes(form: ParallelForm, rule: Rule, op: Op, values: dict[str, Value]) -> Iterator[Change]:
    fitted = fit(op, values)
    assert fitted is not None
    split = set(fitted.factors_of(form))

    def lacks(dims: tuple[tuple[int, ...], ...]) -> bool:
        return split.isdisjoint(f for dim in dims for f in dim)

    given = [values[name] for i, name in enumerate(op.operands) if lacks(fitted.operands[i]) or i in form.whole]
    if any(value.requires_grad for value in given):
        yield "operands in another state", replace(form, operands=STATES[form.operands]), ranks
    if any(map(lacks, fitted.results)):
        yield "results in another state", replace(form, results=STATES[form.results] if form.results == "P" else "P"), ranks
    for what, factors in _factors(form, fitted):
        alike = (one for one in rule.distributed if parallel_ops.PARALLEL_OPS[one.name] is parallel_ops.PARALLEL_OPS[form.name])
        wrong = replace(form, factors=factors, nested=False)
        if factors not in [one.factors for one in alike] and form.name not in TRUSTING and _serves(wrong, (op, values, {})):
            yield what, wrong, ranks
    if form.name in PLACED:
        yield "every rank is the first", form, misplaced
    for module, name, kind, instead in MESSAGES:
        own = parallel_ops.PARALLEL_OPS[form.name].__module__ == module.__name__
        if own and kind in {sent.kind for sent in (*form.forward, *form.backward)}:
            yield f"no {name}", form, partial(_without, module, name, instead)  # type: ignore[misc]


def _factors(form: ParallelForm, fitted: OpSharding) -> Iterator[tuple[str, tuple[str, ...]]]:
    first, *others = form.factors
    for name in (factor.name for factor in fitted.factors if factor.name not in ("_", *form.factors)):
        yield f"splits {name} for {first}", (name, *others)
    for gone in form.factors if others else ():
        yield f"does not split {gone}", tuple(one for one in form.factors if one != gone)


def misplaced(form: str, size: int, run: Callable[[int, Callable[..., object]], T]) -> list[T]:
    """Every rank takes itself for the first."""

    def first(rank: int, function: Callable[..., object]) -> T:
        assert isinstance(function, partial)
        (axis,) = function.args
        return run(rank, partial(function.func, replace(axis, index=0)))

    return ranks(form, size, first)


def _without(
    module: ModuleType, name: str, instead: Callable[..., object], form: str, size: int, run: Callable[..., T]
) -> list[T]:
    """Something stands in place of what is sent."""
    with mock.patch.object(module, name, instead):
        return ranks(form, size, run)


def deaf(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """In place of a sum, or of a maximum: what this rank has."""
    return x


def alone(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """In place of what all ranks give: what this one gives, as often."""
    return x.expand(axis.size, *x.shape)


def repeated(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """The same, joined along a dim."""
    return torch.cat([x] * axis.size, dim)


def kept(held: tuple[torch.Tensor, torch.Tensor], axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of what the rank before has: what this one has."""
    return held


def own(x: torch.Tensor, since: list[int], to: list[int], rows: int, group: str) -> torch.Tensor:
    """In place of the rows of others: as many of its own, over and over."""
    return x[torch.arange(sum(since)) % len(x)]


MESSAGES: tuple[tuple[ModuleType, str, str, Callable[..., object]], ...] = (
    (parallel_ops, "all_reduce_sum", "all_reduce", deaf),
    (parallel_ops, "all_reduce_max", "all_reduce", deaf),
    (losses, "all_reduce_sum", "all_reduce", deaf),
    (losses, "all_reduce_max", "all_reduce", deaf),
    (norms, "all_reduce_sum", "all_reduce", deaf),
    (norms, "all_gather_stack", "all_gather", alone),
    (attention, "ring_step", "all_to_all", kept),
    (row_dispatch, "dispatch_rows", "all_to_all", own),
    (recurrent, "all_gather__slice", "all_gather", repeated),
    (recurrent, "identity__all_reduce", "all_reduce", deaf),
)


def main() -> int:
    """Print what was caught how; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every Nth change of each form")
    every, count, missed, seen = parser.parse_args().every, 0, 0, Counter[str]()
    for mutant in mutants():
        seen[mutant.form] += 1
        if (seen[mutant.form] - 1) % every:
            continue
        found = mutant.caught()
        count, missed = count + 1, missed + (not found)
        print(f"{mutant.form} of {mutant.target}: {mutant.what}: {found.splitlines()[0] if found else 'NOTHING'}", flush=True)
    print(f"{missed} of {count} were not caught" if missed else f"all {count} were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

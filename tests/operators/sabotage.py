"""Rules of the table made wrong, one at a time and at random, to see that the law with its examples notices.

    python -m tests.operators.sabotage [--seed 0] [--count 20]      a table: rule, what was changed, by what it was caught
    python -m tests.operators.sabotage --all                        every change of every rule; those that nothing catches

Changes that say something true are left out: a rule may say less than it could.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from autopar.errors import RuleError
from autopar.ir.program import Op, Value
from autopar.operators import RULES, Factor, OpSharding, Rule, fit
from autopar.operators.call import Call
from autopar.operators.checking.execution_check import check
from autopar.operators.rule import Dims
from tests.operators.examples import EXAMPLES, calls

LINEAR, MEMBER = "calls an operand linear", "takes a member from a group"
TRUSTING = ("backward", "native_batch_norm", "_weight_norm")  # that take any sizes, and write where there is nothing
TRUE = {  # (rule, change)
    *((f"aten.{name}", LINEAR) for name in ("nan_to_num.default", "nanmean.default", "nansum.default")),  # without a NaN
    *((f"aten.{name}.default", LINEAR) for name in ("binary_cross_entropy", "binary_cross_entropy_with_logits")),  # in weights
    *((f"aten.{name}.default", LINEAR) for name in ("nll_loss", "nll_loss_nd", "rms_norm")),
    *((f"aten.{name}", LINEAR) for name in ("xlogy.Tensor", "xlogy.Scalar_Other")),
    *((f"aten.special_{name}.default", LINEAR) for name in ("xlogy", "xlog1py")),
    ("aten.nextafter.default", LINEAR),  # but for one rounding
    ("aten.copy.default", MEMBER),
}


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Mutation:
    """A change of what a rule says."""

    kind: str
    what: str
    change: Callable[[OpSharding], OpSharding]
    averages: bool = True  # whether a mean is still divided


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A rule that was made wrong, and what noticed it; empty if nothing did."""

    target: str
    kind: str
    what: str
    caught: str


def mutants(seed: int, count: int) -> Iterator[Mutant]:
    """As many mutants, of different rules, of every kind in turn; those that change no example are none."""
    draw = random.Random(seed)
    kinds: dict[str, list[tuple[str, Mutation]]] = {}
    for target in sorted(EXAMPLES):
        for mutation in mutations(target):
            kinds.setdefault(mutation.kind, []).append((target, mutation))
    used: set[str] = set()
    for kind in itertools.islice(itertools.cycle(sorted(kinds)), count):
        left = [(target, mutation) for target, mutation in kinds[kind] if target not in used]
        if left:
            target, mutation = draw.choice(left)
            used.add(target)
            yield judged(target, mutation)


def every() -> Iterator[Mutant]:
    """Every mutant of every rule."""
    return (judged(target, mutation) for target in sorted(EXAMPLES) for mutation in mutations(target))


def judged(target: str, mutation: Mutation) -> Mutant:
    """A mutant, and what catches it."""
    return Mutant(target=target, kind=mutation.kind, what=mutation.what, caught=caught(target, mutation))


def caught(target: str, mutation: Mutation) -> str:
    """The trial, and the tensor, with which the law catches a mutant on one of the examples."""
    rule = RULES[target]
    for example in EXAMPLES[target]:
        op, values, tensors = example.build(target)
        try:
            check(op, values, tensors, rule=broken(rule, mutation))
        except RuleError as error:
            return f"{error.details.get('trial', error.what)}: {error.details.get('where', '')}"
        except Exception as error:  # the sizes make no sense at all
            return f"{type(error).__name__}: {error}"
    return ""


def broken(rule: Rule, mutation: Mutation) -> Rule:
    """The rule with the mutation in what it says of each op."""

    def shapes(call: Call) -> OpSharding | None:
        fitted = rule.fit(call)
        if fitted is None:
            return None
        return mutation.change(replace(fitted, linear=call.linear(rule.linear)) if rule.linear else fitted)

    return replace(rule, shapes=shapes, linear=(), averages=rule.averages if mutation.averages else None)


def mutations(target: str) -> Iterator[Mutation]:
    """Every mutation of a rule that changes what it says of its first example that it changes at all."""
    if any(name in target for name in TRUSTING):
        return
    built = calls(target)
    fits = [fit(op, values) for op, values in built]
    if any(fitted and fitted.random for fitted in fits):  # of what draws only shapes can be checked
        return
    for (op, values), fitted in zip(built, fits, strict=True):
        if fitted is None or "zero" in target:  # zeros are linear, and addends of zero
            continue
        found = [mutation for mutation in _of(op, fitted, values, RULES[target]) if (target, mutation.kind) not in TRUE]
        yield from found
        if found:
            return


def _of(op: Op, fitted: OpSharding, values: Mapping[str, Value], rule: Rule) -> Iterator[Mutation]:
    floats = [i for i, name in enumerate(op.operands) if values[name].dtype.is_floating_point]
    smooth = all(value.dtype.is_floating_point for value in op.results)
    for f, factor in enumerate(fitted.factors):
        if factor.whole and factor.size > 1:
            what = f"{factor} of size {factor.size} is split"
            yield Mutation(kind="splits a whole factor", what=what, change=_split(f, factor.name))
    for r, dims in enumerate(fitted.results):
        for d, dim in enumerate(dims):
            if any(not fitted.factors[f].whole for f in dim):
                what = f"result {r} lacks dim {d}"
                yield Mutation(kind="drops a factor of a result", what=what, change=_lacks(r, d, operand=False))
            if any(not fitted.factors[f].whole for other in dims[d : d + 2] for f in other) and dim != (*dims, dim)[d + 1]:
                yield Mutation(kind="swaps two dims of a result", what=f"result {r}: dims {d}, {d + 1}", change=_swapped(r, d))
    for i, dims in enumerate(fitted.operands):
        for d, dim in enumerate(dims):
            if any(not fitted.factors[f].whole and _count(fitted, f) > 1 for f in dim):
                what = f"operand {i} lacks dim {d}"
                yield Mutation(kind="drops a factor of an operand", what=what, change=_lacks(i, d, operand=True))
        if fitted.summed and any(not fitted.factors[f].whole and not _has(dims, f) for f in fitted.summed) and i in floats:
            sign = "no longer" if i in fitted.added else "now"
            yield Mutation(kind="changes what is added", what=f"operand {i} is {sign} added once", change=_toggled(i))
    for i in floats if smooth else ():
        if not any(i in group for group in fitted.linear):
            yield Mutation(kind=LINEAR, what=f"operand {i}", change=_grouped(frozenset({i})))
    for group in fitted.linear:
        for i in sorted(group) if len(group) > 1 else ():
            yield Mutation(kind=MEMBER, what=f"operand {i} from {sorted(group)}", change=_less(group, i))
        for other in fitted.linear:
            if min(group) < min(other) and group | other not in fitted.linear:
                what = f"{sorted(group)} and {sorted(other)}"
                yield Mutation(kind="makes two groups one", what=what, change=_grouped(group | other))
    if rule.averages and rule.averages(Call.of(op)) and any(not fitted.factors[f].whole for f in fitted.summed):
        yield Mutation(kind="forgets to divide a mean", what="", change=lambda fitted: fitted, averages=False)


def _count(fitted: OpSharding, factor: int) -> int:
    """How many dims have a factor."""
    return sum(factor in dim for dims in (*fitted.operands, *fitted.results) for dim in dims)


def _has(dims: Dims, factor: int) -> bool:
    return any(factor in dim for dim in dims)


def _split(f: int, name: str) -> Callable[[OpSharding], OpSharding]:
    def change(fitted: OpSharding) -> OpSharding:
        factors = tuple(replace(one, whole=one.whole and (i, one.name) != (f, name)) for i, one in enumerate(fitted.factors))
        return replace(fitted, factors=factors)

    return change


def _swapped(r: int, d: int) -> Callable[[OpSharding], OpSharding]:
    def change(fitted: OpSharding) -> OpSharding:
        if len(fitted.results) <= r or len(fitted.results[r]) <= d + 1:
            return fitted
        dims = list(fitted.results[r])
        dims[d], dims[d + 1] = dims[d + 1], dims[d]
        return replace(fitted, results=(*fitted.results[:r], tuple(dims), *fitted.results[r + 1 :]))

    return change


def _lacks(position: int, d: int, *, operand: bool) -> Callable[[OpSharding], OpSharding]:
    """A dim is one of its own, that stays whole."""

    def change(fitted: OpSharding) -> OpSharding:
        tensors = fitted.operands if operand else fitted.results
        if len(tensors) <= position or len(tensors[position]) <= d or not tensors[position][d]:
            return fitted
        size = 1
        for f in tensors[position][d]:
            size *= fitted.factors[f].size
        factors = (*fitted.factors, Factor(name="_", size=size, whole=True))
        dims = (*tensors[position][:d], (len(factors) - 1,), *tensors[position][d + 1 :])
        now = (*tensors[:position], dims, *tensors[position + 1 :])
        changed = replace(fitted, factors=factors)
        return replace(changed, operands=now) if operand else replace(changed, results=now)

    return change


def _toggled(i: int) -> Callable[[OpSharding], OpSharding]:
    return lambda fitted: replace(fitted, added=fitted.added ^ {i})


def _grouped(group: frozenset[int]) -> Callable[[OpSharding], OpSharding]:
    def change(fitted: OpSharding) -> OpSharding:
        return replace(fitted, linear=(*fitted.linear, group)) if max(group) < len(fitted.operands) else fitted

    return change


def _less(group: frozenset[int], i: int) -> Callable[[OpSharding], OpSharding]:
    return lambda fitted: replace(fitted, linear=tuple(one - {i} if one == group else one for one in fitted.linear))


def main() -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    found = list(every() if options.all else mutants(options.seed, options.count))
    missed = [mutant for mutant in found if not mutant.caught]
    table = Table("rule", "what it does wrong", "", "caught by", box=None)
    for mutant in missed if options.all else found:
        table.add_row(mutant.target, mutant.kind, mutant.what, mutant.caught or "NOTHING")
    if table.rows:
        Console(width=160, color_system=None).print(table)
    print(f"{len(found) - len(missed)} of {len(found)} were caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

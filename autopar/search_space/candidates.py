"""Candidates: every way to run an op on the mesh, one form per axis.

    linear "b s k, n k, +n -> b s n" on axes (2, 4)   ->   I I | I R | R split b | split b split n | split (b) (b) | ...

On each axis an op runs in exactly one form: invariant (all I), replicated (all R), split of a factor (operands that have the
factor S, the others R; results that lack it P), partial in a group of operands in which the op is jointly linear, or a
distributed form of its own (`rules.ParallelForm`), on one axis at most.
A factor split by several axes is nested in every order; an inner factor of a merged dim is split only where `block_counts`
says so.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.analysis.block_counts import Blocks, left_blocks
from autopar.ir.layout import I, Layout, P, R, State, split
from autopar.ir.program import Op, Value
from autopar.operators import OpSharding, ParallelForm

# ("I"|"R", 0, 0), ("P", group, 0), ("S", factor, stride within the factor), ("D", distributed form, stride of its last factor),
# ("O", 0, parts into which own rows are cut by this axis and those outside it)
Form = tuple[str, int, int]

INVARIANT: Form = ("I", 0, 0)
REPLICATED: Form = ("R", 0, 0)
OWN: Form = ("O", 0, 0)
OWN_ROWS = -1  # in the place of a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run an op: a form per axis, and the layouts that follow for its operands and results."""

    forms: tuple[Form, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    @property
    def own(self) -> bool:
        """Whether it runs on own rows on some axis."""
        return any(kind == "O" for kind, _, _ in self.forms)


def candidates(
    op: Op,
    fitted: OpSharding | None,
    values: Mapping[str, Value],
    sizes: tuple[int, ...],
    blocks: Mapping[str, Blocks],
) -> list[Candidate]:
    """All candidates of an op, with duplicates in all layouts removed; an op without a rule runs whole."""
    operands = [values[name] for name in op.operands]
    grads = [v.requires_grad for v in operands], [v.requires_grad for v in op.results]
    factors = _factor_blocks(op, fitted, blocks) if fitted else []
    found: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], Candidate] = {}
    known: dict[Form, tuple[list[State], list[State]]] = {}
    for forms in _assignments(fitted, factors, sizes, any(grads[0]) or any(grads[1])):
        for form in forms:
            if form not in known:
                known[form] = _states(form, fitted, *grads)
        made = _join(forms, [known[form] for form in forms])
        found.setdefault((made.operands, made.results), made)
    return list(found.values())


def candidate(op: Op, fitted: OpSharding | None, values: Mapping[str, Value], forms: tuple[Form, ...]) -> Candidate:
    """The candidate with these forms."""
    grads = [values[name].requires_grad for name in op.operands], [v.requires_grad for v in op.results]
    return _join(forms, [_states(form, fitted, *grads) for form in forms])


def parts_of(fitted: OpSharding | None, candidate: Candidate, sizes: Sequence[int]) -> list[int]:
    """The number of parts into which a candidate splits each factor."""
    parts = [1] * (len(fitted.factors) if fitted else 0)
    for (kind, factor, _), size in zip(candidate.forms, sizes, strict=True):
        for f, count in _parts(fitted, kind, factor, size).items() if fitted else ():
            parts[f] *= count
    return parts


def _parts(fitted: OpSharding, kind: str, which: int, size: int) -> dict[int, int]:
    """The factors that a form splits on an axis, and into how many parts."""
    match kind:
        case "S":
            return {which: size}
        case "D":
            return fitted.parts(fitted.distributed[which], size)
        case "O":
            return {f: size for dim in fitted.own_dims for f in dim[:1]}
    return {}


def form_factors(fitted: OpSharding | None, number: int) -> tuple[int, ...]:
    """The factors that the distributed form with this number splits."""
    return fitted.factors_of(fitted.distributed[number]) if fitted else ()


def distributed(fitted: OpSharding | None, candidate: Candidate) -> tuple[int, ParallelForm] | None:
    """The axis on which a candidate runs in a distributed form, and that form."""
    for axis, (kind, number, _) in enumerate(candidate.forms):
        if kind == "D" and fitted:
            return axis, fitted.distributed[number]
    return None


def _join(forms: tuple[Form, ...], columns: Sequence[tuple[list[State], list[State]]]) -> Candidate:
    """Combine the operand and result states of each axis into a candidate."""
    inside = tuple(zip(*(c[0] for c in columns), strict=True))
    outside = tuple(zip(*(c[1] for c in columns), strict=True))
    return Candidate(forms=forms, operands=inside, results=outside)


def _assignments(
    fitted: OpSharding | None, factors: list[tuple[int, ...]], sizes: tuple[int, ...], differentiable: bool
) -> Iterator[tuple[Form, ...]]:
    """One form per axis; the strides of a factor shared by several axes follow from the order of their nest."""
    partial_gradients = differentiable and not (fitted and fitted.whole_gradient)
    plain: list[Form] = [INVARIANT, REPLICATED] if partial_gradients else [INVARIANT]
    if fitted:
        plain += [("P", group, 0) for group in range(len(fitted.linear))]
    splits: list[Form] = [("S", f, count) for f, counts in enumerate(factors) for count in counts]
    splits += [OWN] if fitted and fitted.own else []
    choices = [[*plain, *splits, *_distributed_over(fitted, size)] if size > 1 else [INVARIANT] for size in sizes]
    for forms in itertools.product(*choices):
        if any(form[0] == "D" for form in forms) and not _apart(fitted, forms):
            continue
        if OWN in forms and not _own_apart(fitted, forms):
            continue
        groups: dict[int, list[int]] = {}
        for axis, form in enumerate(forms):
            if form[0] in "SO":
                groups.setdefault(form[1] if form[0] == "S" else OWN_ROWS, []).append(axis)
        if not groups:
            yield forms
            continue
        assert fitted is not None
        nests = (
            _own_nests(axes, fitted, sizes) if f == OWN_ROWS else _nests(axes, forms, fitted.factors[f].size, sizes)
            for f, axes in groups.items()
        )
        for orders in itertools.product(*nests):
            strides = dict(pair for order in orders for pair in order)
            yield tuple((form[0], form[1], strides[axis]) if axis in strides else form for axis, form in enumerate(forms))


def _distributed_over(fitted: OpSharding | None, size: int) -> Iterator[Form]:
    """The distributed forms whose factors an axis of this size divides."""
    for number, form in enumerate(fitted.distributed if fitted else ()):
        for stride in list(fitted.chunks(form, size).values())[-1:]:  # type: ignore[union-attr]
            yield "D", number, stride


def _apart(fitted: OpSharding | None, forms: Sequence[Form]) -> bool:
    """Whether at most one form is distributed, and no other axis splits its factors."""
    numbers = [number for kind, number, _ in forms if kind == "D"]
    return len(numbers) == 1 and {f for kind, f, _ in forms if kind == "S"}.isdisjoint(form_factors(fitted, numbers[0]))


def _own_apart(fitted: OpSharding | None, forms: Sequence[Form]) -> bool:
    """Whether no other axis splits own rows, and the rows that they come from, in another way."""
    assert fitted is not None
    own = {f for dim in fitted.own_dims for f in dim}
    others = ({f} if kind == "S" else set(form_factors(fitted, f)) for kind, f, _ in forms if kind in "SD")
    return all(own.isdisjoint(other) for other in others)


def _own_nests(axes: list[int], fitted: OpSharding, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """`(axis, parts)` for every order in which axes can nest in own rows."""
    for order in itertools.permutations(axes):
        parts = list(itertools.accumulate((sizes[axis] for axis in order), operator.mul))
        if all(fitted.size(dim) % parts[-1] == 0 for dim in fitted.own_dims):
            yield tuple(zip(order, parts, strict=True))


def _nests(axes: list[int], forms: Sequence[Form], size: int, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """`(axis, stride)` for every order in which axes can nest in one factor; axes of different block counts do not mix
    freely."""
    by_count: dict[int, list[int]] = {}
    for axis in axes:
        by_count.setdefault(forms[axis][2], []).append(axis)
    counts = sorted(by_count)
    for orders in itertools.product(*(itertools.permutations(by_count[count]) for count in counts)):
        placed: list[tuple[int, int]] = []
        rest = size
        for count, order in zip(counts, orders, strict=True):
            if size % count or rest % (size // count):
                break
            rest = size // count
            for axis in order:
                rest, short = divmod(rest, sizes[axis])
                if short or not rest:
                    break
                placed.append((axis, rest))
            else:
                continue
            break
        else:
            yield tuple(placed)


def _states(
    form: Form, fitted: OpSharding | None, operand_grads: list[bool], result_grads: list[bool]
) -> tuple[list[State], list[State]]:
    """The states of every operand and result on an axis under one form; without a gradient R is I."""
    kind, which, stride = form
    if kind == "I" or fitted is None or kind == "R":
        state = I if kind == "I" else R
        inside, outside = [state] * len(operand_grads), [state] * len(result_grads)
    elif kind == "P":
        group = fitted.linear[which]
        inside = [P if i in group else R for i in range(len(operand_grads))]
        outside = [P] * len(result_grads)
    elif kind == "O" and fitted.own:
        rows = fitted.own
        inside = [_own(state, dims, stride, fitted) for state, dims in zip(rows.operands, fitted.operands, strict=True)]
        outside = [_own(state, dims, stride, fitted) for state, dims in zip(rows.results, fitted.results, strict=True)]
    elif kind == "D":
        own = fitted.distributed[which]
        inside = [
            (_chunk(dims, own, stride, fitted) if i not in own.whole else None) or State(own.operands)
            for i, dims in enumerate(fitted.operands)
        ]
        outside = [_chunk(dims, own, stride, fitted) or State(own.results) for dims in fitted.results]
    else:
        summed = which in fitted.summed
        inside = [
            _digit(dims, which, stride, fitted) or (P if summed and i in fitted.added else R)
            for i, dims in enumerate(fitted.operands)
        ]
        outside = [_digit(dims, which, stride, fitted) or P for dims in fitted.results]
    return (
        [I if s == R and not grad else s for s, grad in zip(inside, operand_grads, strict=True)],
        [I if s == R and not grad else s for s, grad in zip(outside, result_grads, strict=True)],
    )


def _own(state: State | None, dims: tuple[tuple[int, ...], ...], parts: int, fitted: OpSharding) -> State:
    """The state of an operand or result for own rows."""
    if state is None:
        return R
    return state._replace(stride=fitted.size(dims[state.dim]) // parts) if state.kind == "S" else state


def _digit(dims: tuple[tuple[int, ...], ...], factor: int, stride: int, fitted: OpSharding) -> State | None:
    """The split of the dim that has the factor, if one has: the factors to its right stretch the stride."""
    for dim, parts in enumerate(dims):
        if factor in parts:
            for right in parts[parts.index(factor) + 1 :]:
                stride *= fitted.factors[right].size
            return split(dim, stride)
    return None


def _chunk(dims: tuple[tuple[int, ...], ...], form: ParallelForm, stride: int, fitted: OpSharding) -> State | None:
    """The split of the dim that has a factor of a distributed form; the last factor is split at this stride, the others
    alike.
    """
    *others, last = fitted.factors_of(form)
    ranks = fitted.factors[last].size // stride * (fitted.factors[others[0]].size if form.nested else 1)
    found = (_digit(dims, f, own, fitted) for f, own in fitted.chunks(form, ranks).items())
    return next((state for state in found if state), None)


def _factor_blocks(op: Op, fitted: OpSharding, blocks: Mapping[str, Blocks]) -> list[tuple[int, ...]]:
    """Per factor, the block counts in which it may be split: those supported by every dim that has it."""
    names = (*op.operands, *(r.name for r in op.results))
    counts: list[tuple[int, ...]] = []
    for f, factor in enumerate(fitted.factors):
        if factor.whole or factor.size == 1:
            counts.append(())
            continue
        known: set[int] | None = None
        for name, dims in zip(names, (*fitted.operands, *fitted.results), strict=True):
            for dim, parts in enumerate(dims):
                if f in parts:
                    left = left_blocks(fitted, parts, f)
                    here = {k // left for k in blocks[name][dim] if k % left == 0}
                    known = here if known is None else known & here
        counts.append(tuple(sorted(known or ())))
    return counts

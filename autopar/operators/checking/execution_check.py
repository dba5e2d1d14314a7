"""Checks the law of rules by execution: split the operands, run on every rank, join, and get the whole result.

    results    joined, partial ones added, equal the whole results
    gradients  of split operands joined, of replicated ones added, of partial ones the same on every rank, equal the whole's

Every factor is split once, twice nested, and in blocks; neighbouring factors are split together; every linear group is
given random addends. A random op can only be checked for its shapes. Distributed forms, whose ranks talk to each other, are run
on all ranks at once, alone and beside a split of every other factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch

from autopar.errors import RuleError
from autopar.ir.layout import Layout, P, R, State, join, local_shape, shard, split
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Value, filled, overload
from autopar.operators.registry import fit, localise, scale
from autopar.operators.rule import Dims, OpSharding, ParallelForm, Rule

TOLERANCE = 1e-10  # of |a - b| / (1 + max|b|), in float64
Function = Callable[..., object]
T = TypeVar("T")


class Ranks(Protocol):
    """Runs all ranks of a mesh axis at once."""

    def __call__(self, form: str, size: int, run: Callable[[int, Function], T]) -> list[T]:
        """The result of `run(rank, function)` on each rank; the function is that of a distributed form, bound to its axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way to run an op: per mesh axis its size, and a factor split at a stride, a linear group, or a distributed form."""

    sizes: tuple[int, ...]
    forms: tuple[tuple[str, int, int], ...]  # ("split", factor, stride), ("partial", group, 0), ("distributed", form, ranks)

    def describe(self, fitted: OpSharding) -> str:
        """What is split or partial, and how."""
        words = []
        for size, (kind, which, stride) in zip(self.sizes, self.forms, strict=True):
            if kind == "split":
                factor = fitted.factors[which]
                words.append(f"{factor.name} of size {factor.size} split {size} ways at stride {stride}")
            elif kind == "distributed":
                words.append(f"{fitted.distributed[which].name} on {size} ranks")
            else:
                words.append(f"operands {sorted(fitted.linear[which])} partial on {size} ranks")
        return ", ".join(words)

    def layouts(self, fitted: OpSharding) -> tuple[list[Layout], list[Layout]]:
        """The layouts of operands and results that follow from the forms."""
        inside = [tuple(_state(form, fitted, d, i) for form in self.forms) for i, d in enumerate(fitted.operands)]
        return inside, [tuple(_state(form, fitted, d, None) for form in self.forms) for d in fitted.results]

    def parts(self, fitted: OpSharding) -> list[int]:
        """Into how many parts each factor is split."""
        parts = [1] * len(fitted.factors)
        for size, (kind, which, _) in zip(self.sizes, self.forms, strict=True):
            own = fitted.parts(fitted.distributed[which], size) if kind == "distributed" else {}
            for f, count in {which: size}.items() if kind == "split" else own.items():
                parts[f] *= count
        return parts

    def distributed(self, fitted: OpSharding) -> tuple[int, ParallelForm] | None:
        """The axis on which it is run in a distributed form, and that form."""
        for axis, (kind, which, _) in enumerate(self.forms):
            if kind == "distributed":
                return axis, fitted.distributed[which]
        return None


def check(
    op: Op,
    values: Mapping[str, Value],
    tensors: Mapping[str, torch.Tensor],
    *,
    rule: Rule | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Check an op's rule (or the one given) on these operands; returns how many trials it passed.

    Values that require gradients are differentiated. Distributed forms are tried if `ranks` can run them. Raises RuleError,
    naming the factor and the tensor, if a split op does not equal the whole.
    """
    fitted = fit(op, values, rule=rule)
    if fitted is None:
        return 0
    operands = [tensors[name] for name in op.operands]
    grads = [values[name].requires_grad for name in op.operands]
    whole = _Run.of(op, operands, grads, [None] * len(op.results), 1)
    tolerance = max((TOLERANCE, *(_precision(t) for t in (*operands, *whole.results))))
    count = 0
    for trial in (*trials(fitted), *(distributed_trials(fitted) if ranks else ())):
        for what, got, expected in _compare(op, fitted, trial, operands, grads, whole, rule, ranks):
            if not (got.shape == expected.shape if fitted.random else _equal(got, expected, tolerance)):
                raise _wrong(op, fitted, trial, what, _error(got, expected))
        count += 1
    return count


def agree(got: torch.Tensor, expected: torch.Tensor, given: Iterable[torch.Tensor]) -> bool:
    """Whether two results are equal, as far as their dtype and those of the operands that were given allow it."""
    return _equal(got, expected, max((TOLERANCE, *map(_precision, (*given, expected)))))


def _wrong(op: Op, fitted: OpSharding, trial: Trial, where: str, error: object) -> RuleError:
    return RuleError(
        f"the rule of {op.target} is wrong: split and joined it is not the whole",
        rule=fitted,
        trial=trial.describe(fitted),
        where=where,
        error=error,
        fix="mark the factor whole (!), or name the dims that it shares",
    )


def _precision(tensor: torch.Tensor) -> float:
    """What a value of this dtype may be off by, relative to the largest: many roundings of those coarser than float64."""
    coarse = (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and torch.finfo(tensor.dtype).bits < 64
    return 64 * torch.finfo(tensor.dtype).eps if coarse else 0.0


def trials(fitted: OpSharding) -> Iterator[Trial]:
    """Splits of every factor, alone, nested, in blocks and together with the next; every linear group."""
    single: list[Trial] = []
    for f, factor in enumerate(fitted.factors):
        if factor.whole or factor.size < 2:
            continue
        first = _prime(factor.size)
        second = _prime(factor.size // first)
        inner = factor.size // (first * second)
        single.append(Trial(sizes=(first,), forms=(("split", f, factor.size // first),)))
        if second > 1:
            outer, nested = ("split", f, factor.size // first), ("split", f, inner)
            yield Trial(sizes=(second,), forms=(nested,))
            yield Trial(sizes=(first, second), forms=(outer, nested))
            yield Trial(sizes=(second, first), forms=(nested, outer))
    yield from single
    partial = [Trial(sizes=(2,), forms=(("partial", group, 0),)) for group in range(len(fitted.linear))]
    yield from partial
    for one, two in zip([*single, *partial], [*single, *partial][1:], strict=False):
        yield Trial(sizes=one.sizes + two.sizes, forms=one.forms + two.forms)


def distributed_trials(fitted: OpSharding) -> Iterator[Trial]:
    """Every distributed form alone, on few ranks and on many, and outside and inside of a split of every other factor."""
    for number, form in enumerate(fitted.distributed):
        most = math.prod(fitted.factors[f].size for f in fitted.factors_of(form))
        able = [ranks for ranks in range(2, most + 1) if fitted.parts(form, ranks)]
        for ranks in dict.fromkeys((*able[:1], *able[-1:])):
            yield Trial(sizes=(ranks,), forms=(("distributed", number, ranks),))
        for f, factor in enumerate(fitted.factors):
            if not factor.whole and factor.size > 1 and able and factor.name not in form.factors:
                few = able[0]
                parts = _prime(factor.size)
                sizes, forms = (few, parts), (("distributed", number, few), ("split", f, factor.size // parts))
                yield Trial(sizes=sizes, forms=forms)
                yield Trial(sizes=sizes[::-1], forms=forms[::-1])


def _prime(size: int) -> int:
    """The least prime divisor; 1 of 1."""
    return next((n for n in range(2, size + 1) if size % n == 0), 1)


def _state(form: tuple[str, int, int], fitted: OpSharding, dims: Dims, operand: int | None) -> State:
    kind, which, stride = form
    if kind == "partial":
        return P if operand is None or operand in fitted.linear[which] else R
    if kind == "distributed":
        own = fitted.distributed[which]
        if operand in own.whole:
            return State(own.operands)
        splits = (_state(("split", f, one), fitted, dims, operand) for f, one in fitted.chunks(own, stride).items())
        return next((state for state in splits if state.kind == "S"), State(own.results if operand is None else own.operands))
    for d, factors in enumerate(dims):
        if which in factors:
            right = factors[factors.index(which) + 1 :]
            return split(d, stride * math.prod(fitted.factors[f].size for f in right))
    if operand is None:
        return P
    return P if which in fitted.summed and operand in fitted.added else R


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One execution: results, and the gradients of the operands (None where there is none)."""

    results: list[torch.Tensor]
    cotangents: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]

    @staticmethod
    def of(
        op: Op,
        operands: Sequence[torch.Tensor],
        grads: Sequence[bool],
        cotangents: Sequence[torch.Tensor | None],
        divisor: int,
        function: Function | None = None,
    ) -> _Run:
        """Run the op, or its replacement; `grads` says which operands need a gradient; missing cotangents are drawn."""
        leaves = [t.detach().clone().requires_grad_(grad) for t, grad in zip(operands, grads, strict=True)]
        named = dict(zip(op.operands, leaves, strict=True))
        args, kwargs = filled(op.args, op.kwargs, lambda ref: named[ref.name])
        made = (function or overload(op.target))(*args, **kwargs)
        results = [made] if isinstance(made, torch.Tensor) else list(cast("Sequence[torch.Tensor]", made))
        if divisor != 1:
            results = [result / divisor for result in results]
        live = [r.requires_grad for r in results]
        drawn = [torch.randn_like(r) if on else None for r, on in zip(results, live, strict=True)]
        seeds = [new if given is None else given for new, given in zip(drawn, cotangents, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients: list[torch.Tensor | None] = [None] * len(leaves)
        if any(live) and wanted:
            outputs = [r for r, on in zip(results, live, strict=True) if on]
            found = torch.autograd.grad(outputs, wanted, [s for s in seeds if s is not None], allow_unused=True)
            rest = iter(found)
            gradients = [next(rest) if leaf.requires_grad else None for leaf in leaves]
        return _Run(results=[r.detach() for r in results], cotangents=seeds, gradients=gradients)


def _compare(
    op: Op,
    fitted: OpSharding,
    trial: Trial,
    operands: Sequence[torch.Tensor],
    grads: Sequence[bool],
    whole: _Run,
    rule: Rule | None,
    ranks: Ranks | None,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, joined, whole) of every result and gradient."""
    inside, outside = trial.layouts(fitted)
    for i, (value, layout) in enumerate(zip(op.results, outside, strict=True)):
        if value.dtype is torch.bool and P in layout:
            raise _wrong(op, fitted, trial, f"result {i}", "truth values cannot be added")
    mesh = Mesh.of(trial.sizes)
    parts, sizes = trial.parts(fitted), trial.sizes
    results = [tuple(value.shape) for value in op.results]
    args, kwargs = localise(
        op,
        fitted,
        [local_shape(tuple(t.shape), layout, sizes) for t, layout in zip(operands, inside, strict=True)],
        [local_shape(shape, layout, sizes) for shape, layout in zip(results, outside, strict=True)],
        parts,
        rule=rule,
    )
    local = Op(name=op.name, target=op.target, args=args, kwargs=kwargs, results=op.results)
    given = [_distribute(tensor, layout, mesh) for tensor, layout in zip(operands, inside, strict=True)]
    divisor = scale(op, fitted, parts, rule=rule)

    def run(rank: int, function: Function | None = None) -> _Run:
        where = mesh.coordinates(rank)
        seeds = [_whole_or_shard(c, layout, sizes, where) for c, layout in zip(whole.cotangents, outside, strict=True)]
        try:
            return _Run.of(local, [tensor[rank] for tensor in given], grads, seeds, divisor, function)
        except Exception as failure:  # an operator of the user's may raise anything
            raise _wrong(op, fitted, trial, f"rank {rank} of {mesh.size}", failure) from failure

    runs = _at_once(trial, fitted, mesh, run, ranks) if ranks else [run(rank) for rank in range(mesh.size)]
    for i, expected in enumerate(whole.results):
        pieces = [one.results[i] for one in runs]
        yield f"result {i}", *_joined(pieces, expected, outside[i], sizes)
        if "I" in {state.kind for state in outside[i]}:  # every rank of the axis has it
            yield f"result {i}, other ranks", *_joined(_turned(pieces, outside[i], sizes), expected, outside[i], sizes)
    for i, gradient in enumerate(whole.gradients):
        if gradient is None:
            continue
        parts_of = [one.gradients[i] for one in runs]
        shares = [torch.zeros_like(given[i][rank]) if piece is None else piece for rank, piece in enumerate(parts_of)]
        # the gradient of a replicated value is partial, that of a partial one replicated
        dual = tuple({"R": P, "P": R}.get(state.kind, state) for state in inside[i])
        yield f"gradient of operand {i}", *_joined(shares, gradient, dual, sizes)
        if not {"P", "I"}.isdisjoint(state.kind for state in inside[i]):  # every rank of the axis has all of it
            turned = _turned(shares, inside[i], sizes)
            yield f"gradient of operand {i}, other ranks", *_joined(turned, gradient, dual, sizes)


def _at_once(
    trial: Trial, fitted: OpSharding, mesh: Mesh, run: Callable[[int, Function | None], _Run], ranks: Ranks
) -> list[_Run]:
    """Every rank's run; those that talk to each other at the same time."""
    own = trial.distributed(fitted)
    if own is None:
        return [run(rank, None) for rank in range(mesh.size)]
    axis, form = own
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        groups.setdefault((*where[:axis], *where[axis + 1 :]), []).append(rank)
    found: dict[int, _Run] = {}
    for group in groups.values():
        found |= zip(group, ranks(form.name, len(group), _placed(run, group)), strict=True)
    return [found[rank] for rank in range(mesh.size)]


def _placed(run: Callable[[int, Function | None], _Run], group: Sequence[int]) -> Callable[[int, Function], _Run]:
    """The runs of some ranks, told by their place among these."""
    return lambda place, function: run(group[place], function)


def _turned(parts: list[torch.Tensor], layout: Layout, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The parts with the ranks of every axis in reverse order on which they are partial, or complete on every rank."""
    mesh = Mesh.of(sizes)
    turned = []
    for rank in range(mesh.size):
        place = 0
        for state, size, here in zip(layout, sizes, mesh.coordinates(rank), strict=True):
            place = place * size + (size - 1 - here if state.kind in "PI" else here)
        turned.append(parts[place])
    return turned


def _distribute(tensor: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """What every rank holds of a tensor; addends are random."""
    summed = [axis for axis, state in enumerate(layout) if state.kind == "P"]
    copies = math.prod(mesh.sizes[axis] for axis in summed)
    addends = [torch.randn_like(tensor) for _ in range(copies - 1)]
    addends.append(tensor - sum(addends) if addends else tensor)
    plain = tuple(R if state.kind == "P" else state for state in layout)
    held = []
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        which = 0
        for axis in summed:
            which = which * mesh.sizes[axis] + where[axis]
        held.append(shard(addends[which], plain, mesh.sizes, where).contiguous())
    return held


def _whole_or_shard(
    cotangent: torch.Tensor | None, layout: Layout, sizes: tuple[int, ...], where: tuple[int, ...]
) -> torch.Tensor | None:
    """The gradient of a result on one rank: its chunk where the result is split, else all of it."""
    if cotangent is None:
        return None
    return shard(cotangent, tuple(R if state.kind == "P" else state for state in layout), sizes, where)


def _joined(
    parts: Sequence[torch.Tensor], whole: torch.Tensor, layout: Layout, sizes: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts joined, and the whole; or a part that has a wrong shape, and one that has the right one."""
    shape = tuple(whole.shape)
    local = local_shape(shape, layout, sizes)
    misshapen = next((part for part in parts if tuple(part.shape) != local), None)
    return (join(parts, shape, layout, sizes), whole) if misshapen is None else (misshapen, whole.new_empty(local))


def _equal(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return torch.equal(got, expected)
    finite = expected[expected.isfinite()]
    bound = tolerance * (1 + (finite.abs().max().item() if finite.numel() else 0))
    return torch.allclose(got, expected, rtol=0, atol=bound, equal_nan=True)


def _error(got: torch.Tensor, expected: torch.Tensor) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"{got.dtype} {tuple(got.shape)} in place of {expected.dtype} {tuple(expected.shape)}"
    exact = torch.promote_types(got.dtype, torch.float64)
    return f"{(got.to(exact) - expected.to(exact)).abs().max().item():.1e}"

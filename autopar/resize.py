"""A plan at other sizes: the same model, captured at these, under the same choices.

The model itself says what it computes at a size: nothing is interpolated, so that floors, counts and masks are what they are
there. What a plan says of an op by name holds at any size but for one thing, the strides of its splits:

    x: float[8, 16, 32]    S(0) over 4: stride 2         x: float[16, 16, 32]    stride 4
    y: float[128, 32]      S(0) over 4: stride 32   ->   y: float[256, 32]       stride 64
    y: float[128, 32]      S(0/8) over 4: stride 4       y: float[256, 32]       stride 4     the sequence, in 16 blocks

A stride alone does not tell which dims it is made of. But each split stands somewhere as the outermost one of a dim (an anchor:
what is split off of a dim, or merged into it, was or is a dim elsewhere), and there its stride is the dim divided by the axis.
From there the rules carry it along: all dims of an op that have a factor are cut by the same digits of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.conversion import Conversion
from autopar.decisions import Again, Decisions
from autopar.errors import CaptureError, InputError
from autopar.ir import Argument, Op, Program, Value
from autopar.layout import Layout, State, split, valid
from autopar.passes.candidates import Form, candidate
from autopar.passes.microbatches import microbatches
from autopar.plan import Plan, describe, resolve
from autopar.rules import Fitted
from autopar.rules.rule import Dims
from autopar.sizes import Place, Size, placed
from autopar.solver.analysis import Analysis, analyse

# A digit: ("value", name, dim, axis, stride) or ("op", name, factor, axis, stride), with the stride that the plan knows.
Digit = tuple[str, str, int, int, int]
Fits = Mapping[str, Fitted | None]


class Resizer:
    """Carries one plan over; `program` is the whole batch's at the sizes that the plan was made for."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.mesh = plan, plan.mesh
        self.program = microbatches(program, plan.microbatches)
        self.fits = analyse(self.program, self.mesh).fits
        self.decisions = resolve(plan, self.program, self.fits)

    def plan_for(self, program: Program, called: str) -> Plan:
        """The plan for the whole batch's program at other sizes, `called` so in errors.

        Raises CaptureError if it is another program, and InputError if the mesh does not divide it as the plan does.
        """
        new = self._new(program, called)
        strides = {digit: self._whole(digit, stride, called) for digit, stride in self._strides(new, called).items()}
        made = _Carrier(self.decisions, self.program, self.fits, new, strides, called).decisions()
        choices, layouts, routes, again = describe(new.program, made, new.fits, self.mesh.sizes)
        return replace(self.plan, hash=new.program.hash, choices=choices, layouts=layouts, routes=routes, again=again)

    def multiple(self, size: Size, program: Program, number: int) -> int:
        """What a size must be a multiple of, found by the program at another number of it."""
        called = f"{size.name}={number}"
        strides = self._strides(self._new(program, called), called)
        path, dim = size.places[0]
        part = self.program.values[path].shape[dim]  # of a micro-batch
        grown = [digit[4] for digit, stride in strides.items() if stride / digit[4] == Fraction(number, size.sample)]
        return part // math.gcd(part, *grown) * (size.sample // part)

    def _new(self, program: Program, called: str) -> Analysis:
        new = microbatches(program, self.plan.microbatches)
        same_structure(self.program, new, called)
        analysis = analyse(new, self.mesh)
        for op in new.ops:
            if _shape_of(self.fits[op.name]) != _shape_of(analysis.fits[op.name]):
                raise _other(op, called, f"{op.target} may be split in other ways")
        return analysis

    def _strides(self, new: Analysis, called: str) -> dict[Digit, Fraction]:
        return _Digits(self.program, self.fits, self.decisions, new, self.mesh.sizes, called).solve()

    def _whole(self, digit: Digit, stride: Fraction, called: str) -> int:
        if stride.denominator == 1:
            return int(stride)
        kind, name, _, axis, _ = digit
        raise InputError(
            f"{called} cannot be split as the plan does over the {self.mesh.sizes[axis]} devices of mesh axis "
            f"{self.mesh.axes[axis]!r}",
            **{kind: name},
            fix="a size that the plan's layouts divide, or a plan made for this one",
        )


def varied(plan: Plan, program: Program, sizes: Sequence[Size], at: Callable[[dict[Place, int]], Program]) -> Plan:
    """A plan that knows which sizes may vary and in what steps; `at` gives the program with dims of other sizes.

    Raises CaptureError if the model computes something else at another size.
    """
    if not sizes:
        return plan
    resizer = Resizer(plan, program)
    found = []
    for size in sizes:
        number = _another(size)
        other = at(placed(sizes, [number if one is size else one.sample for one in sizes]))
        found.append(replace(size, multiple=resizer.multiple(size, other, number)))
    return replace(plan, dynamic=tuple(found))


def _another(size: Size) -> int:
    """A number beside the sample's at which to look at the program: twice, half, or what the bounds leave."""
    tried = (2 * size.sample, size.sample // 2, size.most or 0, size.least)
    most = math.inf if size.most is None else size.most
    return next(number for number in tried if number != size.sample and size.least <= number <= most)


def same_structure(old: Program, new: Program, called: str) -> None:
    """Raise CaptureError unless two programs differ in nothing but numbers."""
    for one, other in zip(old.ops, new.ops, strict=False):
        if _structure(one) != _structure(other):
            raise _other(other, called, f"{other.target} where it was {one.target}" if one.target != other.target else "")
    if len(old.ops) != len(new.ops):
        longer = max(old.ops, new.ops, key=len)
        raise _other(longer[min(len(old.ops), len(new.ops))], called, f"{len(new.ops)} operators, planned {len(old.ops)}")
    if [(o.path, o.value) for o in old.outputs] != [(o.path, o.value) for o in new.outputs]:
        raise _other(new.ops[-1], called, "other results")
    if old.loop and new.loop and old.loop.ahead and new.loop.ahead:
        same_structure(old.loop.ahead, new.loop.ahead, called)


def _structure(op: Op) -> object:
    """What must be the same at all sizes: all but numbers."""
    results = [(r.name, len(r.shape), r.dtype, r.requires_grad) for r in op.results]
    return op.name, op.target, [_kind(a) for a in op.args], [(name, _kind(a)) for name, a in op.kwargs], results


def _kind(argument: Argument) -> object:
    if isinstance(argument, tuple):
        return [_kind(part) for part in argument]
    return "number" if isinstance(argument, (int, float)) and not isinstance(argument, bool) else argument


def _shape_of(fitted: Fitted | None) -> object:
    """What must be the same of an op's rule at all sizes: all but the sizes of factors."""
    if fitted is None:
        return None
    names = [(factor.name, factor.whole) for factor in fitted.factors]
    forms = [form.name for form in fitted.distributed]
    return names, fitted.operands, fitted.results, fitted.added, fitted.linear, forms


def _other(op: Op, called: str, what: str = "") -> CaptureError:
    return CaptureError(
        f"the model computes something else at {called} than at the sample's size",
        op=op.name,
        differs=what,
        at=op.source,
        fix="leave the size fixed, or plan for each of them; what does not depend on a size by number is carried over",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relation:
    """A digit's stride is `times` another one's."""

    digit: Digit
    times: Fraction


class _Digits:
    """The strides of a plan's splits at other sizes, as fractions: not whole where the mesh does not divide."""

    def __init__(
        self, old: Program, fits: Fits, decisions: Decisions, new: Analysis, sizes: tuple[int, ...], called: str
    ) -> None:
        self.old, self.fits, self.decisions, self.new, self.sizes, self.called = old, fits, decisions, new, sizes, called
        self.relations: dict[Digit, list[_Relation]] = {}
        self.found: dict[Digit, Fraction] = {}
        self.nests: dict[tuple[Digit, ...], None] = {}  # of one dim or factor, outermost first
        self.lengths: dict[Digit, tuple[int, int]] = {}  # of the dim or factor, before and now
        self.touching: dict[str, list[Op]] = {}
        for op in old.ops:
            for name in dict.fromkeys((*op.operands, *(result.name for result in op.results))):
                self.touching.setdefault(name, []).append(op)

    def solve(self) -> dict[Digit, Fraction]:
        for op in self.old.ops:
            self._op(op)
        for name, layouts in _layouts(self.old, self.decisions).items():
            for layout in layouts:
                self._layout(name, layout)
        for nest in self.nests:
            before, now = self.lengths[nest[0]]
            if before == nest[0][4] * self.sizes[nest[0][3]]:  # it is the outermost one of all
                self._settle(nest[0], Fraction(now, self.sizes[nest[0][3]]))
        self._nested()
        for digit, (before, now) in self.lengths.items():
            if digit in self.found:
                continue
            stride = self._searched(digit)
            if stride is None and before != now:
                raise self._unclear(digit)
            self._settle(digit, Fraction(digit[4]) if stride is None else stride)
            self._nested()
        return self.found

    def _nested(self) -> None:
        """Settle what is nowhere outermost but nested in what is settled."""
        for nest in self.nests:
            for outer, inner in itertools.pairwise(nest):
                if inner not in self.found and outer in self.found and outer[4] == inner[4] * self.sizes[inner[3]]:
                    self._settle(inner, self.found[outer] / self.sizes[inner[3]])

    def _searched(self, digit: Digit) -> Fraction | None:
        """The stride of a digit of a value, found where the rules would carry it, though the plan does not."""
        todo, seen = [(digit, Fraction(1))], {digit}
        for place, times in todo:
            kind, name, dim, axis, stride = place
            if place in self.found:
                return self.found[place] * times
            if kind == "op":
                todo += [(relation.digit, times / relation.times) for relation in self.relations.get(place, ())]
                continue
            before, now = (program.values[name].shape[dim] for program in (self.old, self.new.program))
            if before == stride * self.sizes[axis]:
                return Fraction(now, self.sizes[axis]) * times
            for other, ratio in self._beside(place):
                if other not in seen:
                    seen.add(other)
                    todo.append((other, times * ratio))
        return None

    def _beside(self, digit: Digit) -> Iterator[tuple[Digit, Fraction]]:
        """The same digit in other dims, by the rules of the ops that touch the value: its stride is so many times theirs."""
        _, name, dim, axis, stride = digit
        for op in self.touching.get(name, ()):
            before, now = self.fits[op.name], self.new.fits[op.name]
            if before is None or now is None:
                continue
            names = (*op.operands, *(result.name for result in op.results))
            spots = [
                (other, d, parts)
                for other, dims in zip(names, (*before.operands, *before.results), strict=True)
                for d, parts in enumerate(dims)
            ]
            for parts in (parts for other, d, parts in spots if (other, d) == (name, dim)):
                for factor in parts:
                    was, is_ = _inside(parts, factor, before), _inside(parts, factor, now)
                    if stride % was == 0 and stride * self.sizes[axis] <= was * before.factors[factor].size:
                        for other, d, places in ((o, d, p) for o, d, p in spots if factor in p):
                            step = stride // was * _inside(places, factor, before)
                            yield ("value", other, d, axis, step), Fraction(is_, _inside(places, factor, now))

    def _settle(self, digit: Digit, stride: Fraction) -> None:
        """Give a digit its stride, and all that follow from it."""
        todo = [(digit, stride)]
        while todo:
            digit, stride = todo.pop()
            if digit in self.found:
                if self.found[digit] != stride:
                    raise self._unclear(digit)
                continue
            self.found[digit] = stride
            todo += [(relation.digit, stride * relation.times) for relation in self.relations.get(digit, ())]

    def _unclear(self, digit: Digit) -> InputError:
        kind, name, _, axis, _ = digit
        return InputError(
            f"it is not clear how the plan splits {self.called}: two dims are equally long in the sample",
            **{kind: name},
            axis=axis,
            fix="plan with a sample whose sizes differ from each other and from those of the model",
        )

    def _op(self, op: Op) -> None:
        """The digits of an op's factors, and what they are in the dims that have these."""
        before, now = self.fits[op.name], self.new.fits[op.name]
        if before is None or now is None:
            return
        nests: dict[int, list[tuple[int, Digit]]] = {}
        for axis, (kind, which, stride) in enumerate(self.decisions.ops[op.name].forms):
            if kind not in "SD":
                continue
            for factor in (which,) if kind == "S" else before.spread(before.distributed[which]):
                step = stride if kind == "S" else before.factors[factor].size // self.sizes[axis]
                digit = ("op", op.name, factor, axis, step)
                nests.setdefault(factor, []).append((step, digit))
                self.lengths[digit] = before.factors[factor].size, now.factors[factor].size
                self._dims(digit, zip(op.operands, before.operands, strict=True), before, now)
                self._dims(digit, zip((r.name for r in op.results), before.results, strict=True), before, now)
        self.nests |= {tuple(digit for _, digit in sorted(nest, reverse=True)): None for nest in nests.values()}

    def _dims(self, digit: Digit, tensors: Iterator[tuple[str, Dims]], before: Fitted, now: Fitted) -> None:
        _, _, factor, axis, stride = digit
        for name, dims in tensors:
            for dim, parts in enumerate(dims):
                if factor in parts:
                    place = ("value", name, dim, axis, stride * _inside(parts, factor, before))
                    self._relate(digit, place, Fraction(_inside(parts, factor, now)))

    def _relate(self, one: Digit, other: Digit, times: Fraction) -> None:
        self.relations.setdefault(one, []).append(_Relation(digit=other, times=times))
        self.relations.setdefault(other, []).append(_Relation(digit=one, times=1 / times))

    def _layout(self, name: str, layout: Layout) -> None:
        """The digits of a value in one of its layouts."""
        nests: dict[int, list[tuple[int, Digit]]] = {}
        for axis, state in enumerate(layout):
            if state.kind == "S":
                digit = ("value", name, state.dim, axis, state.stride)
                nests.setdefault(state.dim, []).append((state.stride, digit))
                lengths = (program.values[name].shape[state.dim] for program in (self.old, self.new.program))
                self.lengths[digit] = next(lengths), next(lengths)
        self.nests |= {tuple(digit for _, digit in sorted(nest, reverse=True)): None for nest in nests.values()}


def _inside(parts: tuple[int, ...], factor: int, fitted: Fitted) -> int:
    """The elements of a dim within one index of a factor."""
    return math.prod(fitted.factors[f].size for f in parts[parts.index(factor) + 1 :])


def _layouts(program: Program, decisions: Decisions) -> dict[str, dict[Layout, None]]:
    """Every layout in which a value is."""
    found: dict[str, dict[Layout, None]] = {name: {} for name in program.values}
    for name, layout in decisions.given.items():
        found[name][layout] = None
    for op in program.ops:
        made = decisions.ops[op.name]
        names = (*op.operands, *(result.name for result in op.results))
        for name, layout in zip(names, (*made.operands, *made.results), strict=True):
            found[name][layout] = None
    for name, steps in decisions.routes.items():
        found[name] |= {layout: None for step in steps for layout in (step.source, step.target)}
    for output in program.outputs:
        found[output.value][decisions.outputs[output.path]] = None
    return found


class _Carrier:
    """Decisions with other strides."""

    def __init__(
        self, old: Decisions, program: Program, fits: Fits, new: Analysis, strides: Mapping[Digit, int], called: str
    ) -> None:
        self.old, self.program, self.fits, self.new, self.strides, self.called = old, program, fits, new, strides, called

    def decisions(self) -> Decisions:
        old, program = self.old, self.new.program
        path = {output.path: output.value for output in program.outputs}
        return Decisions(
            ops={
                op.name: candidate(op, self.new.fits[op.name], program.values, self._forms(op.name)) for op in program.ops
            },
            given={name: self._layout(program.values[name], layout) for name, layout in old.given.items()},
            outputs={name: self._layout(program.values[path[name]], layout) for name, layout in old.outputs.items()},
            routes={name: tuple(self._step(name, step) for step in steps) for name, steps in old.routes.items()},
            again=Again(ops=old.again.ops, steps=frozenset((n, self._step(n, step)) for n, step in old.again.steps)),
        )

    def _forms(self, name: str) -> tuple[Form, ...]:
        fitted = self.new.fits[name]

        def form(axis: int, old: Form) -> Form:
            kind, which, stride = old
            if kind == "S":
                return kind, which, self.strides["op", name, which, axis, stride]
            if kind == "D" and fitted:
                return kind, which, fitted.factors[fitted.spread(fitted.distributed[which])[0]].size // self.new.sizes[axis]
            return old

        return tuple(form(axis, old) for axis, old in enumerate(self.old.ops[name].forms))

    def _layout(self, value: Value, layout: Layout) -> Layout:
        def state(axis: int, old: State) -> State:
            return split(old.dim, self.strides["value", value.name, old.dim, axis, old.stride]) if old.kind == "S" else old

        found = tuple(state(axis, old) for axis, old in enumerate(layout))
        if not valid(found, value.shape, self.new.sizes):
            fix = "a size that the plan's layouts divide, or a plan made for this one"
            raise InputError(f"{self.called} cannot be split as the plan does: {value.name} is {list(value.shape)}", fix=fix)
        return found

    def _step(self, name: str, step: Conversion) -> Conversion:
        value = self.new.program.values[name]
        return replace(step, source=self._layout(value, step.source), target=self._layout(value, step.target))


__all__ = ["Resizer", "same_structure", "varied"]

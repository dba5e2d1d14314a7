"""Adapts a plan to other sizes: the model is captured at these, and keeps the same choices.

The model is captured again at a size, nothing is interpolated, so floors, counts and masks are right. A plan's entries for an
op, by name, hold at any size except for the strides of its splits: see `autopar.planning.stride_inference`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from autopar.analysis.analysis import Analysis, analyse
from autopar.errors import CaptureError, InputError
from autopar.ir.conversion import Conversion
from autopar.ir.dynamic_dims import InputDim, Size, dim_sizes
from autopar.ir.layout import Layout, State, valid
from autopar.ir.program import Argument, Op, Program, Value
from autopar.ir.training_step import TrainingStep
from autopar.operators import OpSharding
from autopar.plan.assignment_text import as_planned, describe, paddings
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan
from autopar.plan.stages import ResolvedPipeline, StageSteps, crossing_values, read_any
from autopar.planning.stride_inference import Split, StrideInference
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.search_space.candidates import Form, candidate

Strides = Mapping[Split, Fraction]
NONE: Strides = {}


class Respecializer:
    """Carries one plan over to other sizes."""

    def __init__(self, resolved: ResolvedPlan) -> None:
        self.plan, self.mesh, self.step, self.program = resolved.plan, resolved.plan.mesh, resolved.step, resolved.program
        self.fits, self.assignment = resolved.analysis.fits, resolved.assignment

    def plan_for(self, program: Program, called: str) -> ResolvedPlan:
        """The plan for the whole batch's program at other sizes; `called` names them in errors.

        Raises CaptureError if it is another program, and InputError if it cannot be split over the mesh as in the plan.
        """
        new = self.analysed(as_planned(self.plan, program), called)
        return self.carried(new, self.strides(new, called), called)

    def multiple(self, size: Size, program: Program, number: int) -> int:
        """What a size must be a multiple of, found from the program at another value."""
        called = f"{size.name}={number}"
        new = self.analysed(as_planned(self.plan, program), called)
        return _multiple(size, self.program, number, self.strides(new, called))

    def analysed(self, new: TrainingStep, called: str) -> Analysis:
        """The step at other sizes. Raises CaptureError if it is another one."""
        same_structure(self.step, new, called)
        analysis = analyse(new, self.mesh)
        for op in new.program.ops:
            before, now = self.fits[op.name], analysis.fits[op.name]
            if _shape_of(before) != _shape_of(now) and not _splits_alike(self.assignment.ops[op.name].forms, before, now):
                raise _other(op, called, f"{op.target} may be split in other ways")
        return analysis

    def strides(self, new: Analysis, called: str, known: Strides = NONE) -> Strides:
        """The stride of every split at the new sizes; those of what a stage receives are `known`."""
        received = self.step.received
        inference = StrideInference(self.program, self.fits, self.assignment, new, self.mesh.sizes, called)
        return inference.solve({split: known[split] for split in known if split.kind == "value" and split.name in received})

    def carried(self, new: Analysis, strides: Strides, called: str) -> ResolvedPlan:
        """The plan with these strides. Raises InputError for one that is not whole."""
        whole = {digit: self._whole(digit, stride, called) for digit, stride in strides.items()}
        made = _Carrier(self.assignment, new, whole, called).assignment()
        choices, layouts, routes, recompute = describe(new.program, made, new.fits, self.mesh.sizes)
        plan = replace(
            self.plan, hash=new.step.hash, choices=choices, layouts=layouts, routes=routes, recompute=recompute,
            padded=paddings(new.step),
        )  # fmt: skip
        return ResolvedPlan(plan=plan, analysis=new, assignment=made)

    def _whole(self, digit: Split, stride: Fraction, called: str) -> int:
        if stride.denominator == 1:
            return int(stride)
        axis = f"the {self.mesh.sizes[digit.axis]} devices of mesh axis {self.mesh.axes[digit.axis]!r}"
        raise InputError(
            f"{called} cannot be split as the plan does over {axis}",
            **{digit.kind: digit.name},
            fix="a size that the plan's layouts divide, or a plan made for this one",
        )


class StagesRespecializer:
    """Carries a plan in pipeline stages over to other sizes: each stage by itself, from what the one before it sends."""

    def __init__(self, found: ResolvedPipeline) -> None:
        assert found.plan.pipeline is not None, "the plan has a pipeline"
        self.plan, self.found, self.pipeline = found.plan, found, found.plan.pipeline
        self._stages = [Respecializer(one) for one in found.resolved]

    def plan_for(self, program: Program, called: str) -> ResolvedPipeline:
        """The plan for the whole batch's program at other sizes; raises as `Respecializer.plan_for` does."""
        steps, made = self._steps(program, called), list[ResolvedPlan]()
        layouts: Mapping[str, Layout] = {}
        known: Strides = {}
        for place, stage in enumerate(self._stages):
            new = stage.analysed(steps.made(place, layouts, self.pipeline.in_flight(place)), called)
            known = stage.strides(new, called, known)
            made.append(stage.carried(new, known, called))
            layouts = made[-1].assignment.outputs
        sent = [(one.program, one.assignment.outputs) for one in made]
        crossings = tuple(crossing_values(steps.step.program, sent, made[0].plan.mesh))
        plan = replace(
            self.plan,
            hash=steps.step.hash,
            stages=tuple(one.plan for one in made),
            padded=paddings(steps.step),
            pipeline=replace(self.pipeline, crossings=crossings),
        )
        return ResolvedPipeline(plan=plan, step=steps.step, stages=steps.stages, resolved=tuple(made))

    def multiple(self, size: Size, program: Program, number: int) -> int:
        """What a size must be a multiple of, found from the program at another value."""
        called = f"{size.name}={number}"
        strides: dict[Split, Fraction] = {}
        for known in self._strides(self._steps(program, called), called):
            strides |= known
        return _multiple(size, self.found.step.program, number, strides)

    def _steps(self, program: Program, called: str) -> StageSteps:
        """The stages at other sizes. Raises CaptureError if the program is another one."""
        step = as_planned(self.plan, program)
        same_structure(self.found.step, step, called)
        return StageSteps(step, self.pipeline.starts)

    def _strides(self, steps: StageSteps, called: str) -> Iterator[Strides]:
        """The strides of each stage, also where these are not whole: layouts of what it receives are those of the sample."""
        known: Strides = {}
        for place, stage in enumerate(self._stages):
            new = stage.analysed(steps.made(place, stage.step.received, self.pipeline.in_flight(place)), called)
            known = stage.strides(new, called, known)
            yield known


def respecializer(resolved: ResolvedPlan | ResolvedPipeline) -> Respecializer | StagesRespecializer:
    """The respecializer of a plan."""
    return StagesRespecializer(resolved) if isinstance(resolved, ResolvedPipeline) else Respecializer(resolved)


Resolved = TypeVar("Resolved", bound=ResolvedPlan | ResolvedPipeline)


def varied(resolved: Resolved, sizes: Sequence[Size], at: Callable[[dict[InputDim, int]], Program]) -> Resolved:
    """A plan with its dynamic sizes and their multiples; `at` gives the whole batch's program at other sizes.

    Raises CaptureError if the model is another program at another size.
    """
    if not sizes:
        return resolved
    resizer = respecializer(resolved)
    found = []
    for asked in sizes:
        size = _bounded(asked, resolved.step.program)
        number = _another(size)
        other = _captured(at, dim_sizes(sizes, [number if one is asked else one.sample for one in sizes]), asked, number)
        found.append(replace(size, multiple=resizer.multiple(size, other, number)))
    return replace(resolved, plan=replace(resolved.plan, dynamic=tuple(found)))


def _captured(at: Callable[[dict[InputDim, int]], Program], places: dict[InputDim, int], size: Size, number: int) -> Program:
    """The program at another value of a size. Raises CaptureError, which names the size, if the model does not support it."""
    try:
        return at(places)
    except CaptureError as error:
        what = f"{size.name} ({size.where}) cannot vary: the model cannot be captured where it is {number}, not {size.sample}"
        fix = f"leave {size.name} out of dynamic=, or bound it: autopar.Dynamic"
        raise CaptureError(what, **{**error.details, "error": error.what, "fix": fix}) from error


def varied_plan(plan: Plan, program: Program, sizes: Sequence[Size], at: Callable[[dict[InputDim, int]], Program]) -> Plan:
    """A plan of a captured program, in stages or not, with its dynamic sizes; see `varied`."""
    return varied(read_any(plan, program, plan.mesh), sizes, at).plan if sizes else plan


def _bounded(size: Size, program: Program) -> Size:
    """Bound a size so that each micro-batch has at least 2 of it: a dim of size 1 is another program."""
    path, dim = size.places[0]
    part = program.values[path].shape[dim]
    return replace(size, least=max(size.least, 2 * size.sample // part)) if part > 1 else size


def _multiple(size: Size, program: Program, number: int, strides: Strides) -> int:
    """What a size must be a multiple of, by the strides of the program's splits at another value."""
    path, dim = size.places[0]
    part = program.values[path].shape[dim]  # of a micro-batch
    grown = [digit.stride for digit, stride in strides.items() if stride / digit.stride == Fraction(number, size.sample)]
    return part // math.gcd(part, *grown) * (size.sample // part)


def _another(size: Size) -> int:
    """Another value than the sample's at which to inspect the program: twice, half, or whatever the bounds allow."""
    tried = (2 * size.sample, size.sample // 2, size.most or 0, size.least)
    most = math.inf if size.most is None else size.most
    return next(number for number in tried if number != size.sample and size.least <= number <= most)


def same_structure(old: TrainingStep, new: TrainingStep, called: str) -> None:
    """Raise CaptureError unless the programs of two steps, and their loops, differ only in numbers."""
    _same_ops(old.program, new.program, called)
    if _ends(old) != _ends(new):
        raise _other(new.program.ops[-1], called, "what it is given and returns, or what its micro-batches share")
    if old.loop and new.loop and old.loop.hoisted and new.loop.hoisted:
        same_structure(TrainingStep(program=old.loop.hoisted), TrainingStep(program=new.loop.hoisted), called)


def _same_ops(old: Program, new: Program, called: str) -> None:
    for one, other in zip(old.ops, new.ops, strict=False):
        if _structure(one) != _structure(other):
            raise _other(other, called, f"{other.target} where it was {one.target}" if one.target != other.target else "")
    if len(old.ops) != len(new.ops):
        longer = max(old.ops, new.ops, key=len)
        raise _other(longer[min(len(old.ops), len(new.ops))], called, f"{len(new.ops)} operators, planned {len(old.ops)}")


def _ends(step: TrainingStep) -> object:
    """The parts of inputs and outputs, and of their handling over micro-batches, that must be the same."""
    program = step.program
    names = [value.name for value in program.inputs], [(output.path, output.value) for output in program.outputs]
    return names, [(state.kind, state.dim) for state in step.states.values()]


def _structure(op: Op) -> object:
    """The parts that must be the same at all sizes: everything but numbers."""
    results = [(r.name, len(r.shape), r.dtype, r.requires_grad) for r in op.results]
    return op.name, op.target, [_kind(a) for a in op.args], [(name, _kind(a)) for name, a in op.kwargs], results


def _kind(argument: Argument) -> object:
    if isinstance(argument, tuple):
        return [_kind(part) for part in argument]
    return "number" if isinstance(argument, (int, float)) and not isinstance(argument, bool) else argument


def _shape_of(fitted: OpSharding | None) -> object:
    """The parts of an op's rule that must be the same at all sizes: everything but the sizes of factors."""
    if fitted is None:
        return None
    names = [(factor.name, factor.whole) for factor in fitted.factors]
    forms = [form.name for form in fitted.distributed]
    return names, fitted.operands, fitted.results, fitted.added, fitted.linear, forms, fitted.own


def _splits_alike(forms: Sequence[Form], before: OpSharding | None, now: OpSharding | None) -> bool:
    """Whether these forms of an op split, and sum over, the same dims under two rules, ignoring other splits that one
    allows.
    """
    rest = [(kind, which) for kind, which, _ in forms if kind not in ("I", "R")]
    if before is None or now is None:
        return not rest
    return all(kind == "S" and _cuts(which, before) == _cuts(which, now) for kind, which in rest)


def _cuts(factor: int, fitted: OpSharding) -> object:
    """Where a factor occurs in a rule: its dims, with the factors beside it, and the results summed over it."""
    if factor >= len(fitted.factors):
        return None
    dims = [[dim if factor in dim else () for dim in dims] for dims in (*fitted.operands, *fitted.results)]
    return fitted.factors[factor].name, fitted.factors[factor].whole, dims, factor in fitted.summed, fitted.added


def _other(op: Op, called: str, what: str = "") -> CaptureError:
    return CaptureError(
        f"the model computes something else at {called} than at the sample's size",
        op=op.name,
        differs=what,
        at=op.source,
        fix="bound the size where the model is the same (autopar.Dynamic(dims, least=..., most=...)), or plan for each",
    )


class _Carrier:
    """The assignment of a plan with other strides."""

    def __init__(self, old: Assignment, new: Analysis, strides: Mapping[Split, int], called: str) -> None:
        self.old, self.new, self.strides, self.called = old, new, strides, called

    def assignment(self) -> Assignment:
        old, program = self.old, self.new.program
        path = {output.path: output.value for output in program.outputs}
        return Assignment(
            ops={op.name: candidate(op, self.new.fits[op.name], program.values, self._forms(op.name)) for op in program.ops},
            given={name: self._layout(program.values[name], layout) for name, layout in old.given.items()},
            outputs={name: self._layout(program.values[path[name]], layout) for name, layout in old.outputs.items()},
            routes={name: tuple(self._step(name, step) for step in steps) for name, steps in old.routes.items()},
            recompute=RecomputeChoice(
                ops=old.recompute.ops,
                steps=frozenset((name, self._step(name, step)) for name, step in old.recompute.steps),
                offload=frozenset((name, self._layout(program.values[name], layout)) for name, layout in old.recompute.offload),
            ),
            once=old.once,
        )

    def _forms(self, name: str) -> tuple[Form, ...]:
        fitted = self.new.fits[name]

        def form(axis: int, old: Form) -> Form:
            kind, which, stride = old
            if kind == "S":
                return kind, which, self.strides[Split("op", name, which, axis, stride)]
            if kind == "D" and fitted:
                *_, last = fitted.factors_of(fitted.distributed[which])
                return kind, which, fitted.factors[last].size // self.new.sizes[axis]
            return old

        return tuple(form(axis, old) for axis, old in enumerate(self.old.ops[name].forms))

    def _layout(self, value: Value, layout: Layout) -> Layout:
        def state(axis: int, old: State) -> State:
            if old.kind != "S":
                return old
            return old._replace(stride=self.strides[Split("value", value.name, old.dim, axis, old.stride)])

        found = tuple(state(axis, old) for axis, old in enumerate(layout))
        if not valid(found, value.shape, self.new.sizes):
            raise self._undivided(value)
        return found

    def _step(self, name: str, step: Conversion) -> Conversion:
        value = self.new.program.values[name]
        made = replace(step, source=self._layout(value, step.source), target=self._layout(value, step.target))
        if not made.possible(value.shape, self.new.sizes):
            raise self._undivided(value)
        return made

    def _undivided(self, value: Value) -> InputError:
        fix = "a size that the plan's layouts divide, or a plan made for this one"
        return InputError(f"{self.called} cannot be split as the plan does: {value.name} is {list(value.shape)}", fix=fix)


__all__ = ["Respecializer", "StagesRespecializer", "respecializer", "same_structure", "varied", "varied_plan"]

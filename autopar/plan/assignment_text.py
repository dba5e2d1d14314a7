"""Converts assignments to the text that a plan keeps (`describe`), and back (`resolve`).

The text serves files and other ranks: the process that planned emits its assignment directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from autopar.analysis.recomputability import recomputable
from autopar.errors import AutoparError, LayoutError, PlanError
from autopar.ir.conversion import Conversion
from autopar.ir.layout import AWAY, I, Layout, parse, text
from autopar.ir.program import OUTPUT, Op, Program
from autopar.ir.training_step import TrainingStep
from autopar.operators import OpSharding
from autopar.passes.microbatches import microbatches
from autopar.passes.padding import MOST, padded
from autopar.plan.breakdown import OWN_ROWS
from autopar.plan.plan import Plan
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.search_space.candidates import Candidate, Form, candidate

RUN = "run"
HOST = "host: "


def _entries(layout: str) -> list[str]:
    return [entry.strip() for entry in layout.split(",")]


def form_text(form: Form, fitted: OpSharding | None) -> str:
    """One form of a candidate as text."""
    kind, which, stride = form
    if kind == "S":
        assert fitted is not None
        return f"{fitted.factors[which].name}/{stride}"
    if kind == "D":
        assert fitted is not None
        return f"{fitted.distributed[which].name}/{stride}"
    if kind == "O":
        return f"{OWN_ROWS}/{stride}"
    return f"P {which}" if kind == "P" else kind


def _form(entry: str, fitted: OpSharding | None) -> Form:
    if entry in ("I", "R"):
        return entry, 0, 0
    if fitted is None:
        raise ValueError(f"{entry!r} is not a choice of an operator without a sharding rule: register its rule first")
    if entry.startswith("P "):
        return "P", range(len(fitted.linear))[int(entry[2:])], 0
    name, _, stride = entry.rpartition("/")
    if name == OWN_ROWS and fitted.own:
        if int(stride) < 1 or any(fitted.size(dim) % int(stride) for dim in fitted.own_dims):
            raise ValueError(f"{entry!r} does not cut all rows into equal parts")
        return "O", 0, int(stride)
    names = [factor.name for factor in fitted.factors]
    forms = [form.name for form in fitted.distributed]
    if name in forms:
        return "D", forms.index(name), int(stride)
    if name not in names:
        known = ", ".join(f"{name}/stride" for name in (*names, *forms))
        raise ValueError(f"{entry!r} is not a choice: I, R, P and a number, or one of {known}")
    return "S", names.index(name), int(stride)


def describe(
    program: Program, assignment: Assignment, fits: Mapping[str, OpSharding | None], sizes: tuple[int, ...]
) -> tuple[dict[str, str], dict[str, str], dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The assignment as text: `choices`, `layouts`, `routes` and `recompute` of a plan."""
    choices = {
        op.name: ", ".join(form_text(form, fits[op.name]) for form in assignment.ops[op.name].forms) for op in program.ops
    }
    layouts = {name: text(assignment.produced(name, program), value.shape, sizes) for name, value in program.values.items()}
    for output in program.outputs:
        shape = program.values[output.value].shape
        layouts[OUTPUT + output.path] = text(assignment.outputs[output.path], shape, sizes)

    def step_text(name: str, step: Conversion) -> str:
        shape = program.values[name].shape
        return f"{text(step.source, shape, sizes)} -> {text(step.target, shape, sizes)}"

    routes = {name: tuple(step_text(name, step) for step in steps) for name, steps in assignment.routes.items()}
    recompute: dict[str, tuple[str, ...]] = {op.name: (RUN,) for op in program.ops if op.name in assignment.recompute.ops}
    for name, steps in assignment.routes.items():
        if chosen := tuple(step_text(name, step) for step in steps if (name, step) in assignment.recompute.steps):
            recompute[name] = (*recompute.get(name, ()), *chosen)
    for name, layout in sorted(assignment.recompute.offload, key=str):
        recompute[name] = (*recompute.get(name, ()), HOST + text(layout, program.values[name].shape, sizes))
    return choices, layouts, routes, recompute


def paddings(step: TrainingStep) -> dict[str, str]:
    """The padding of a step, in a plan's notation."""

    def shape_text(shape: tuple[int, ...]) -> str:
        return " x ".join(map(str, shape))

    program, returned = step.program, {output.value for output in step.program.outputs}
    return {
        name: f"{shape_text(unpadded)} -> {shape_text(program.values[name].shape)}"
        for name, unpadded in step.padding
        if name not in returned
    }


def as_planned(plan: Plan, program: Program) -> TrainingStep:
    """The step of a captured program with the micro-batches and padding of a plan.

    Raises PlanError if the program cannot be padded like this.
    """
    step = microbatches(program, plan.microbatches)
    try:
        made = padded(step, {name: _room(line, step.program.values[name].shape) for name, line in plan.padded.items()})
    except (KeyError, ValueError, LayoutError) as error:
        check_step(plan, step)
        raise PlanError("the plan is damaged", error=f"it pads what cannot be: {error}", fix="make the plan again") from error
    return made


def _room(line: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape with the padding that a line of a plan adds to it; dims without padding may have other sizes."""
    true, wide = ([int(size) for size in part.split(" x ")] for part in line.split(" -> "))
    if any(a != b and not size == a < b <= a * (1 + MOST) for size, a, b in zip(shape, true, wide, strict=True)):
        raise ValueError(f"{line!r} is more padding than a plan has, or of another size")
    return tuple(size if a == b else b for size, a, b in zip(shape, true, wide, strict=True))


def check_step(plan: Plan, step: TrainingStep) -> None:
    """Raise PlanError if a plan was made for another program, or for another number of micro-batches or other padding."""
    if plan.hash != step.hash:
        raise PlanError(
            "the plan was made for another model or sample",
            plan=plan.hash,
            model=step.hash,
            fix="plan again with this model, sample shapes and mode (train or eval)",
        )


def resolve(plan: Plan, step: TrainingStep, fits: Mapping[str, OpSharding | None]) -> Assignment:
    """Parse a plan's text into an assignment for a step.

    Raises PlanError if the plan was made for another program, or if an entry does not fit.
    """
    check_step(plan, step)
    program = step.program
    reader = _Reader(plan, program)
    try:
        assignment = Assignment(
            ops={op.name: reader.candidate(op, fits[op.name]) for op in program.ops},
            given=dict(step.received)
            | {
                value.name: reader.stored(value.name, value.shape, plan.layouts[value.name])
                for value in program.given
                if value.name not in step.received
            },
            outputs={
                o.path: (reader.layout if step.sends else reader.stored)(
                    o.path, program.values[o.value].shape, plan.layouts[OUTPUT + o.path]
                )
                for o in program.outputs
            },
            routes={name: tuple(reader.steps(name, lines)) for name, lines in plan.routes.items()},
            recompute=reader.recompute(recomputable(program)),
            once=plan.once,
        )
        _check(program, assignment)
    except (KeyError, ValueError, IndexError, LayoutError) as error:
        raise PlanError("the plan is damaged", error=_what(error), fix="make the plan again") from error
    return assignment


def _what(error: Exception) -> str:
    """The problem with an entry of a plan, in words."""
    match error:
        case AutoparError():
            return error.what
        case KeyError():
            return f"there is no entry for {error}"
        case _:
            return str(error)


class _Reader:
    """Reads the texts of one plan."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        self._layouts: dict[tuple[tuple[int, ...], str], Layout] = {}  # many values have the same shape and layout

    def candidate(self, op: Op, fitted: OpSharding | None) -> Candidate:
        forms = tuple(_form(entry, fitted) for entry in _entries(self.plan.choices[op.name]))
        if len(forms) != len(self.plan.sizes):
            raise ValueError(f"choices[{op.name!r}] has {len(forms)} entries, the mesh {len(self.plan.sizes)} axes")
        return candidate(op, fitted, self.program.values, forms)

    def layout(self, name: str, shape: tuple[int, ...], line: str) -> Layout:
        if (shape, line) not in self._layouts:
            states = parse(line, shape, self.plan.sizes, name)
            self._layouts[shape, line] = tuple(state or I for state in states)
        return self._layouts[shape, line]

    def stored(self, name: str, shape: tuple[int, ...], line: str) -> Layout:
        """The layout of an input, parameter or output: I and S; for parameters also H and D, on the memory axis."""
        layout = self.layout(name, shape, line)
        parameters = {p.value.name for p in self.program.parameters}
        elsewhere = [state for state in layout if state in AWAY]
        if elsewhere and not (self.plan.mesh.has_memories and [layout[-1]] == elsewhere and name in parameters):
            raise ValueError(f"layouts[{name!r}] is {line!r}, but {elsewhere[0]} is of parameters, on the axis of memories")
        if any(state.own or state.kind not in "ISHD" for state in layout):
            raise ValueError(f"layouts[{name!r}] is {line!r}, but what is stored, given or returned is I or S on every axis")
        return layout

    def steps(self, name: str, lines: tuple[str, ...]) -> Iterator[Conversion]:
        shape = self.program.values[name].shape
        for line in lines:
            source, target = (self.layout(name, shape, part) for part in line.split(" -> "))
            step = Conversion.between(source, target, self.plan.sizes)
            if step is None:
                raise ValueError(f"routes[{name!r}]: {line!r} is not a conversion on one axis, or on several at once")
            if not step.possible(shape, self.plan.sizes):
                raise ValueError(f"routes[{name!r}]: no collective makes {line!r} of a shape of {list(shape)}")
            yield step

    def recompute(self, allowed: Set[str]) -> RecomputeChoice:
        """What is recomputed or offloaded: only `allowed` ops, and only conversions that are on a route."""
        ops: set[str] = set()
        steps: set[tuple[str, Conversion]] = set()
        offload: set[tuple[str, Layout]] = set()
        for name, lines in self.plan.recompute.items():
            if RUN in lines:
                ops.add(name)
            shape = self.program.values[name].shape if name in self.program.values else ()
            offload |= {(name, self.layout(name, shape, x.removeprefix(HOST))) for x in lines if x.startswith(HOST)}
            moved = tuple(line for line in lines if line != RUN and not line.startswith(HOST))
            if lost := [line for line in moved if line not in self.plan.routes.get(name, ())]:
                raise ValueError(f"recompute[{name!r}]: {lost[0]!r} is not on the route of {name}")
            if moved:
                steps |= {(name, step) for step in self.steps(name, moved)}
        if wrong := sorted(ops - allowed):
            raise ValueError(f"recompute[{wrong[0]!r}]: {wrong[0]} is not an op that may be recomputed")
        if lost := sorted(name for name, _ in offload if name not in self.program.producer):
            raise ValueError(f"recompute[{lost[0]!r}]: {lost[0]} is not a result of an op, so it cannot be offloaded")
        return RecomputeChoice(ops=frozenset(ops), steps=frozenset(steps), offload=frozenset(offload))


def _check(program: Program, assignment: Assignment) -> None:
    """Check that every layout that is used is produced, or reached by a route."""
    wants: dict[str, list[tuple[str, Layout]]] = {name: [] for name in program.values}
    for op in program.ops:
        for operand, layout in zip(op.operands, assignment.ops[op.name].operands, strict=True):
            wants[operand].append((op.name, layout))
    for output in program.outputs:
        wants[output.value].append((output.path, assignment.outputs[output.path]))
    for name in program.values:
        reached = {assignment.produced(name, program)}
        for step in assignment.routes.get(name, ()):
            if step.source not in reached:
                raise ValueError(f"routes[{name!r}] starts from a layout that {name} does not have")
            reached.add(step.target)
        for consumer, layout in wants[name]:
            if layout not in reached:
                raise ValueError(f"{consumer} wants {name} in a layout that no route reaches")

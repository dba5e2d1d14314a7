"""From a program to a planning problem, and from the solver's answer back to decisions about the program.

    ops, given tensors, outputs  ->  choices    candidates priced at their local shapes, repeated blocks as one
    values                       ->  wires      the layout graph between the layouts that are produced and wanted
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.conversion import COLLECTIVES, CONVERSIONS, Conversion
from autopar.cost_models.collectives import seconds as collective_seconds
from autopar.cost_models.compute import pricer
from autopar.cost_models.optimizers import Optimizer, step_seconds
from autopar.cost_models.saved import Saved, saved
from autopar.decisions import Decisions
from autopar.ir import Op, Output, Parameter, Program, Value, elements, writes
from autopar.errors import ConstraintError
from autopar.layout import I, Layout, local_shape, storable, text
from autopar.mesh import Device, Mesh
from autopar.passes.candidates import Candidate, asked, candidates
from autopar.passes.classes import OUTPUT, Classes, ValueClass, fold
from autopar.passes.strategies import Demands
from autopar.passes.space import Blocks, Space, placeable, space, states
from autopar.rules import Fitted, fit
from autopar.solver.problem import Choice, Consumer, Floats, Ints, Problem, Solution, Surcharge, Wire

FREE = [number for number, (forward, _) in enumerate(CONVERSIONS.values()) if forward == "identity"]
NO_DEMANDS = Demands()


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """What is known of a program on a mesh before any choice: rules, block counts, repeated blocks, what autograd saves."""

    program: Program
    sizes: tuple[int, ...]
    classes: Classes
    fits: Mapping[str, Fitted | None]
    blocks: Mapping[str, Blocks]
    saved: Mapping[str, Saved]  # by op class

    @functools.cached_property
    def readers(self) -> dict[str, list[Op]]:
        """The ops that read each value."""
        found: dict[str, list[Op]] = {name: [] for name in self.program.values}
        for op in self.program.ops:
            for operand in dict.fromkeys(op.operands):
                found[operand].append(op)
        return found

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """The buffers that ops change in place."""
        return frozenset(name for op in self.program.ops for name in writes(op))

    @functools.cached_property
    def backward(self) -> frozenset[str]:
        """The values that get a gradient in a step: those that a differentiable op reads, and what the user differentiates."""
        program = self.program
        outputs = {o.value for o in program.outputs}
        scalars = {name for name in outputs if not program.values[name].shape and program.values[name].requires_grad}
        found = {name for name in scalars or outputs if program.values[name].requires_grad}
        for op in reversed(program.ops):
            if any(result.name in found for result in op.results):
                found |= {name for name in op.operands if program.values[name].requires_grad}
        return frozenset(found)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Formulated:
    """A problem with what each choice and wire stands for."""

    analysis: Analysis
    mesh: Mesh
    problem: Problem
    names: tuple[str, ...]  # class of each choice
    candidates: tuple[tuple[Candidate, ...], ...]
    wires: tuple[ValueClass, ...]
    spaces: tuple[Space, ...]

    @property
    def program(self) -> Program:
        return self.analysis.program


def analyse(
    program: Program, mesh: Mesh, *, apart: Callable[[str], str] = lambda value: "", repeated: bool = True
) -> Analysis:
    """Fit rules, spread block counts, fold repeated blocks (`fold` says what `apart` and `repeated` mean)."""
    classes = fold(program, apart=apart, repeated=repeated)
    cpu = mesh.device is not None and mesh.device.name == "cpu"
    by_class = {name: fit(op, program.values) for name, op in _representatives(program, classes).items()}
    fits = {op.name: by_class[classes.of[op.name]] for op in program.ops}
    return Analysis(
        program=program,
        sizes=mesh.sizes,
        classes=classes,
        fits=fits,
        blocks=asked(program, fits),
        saved={name: saved(op, program.values, cpu=cpu) for name, op in _representatives(program, classes).items() if op.requires_grad},
    )


def _representatives(program: Program, classes: Classes) -> dict[str, Op]:
    return {op.name: op for op in program.ops if classes.of[op.name] == op.name}


def formulate(
    analysis: Analysis,
    mesh: Mesh,
    optimizer: Optimizer,
    *,
    demands: Demands = NO_DEMANDS,
    sharded_outputs: Callable[[Output], bool] = lambda output: False,
) -> Formulated:
    """The planning problem of an analysed program.

    `demands` limits candidates and conversions, `sharded_outputs` says which outputs may leave split. `mesh` must have links and a
    device. Raises ConstraintError where nothing is left to choose.
    """
    device = mesh.device
    assert device is not None and mesh.links, "a mesh is priced with its device and links"
    lists = {
        name: _accepted(analysis, name, found, demands)
        for name, found in _all_candidates(analysis, demands, sharded_outputs)
    }
    names = tuple(lists)
    place = {name: i for i, name in enumerate(names)}
    choices = tuple(
        Choice(
            name=name,
            seconds=_choice_seconds(analysis, name, found, optimizer, device),
            tie=_result_bytes(analysis, name, found),
        )
        for name, found in lists.items()
    )
    wires, values, spaces = [], [], []
    for value_class in analysis.classes.values:
        if value_class.consumers:
            graph, wire = _wire(analysis, mesh, value_class, lists, place, demands)
            wires.append(wire)
            values.append(value_class)
            spaces.append(graph)
    return Formulated(
        analysis=analysis, mesh=mesh, problem=Problem(choices=choices, wires=tuple(wires)), names=names,
        candidates=tuple(map(tuple, lists.values())), wires=tuple(values), spaces=tuple(spaces),
    )  # fmt: skip


def _all_candidates(
    analysis: Analysis, demands: Demands, sharded_outputs: Callable[[Output], bool]
) -> Iterator[tuple[str, list[Candidate]]]:
    program, sizes = analysis.program, analysis.sizes
    whole = (I,) * len(sizes)
    for value in program.inputs:
        if analysis.classes.of[value.name] == value.name:
            yield value.name, [Candidate(forms=(), operands=(), results=(demands.taken.get(value.name, whole),))]
    for parameter in (*program.parameters, *program.buffers):
        name = parameter.value.name
        if analysis.classes.of[name] == name:
            yield name, [Candidate(forms=(), operands=(), results=(s,)) for s in stored(parameter, sizes, analysis.blocks[name])]
    memory: dict[tuple[object, ...], list[Candidate]] = {}
    for name, op in _representatives(program, analysis.classes).items():
        names = (*op.operands, *(r.name for r in op.results))
        kinds = tuple((program.values[n].shape, program.values[n].requires_grad, analysis.blocks[n]) for n in names)
        key = (str(analysis.fits[name]), analysis.fits[name], kinds)
        if key not in memory:
            memory[key] = [
                c
                for c in candidates(op, analysis.fits[name], program.values, sizes, analysis.blocks)
                if all(
                    placeable(layout, shape, sizes, counts)
                    for layout, (shape, _, counts) in zip((*c.operands, *c.results), kinds, strict=True)
                )
            ]
        yield name, memory[key]
    for output in program.outputs:
        value = program.values[output.value]
        if sharded_outputs(output):
            yield OUTPUT + output.path, [
                Candidate(forms=(), operands=(layout,), results=())
                for layout in invariant_or_split(value.shape, sizes, ((1,),) * len(value.shape))
            ]
        else:
            yield OUTPUT + output.path, [Candidate(forms=(), operands=(whole,), results=())]


def _accepted(analysis: Analysis, name: str, found: list[Candidate], demands: Demands) -> list[Candidate]:
    """The candidates of a class that the demands allow."""
    program = analysis.program
    results = [name] if name not in program.op else [r.name for r in program.op[name].results]
    if not any(result in demands.patterns for result in results):
        if demands.invariant:
            return [c for c in found if all(state == I for layout in (*c.operands, *c.results) for state in layout)]
        return found
    kept = [c for c in found if all(demands.accept(r, x) for r, x in zip(results, c.results, strict=True))]
    if not kept:
        value = next(program.values[r] for r in results if r in demands.patterns)
        pattern = demands.patterns[value.name]
        asked = text(tuple(state or I for state in pattern), value.shape, analysis.sizes).split(", ")
        wanted = ", ".join("*" if state is None else entry for state, entry in zip(pattern, asked, strict=True))
        raise ConstraintError(
            f"{value.name} cannot be {'produced' if name in program.op else 'stored'} as {wanted!r}",
            shape=value.shape,
            known="; ".join(dict.fromkeys(text(c.results[0], value.shape, analysis.sizes) for c in found[:8])),
            at=program.op[name].source if name in program.op else "",
            fix="one of the layouts above, or * on an axis that may stay free",
        )
    return kept


def stored(parameter: Parameter, sizes: tuple[int, ...], blocks: Blocks) -> list[Layout]:
    """The layouts in which a parameter or buffer may be stored: every axis I or S."""
    if not parameter.used:
        return [(I,) * len(sizes)]
    return invariant_or_split(parameter.value.shape, sizes, blocks)


def invariant_or_split(shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> list[Layout]:
    """Every layout of a shape without R and P that a DTensor can have."""
    allowed = tuple(tuple(s for s in axis if s.kind in "IS") for axis in states(shape, sizes, blocks, True))
    return [layout for layout in space(shape, sizes, allowed, blocks).nodes if storable(layout, shape, sizes)]


def _choice_seconds(analysis: Analysis, name: str, found: Sequence[Candidate], optimizer: Optimizer, device: Device) -> Floats:
    program, sizes = analysis.program, analysis.sizes
    count = len(analysis.classes.members[name])
    if name in program.op:
        return count * np.array(op_seconds(program.op[name], found, program.values, sizes, device))
    if name.startswith(OUTPUT):
        return np.zeros(len(found))
    value = program.values[name]
    local = [elements(local_shape(value.shape, c.results[0], sizes)) * value.dtype.itemsize for c in found]
    trained = name in {p.value.name for p in program.parameters} and value.requires_grad
    if name in {v.name for v in program.inputs}:
        return np.array([_slicing(value, c.results[0], sizes, device) for c in found])
    return np.array([count * step_seconds(b, optimizer, device) if trained else 0.0 for b in local])


def _result_bytes(analysis: Analysis, name: str, found: Sequence[Candidate]) -> Floats:
    """Bytes that a candidate leaves on one rank: among equal prices the least wins."""
    program = analysis.program
    values = program.op[name].results if name in program.op else [program.values[name]] if name in program.values else []
    return np.array(
        [
            float(sum(elements(local_shape(v.shape, x, analysis.sizes)) * v.dtype.itemsize for v, x in zip(values, c.results, strict=True)))
            for c in found
        ]
    )


def _slicing(value: Value, layout: Layout, sizes: tuple[int, ...], device: Device) -> float:
    """Seconds of slicing a whole input, one axis after the other."""
    seconds, size = 0.0, value.bytes
    for axis, state in enumerate(layout):
        if state.kind == "S":
            size //= sizes[axis]
            seconds += max(2 * size / device.bandwidth, device.launch)
    return seconds


def op_seconds(
    op: Op, found: Sequence[Candidate], values: Mapping[str, Value], sizes: tuple[int, ...], device: Device
) -> list[float]:
    """Forward and backward seconds of one op under each candidate; equal local shapes are priced once."""
    price = pricer(op, values, device)
    shapes = [values[name].shape for name in op.operands], [r.shape for r in op.results]
    known: dict[tuple[object, object], float] = {}
    result = []
    for candidate in found:
        inside = tuple(local_shape(s, layout, sizes) for s, layout in zip(shapes[0], candidate.operands, strict=True))
        outside = tuple(local_shape(s, layout, sizes) for s, layout in zip(shapes[1], candidate.results, strict=True))
        if (inside, outside) not in known:
            known[inside, outside] = price(inside, outside)
        result.append(known[inside, outside])
    return result


def _wire(
    analysis: Analysis,
    mesh: Mesh,
    values: ValueClass,
    lists: Mapping[str, list[Candidate]],
    place: Mapping[str, int],
    demands: Demands,
) -> tuple[Space, Wire]:
    program = analysis.program
    value = program.values[values.example]
    made = [c.results[values.result] for c in lists[values.producer]]
    wanted = [[c.operands[position] for c in lists[name]] for name, position in values.consumers]
    allowed = tuple(
        tuple(sorted({layout[axis] for layouts in (made, *wanted) for layout in layouts})) for axis in range(len(mesh.sizes))
    )
    graph = space(value.shape, mesh.sizes, allowed, analysis.blocks[value.name])
    weight = value.name not in program.producer and value.requires_grad
    seconds, back, rerun = arc_seconds(graph, value, mesh)
    arcs = np.arange(len(seconds))
    if value.name in analysis.written:  # what is written in place is used as it is stored
        arcs = arcs[:0]
    if demands.weights:
        allowed_arcs = np.array(
            [[demands.allow(value.name, axis, *pair) for pair in CONVERSIONS] for axis in range(len(mesh.sizes))]
        )
        arcs = arcs[allowed_arcs[graph.axis[arcs], graph.pair[arcs]]]
    count = len(values.members)
    return graph, Wire(
        name=value.name,
        producer=place[values.producer],
        produced=np.array([graph.index[layout] for layout in made], dtype=np.int64),
        consumers=tuple(
            Consumer(
                choice=place[name],
                wants=np.array([graph.index[layout] for layout in layouts], dtype=np.int64),
            )
            for (name, _), layouts in zip(values.consumers, wanted, strict=True)
        ),
        nodes=len(graph.nodes),
        source=graph.source[arcs],
        target=graph.target[arcs],
        seconds=count * seconds[arcs],
        surcharges=(
            Surcharge(seconds=count * back[arcs], consumers=_where(values, lambda name, _: has_gradient(analysis, value.name, name))),
            Surcharge(seconds=count * rerun[arcs], consumers=_where(values, lambda *end: weight and saves(analysis, *end))),
        ),
        free=np.isin(graph.pair[arcs], FREE),
    )  # fmt: skip


def _where(values: ValueClass, true: Callable[[str, int], bool]) -> frozenset[int]:
    """The places of the consumers for which something is true."""
    return frozenset(place for place, end in enumerate(values.consumers) if true(*end))


def has_gradient(analysis: Analysis, value: str, consumer: str) -> bool:
    """Whether a gradient comes back to a value from an op class, or from an output."""
    if value not in analysis.backward:
        return False
    op = analysis.program.op.get(consumer)
    return op is None or any(r.name in analysis.backward for r in op.results)


def saves(analysis: Analysis, consumer: str, position: int) -> bool:
    """Whether the backward of an op class needs this operand again."""
    return consumer in analysis.saved and position in analysis.saved[consumer].operands


def arc_seconds(graph: Space, value: Value, mesh: Mesh) -> tuple[Floats, Floats, Floats]:
    """Per arc: seconds of the conversion, of its gradient, and of its collective alone if it is run again."""
    size = value.dtype.itemsize
    large = np.maximum(graph.elements[graph.source], graph.elements[graph.target]) * size
    small = np.minimum(graph.elements[graph.source], graph.elements[graph.target]) * size
    there, back, rerun = np.zeros((3, len(large)))
    for number, (forward, backward) in enumerate(CONVERSIONS.values()):
        for axis in range(len(mesh.sizes)):
            here = np.flatnonzero((graph.pair == number) & (graph.axis == axis))
            there[here] = primitive_seconds(forward, large[here], small[here], axis, mesh)
            back[here] = primitive_seconds(backward, large[here], small[here], axis, mesh)
            if forward in COLLECTIVES:
                rerun[here] = there[here]
    return there, back, rerun


def primitive_seconds(primitive: str, large: Ints, small: Ints, axis: int, mesh: Mesh) -> Floats:
    """A collective by its link; a local primitive by the memory that it moves (slice: part read and written; pad: whole)."""
    if primitive in COLLECTIVES:
        return np.asarray(collective_seconds(primitive, large.astype(np.float64), mesh.sizes[axis], mesh.links[axis]))
    if primitive == "identity":
        return np.zeros(len(large))
    assert mesh.device is not None
    moved = 2 * small if primitive == "slice" else small + large
    return np.maximum(moved / mesh.device.bandwidth, mesh.device.launch)


def due(analysis: Analysis, chosen: Decisions, name: str) -> tuple[set[Conversion], set[Conversion]]:
    """The conversions of a value whose gradient comes back, and those of a weight that run again for the backward."""
    program, of = analysis.program, analysis.classes.of
    into = {step.target: step for step in chosen.routes.get(name, ())}
    weight = name not in program.producer and program.values[name].requires_grad
    back: set[Conversion] = set()
    again: set[Conversion] = set()

    def walk(node: Layout, found: set[Conversion]) -> None:
        while node in into and into[node] not in found:
            found.add(into[node])
            node = into[node].source

    for op in analysis.readers[name]:
        for position, operand in enumerate(op.operands):
            if operand == name:
                node = chosen.ops[op.name].operands[position]
                if has_gradient(analysis, name, op.name):
                    walk(node, back)
                if weight and saves(analysis, of[op.name], position):
                    walk(node, again)
    for output in program.outputs:
        if output.value == name and has_gradient(analysis, name, OUTPUT + output.path):
            walk(chosen.outputs[output.path], back)
    return back, again


def decisions(formulated: Formulated, solution: Solution) -> Decisions:
    """What a solution says about every member of every class."""
    program, of = formulated.program, formulated.analysis.classes.of
    picked = {
        name: found[pick]
        for name, found, pick in zip(formulated.names, formulated.candidates, solution.picks, strict=True)
    }
    routes: dict[str, tuple[Conversion, ...]] = {}
    for values, graph, wire, arcs in zip(
        formulated.wires, formulated.spaces, formulated.problem.wires, solution.arcs, strict=True
    ):
        nodes = graph.nodes
        steps = tuple(_step(nodes[int(wire.source[a])], nodes[int(wire.target[a])]) for a in arcs)
        routes |= {member: steps for member in values.members if steps}
    return Decisions(
        ops={op.name: picked[of[op.name]] for op in program.ops},
        given={
            value.name: picked[of[value.name]].results[0]
            for value in (*program.inputs, *(p.value for p in (*program.parameters, *program.buffers)))
        },
        outputs={o.path: picked[OUTPUT + o.path].operands[0] for o in program.outputs},
        routes=routes,
    )


def _step(source: Layout, target: Layout) -> Conversion:
    axis = next(a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t)
    return Conversion(axis=axis, source=source, target=target)


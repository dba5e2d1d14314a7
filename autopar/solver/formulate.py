"""From a program to a planning problem, and from the solver's answer back to decisions about the program.

ops, given tensors, outputs  ->  choices    candidates priced at their local shapes, repeated blocks as one
values                       ->  wires      the layout graph between the layouts that are produced and wanted
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from autopar.conversion import COLLECTIVES, CONVERSIONS, Conversion
from autopar.cost_models.optimizers import Optimizer
from autopar.decisions import Again, Decisions
from autopar.errors import ConstraintError
from autopar.ir import Output, Parameter, Program
from autopar.layout import I, Layout, storable, text
from autopar.mesh import Mesh
from autopar.passes.again import lies, may_run
from autopar.passes.bundles import TOGETHER, bundles, shared
from autopar.passes.candidates import Candidate, candidates, distributed
from autopar.passes.classes import OUTPUT, ValueClass
from autopar.passes.regions import inner
from autopar.passes.space import Blocks, Space, placeable, space, states
from autopar.passes.strategies import Demands
from autopar.solver.analysis import Analysis, has_gradient, representatives, saves
from autopar.solver.messages import inside, returns
from autopar.solver.pricing import added_up, again_seconds, arc_seconds, choice_seconds, latency, ties
from autopar.solver.problem import Choice, Consumer, Floats, Ints, Problem, Solution, Surcharge, Toll, Way, Wire

FREE = [number for number, (forward, _) in enumerate(CONVERSIONS.values()) if forward == "identity"]
ANEW = [  # what may be converted again but weights: a change of dims takes as much as what it is made from
    number for number, (forward, _) in enumerate(CONVERSIONS.values())
    if forward in ("all_gather", "all_reduce", "reduce_scatter", "slice")
]  # fmt: skip
TO_INVARIANT = [number for number, (_, target) in enumerate(CONVERSIONS) if target == "I"]
NO_DEMANDS = Demands()
BACK, AGAIN = 0, 1  # the surcharges of a wire: gradients on their way back, weights that are gathered again


@dataclass(frozen=True, eq=False, kw_only=True)
class Formulated:
    """A problem with what each choice and wire stands for."""

    analysis: Analysis
    mesh: Mesh
    problem: Problem
    names: tuple[str, ...]  # class of each choice
    candidates: tuple[tuple[Candidate, ...], ...]
    wires: tuple[ValueClass, ...]
    spaces: tuple[Space, ...]
    reruns: frozenset[str]  # ops that may run again, or that come back with what does
    dropped: bool  # whether gathered weights are dropped after their use, whatever that costs

    @functools.cached_property
    def given(self) -> frozenset[str]:
        """Inputs, parameters and buffers."""
        program = self.program
        return frozenset(value.name for value in (*program.inputs, *(p.value for p in (*program.parameters, *program.buffers))))

    @property
    def program(self) -> Program:
        return self.analysis.program

    def only(self, solution: Solution) -> Formulated:
        """The same with the layouts of a solution alone; what is made again, and the routes, are still to choose."""
        picks = [np.array([pick]) for pick in solution.picks]
        return replace(
            self,
            problem=replace(
                self.problem,
                choices=tuple(
                    replace(
                        choice, seconds=choice.seconds[pick], tie=choice.tie[pick],
                        again=None if choice.again is None else choice.again[pick],
                    )
                    for choice, pick in zip(self.problem.choices, picks, strict=True)
                ),
                wires=tuple(
                    replace(
                        wire, produced=wire.produced[picks[wire.producer]],
                        consumers=tuple(replace(end, wants=end.wants[picks[end.choice]]) for end in wire.consumers),
                    )
                    for wire in self.problem.wires
                ),
            ),
            candidates=tuple((found[pick],) for found, pick in zip(self.candidates, solution.picks, strict=True)),
        )  # fmt: skip


def formulate(
    analysis: Analysis,
    mesh: Mesh,
    optimizer: Optimizer,
    *,
    demands: Demands = NO_DEMANDS,
    sharded_outputs: Callable[[Output], bool] = lambda output: False,
) -> Formulated:
    """The planning problem of an analysed program.

    `demands` limits candidates and conversions, `sharded_outputs` says which outputs may leave split. `mesh` must have
    links and a
    device. Raises ConstraintError where nothing is left to choose.
    """
    device = mesh.device
    assert device is not None, "a mesh is priced with its device"
    assert mesh.links, "a mesh is priced with its links"
    lists = {
        name: _accepted(analysis, name, found, demands) for name, found in _all_candidates(analysis, demands, sharded_outputs)
    }
    names = tuple(lists)
    place = {name: i for i, name in enumerate(names)}
    reruns = _reruns(analysis)
    recast = _recast(analysis) if demands.dropped else frozenset[str]()
    choices = tuple(
        Choice(
            name=name,
            seconds=choice_seconds(analysis, name, found, optimizer, device)
            + _returning(analysis, name, found, mesh)
            + _inside(analysis, name, found, mesh, "forward", "backward")
            + (again_seconds(analysis, name, found, device) if name in recast else 0.0),
            tie=ties(analysis, name, found),
            count=len(analysis.classes.members[name]),
            again=again_seconds(analysis, name, found, device) + _inside(analysis, name, found, mesh, "forward")
            if name in reruns - recast
            else None,
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
    tolls = tuple(_tolls(analysis, mesh, wires, values, spaces, demands.dropped))
    return Formulated(
        analysis=analysis, mesh=mesh, problem=Problem(choices=choices, wires=tuple(wires), tolls=tolls), names=names,
        candidates=tuple(map(tuple, lists.values())), wires=tuple(values), spaces=tuple(spaces), reruns=reruns,
        dropped=demands.dropped,
    )  # fmt: skip


def _reruns(analysis: Analysis) -> frozenset[str]:
    """The ops that may run again for the backward, and those whose results come back with their operand's.

    A weight is cast again wherever its copy is needed; everything else stays within its region.
    """
    program = analysis.program
    lying = (op.name for op in program.ops if op.requires_grad and lies(op, program.values))
    return may_run(program, analysis.fits).union(lying) & (inner(program) | analysis.casts)


def _recast(analysis: Analysis) -> frozenset[str]:
    """The classes of ops that cast weights which the backward needs: these run again where gathered weights are dropped."""
    program, of = analysis.program, analysis.classes.of
    runs = may_run(program, analysis.fits) & analysis.casts
    return frozenset(of[name] for name in runs if saves(analysis, of[name], 0))


def _returning(analysis: Analysis, name: str, found: Sequence[Candidate], mesh: Mesh) -> float:
    """Seconds in which the gradient of an input comes back; there is one way to take an input."""
    value = next((value for value in analysis.program.inputs if value.name == name), None)
    back = returns(analysis, value, found[0].results[0], mesh) if value else ()
    return analysis.program.runs * sum(message.seconds for message in back)


def _inside(analysis: Analysis, name: str, found: Sequence[Candidate], mesh: Mesh, *passes: str) -> Floats | float:
    """Seconds of what the candidates of an op class send inside in these passes, all members together."""
    program, op = analysis.program, analysis.program.op.get(name)
    if op is None or not any(distributed(analysis.fits[name], candidate) for candidate in found):
        return 0.0
    differentiated = any(result.name in analysis.backward for result in op.results)
    times = program.runs * len(analysis.classes.members[name])
    return times * np.array(
        [
            sum(
                message.seconds
                for where in passes
                if where == "forward" or differentiated
                for message in inside(op, analysis.fits[name], candidate, program.values, mesh, where)
            )
            for candidate in found
        ]
    )


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
            yield (
                name,
                [
                    Candidate(forms=(), operands=(), results=(s,))
                    for s in stored(parameter, sizes, analysis.blocks[name], program.true.get(name))
                ],
            )
    memory: dict[tuple[object, ...], list[Candidate]] = {}
    for name, op in representatives(program, analysis.classes).items():
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
            yield (
                OUTPUT + output.path,
                [
                    Candidate(forms=(), operands=(layout,), results=())
                    for layout in invariant_or_split(value.shape, sizes, ((1,),) * len(value.shape))
                    if storable(layout, program.whole(value.name), sizes)
                ],
            )
        else:
            yield OUTPUT + output.path, [Candidate(forms=(), operands=(whole,), results=())]


def _accepted(analysis: Analysis, name: str, found: list[Candidate], demands: Demands) -> list[Candidate]:
    """The candidates of a class that the demands allow."""
    program = analysis.program
    if name in demands.divided:
        found = [c for c in found if c.results[0][-1].kind == "S"] or found
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


def stored(
    parameter: Parameter, sizes: tuple[int, ...], blocks: Blocks, true: tuple[int, ...] | None = None
) -> list[Layout]:
    """The layouts in which a parameter or buffer may be stored, in its true shape if it is padded: every axis I or S."""
    if not parameter.used:
        return [(I,) * len(sizes)]
    found = invariant_or_split(parameter.value.shape, sizes, blocks)
    return [layout for layout in found if storable(layout, true, sizes)] if true else found


def invariant_or_split(shape: tuple[int, ...], sizes: tuple[int, ...], blocks: Blocks) -> list[Layout]:
    """Every layout of a shape without R and P that a DTensor can have."""
    allowed = tuple(tuple(s for s in axis if s.kind in "IS") for axis in states(shape, sizes, blocks, True))
    return [layout for layout in space(shape, sizes, allowed, blocks).nodes if storable(layout, shape, sizes)]


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
    weight = value.name in analysis.weights
    summed, bundled = analysis.summed.get(value.name), value.name in analysis.bundled
    there, back, rerun = arc_seconds(graph, value, mesh, bundled=bundled, summed=summed, runs=program.runs)
    arcs = np.arange(len(there))
    if value.name in analysis.written:  # what is written in place is used as it is stored
        arcs = arcs[:0]
    if bundled and value.requires_grad and program.runs > 1:  # what is I is so because it is stored so: see `added_up`
        arcs = arcs[~np.isin(graph.pair[arcs], TO_INVARIANT)]
    if demands.weights:
        allowed_arcs = np.array(
            [[demands.allow(value.name, axis, *pair) for pair in CONVERSIONS] for axis in range(len(mesh.sizes))]
        )
        arcs = arcs[allowed_arcs[graph.axis[arcs], graph.pair[arcs]]]
    count, free = len(values.members), np.isin(graph.pair[arcs], FREE)
    grows = graph.elements[graph.target[arcs]] > graph.elements[graph.source[arcs]]  # else a weight had better be kept
    may = grows if weight else np.isin(graph.pair[arcs], ANEW)
    again = np.where(may, count * (rerun if weight else there)[arcs], np.inf)
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
        seconds=count * there[arcs],
        surcharges=(
            Surcharge(
                seconds=count * back[arcs],
                consumers=_where(values, lambda name, _: has_gradient(analysis, value.name, name)),
            ),
            Surcharge(
                seconds=count * rerun[arcs],
                consumers=_where(values, lambda *end: weight and demands.dropped and saves(analysis, *end)),
            ),
        ),
        free=free,
        count=count,
        again=again if value.requires_grad and not (weight and demands.held) else None,
    )  # fmt: skip


def _tolls(
    analysis: Analysis, mesh: Mesh, wires: Sequence[Wire], values: Sequence[ValueClass], spaces: Sequence[Space], dropped: bool
) -> Iterator[Toll]:
    """The latency of every message in which the weights of a bundle may travel, bundles of alike weights together.

    It is that of the large bundles wherever only gradients travel, though within a block if the weight has moved before. What
    moves goes over one axis after the other: weights share a message that are `shared` on as many axes before, which is how
    many steps they have gone, unless they change dims on their way. What is sent again is a message of its own: always, if
    gathered weights are `dropped`, else if the solver says so.
    """
    place = {member: i for i, found in enumerate(values) for member in found.members}
    kinds = [_kinds(wire, graph) for wire, graph in zip(wires, spaces, strict=True)]
    groups = {
        moved: Counter(frozenset(place[name] for name in names) for names in bundles(analysis.program, moved=moved))
        for moved in (False, True)
    }
    axes = range(len(mesh.sizes))
    for (number, (forward, backward)), axis, before in itertools.product(enumerate(CONVERSIONS.values()), axes, axes):
        due = [(forward, None), (forward, AGAIN)] if forward in TOGETHER[0] else []
        due += [(backward, BACK)] if backward in TOGETHER[1] else []
        if before and forward == "identity":
            continue
        for (group, count), (kind, surcharge) in itertools.product(groups[forward != "identity"].items(), due):
            ways = []
            for w in sorted(group):
                wire, arcs = wires[w], (kinds[w][0] == axis) & (kinds[w][1] == number)
                if forward != "identity":
                    arcs &= kinds[w][2] == before
                consumers: frozenset[int] | None = frozenset(range(len(wire.consumers)))
                if surcharge is not None:
                    consumers = wire.surcharges[surcharge].consumers
                if surcharge == AGAIN and not dropped:
                    consumers = None if wire.again is not None else frozenset()
                if consumers != frozenset() and arcs.any():
                    ways.append(Way(wire=w, consumers=consumers, arcs=arcs))
            runs = 1 if kind == backward and added_up(forward, backward) else analysis.program.runs
            seconds = runs * count * latency(kind, axis, mesh)
            if ways and seconds > 0:
                yield Toll(name=f"{kind} over {mesh.axes[axis]}", seconds=seconds, ways=tuple(ways))


def _kinds(wire: Wire, graph: Space) -> tuple[Ints, Ints, Ints]:
    """The axis and the pair of each arc of a wire, and on how many axes its source is shared."""
    of = {ends: i for i, ends in enumerate(zip(graph.source.tolist(), graph.target.tolist(), strict=True))}
    arcs = [of[ends] for ends in zip(wire.source.tolist(), wire.target.tolist(), strict=True)]
    return graph.axis[arcs], graph.pair[arcs], np.array([shared(layout) for layout in graph.nodes])[wire.source]


def _where(values: ValueClass, true: Callable[[str, int], bool]) -> frozenset[int]:
    """The places of the consumers for which something is true."""
    return frozenset(place for place, end in enumerate(values.consumers) if true(*end))


def decisions(formulated: Formulated, solution: Solution) -> Decisions:
    """What a solution says about every member of every class."""
    program, of = formulated.program, formulated.analysis.classes.of
    picked = {
        name: found[pick] for name, found, pick in zip(formulated.names, formulated.candidates, solution.picks, strict=True)
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
        again=_again(formulated, solution, routes),
    )


def _again(formulated: Formulated, solution: Solution, routes: Mapping[str, tuple[Conversion, ...]]) -> Again:
    """What a solution makes again: the first members of classes and values; gathered weights and casts if all are dropped."""
    analysis, ops, steps = formulated.analysis, set[str](), set[tuple[str, Conversion]]()
    for choice, count in solution.again.choices.items():
        ops.update(analysis.classes.members[formulated.names[choice]][:count])
    for (w, arc), count in solution.again.arcs.items():
        if arc in solution.arcs[w] and not formulated.problem.wires[w].free[arc]:
            place = solution.arcs[w].index(arc)
            steps.update((member, routes[member][place]) for member in formulated.wires[w].members[:count])
    for name in analysis.weights & routes.keys() if formulated.dropped else ():
        view = name in analysis.program.producer
        steps.update((name, step) for step in routes[name] if view or _gathered(routes[name], step))
    beside = list(_beside(analysis, routes, steps)) if steps else []
    steps.update(beside)
    ops.update(analysis.casts if formulated.dropped else ())
    ops.update(analysis.program.producer[name].name for name, _ in beside if name in analysis.copies)
    return Again(ops=frozenset(ops) & may_run(analysis.program, analysis.fits), steps=frozenset(steps))


def _beside(
    analysis: Analysis, routes: Mapping[str, tuple[Conversion, ...]], steps: Set[tuple[str, Conversion]]
) -> Iterator[tuple[str, Conversion]]:
    """The conversions of weights that the backward does not need, where others of their bundle are done again: they travel with
    these, and are dropped like them."""
    for names in bundles(analysis.program, moved=True):
        kinds = {(step.axis, step.primitives) for name in names for step in routes.get(name, ()) if (name, step) in steps}
        for name in names if kinds else ():
            uses = ((o, place) for o in analysis.readers[name] for place, n in enumerate(o.operands) if n == name)
            if not any(saves(analysis, analysis.classes.of[o.name], place) for o, place in uses):
                yield from ((name, step) for step in routes.get(name, ()) if (step.axis, step.primitives) in kinds)


def _gathered(route: tuple[Conversion, ...], step: Conversion) -> bool:
    """Whether a step of a weight's route moves it between ranks, or follows one that does: it is dropped and gathered again."""
    before = [other for other in route if other.target == step.source]
    return step.primitives[0] in COLLECTIVES or any(_gathered(route, other) for other in before)


def _step(source: Layout, target: Layout) -> Conversion:
    axis = next(a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t)
    return Conversion(axis=axis, source=source, target=target)

"""Converts a solution of the integer program to an assignment, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import TypeVar

from autopar.analysis.analysis import Analysis, saves
from autopar.analysis.weight_buckets import weight_buckets
from autopar.formulation.formulate import PlanningProblem
from autopar.ir.conversion import CARRIED, Conversion
from autopar.ir.layout import Layout
from autopar.ir.program import OUTPUT
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.solver.problem import RecomputeCounts, Solution, price, storages

Key = TypeVar("Key")


def assignment(formulated: PlanningProblem, solution: Solution) -> Assignment:
    """Expand a solution to every member of every class."""
    program, of = formulated.program, formulated.analysis.classes.of
    picked = {
        name: found[pick] for name, found, pick in zip(formulated.names, formulated.candidates, solution.picks, strict=True)
    }
    routes: dict[str, tuple[Conversion, ...]] = {}
    for values, graph, edge, arcs in zip(
        formulated.edges, formulated.spaces, formulated.problem.edges, solution.arcs, strict=True
    ):
        nodes = graph.nodes
        steps = tuple(
            Conversion(axis=int(graph.axis[a]), source=nodes[int(edge.source[a])], target=nodes[int(edge.target[a])])
            for a in arcs
        )
        routes |= {member: steps for member in values.members if steps}
    return Assignment(
        ops={op.name: picked[of[op.name]] for op in program.ops},
        given={value.name: picked[of[value.name]].results[0] for value in program.given},
        outputs={o.path: picked[OUTPUT + o.path].operands[0] for o in program.outputs},
        routes=routes,
        recompute=_recompute_choice(formulated, solution, routes),
        once=formulated.once,
    )


class NoSolutionError(Exception):
    """No solution of the problem represents the assignment."""


def solution_of(formulated: PlanningProblem, chosen: Assignment, *, gap: float, status: str) -> Solution:
    """The solution that represents an assignment, at the problem's prices; its bound follows from the relative `gap`.

    Raises NoSolutionError if there is none: members of a class differ, or the problem allows something else.
    """
    bare = Solution(
        picks=tuple(_picks(formulated, chosen)),
        arcs=tuple(_arcs(formulated, chosen)),
        seconds=0.0,
        bound=0.0,
        status=status,
    )
    found = replace(bare, recompute=_counts(formulated, bare, chosen.recompute))
    if assignment(formulated, found) != chosen:
        raise NoSolutionError("the solution of the first members stands for another assignment")
    seconds = price(formulated.problem, found.picks, found.arcs, found.recompute)
    return replace(found, seconds=seconds, bound=(1 - gap) * seconds)


def _picks(formulated: PlanningProblem, chosen: Assignment) -> Iterator[int]:
    """The candidate of each choice, by its first member."""
    program = formulated.program
    for name, found in zip(formulated.names, formulated.candidates, strict=True):
        if name in program.op:
            alike = [candidate == chosen.ops[name] for candidate in found]
        elif name in program.values:
            alike = [candidate.results[0] == chosen.given[name] for candidate in found]
        else:
            alike = [candidate.operands[0] == chosen.outputs[name.removeprefix(OUTPUT)] for candidate in found]
        if True not in alike:
            raise NoSolutionError(f"{name} has no such candidate")
        yield alike.index(True)


def _arcs(formulated: PlanningProblem, chosen: Assignment) -> Iterator[tuple[int, ...]]:
    """The arcs of each edge, by its first member."""
    for values, graph, edge in zip(formulated.edges, formulated.spaces, formulated.problem.edges, strict=True):
        ends = [(graph.nodes[s], graph.nodes[t]) for s, t in zip(edge.source.tolist(), edge.target.tolist(), strict=True)]
        steps = [(step.source, step.target) for step in chosen.routes.get(values.example, ())]
        if not set(steps) <= set(ends):
            raise NoSolutionError(f"{values.example} has no such conversions")
        yield tuple(map(ends.index, steps))


def _counts(formulated: PlanningProblem, bare: Solution, chosen: RecomputeChoice) -> RecomputeCounts:
    """How many members are recomputed, converted again and fetched from the host, beyond those that always are."""
    analysis, anyway = formulated.analysis, assignment(formulated, bare)
    ops, steps = chosen.ops - anyway.recompute.ops, chosen.steps - anyway.recompute.steps
    members = analysis.classes.members
    again = {choice: len(ops.intersection(members[name])) for choice, name in enumerate(formulated.names) if name in members}
    arcs, offload = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for w, values in enumerate(formulated.edges):
        for place, arc in enumerate(bare.arcs[w]):
            arcs[w, arc] = sum((member, anyway.routes[member][place]) in steps for member in values.members)
        for node, layout in enumerate(formulated.spaces[w].nodes):
            offload[w, node] = sum((member, layout) in chosen.offload for member in values.members)
    return RecomputeCounts(choices=_positive(again), arcs=_positive(arcs), offload=_positive(offload))


def _positive(counts: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count for key, count in counts.items() if count}


def _recompute_choice(
    formulated: PlanningProblem, solution: Solution, routes: Mapping[str, tuple[Conversion, ...]]
) -> RecomputeChoice:
    """What a solution recomputes: the first members of classes and values, and dropped gathered weights and casts."""
    analysis, ops, steps = formulated.analysis, set[str](), set[tuple[str, Conversion]]()
    for choice, count in solution.recompute.choices.items():
        ops.update(analysis.classes.members[formulated.names[choice]][:count])
    for (w, arc), count in solution.recompute.arcs.items():
        if arc in solution.arcs[w] and not formulated.problem.edges[w].free[arc]:
            place = solution.arcs[w].index(arc)
            steps.update((member, routes[member][place]) for member in formulated.edges[w].members[:count])
    ops.update(formulated.policy.ops)
    steps.update(formulated.policy.steps(routes))
    offload = frozenset(_offloaded(formulated, solution))
    for name in formulated.dropped & routes.keys():
        view = name in analysis.program.producer
        steps.update((name, step) for step in routes[name] if view or _gathered(routes[name], step))
    beside = list(_with_their_bucket(analysis, routes, steps)) if steps else []
    steps.update(beside)
    ops.update(analysis.casts_to(formulated.dropped))
    ops.update(analysis.program.producer[name].name for name, _ in beside if name in analysis.copies)
    return RecomputeChoice(ops=frozenset(ops) & analysis.recomputable, steps=frozenset(steps), offload=offload)


def _offloaded(formulated: PlanningProblem, solution: Solution) -> Iterator[tuple[str, Layout]]:
    """What a solution offloads to the host: the members after the recomputed ones."""
    for (w, node), count in solution.recompute.offload.items():
        edge, values = formulated.problem.edges[w], formulated.edges[w]
        storage = storages(edge)
        made = [(int(edge.produced[solution.picks[edge.producer]]), solution.recompute.choices.get(edge.producer, 0))]
        made += [(int(edge.target[arc]), solution.recompute.arcs.get((w, arc), 0)) for arc in solution.arcs[w]]
        there = [(layout, members) for layout, members in made if storage[layout] == storage[node]]
        first, layout = max(members for _, members in there), formulated.spaces[w].nodes[there[0][0]]
        yield from ((member, layout) for member in values.members[first : first + count])


def _with_their_bucket(
    analysis: Analysis, routes: Mapping[str, tuple[Conversion, ...]], steps: Set[tuple[str, Conversion]]
) -> Iterator[tuple[str, Conversion]]:
    """Conversions of weights that the backward does not need, but whose bucket is recomputed: they travel with the others, and
    are dropped like them.
    """
    for names in weight_buckets(analysis.program, moved=True):
        kinds = {(step.axis, step.primitives) for name in names for step in routes.get(name, ()) if (name, step) in steps}
        for name in names if kinds else ():
            uses = ((o, place) for o in analysis.readers[name] for place, n in enumerate(o.operands) if n == name)
            if not any(saves(analysis, analysis.classes.of[o.name], place) for o, place in uses):
                yield from ((name, step) for step in routes.get(name, ()) if (step.axis, step.primitives) in kinds)


def _gathered(route: tuple[Conversion, ...], step: Conversion) -> bool:
    """Whether a step of a weight's route moves it between ranks, or follows one that does, so that it is dropped and gathered
    again.
    """
    before = [other for other in route if other.target == step.source]
    return step.primitives[0] in CARRIED or any(_gathered(route, other) for other in before)


__all__ = ["NoSolutionError", "assignment", "solution_of"]

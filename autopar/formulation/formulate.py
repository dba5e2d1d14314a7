"""Formulates a program as a planning problem, and turns the solver's answer into an assignment.

ops, given tensors, outputs  ->  choices    candidates priced at their local shapes, repeated blocks merged
values                       ->  edges      the layout graph between produced and wanted layouts
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.analysis.analysis import Analysis, has_gradient, saves
from autopar.analysis.dropped_weights import dropped_weights
from autopar.analysis.recompute_policy import FREE, RecomputePolicy
from autopar.analysis.repeated_blocks import ValueClass
from autopar.cost_models.cost_model import CATALOG, CostModel
from autopar.cost_models.optimizers import Optimizer
from autopar.formulation.fixed_charges import fixed_charges
from autopar.formulation.overlap import Overlap
from autopar.formulation.overlap_loads import STILL, OverlapLoads
from autopar.formulation.prices import ArcSeconds, Prices, arc_seconds, end_seconds, op_class_seconds, ties
from autopar.formulation.recompute_terms import reconvert_seconds, repeated_seconds, rerunnable
from autopar.formulation.step_collectives import Phase, inside, returns
from autopar.formulation.step_time import StepPrices
from autopar.ir.mesh import Mesh
from autopar.ir.program import OUTPUT, Output, Program, Value
from autopar.search_space.candidates import Candidate, distributed
from autopar.search_space.domains import offers
from autopar.search_space.layout_graph import LayoutGraph
from autopar.search_space.reachable import Conversions, reachable
from autopar.search_space.strategies import StrategyConstraints
from autopar.solver.problem import Choice, ConditionalCost, Consumer, Edge, Floats, Ints, Problem, Solution, storages

UNCONSTRAINED = StrategyConstraints()


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanningProblem:
    """A problem with the meaning of each choice and edge."""

    analysis: Analysis
    prices: Prices
    problem: Problem
    names: tuple[str, ...]  # class of each choice
    candidates: tuple[tuple[Candidate, ...], ...]
    edges: tuple[ValueClass, ...]
    spaces: tuple[LayoutGraph, ...]
    reruns: frozenset[str]  # ops that may be recomputed, or that come back with what does
    drops: bool  # whether gathered weights are dropped after their use, but those that are needed at once
    dropped: frozenset[str]  # weights that are dropped after their use once they were gathered, whatever that costs
    once: bool  # whether they are gathered once for all micro-batches
    policy: RecomputePolicy

    @property
    def program(self) -> Program:
        """The program that is planned."""
        return self.analysis.program

    @property
    def mesh(self) -> Mesh:
        """The mesh with its device and links."""
        return self.prices.mesh

    @functools.cached_property
    def step_prices(self) -> StepPrices:
        """What the events of a step cost."""
        return StepPrices(self.analysis, self.prices)

    def renamed(self, analysis: Analysis, policy: RecomputePolicy) -> PlanningProblem:
        """This problem for another program that differs only in names: all numbers are the same."""
        new = dict(zip(_names(self.program), _names(analysis.program), strict=True))
        choices = tuple(replace(choice, name=new[choice.name]) for choice in self.problem.choices)
        edges = tuple(replace(edge, name=new[edge.name]) for edge in self.problem.edges)
        return replace(
            self,
            analysis=analysis,
            problem=replace(self.problem, choices=choices, edges=edges),
            names=tuple(new[name] for name in self.names),
            edges=tuple(values.renamed(new) for values in self.edges),
            reruns=frozenset(new[name] for name in self.reruns),
            dropped=frozenset(new[name] for name in self.dropped),
            policy=policy,
        )

    def only(self, solution: Solution) -> PlanningProblem:
        """This problem restricted to a solution's layouts; recomputation and routes stay open."""
        return self.within([np.array([pick]) for pick in solution.picks])

    def within(self, picks: Sequence[Ints]) -> PlanningProblem:
        """This problem restricted to these candidates of each choice."""
        return replace(
            self,
            problem=replace(
                self.problem,
                choices=tuple(
                    replace(
                        choice, seconds=choice.seconds[pick], tie=choice.tie[pick],
                        recompute=None if choice.recompute is None else choice.recompute[pick],
                    )
                    for choice, pick in zip(self.problem.choices, picks, strict=True)
                ),
                edges=tuple(
                    replace(
                        edge, produced=edge.produced[picks[edge.producer]],
                        consumers=tuple(replace(end, wants=end.wants[picks[end.choice]]) for end in edge.consumers),
                    )
                    for edge in self.problem.edges
                ),
                regions=tuple(region.mapped(lambda load: load.within(picks)) for region in self.problem.regions),
            ),
            candidates=tuple(
                tuple(found[c] for c in pick.tolist()) for found, pick in zip(self.candidates, picks, strict=True)
            ),
        )  # fmt: skip


def _names(program: Program) -> Iterator[str]:
    """The names of values, ops and outputs, in order."""
    yield from program.values
    yield from program.op
    yield from (OUTPUT + output.path for output in program.outputs)


def formulate(
    analysis: Analysis,
    mesh: Mesh,
    optimizer: Optimizer,
    *,
    cost_model: CostModel = CATALOG,
    constraints: StrategyConstraints = UNCONSTRAINED,
    policy: RecomputePolicy = FREE,
    sharded_outputs: Callable[[Output], bool] = lambda output: False,
) -> PlanningProblem:
    """The planning problem of an analysed program.

    `constraints` limits candidates and conversions, `policy` says which activations are recomputed, `sharded_outputs` which
    outputs may be returned split. `mesh` must have links and a device. Raises ConstraintError if no candidate is left.
    """
    assert mesh.links, "a mesh is priced with its links"
    prices = Prices(mesh=mesh, optimizer=optimizer, model=cost_model)
    lists, spaces = reachable(
        analysis, dict(offers(analysis, constraints, sharded_outputs)), constraints, tuple(axes for axes, _ in mesh.flattened)
    )
    place = {name: i for i, name in enumerate(lists)}
    reruns = rerunnable(analysis, policy)
    dropped = dropped_weights(analysis) if constraints.reshard_after_forward else frozenset[str]()
    recast = _recast(analysis, dropped)
    overlap = Overlap.of(analysis, mesh, once=constraints.once)
    loads = OverlapLoads(overlap) if overlap else None
    choices = tuple(
        _choice(
            analysis, name, found, prices, policy, rerun=name in reruns - recast, recast=name in recast, number=n, loads=loads
        )
        for n, (name, found) in enumerate(lists.items())
    )
    edges = [_edge(analysis, prices, space, place, constraints, dropped, policy, n, loads) for n, space in enumerate(spaces)]
    found = tuple(fixed_charges(analysis, prices, edges, spaces, constraints, dropped, loads))
    return PlanningProblem(
        analysis=analysis,
        prices=prices,
        problem=Problem(choices=choices, edges=tuple(edges), fixed_charges=found, regions=loads.regions() if loads else ()),
        names=tuple(lists),
        candidates=tuple(map(tuple, lists.values())),
        edges=tuple(space.values for space in spaces),
        spaces=tuple(space.graph for space in spaces),
        reruns=reruns,
        drops=constraints.reshard_after_forward,
        dropped=dropped,
        once=constraints.once,
        policy=policy,
    )


def _choice(
    analysis: Analysis,
    name: str,
    found: Sequence[Candidate],
    prices: Prices,
    policy: RecomputePolicy,
    *,
    rerun: bool,
    recast: bool,
    number: int,
    loads: OverlapLoads | None,
) -> Choice:
    """The choice of an op class, a given tensor or an output, and whether it may, or must, be recomputed."""
    tie, count = ties(analysis, name, found), len(analysis.classes.members[name])
    if name not in analysis.program.op:
        seconds = end_seconds(analysis, name, found, prices) + _returning(analysis, name, found, prices)
        return Choice(name=name, seconds=seconds, tie=tie, count=count)
    both, forward = op_class_seconds(analysis, name, found, prices)
    sent_again = _inside(analysis, name, found, prices, "forward")
    again = forward if recast or name in policy.asked else 0.0
    chosen = rerun and name not in policy.ops | policy.views
    if loads is not None:
        sent = dict(_inside_by_axis(analysis, name, found, prices))
        if name in policy.asked:
            sent |= {(True, axis): sent[True, axis] + seconds for (back, axis), seconds in sent.items() if not back}
        loads.op(number, name, {False: forward, True: both - forward + again}, sent, forward if chosen else None)
    seconds = both + _inside(analysis, name, found, prices, "forward", "backward") + again
    recompute = np.zeros_like(forward) if rerun else None
    return Choice(
        name=name,
        seconds=seconds + sent_again if name in policy.asked else seconds,
        tie=tie,
        count=count,
        recompute=forward + sent_again if chosen else recompute,
    )


def _recast(analysis: Analysis, dropped: frozenset[str]) -> frozenset[str]:
    """The classes of ops that cast weights needed by the backward: recomputed if gathered weights are dropped."""
    of = analysis.classes.of
    runs = analysis.recomputable & analysis.casts_to(dropped)
    return frozenset(of[name] for name in runs if saves(analysis, of[name], 0))


def _returning(analysis: Analysis, name: str, found: Sequence[Candidate], prices: Prices) -> float:
    """Seconds to return the gradient of an input, for the one way to take it."""
    value = next((value for value in analysis.program.inputs if value.name == name), None)
    back = returns(analysis, value, found[0].results[0], prices) if value else ()
    return analysis.step.microbatches * sum(message.seconds for message in back)


def _inside(
    analysis: Analysis, name: str, found: Sequence[Candidate], prices: Prices, *phases: Phase, axis: int | None = None
) -> Floats | float:
    """Seconds of messages inside of an op class's candidates in these phases, over one axis or all, for all members
    together.
    """
    program, op = analysis.program, analysis.program.op[name]
    if not any(distributed(analysis.fits[name], candidate) for candidate in found):
        return 0.0
    differentiated = any(result.name in analysis.backward for result in op.results)
    times = analysis.step.microbatches * len(analysis.classes.members[name])
    return times * np.array(
        [
            sum(
                message.seconds
                for phase in phases
                if phase == "forward" or differentiated
                for message in inside(op, analysis.fits[name], candidate, program.values, prices, phase)
                if axis in (None, message.axis)
            )
            for candidate in found
        ]
    )


def _inside_by_axis(
    analysis: Analysis, name: str, found: Sequence[Candidate], prices: Prices
) -> Iterator[tuple[tuple[bool, int], Floats]]:
    """Seconds of messages inside of an op class's candidates, by (whether in the backward) and by axis."""
    for backward, axis in itertools.product((False, True), range(len(prices.mesh.sizes))):
        seconds = _inside(analysis, name, found, prices, "backward" if backward else "forward", axis=axis)
        if isinstance(seconds, np.ndarray):
            yield (backward, axis), seconds


def _edge(
    analysis: Analysis,
    prices: Prices,
    space: Conversions,
    place: Mapping[str, int],
    constraints: StrategyConstraints,
    dropped: frozenset[str],
    policy: RecomputePolicy,
    number: int,
    loads: OverlapLoads | None,
) -> Edge:
    """The edge of a class of values: its conversions and their costs."""
    values, graph, count = space.values, space.graph, len(space.values.members)
    value = analysis.program.values[values.example]
    weight, bucketed = value.name in analysis.weights, value.name in analysis.bucketed
    found = _arc_prices(analysis, prices, value, graph, count, constraints, policy)
    if loads is not None:
        found = loads.edge(number, values.members, graph.pair, graph.axis, found, bucketed=bucketed)
    repeated = _repeated(analysis, policy, weight=weight, dropped=value.name in dropped)
    edge = Edge(
        name=value.name,
        producer=place[values.producer],
        produced=space.produced,
        consumers=tuple(
            Consumer(choice=place[name], wants=wants)
            for (name, _), wants in zip(values.consumers, space.wanted, strict=True)
        ),
        nodes=len(graph.nodes),
        source=graph.source,
        target=graph.target,
        seconds=found.there,
        conditional_costs=(
            ConditionalCost(
                seconds=found.back,
                consumers=_where(values, lambda name, _: has_gradient(analysis, value.name, name)),
            ),
            ConditionalCost(seconds=found.rerun, consumers=_where(values, repeated)),
        ),
        free=STILL[graph.pair],
        count=count,
        recompute=found.recompute,
        offload=_offload_seconds(analysis, value, graph, count, prices),
    )  # fmt: skip
    if edge.offload is not None:  # said of the memory in which several layouts may lie
        edge = replace(edge, offload=np.where(storages(edge) == np.arange(edge.nodes), edge.offload, np.inf))
    return edge


def _repeated(analysis: Analysis, policy: RecomputePolicy, *, weight: bool, dropped: bool) -> Callable[[str, int], bool]:
    """Whether the backward converts a value again for a consumer: a dropped weight, or a recomputed value."""
    if weight:
        return lambda name, position: dropped and saves(analysis, name, position)
    return lambda name, position: (name, position) in policy.uses


def _arc_prices(
    analysis: Analysis,
    prices: Prices,
    value: Value,
    graph: LayoutGraph,
    count: int,
    constraints: StrategyConstraints,
    policy: RecomputePolicy,
) -> ArcSeconds:
    """The prices of these conversions of a value, for so many members together."""
    weight, bucketed = value.name in analysis.weights, value.name in analysis.bucketed
    reduce_dtype = analysis.reduce_dtypes.get(value.name)
    runs = 1 if constraints.once and bucketed else analysis.step.microbatches
    one = arc_seconds(graph, value, prices, bucketed=bucketed, reduce_dtype=reduce_dtype, runs=runs)
    again = one.rerun if weight else repeated_seconds(value, graph, one.there, policy)
    recompute = reconvert_seconds(value, graph, one.rerun if weight else one.there, policy, weight=weight)
    if weight and constraints.keep_gathered:
        recompute = None
    return ArcSeconds(
        there=count * one.there, back=count * one.back, unpacking=count * one.unpacking, packing=count * one.packing,
        rerun=count * again, recompute=None if recompute is None else count * recompute,
    )  # fmt: skip


def _offload_seconds(analysis: Analysis, value: Value, graph: LayoutGraph, count: int, prices: Prices) -> Floats | None:
    """Seconds to move so many members to the host and back, by layout; only for results that the backward may need."""
    result = value.requires_grad and value.name in analysis.program.producer and value.name not in analysis.weights
    if not result or prices.device.host is None:
        return None
    sizes = (value.dtype.itemsize * graph.elements).tolist()
    return analysis.step.microbatches * count * np.array([prices.offload(size) for size in sizes])


def _where(values: ValueClass, true: Callable[[str, int], bool]) -> frozenset[int]:
    """The indices of the consumers that satisfy a predicate."""
    return frozenset(place for place, end in enumerate(values.consumers) if true(*end))

"""Small random problems, and their solution by enumeration: every pick, every tree of every edge."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.solver.overlap import Load, OverlapRegion
from autopar.solver.problem import (
    PRODUCER,
    ChargeTrigger,
    Choice,
    ConditionalCost,
    Consumer,
    Edge,
    FixedCharge,
    InFlightTerm,
    Problem,
    RetainedTerm,
    Row,
    leading_to,
    price,
    route_price,
)


def random_problem(seed: int) -> Problem:
    """Three to five choices in a random order of production, edges over layout graphs of three nodes; ties are common."""
    draw = random.Random(seed)
    cost = (lambda: float(draw.randint(0, 3))) if seed % 2 else (lambda: draw.uniform(0, 3))
    choices = tuple(
        Choice(name=f"o{i}", seconds=np.array([cost() for _ in range(n)]), tie=np.zeros(n))
        for i, n in enumerate(draw.randint(1, 3) for _ in range(draw.randint(3, 5)))
    )
    edges = []
    for producer in range(len(choices) - 1):
        later = list(range(producer + 1, len(choices)))
        readers = sorted(draw.sample(later, draw.randint(1, min(2, len(later)))))
        edges.append(random_edge(draw, cost, choices, producer, readers))
    fixed_charges = tuple(_random_charge(draw, cost, edges) for _ in range(seed % 4))
    return Problem(choices=choices, edges=tuple(edges), fixed_charges=fixed_charges)


def _random_charge(draw, cost, edges) -> FixedCharge:
    """Seconds for one or two edges; a unit goes at most once along the arcs of a trigger, for they all lead to one node."""
    ways = []
    for w in draw.sample(range(len(edges)), draw.randint(1, min(2, len(edges)))):
        consumers = frozenset(k for k in range(len(edges[w].consumers)) if draw.random() < 0.7)
        ways.append(
            ChargeTrigger(edge=w, consumers=consumers or frozenset({0}), arcs=edges[w].target == draw.randrange(edges[w].nodes))
        )
    return FixedCharge(name="charge", seconds=cost(), triggers=tuple(ways))


def random_edge(draw, cost, choices, producer, readers) -> Edge:
    """An edge over a layout graph of three nodes, connected in a circle."""
    nodes = 3
    arcs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j and draw.random() < 0.8]
    arcs += [(i, (i + 1) % nodes) for i in range(nodes) if (i, (i + 1) % nodes) not in arcs]
    wants = lambda choice: np.array([draw.randrange(nodes) for _ in choices[choice].seconds])  # noqa: E731
    return Edge(
        name=f"v{producer}",
        producer=producer,
        produced=wants(producer),
        consumers=tuple(Consumer(choice=k, wants=wants(k)) for k in readers),
        nodes=nodes,
        source=np.array([i for i, _ in arcs]),
        target=np.array([j for _, j in arcs]),
        seconds=np.array([cost() for _ in arcs]),
        conditional_costs=tuple(
            ConditionalCost(
                seconds=np.array([cost() * draw.randint(0, 1) for _ in arcs]),
                consumers=frozenset(k for k in range(len(readers)) if draw.random() < 0.5),
            )
            for _ in range(2)
        ),
        free=np.zeros(len(arcs), bool),
    )


def with_regions(problem: Problem, seed: int) -> Problem:
    """The problem with one to three regions over two links, the last around the others; a link carries more or less than what
    is computed beside it."""
    draw = random.Random(seed)
    regions = tuple(_random_region(draw, problem, f"region {i}") for i in range(draw.randint(1, 2)))
    outer = replace(_random_region(draw, problem, "around"), parts=tuple(range(len(regions))), share=draw.choice([1.0, 0.5]))
    return replace(problem, regions=(*regions, *[outer] * (seed % 3 > 0)))


def _random_region(draw, problem, name) -> OverlapRegion:
    """What some choices compute, hidden behind what some edges and charges send.

    What is recomputed never shortens a step: in all three regions together it is busy for at most what it costs.
    """
    inside = {o for o in range(len(problem.choices)) if draw.random() < 0.6}
    sent = {w for w in range(len(problem.edges)) if draw.random() < 0.7}
    part = lambda seconds, most: seconds * draw.uniform(0.0, most)  # noqa: E731

    def load(choices: float, sends: float) -> Load:
        edges = {w: problem.edges[w] for w in sent}
        return Load(
            choices={o: part(problem.choices[o].seconds, choices) for o in inside},
            reruns={o: part(again, choices / 3) for o in inside if (again := problem.choices[o].recompute) is not None},
            arcs={w: part(edge.seconds, sends) for w, edge in edges.items()},
            conditional={
                (w, k): part(cost.seconds, sends) for w, edge in edges.items() for k, cost in enumerate(edge.conditional_costs)
            },
            reconverts={w: part(edge.recompute, sends / 3) for w, edge in edges.items() if edge.recompute is not None},
            charges={t: charge.seconds * draw.uniform(0.0, sends) for t, charge in enumerate(problem.fixed_charges)},
        )  # fmt: skip

    return OverlapRegion(name=name, busy=load(1.0, 0.5), links=(load(0.5, 2.0), load(0.0, 3.0)))


def random_row(problem: Problem, seed: int) -> Row:
    """A memory row over picks, uses and kept values, with a limit that some solutions break."""
    draw = random.Random(seed)
    size = lambda n: np.array([float(draw.randint(0, 5)) for _ in range(n)])  # noqa: E731
    kept = tuple(
        RetainedTerm(
            edge=i,
            saved_by=draw.choice([(0,), (PRODUCER,), tuple(range(len(w.consumers))), (PRODUCER, 0)]),
            bytes=size(w.nodes),
        )
        for i, w in enumerate(problem.edges)
    )
    least = tuple(InFlightTerm(edge=i, bytes=size(w.nodes)) for i, w in enumerate(problem.edges) if draw.random() < 0.4)
    return Row(
        name=f"random {seed}",
        limit=float(draw.randint(8, 25)),
        constant=float(draw.randint(0, 3)),
        picks={i: size(len(c.seconds)) for i, c in enumerate(problem.choices)},
        uses={i: size(len(w.seconds)) for i, w in enumerate(problem.edges)},
        retained=kept,
        in_flight=least,
    )


def bytes_of(problem: Problem, row: Row, picks: tuple[int, ...], arcs: tuple[tuple[int, ...], ...]) -> float:
    """The left side of a row, computed without the solver."""
    total = row.constant + sum(float(b[picks[c]]) for c, b in row.picks.items())
    total += sum(float(b[list(arcs[w])].sum()) for w, b in row.uses.items())
    for kept in row.retained:
        edge = problem.edges[kept.edge]
        ends = {
            int(edge.produced[picks[edge.producer]])
            if k == PRODUCER
            else int(edge.consumers[k].wants[picks[edge.consumers[k].choice]])
            for k in kept.saved_by
        }
        total += sum(float(kept.bytes[node]) for node in ends)
    for least in row.in_flight:
        edge = problem.edges[least.edge]
        ends = {int(k.wants[picks[k.choice]]) for k in edge.consumers} | {int(edge.produced[picks[edge.producer]])}
        total += min(float(least.bytes[node]) for node in ends)
    return total


def trees(edge: Edge, picks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every set of arcs in which each node has at most one arc into it and every wanted layout is reached."""
    root = int(edge.produced[picks[edge.producer]])
    goals = {int(k.wants[picks[k.choice]]) for k in edge.consumers} - {root}
    arcs_to = {node: [a for a in range(len(edge.target)) if edge.target[a] == node != root] for node in range(edge.nodes)}
    into = [[None, *arcs_to[node]] for node in range(edge.nodes)]
    for chosen in itertools.product(*into):
        arcs = tuple(a for a in chosen if a is not None)
        reached, grew = {root}, True
        while grew:
            fresh = {int(edge.target[a]) for a in arcs if int(edge.source[a]) in reached} - reached
            reached |= fresh
            grew = bool(fresh)
        if goals <= reached and len(reached) == len(arcs) + 1:
            yield arcs


def enumerate_all(problem: Problem, rows: tuple[Row, ...] = ()) -> float | None:
    """The least price of any solution that the rows allow; None if there is none."""
    best = None
    for picks in itertools.product(*(range(len(c.seconds)) for c in problem.choices)):
        options = [_undominated(problem, picks, i, rows) for i in range(len(problem.edges))]
        for arcs in itertools.product(*options):
            if best is not None and price(problem, picks, arcs) >= best:
                continue
            if all(bytes_of(problem, row, picks, arcs) <= row.limit + 1e-9 for row in rows):
                best = price(problem, picks, arcs)
    return best


def _undominated(problem: Problem, picks: tuple[int, ...], number: int, rows: tuple[Row, ...]) -> list[tuple[int, ...]]:
    """The trees of an edge that no other tree matches in price, in every row and in every charge."""
    edge, ways = (
        problem.edges[number],
        [trigger for fixed_charge in problem.fixed_charges for trigger in fixed_charge.triggers if trigger.edge == number],
    )
    scored = [
        (
            tuple(
                [route_price(edge, picks, t)]
                + [float(row.uses[number][list(t)].sum()) for row in rows]
                + [float(trigger.arcs[list(leading_to(edge, trigger.consumers, picks, t))].any()) for trigger in ways]
                + [_put(load, edge, number, picks, t) for region in problem.regions for load in region.loads]
            ),
            t,
        )
        for t in trees(edge, picks)
    ]
    kept: list[tuple[tuple[float, ...], tuple[int, ...]]] = []
    for score, t in sorted(scored):
        if not any(all(a <= b for a, b in zip(other, score, strict=True)) for other, _ in kept):
            kept.append((score, t))
    return [t for _, t in kept]


def _put(load: Load, edge: Edge, number: int, picks: tuple[int, ...], arcs: tuple[int, ...]) -> float:
    """What a tree of an edge puts on a load."""
    total = float(load.arcs[number][list(arcs)].sum()) if number in load.arcs else 0.0
    for place, cost in enumerate(edge.conditional_costs):
        if (number, place) in load.conditional:
            total += float(load.conditional[number, place][list(leading_to(edge, cost.consumers, picks, arcs))].sum())
    return total

"""Recomputation against enumeration, member by member: which keep, which run again, and the remaining bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.problem import (
    PRODUCER,
    Arcs,
    Choice,
    Consumer,
    Edge,
    Picks,
    Problem,
    RecomputeCounts,
    RetainedTerm,
    Row,
    end_node,
    price,
    row_bytes,
    storages,
)
from autopar.solver.settings import EXACT
from autopar.solver.solve import solve
from tests.solver.random_problems import random_problem, trees, with_regions

MEMBERS = 2
SMALL = [seed for seed in range(200) if len(random_problem(seed).choices) == 3]


def repeated(seed: int) -> Problem:
    """A random problem of three choices, two members each; some may run again, edges may be converted again."""
    draw, problem = random.Random(seed), replace(random_problem(seed), fixed_charges=())
    some = lambda number: np.array([draw.uniform(0.1, 2.0) for _ in range(number)])  # noqa: E731
    return replace(
        problem,
        choices=tuple(
            replace(c, count=MEMBERS, recompute=some(len(c.seconds)) if draw.random() < 0.8 else None) for c in problem.choices
        ),
        edges=tuple(
            replace(w, count=MEMBERS, recompute=some(len(w.seconds)) if draw.random() < 0.8 else None) for w in problem.edges
        ),
    )


def held(seed: int) -> Problem:
    """The same, where the host may hold the first edge as one of its readers wants it."""
    draw, problem = random.Random(seed), repeated(seed)
    first, *others = problem.edges
    seconds = np.full(first.nodes, np.inf)
    seconds[int(draw.choice(first.consumers[0].wants))] = draw.uniform(0.1, 2.0)
    return replace(problem, edges=(replace(first, offload=seconds), *others))


def overlapping(seed: int) -> Problem:
    """A problem with recomputation where messages overlap with computing."""
    return with_regions(repeated(seed), seed)


CASES = [(make, seed) for make, number in ((repeated, 25), (held, 10), (overlapping, 25)) for seed in SMALL[:number]]


def tight_row(problem: Problem, seed: int) -> Row:
    """A row over what is kept of every edge and inside every choice, which plain solutions break."""
    draw = random.Random(seed)
    size = lambda number: np.array([float(draw.randint(1, 5)) for _ in range(number)])  # noqa: E731
    inside = {i: MEMBERS * size(len(c.seconds)) for i, c in enumerate(problem.choices)}
    kept = []
    for i, edge in enumerate(problem.edges):
        every = list(range(len(edge.consumers)))
        keepers = draw.choice([(PRODUCER,), tuple(every), (every[0],), (PRODUCER, every[-1])])
        reruns = tuple(k for k in every if problem.choices[edge.consumers[k].choice].recompute is not None)
        gone, given, bytes_of = draw.random() < 0.8, draw.random() < 0.3, MEMBERS * size(edge.nodes)
        there = (draw.choice([PRODUCER, every[-1]]),) if draw.random() < 0.3 else ()
        kept.append(
            RetainedTerm(
                edge=i, read_by=there, saved_by=keepers, rerun_by=reruns, bytes=bytes_of, droppable=gone, free_as_produced=given
            )
        )
    return Row(name="tight", limit=float(draw.randint(8, 26)), picks=inside, uses={}, retained=tuple(kept),
               recompute={i: -b for i, b in inside.items() if problem.choices[i].recompute is not None})  # fmt: skip


def members_bytes(
    problem: Problem, row: Row, picks: Picks, arcs: Arcs, recompute: RecomputeCounts, members: int = MEMBERS
) -> float:
    """The left side of a row of the first members, each by itself."""
    total = 0.0
    for member in range(members):
        runs = {c for c, count in recompute.choices.items() if member < count}
        total += sum(float(b[picks[c]]) / members for c, b in row.picks.items() if c not in runs)
        for kept in row.retained:
            edge = problem.edges[kept.edge]
            sent = [arc for (w, arc), count in recompute.arcs.items() if w == kept.edge and member < count]
            made = {int(edge.target[arc]) for arc in sent}
            made |= {end_node(edge, PRODUCER, picks)} if edge.producer in runs else set()
            before = {node: 0 for w, node in recompute.offload if w == kept.edge}  # how many members are made again
            for node in before:
                counts = [count for (w, arc), count in recompute.arcs.items() if w == kept.edge and edge.target[arc] == node]
                rerun_here = end_node(edge, PRODUCER, picks) == node
                before[node] = sum(counts) + (recompute.choices.get(edge.producer, 0) if rerun_here else 0)
            made |= {node for node, first in before.items() if first <= member < first + recompute.offload[kept.edge, node]}
            needed = {end_node(edge, k, picks) for k in kept.saved_by} - (made if kept.droppable else set())
            rerun = {end_node(edge, k, picks) for k in kept.rerun_by if edge.consumers[k].choice in runs}
            needed |= (rerun | {int(edge.source[arc]) for arc in sent}) - made
            needed |= {end_node(edge, k, picks) for k in kept.read_by}
            needed -= {end_node(edge, PRODUCER, picks)} if kept.free_as_produced else set()
            total += sum(float(kept.bytes[node]) / members for node in needed)
    return total


def all_again(problem: Problem, picks: Picks, arcs: Arcs) -> Iterator[RecomputeCounts]:
    """Every way to make things again, or to have the host hold them."""
    choices = [i for i, c in enumerate(problem.choices) if c.recompute is not None]
    ends = [(w, arc) for w, used in enumerate(arcs) if problem.edges[w].recompute is not None for arc in used]
    there = [
        (w, node)
        for w, edge in enumerate(problem.edges)
        if edge.offload is not None
        for node in {end_node(edge, PRODUCER, picks), *(int(edge.target[arc]) for arc in arcs[w])}
        if np.isfinite(edge.offload[node])
    ]
    for counts in itertools.product(range(MEMBERS + 1), repeat=len(choices) + len(ends) + len(there)):
        runs = {c: n for c, n in zip(choices, counts, strict=False) if n}
        sent = {end: n for end, n in zip(ends, counts[len(choices) :], strict=False) if n}
        offload = {end: n for end, n in zip(there, counts[len(choices) + len(ends) :], strict=True) if n}
        yield RecomputeCounts(choices=runs, arcs=sent, offload=offload)


def straight(edge: object, used: tuple[int, ...]) -> bool:
    """Whether no two arcs leave one layout: of these the program counts the sum, which is too much."""
    sources = [int(edge.source[a]) for a in used]  # type: ignore[attr-defined]
    return len(set(sources)) == len(sources)


def cheapest(problem: Problem, row: Row) -> float | None:
    """The least price of any solution that keeps to the row."""
    best: float | None = None
    for picks in itertools.product(*(range(len(c.seconds)) for c in problem.choices)):
        for arcs in itertools.product(*([t for t in trees(w, picks) if straight(w, t)] for w in problem.edges)):
            if best is not None and price(problem, picks, arcs) >= best:
                continue
            for recompute in all_again(problem, picks, arcs):
                seconds = price(problem, picks, arcs, recompute)
                if (best is None or seconds < best) and members_bytes(problem, row, picks, arcs, recompute) <= row.limit + 1e-9:
                    best = seconds
    return best


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_no_solution_is_cheaper_than_the_bound_and_the_one_that_is_found_is_dearer_by_parts_of_members_only(
    make: Callable[[int], Problem], seed: int
) -> None:
    problem = make(seed)
    row = tight_row(problem, seed)
    best, found = cheapest(problem, row), solve(problem, rows=[row], settings=EXACT).solution
    if best is None:
        return
    assert found is not None
    assert found.bound <= best * (1 + 1e-6) + 1e-9
    assert found.seconds == pytest.approx(price(problem, found.picks, found.arcs, found.recompute))
    kept = row_bytes(problem, row, found.picks, found.arcs, found.recompute) <= row.limit + 1e-6
    if kept and all(map(straight, problem.edges, found.arcs)):
        assert found.seconds >= best - 1e-6


@pytest.mark.one_in(5)
@pytest.mark.parametrize("make, seed", CASES)
def test_shares_say_what_members_do(make: Callable[[int], Problem], seed: int) -> None:
    problem = make(seed)
    row, draw = tight_row(problem, seed), random.Random(seed)
    for _ in range(20):
        picks = tuple(draw.randrange(len(c.seconds)) for c in problem.choices)
        arcs = tuple(draw.choice([t for t in trees(w, picks) if straight(w, t)] or [()]) for w in problem.edges)
        recompute = draw.choice(list(all_again(problem, picks, arcs)))
        expected = members_bytes(problem, row, picks, arcs, recompute)
        assert row_bytes(problem, row, picks, arcs, recompute) == pytest.approx(expected)


def test_something_is_made_again_and_something_is_not() -> None:
    found = [solve(repeated(seed), rows=[tight_row(repeated(seed), seed)]).solution for seed in SMALL[:25]]
    assert any(one is not None and one.recompute.choices for one in found)
    assert any(one is not None and one.recompute.arcs for one in found)
    assert any(one is not None and not one.recompute.choices and not one.recompute.arcs for one in found)
    found = [solve(held(seed), rows=[tight_row(held(seed), seed)]).solution for seed in SMALL[:25]]
    assert any(one is not None and one.recompute.offload for one in found)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", SMALL[:25])
def test_a_row_of_the_first_members_never_says_more_than_they_take(seed: int) -> None:
    problem, draw, exact = repeated(seed), random.Random(seed), seed % 2
    first = [replace(kept, first_share=1 / MEMBERS, droppable=True) for kept in tight_row(problem, seed).retained]
    first = [replace(kept, rerun_by=()) for kept in first] if exact else first
    row = Row(name="first", limit=1.0, picks={}, uses={}, retained=tuple(first))
    for _ in range(20):
        picks = tuple(draw.randrange(len(c.seconds)) for c in problem.choices)
        arcs = tuple(draw.choice([t for t in trees(w, picks) if straight(w, t)] or [()]) for w in problem.edges)
        recompute = draw.choice(list(all_again(problem, picks, arcs)))
        recompute = replace(recompute, arcs={}) if exact else recompute
        expected = members_bytes(problem, row, picks, arcs, recompute, members=1)
        assert row_bytes(problem, row, picks, arcs, recompute) <= expected + 1e-9
        assert not exact or row_bytes(problem, row, picks, arcs, recompute) == pytest.approx(expected)


def test_what_is_only_shared_lies_in_one_memory() -> None:
    edge = replace(
        random_problem(1).edges[0], nodes=4, source=np.array([0, 1, 2]), target=np.array([1, 2, 3]),
        seconds=np.zeros(3), conditional_costs=(), free=np.array([True, False, True]),
    )  # fmt: skip
    found = storages(edge)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]


@pytest.mark.parametrize("back", [0, 2])
@pytest.mark.parametrize("limit", [3.0, 4.0])
def test_layouts_do_not_make_each_other_again(limit: float, back: int) -> None:
    """A gathered value may be gone where what it is gathered from is kept, which lies in the memory of a third layout."""
    one = np.zeros(1)
    gathered, sliced, same = (0, 1), (1, back), (0, 2)
    source, target = (np.array(ends) for ends in zip(gathered, sliced, same, strict=True))
    seconds = np.array([1.0, 0.1, 0.0])
    edge = Edge(
        name="w",
        producer=0,
        produced=np.array([0]),
        consumers=(Consumer(choice=1, wants=np.array([1])),),
        nodes=3,
        source=source,
        target=target,
        seconds=seconds,
        conditional_costs=(),
        free=np.array([False, False, True]),
        recompute=seconds,
    )
    problem = Problem(choices=(Choice(name="x", seconds=one, tie=one), Choice(name="y", seconds=one, tie=one)), edges=(edge,))
    kept = RetainedTerm(edge=0, saved_by=(0,), bytes=np.array([4.0, 16.0, 4.0]), droppable=True, storages=storages(edge))
    found = solve(problem, rows=[Row(name="r", limit=limit, picks={}, uses={}, retained=(kept,))]).solution
    if limit < 4:
        assert found is None
    else:
        assert found is not None
        assert found.recompute == RecomputeCounts(arcs={(0, 0): 1})
        assert found.seconds == pytest.approx(2.0)

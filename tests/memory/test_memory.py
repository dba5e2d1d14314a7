"""Memory: the liveness walk and its rows agree, and the solver's plans fit."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autopar.analysis.analysis import analyse
from autopar.capture import Captured
from autopar.cost_models import optimizers
from autopar.errors import BudgetError
from autopar.formulation.budget_loop import smallest, within
from autopar.formulation.formulate import PlanningProblem, formulate
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.training_step import TrainingStep
from autopar.solver.lazy_rows import Excess
from autopar.solver.memory_prices import least_bytes
from autopar.solver.presolve import merge_followers
from autopar.solver.problem import Choice, ConditionalCost, Consumer, Edge, Floats, Problem, Solution, price, row_bytes
from autopar.solver.settings import DEFAULTS, EXACT
from autopar.solver.solve import Solver, solve
from autopar.verify.testing import random_solution
from tests.solver.random_problems import bytes_of, enumerate_all, random_problem, random_row
from tests.support import planning
from tests.support.planning import NETWORK, NVLINK, link, mesh

Model = Callable[[], Captured]

MODELS: dict[str, Model] = {
    "layers": partial(planning.layers, 4096, 1024, 4096, 1024, 512),
    "llama": partial(planning.llama, 16, 128, 512),
    "gpt2": partial(planning.gpt2, 16, 128, 256),
    "canvas": partial(planning.canvas, 64, 8, 16),
}
MESHES = {"8": mesh((8,), link(100)), "2x4": mesh((2, 4), NETWORK, NVLINK)}
ADAMW = optimizers.optimizer("adamw")


@functools.cache
def formulated(model: str, on: str, folded: bool = True) -> tuple[PlanningProblem, MemoryModel]:
    """The problem of a model on a mesh, and its ledger."""
    analysis = analyse(TrainingStep(program=MODELS[model]().program), MESHES[on], repeated=folded)
    made = formulate(analysis, MESHES[on], ADAMW, sharded_outputs=lambda output: bool(output.path != "loss"))
    return made, MemoryModel(made, ADAMW)


CASES = [(model, on, folded) for model, on in itertools.product(MODELS, MESHES) for folded in (True, False)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("model, on, folded", CASES)
def test_a_row_of_the_best_solution_is_nearly_the_walk_and_never_more(model: str, on: str, folded: bool) -> None:
    made, memory_model = formulated(model, on, folded)
    free = within(made, memory_model, 1 << 50)
    assert free is not None
    walk = memory_model.walk(free)
    rows = said(made, memory_model, free)
    assert (rows <= walk * (1 + 1e-9)).all()
    assert rows[walk.argmax()] >= 0.99 * walk.max()


@pytest.mark.one_in(16)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("model, on, folded", CASES)
def test_at_the_peak_of_any_solution_its_row_says_no_more_than_the_walk(model: str, on: str, folded: bool, seed: int) -> None:
    made, memory_model = formulated(model, on, folded)
    solution = random_solution(made.problem, random.Random(seed))
    walk = memory_model.walk(solution)
    moment = int(walk.argmax())
    assert said(made, memory_model, solution)[moment] <= walk[moment] * (1 + 1e-9)


def said(made: PlanningProblem, memory_model: MemoryModel, solution: Solution) -> Floats:
    """What the rows of all moments say of a solution."""
    rows = (memory_model.row(moment, 1.0) for moment in range(2 * memory_model.liveness.count + 1))
    return np.array([row_bytes(made.problem, row, solution.picks, solution.arcs, solution.recompute) for row in rows])


@pytest.mark.parametrize("model, on, folded", CASES)
def test_the_walk_never_falls_below_what_is_stored(model: str, on: str, folded: bool) -> None:
    made, memory_model = formulated(model, on, folded)
    solution = random_solution(made.problem, random.Random(7))
    walk = memory_model.walk(solution)
    assert walk.min() >= _stored(made, solution) > 0
    assert np.all(walk == np.round(walk))


def _stored(made: PlanningProblem, solution: Solution) -> float:
    """Bytes of the parameters with their two moments, in the layouts that a solution stores them in."""
    program, sizes = made.program, made.mesh.sizes
    total = 0.0
    for name, found, pick, choice in zip(made.names, made.candidates, solution.picks, made.problem.choices, strict=True):
        if any(p.value.name == name for p in program.parameters):
            parts = int(np.prod([n for n, state in zip(sizes, found[pick].results[0], strict=True) if state.kind == "S"]))
            total += 3 * program.values[name].bytes / parts * len(made.analysis.classes.members[choice.name])
    return total


@pytest.mark.parametrize(
    "model, share", [("layers", 0.0), ("layers", 0.3), ("layers", 0.7), pytest.param("llama", 0.0, marks=pytest.mark.thorough)]
)
def test_the_walk_never_exceeds_the_budget(model: str, share: float) -> None:
    made, memory_model = formulated(model, "8")
    free, least = within(made, memory_model, 1 << 50), smallest(made, memory_model)
    assert free is not None
    assert least is not None
    most, fewest = memory_model.walk(free).max(), memory_model.walk(least).max()
    assert fewest <= most
    budget = int(np.ceil(1.01 * fewest + share * max(0.0, most - 1.01 * fewest)))
    found = within(made, memory_model, budget)
    assert found is not None
    assert memory_model.walk(found).max() <= budget
    assert found.seconds >= free.seconds * (1 - 2e-3)
    assert found.seconds == pytest.approx(price(made.problem, found.picks, found.arcs, found.recompute))


@pytest.mark.parametrize("model", ["layers", "canvas", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_no_peak_is_below_the_least_bytes_of_any_moment(model: str) -> None:
    made, memory_model = formulated(model, "2x4")
    rows = [memory_model.row(moment, 1.0) for moment in range(2 * memory_model.liveness.count + 1)]
    bytes, least = max(least_bytes(made.problem, rows)), smallest(made, memory_model)
    assert least is not None
    others = [random_solution(made.problem, random.Random(seed)) for seed in range(20)]
    peaks = [memory_model.walk(one).max() for one in (least, *others)]
    assert 0.6 * min(peaks) <= bytes <= min(peaks) * (1 + 1e-9)


def test_where_every_solution_has_too_much_at_some_moment_no_window_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    made, memory_model = formulated("gpt2", "2x4")
    rows = [memory_model.row(moment, 1.0) for moment in range(2 * memory_model.liveness.count + 1)]
    monkeypatch.setattr(Solver, "_within_rows", lambda *args, **named: pytest.fail("a window is searched"))
    assert within(made, memory_model, int(0.9 * max(least_bytes(made.problem, rows)))) is None


@pytest.mark.parametrize("model", ["layers", "canvas", pytest.param("gpt2", marks=pytest.mark.thorough)])
def test_the_smallest_budget_that_is_reported_works_and_one_percent_less_does_not(model: str) -> None:
    captured, on = MODELS[model](), MESHES["8"]
    budget = planning.smallest(captured, on)
    assert planning.plan(captured, on, budget=budget).peak_memory <= budget
    with pytest.raises(BudgetError):
        planning.plan(captured, on, budget=int(0.99 * budget))


def test_more_memory_never_makes_a_slower_plan() -> None:
    captured, on = MODELS["layers"](), MESHES["8"]
    budget = planning.smallest(captured, on)
    times = [planning.plan(captured, on, budget=int(budget * factor)).step_time for factor in (1.0, 1.1, 1.3, 2.0, 5.0)]
    assert all(after <= before * (1 + 1e-3) for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("seed", range(60))
def test_a_solution_of_a_random_problem_keeps_to_its_rows_or_none_does(seed: int) -> None:
    """Rows that a judge brings one by one, as the memory walk does, bind as those that are known from the start."""
    problem = random_problem(seed)
    rows = [random_row(problem, 100 * seed + i) for i in range(4)]

    def judge(solution: Solution) -> list[Excess]:
        excess = [(row, bytes_of(problem, row, solution.picks, solution.arcs) - row.limit) for row in rows]
        return [Excess(row=row, bytes=more) for row, more in excess if more > row.limit * 1e-6][:1]

    late, best = solve(problem, judge, settings=EXACT).solution, enumerate_all(problem, tuple(rows))
    assert (late is None) == (best is None)
    if late is not None:
        assert late.seconds == pytest.approx(best, rel=1e-6, abs=1e-9)


def chained(seed: int) -> Problem:
    """A random problem, one to three of its wires led through an operator without a price that follows its operand."""
    draw, problem = random.Random(seed), random_problem(seed)
    choices, edges = list(problem.choices), list(problem.edges)
    for number in draw.sample(range(len(edges)), min(len(edges), draw.randint(1, 3))):
        old = edges[number]
        order = draw.sample(range(old.nodes), old.nodes)  # follower's candidate c reads node order[c]
        rename = draw.sample(range(old.nodes), old.nodes)  # and makes of it what the consumers know as rename[order[c]]
        place, keep = len(choices), draw.random() < 0.7
        choices.append(Choice(name=f"f{number}", seconds=np.zeros(old.nodes), tie=np.zeros(old.nodes)))
        back = np.argsort(rename)
        dearer = old.seconds + sum((s.seconds for s in old.conditional_costs if s.consumers), np.zeros(len(old.seconds)))
        before = dearer if keep else np.array([draw.uniform(0, 3) for _ in dearer])
        edges[number] = Edge(
            name=f"{old.name}a",
            producer=old.producer,
            produced=back[old.produced],
            nodes=old.nodes,
            consumers=(Consumer(choice=place, wants=np.array(order)),),
            source=back[old.source],
            target=back[old.target],
            seconds=before,
            conditional_costs=(ConditionalCost(seconds=np.zeros(len(before)), consumers=frozenset()),),
            free=old.free,
        )
        edges.append(
            Edge(
                name=f"{old.name}b",
                producer=place,
                produced=np.array(rename)[order],
                nodes=old.nodes,
                consumers=old.consumers,
                source=old.source,
                target=old.target,
                seconds=old.seconds,
                conditional_costs=old.conditional_costs,
                free=old.free,
            )
        )
    return Problem(choices=tuple(choices), edges=tuple(edges))


@pytest.mark.parametrize("seed", range(80))
def test_merging_followers_leaves_the_optimum(seed: int) -> None:
    problem = chained(seed)
    merged = merge_followers(problem)
    settings = replace(EXACT, presolve=False)
    found, whole = solve(merged.problem, settings=settings).solution, solve(problem, settings=settings).solution
    assert found is not None
    assert whole is not None
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-6, abs=1e-9)
    expanded = merged.expand(found)
    assert price(problem, expanded.picks, expanded.arcs) == pytest.approx(found.seconds, rel=1e-9, abs=1e-12)


def test_followers_are_merged_at_all() -> None:
    sizes = [(len(chained(seed).choices), len(merge_followers(chained(seed)).problem.choices)) for seed in range(80)]
    assert sum(before > after for before, after in sizes) > 30
    assert sum(before == after for before, after in sizes) > 5


def test_a_follower_all_of_whose_candidates_leave_one_layout_has_a_problem_too() -> None:
    """Its result has no conversions, as that of a detached weight under data parallelism."""

    def edge(name: str, producer: int, nodes: int, produced: list[int], wants: list[int], arcs: int) -> Edge:
        at = np.arange(arcs)
        zero = ConditionalCost(seconds=np.zeros(arcs), consumers=frozenset())
        return Edge(
            name=name, producer=producer, produced=np.array(produced), nodes=nodes, source=at, target=at + 1,
            consumers=(Consumer(choice=producer + 1, wants=np.array(wants)),), seconds=np.zeros(arcs),
            conditional_costs=(zero,), free=np.ones(arcs, bool),
        )  # fmt: skip

    counts = {"weight": 1, "detach": 2, "mul": 2}
    choices = tuple(Choice(name=name, seconds=np.zeros(n), tie=np.zeros(n)) for name, n in counts.items())
    problem = Problem(choices=choices, edges=(edge("weight", 0, 2, [0], [0, 1], 1), edge("detach", 1, 1, [0, 0], [0, 0], 0)))
    merged = merge_followers(problem)
    found = solve(merged.problem, settings=replace(EXACT, presolve=False)).solution
    assert found is not None
    assert price(problem, merged.expand(found).picks, merged.expand(found).arcs) == 0.0


@pytest.mark.parametrize("seed", range(80))
def test_a_row_said_of_the_merged_problem_is_the_row_of_the_original(seed: int) -> None:
    problem = chained(seed)
    merged = merge_followers(problem)
    row = random_row(problem, seed)
    solution = random_solution(merged.problem, random.Random(seed))
    expanded = merged.expand(solution)
    expected = bytes_of(problem, row, expanded.picks, expanded.arcs)
    assert bytes_of(merged.problem, merged.row(row), solution.picks, solution.arcs) == pytest.approx(expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model, on", [("llama", "8"), ("gpt2", "8"), ("gpt2", "2x4")])
def test_merging_followers_leaves_the_optimum_of_a_model(model: str, on: str) -> None:
    made, memory_model = formulated(model, on)
    merged = merge_followers(made.problem)
    settings = replace(DEFAULTS, presolve=False)
    found, whole = solve(merged.problem, settings=settings).solution, solve(made.problem, settings=settings).solution
    assert found is not None
    assert whole is not None
    assert len(merged.problem.choices) < len(made.problem.choices)
    assert found.bound <= whole.seconds * (1 + 1e-6)
    assert whole.bound <= found.seconds * (1 + 1e-6)
    solution = random_solution(merged.problem, random.Random(3))
    expanded = merged.expand(solution)
    moments = len(memory_model.walk(expanded))
    for moment in {0, moments // 2, moments // 3, moments - 1}:
        row = memory_model.row(moment, 1.0)
        expected = row_bytes(made.problem, row, expanded.picks, expanded.arcs)
        assert row_bytes(merged.problem, merged.row(row), solution.picks, solution.arcs) == pytest.approx(expected, rel=1e-12)
    assert price(made.problem, expanded.picks, expanded.arcs) == pytest.approx(solution.seconds, rel=1e-9)

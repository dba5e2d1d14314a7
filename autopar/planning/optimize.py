"""Finds the best solution for a fixed program: over all layouts, and over the named strategies if that is not proven.

analyse -> formulate -> merge followers -> solve, walk the memory, bound it, solve again
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autopar.analysis.analysis import Analysis, analyse
from autopar.analysis.recompute_policy import policy_of
from autopar.analysis.repeated_blocks import blocks
from autopar.cost_models.optimizers import Optimizer
from autopar.errors import ConstraintError
from autopar.formulation.budget_loop import BudgetLoop, within
from autopar.formulation.formulate import PlanningProblem, formulate
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import step_time, unhidden_time
from autopar.ir.device import Bytes, Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Output, Program
from autopar.ir.training_step import TrainingStep
from autopar.plan.budget import parse_bytes
from autopar.plan.options import AUTO, Options
from autopar.planning.no_plan import NoWayError, UnfitError
from autopar.planning.recompute_policies import NARROWER, cheapest_within
from autopar.search_space.assignment import Assignment
from autopar.search_space.constraints import constrained
from autopar.search_space.strategies import constraints_of
from autopar.solver.dual_ascent import dual_ascent
from autopar.solver.highs import SlowerError, SolverError, TimeLimitError
from autopar.solver.presolve import merge_followers
from autopar.solver.problem import Problem, Solution
from autopar.solver.settings import DEFAULTS, SearchSettings
from autopar.solver.solve import solve

ONCE = "zero1"
NAMED = ("ddp", ONCE, "zero2", "fsdp", "megatron", "replicate")
Stop = Callable[[str], None]  # called with the name of each phase when it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimized:
    """A planning problem with its solution; `memory_model` holds the problem and the memory of its solutions.

    The problem is that of `strategy`, perhaps not the requested one; `stopped` says what ended the search early; `shapes` has
    the sizes and outcome of each mesh tried; `loop` solved the problem, if it is still useful; `beside` is the best solution of
    all layouts, if one of a named strategy is cheaper; `decided` says what the simulator decided (`planning.decide`).
    """

    memory_model: MemoryModel
    solution: Solution
    optimizer: Optimizer
    strategy: str = AUTO
    stopped: str = ""
    shapes: tuple[str, ...] = ()
    loop: BudgetLoop | None = None
    beside: Optimized | None = None
    decided: str = ""

    @property
    def formulated(self) -> PlanningProblem:
        return self.memory_model.formulated

    @property
    def searched(self) -> Optimized:
        """The solution without the leftovers of its search."""
        return replace(self, loop=None, beside=None)


def analysed(step: TrainingStep, mesh: Mesh, options: Options) -> Analysis:
    """The analysis of a step before any choice; constraints separate what they treat differently."""
    user = constrained(step, mesh, options.constraints)
    stored = {held.value.name for held in (*step.program.parameters, *step.program.buffers) if step.stage}
    shared = {name: tuple(filter(None, user[name])) for name in stored & user.keys() if None not in user[name]}
    return analyse(step, mesh, apart=lambda name: str(user.get(name, "")), settled=shared)  # as another stage stores them


def solved(
    analysis: Analysis,
    mesh: Mesh,
    options: Options,
    stop: Stop = lambda phase: None,
    *,
    settings: SearchSettings = DEFAULTS,
) -> Optimized:
    """The solution for an analysed program.

    At the deadline the best known solution or named strategy is returned, however long the strategies take.

    Raises ConstraintError, MeshError or UnfitError if there is none, SolverError if a limit of the settings leaves no answer,
    TimeLimitError if the deadline or Ctrl-C does, and SlowerError if no solution beats the settings' cutoff.
    """
    optimizer, limit = options.stepped, parse_bytes(options.budget, mesh)
    memory_model = problem_of(analysis, mesh, optimizer, options)
    stop("formulate")
    deadline = settings.deadline.earlier(settings.named_share if options.strategy == AUTO else 0.0)
    loop = BudgetLoop(memory_model.formulated, memory_model, replace(settings, deadline=deadline))
    try:
        apart = _faster(loop, analysis, mesh, options, limit, settings) if settings.below < math.inf else {}
        solution = loop.within(limit)
    except TimeLimitError as error:
        named = NAMED if options.strategy == AUTO else ()
        best = _best_named(None, memory_model, options, limit, named, settings, error.bound, {})
        if best is None:
            raise
    else:
        if solution is None and not loop.binds:
            raise NoWayError(memory_model.formulated, options, settings)
        if solution is None:
            best = _by_policies(memory_model, analysis, mesh, options, limit, settings)
        else:
            best = Optimized(
                memory_model=memory_model, solution=solution, optimizer=optimizer, strategy=options.strategy, loop=loop
            )
            settings.deadline.note_solution()
            best = _beside_strategies(best, loop, options, limit, settings, apart)
    stop("solve")
    return replace(best, stopped=deadline.text if deadline.passed and best.solution.status != "optimal" else "")


def solved_within(
    analysis: Analysis, mesh: Mesh, options: Options, limits: Sequence[Bytes], *, settings: SearchSettings = DEFAULTS
) -> Iterator[tuple[Bytes, Optimized]]:
    """The solutions, if any, within one limit after the other: with one formulation, and one relaxation that stays warm.

    The limits fall. Raises as `solved` does, except for limits that nothing fits into.
    """
    optimizer = options.stepped
    memory_model = problem_of(analysis, mesh, optimizer, options)
    loop = BudgetLoop(memory_model.formulated, memory_model, settings)
    for limit in limits:
        solution = loop.within(limit)
        if solution is not None:
            found = Optimized(memory_model=memory_model, solution=solution, optimizer=optimizer, strategy=options.strategy)
            yield limit, _beside_strategies(found, loop, options, limit, settings, {})


def _faster(
    loop: BudgetLoop, analysis: Analysis, mesh: Mesh, options: Options, limit: Bytes, settings: SearchSettings
) -> dict[str, MemoryModel]:
    """The problems of named strategies, formulated to see whether any solution may beat the settings' cutoff.

    Raises SlowerError if it is proven that none does, neither of the `loop` nor of such a strategy.
    """
    formulated: dict[str, MemoryModel] = {}
    if not loop.none_below(limit, settings.below):
        return formulated
    for strategy in _apart(analysis, options):
        with suppress(ConstraintError):
            formulated[strategy] = model = problem_of(analysis, mesh, options.stepped, replace(options, strategy=strategy))
            if not BudgetLoop(model.formulated, model, settings).none_below(limit, settings.below):
                return formulated
    raise SlowerError("no plan is faster than one that is known")


def _apart(analysis: Analysis, options: Options) -> tuple[str, ...]:
    """The named strategies with a program of their own, which gathers weights once for all micro-batches."""
    return (ONCE,) if options.strategy == AUTO and analysis.step.loop else ()


def _beside_strategies(
    best: Optimized,
    loop: BudgetLoop,
    options: Options,
    limit: Bytes,
    settings: SearchSettings,
    apart: Mapping[str, MemoryModel],
) -> Optimized:
    """The best of a solution and: `zero1`, if weights gathered once may be hidden better; all named strategies, if it is or may
    be far from its bound; and the unconstrained layouts, if the limit of its `loop` binds. `apart` has the strategies
    formulated already.
    """
    if options.strategy != "auto":
        return best
    analysis, gap = best.formulated.analysis, _gap(best)
    with suppress(TimeLimitError):
        if loop.binds and gap > settings.free_layouts_gap:
            best = _with_free_layouts(best, loop, limit, settings)
    once = (ONCE,) if analysis.step.loop or _waits(best) > settings.once_gap else ()  # a program of its own
    named = NAMED if gap > (settings.gap if loop.stopped else settings.strategies_gap) else once
    found = _best_named(best, best.memory_model, options, limit, named, settings, best.solution.bound, apart)
    return best if found is None or found is best else replace(found, beside=best)


def _waits(found: Optimized) -> float:
    """The share of a solution's step taken by messages of weights that nothing hides where they are."""
    formulated, seconds = found.formulated, solution_time(found.memory_model, found.solution)
    schedule = found.memory_model.liveness.schedule(assignment(formulated, found.solution))
    return unhidden_time(schedule, formulated.step_prices) / seconds if seconds else 0.0


def _gap(found: Optimized) -> float:
    """How much faster, relatively, the best plan may be than a solution's step with its actual messages."""
    seconds = solution_time(found.memory_model, found.solution)
    return (seconds - found.solution.bound) / seconds if seconds else 0.0


def cheaper(best: Optimized, analysis: Analysis, mesh: Mesh, options: Options, settings: SearchSettings) -> Optimized:
    """The better of a solution and that of another variant of its program, if that wins `padding_gain` and is found soon.

    Raises ConstraintError if the other variant cannot run under the constraints.
    """
    memory_model, seconds = (
        problem_of(analysis, mesh, best.optimizer, options),
        solution_time(best.memory_model, best.solution),
    )
    limit, cutoff = parse_bytes(options.budget, mesh), (1 - settings.padding_gain) * seconds
    loop = BudgetLoop(memory_model.formulated, memory_model, settings.near_relaxation())
    found = loop.within(limit, cutoff=cutoff)
    if found is None or solution_time(memory_model, found) >= seconds:
        return best
    return replace(best, memory_model=memory_model, solution=found, loop=loop, beside=None)


def transferred(found: Optimized, analysis: Analysis, options: Options) -> Optimized:
    """Transfer a solution to a program that differs only in names."""
    formulated = found.formulated.renamed(analysis, policy_of(analysis, options.recompute))
    return replace(found.searched, memory_model=MemoryModel(formulated, found.optimizer))


def least_price(
    analysis: Analysis, mesh: Mesh, options: Options, settings: SearchSettings = DEFAULTS, *, exact: bool = False
) -> Seconds:
    """A lower bound in seconds on every solution for an analysed program, in any memory: by dual ascent, or with `exact` by
    solving the problem, which takes seconds for a large model.

    With `strategy="auto"` it covers every named strategy, also those with a program of their own (weights gathered once for all
    micro-batches). Raises ConstraintError if none can run under the constraints.
    """
    bounds, refused = list[tuple[Seconds, Problem]](), list[ConstraintError]()
    for strategy in (options.strategy, *_apart(analysis, options)):
        try:
            problem = problem_of(analysis, mesh, options.stepped, replace(options, strategy=strategy)).formulated.problem
        except ConstraintError as error:
            refused.append(error)
        else:
            bounds.append((dual_ascent(merge_followers(problem, settings).problem, settings).bound, problem))
    if not bounds:
        raise refused[0]
    bounds.sort(key=lambda one: one[0])
    if not exact:
        return bounds[0][0]
    least = math.inf
    for bound, problem in bounds:
        if bound < least:
            least = min(least, max(bound, _solved_bound(problem, settings)))
    return least


def _solved_bound(problem: Problem, settings: SearchSettings) -> Seconds:
    """The bound proven by solving a problem; 0 if that fails."""
    try:
        return solve(problem, settings=settings).bound
    except TimeLimitError as error:
        return error.bound
    except SolverError:
        return 0.0


def solution_time(memory_model: MemoryModel, solution: Solution) -> Seconds:
    """Seconds of a solution's step, with its actual messages; see `Prices.sending` for what a stage sends to the next."""
    formulated = memory_model.formulated
    chosen = assignment(formulated, solution)
    return step_time(memory_model.liveness.schedule(chosen), formulated.step_prices) + sent_seconds(formulated, chosen)


def sent_seconds(formulated: PlanningProblem, chosen: Assignment) -> Seconds:
    """Seconds for a pipeline stage to send its outputs, as the integer program prices them; 0 without stages."""
    program, step, prices = formulated.program, formulated.analysis.step, formulated.prices
    return sum(prices.sending(step, program.values[o.value], chosen.outputs[o.path]) for o in program.outputs)


def sharded(program: Program, outputs: str | None) -> Callable[[Output], bool]:
    """Which outputs may be returned split: by default those of a model that also returns a scalar."""
    if outputs not in (None, "whole", "sharded"):
        raise ConstraintError(f"outputs={outputs!r} is unknown", fix='None, "whole" or "sharded"')
    ends = [program.values[o.value] for o in program.outputs]
    scalar = any(not value.shape and value.requires_grad for value in ends)
    split = outputs == "sharded" or (outputs is None and scalar)
    return lambda output: split and bool(program.values[output.value].shape)


def problem_of(analysis: Analysis, mesh: Mesh, optimizer: Optimizer, options: Options) -> MemoryModel:
    """The problem that the options pose.

    Raises ConstraintError if they leave no way to run the program.
    """
    wanted = constraints_of(analysis.step, mesh, options.strategy, options.constraints, analysis.fits)
    outputs = sharded(analysis.program, options.outputs)
    formulated = formulate(
        analysis,
        mesh,
        optimizer,
        cost_model=options.cost_model,
        constraints=wanted,
        policy=policy_of(analysis, options.recompute),
        sharded_outputs=outputs,
    )
    return MemoryModel(formulated, optimizer)


def _by_policies(
    memory_model: MemoryModel, analysis: Analysis, mesh: Mesh, options: Options, limit: Bytes, settings: SearchSettings
) -> Optimized:
    """A solution by a narrower recompute policy, if the search over all found none within the limit.

    Raises UnfitError if none was found.
    """
    narrower = list(_narrower(analysis, mesh, options)) if settings.branch_whole else []
    if found := cheapest_within(limit, narrower, settings):
        model, solution = found
        solution = solution.bounded(least_price(analysis, mesh, options, settings), settings.equal_price)
        return Optimized(memory_model=model, solution=solution, optimizer=options.stepped, strategy=options.strategy)
    raise UnfitError((memory_model, *narrower), limit, options, settings)


def _narrower(analysis: Analysis, mesh: Mesh, options: Options) -> Iterator[MemoryModel]:
    """The problems of policies narrower than the one of the options; there are none for a model without blocks."""
    for policy in NARROWER if options.recompute == AUTO and blocks(analysis.program) else ():
        yield problem_of(analysis, mesh, options.stepped, replace(options, recompute=policy))


def _with_free_layouts(best: Optimized, loop: BudgetLoop, limit: Bytes, settings: SearchSettings) -> Optimized:
    """The better of a solution and the layouts that are best without a budget, with the recomputation that they need."""
    formulated, solution = best.formulated, best.solution
    free = loop.free()
    if free is None:
        return best
    other = formulated.only(free)
    cutoff = solution_time(best.memory_model, solution)
    found = within(other, MemoryModel(other, best.optimizer), limit, cutoff=cutoff, settings=settings)
    if found is None:
        return best
    found = replace(found, picks=free.picks, bound=min(solution.bound, found.seconds), status="feasible")
    return min(best, replace(best, solution=found), key=lambda one: solution_time(one.memory_model, one.solution))


def _best_named(
    best: Optimized | None,
    posed: MemoryModel,
    options: Options,
    limit: Bytes,
    named: Sequence[str],
    settings: SearchSettings,
    bound: Seconds,
    apart: Mapping[str, MemoryModel],
) -> Optimized | None:
    """The best of a solution, if there is one, and the named strategies, by their actual messages.

    Args:
        best: the solution.
        posed: the problem of all layouts, every solution of which takes at least `bound` seconds.
        options, limit, settings: as for `solved`.
        named: the strategies; they are solved even at the deadline, so that no plan is worse than the best of them.
        bound: see `posed`.
        apart: the problems of strategies formulated already.
    """
    analysis, mesh = posed.formulated.analysis, posed.formulated.mesh
    optimizer, settings = options.stepped, replace(settings, deadline=settings.deadline.only_interrupt())
    for strategy in named:
        if best is not None and settings.deadline.passed:
            break
        seconds = math.inf if best is None else solution_time(best.memory_model, best.solution)
        try:
            model = apart.get(strategy) or problem_of(analysis, mesh, optimizer, replace(options, strategy=strategy))
            found = BudgetLoop(model.formulated, model, settings).near(limit, seconds).solution
        except ConstraintError:
            continue
        except TimeLimitError:
            break
        if found is not None and solution_time(model, found) < seconds:
            solution = replace(found, bound=min(bound, found.seconds), status="feasible")
            best = Optimized(memory_model=model, solution=solution, optimizer=optimizer, strategy=strategy)
    return best


__all__ = [
    "Optimized",
    "analysed",
    "cheaper",
    "least_price",
    "sent_seconds",
    "sharded",
    "solution_time",
    "solved",
    "solved_within",
    "transferred",
]

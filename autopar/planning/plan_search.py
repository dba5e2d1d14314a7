"""Searches over the variants of a program: numbers of micro-batches, and padding of dims that the mesh does not divide."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace

from autopar import files
from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError
from autopar.ir.device import Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.passes.microbatches import counts, microbatches
from autopar.passes.padding import PaddingExtent, Rooms, padded
from autopar.plan.options import AUTO, Options
from autopar.planning.decide import decided
from autopar.planning.model_checks import useless_axes, without_rule
from autopar.planning.no_plan import UnfitError, explaining
from autopar.planning.optimize import Optimized, Stop, analysed, cheaper, least_price, solution_time, solved
from autopar.solver.deadline import NEVER, Deadline, Interrupt
from autopar.solver.highs import SlowerError, SolverError, TimeLimitError
from autopar.solver.settings import DEFAULTS, SearchSettings

PADDED = (
    "auto",
    "megatron",
    "fsdp+tp",
    "hsdp+tp",
)  # the strategies that try to pad dims: the others split the batch, and parameters as they are


def best_shape(
    program: Program, meshes: Sequence[Mesh], options: Options, stop: Stop, settings: SearchSettings = DEFAULTS
) -> Optimized:
    """The best solution on any of these meshes; ties go to the first.

    If no mesh has a solution, raises an error of `best_variant`: of the smallest budget that works, or the first.
    """
    with explaining():
        return _best_shape(program, meshes, options, stop, settings)


def _best_shape(program: Program, meshes: Sequence[Mesh], options: Options, stop: Stop, settings: SearchSettings) -> Optimized:
    """The best solution on any of these meshes; raises UnfitError if none fits."""
    if len(meshes) == 1:
        return best_variant(program, meshes[0], options, stop, settings)
    best: Optimized | None = None
    seconds, shapes, refused = math.inf, list[str](), list[AutoparError]()
    for mesh in meshes:
        if best is not None and settings.deadline.passed:
            best = replace(best, stopped=settings.deadline.text)
            break
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                one = _best_variant(program, mesh, options, stop, replace(settings, below=seconds))
            except (BudgetError, ConstraintError, MeshError, SolverError) as error:
                refused.append(error)
                shapes.append(f"{mesh.sizes} {'slower' if isinstance(error, SlowerError) else 'no plan'}")
                continue
        took = solution_time(one.memory_model, one.solution)
        shapes.append(f"{mesh.sizes} {1e3 * took:.3f} ms")
        if took < seconds:
            best, seconds, warned = one, took, said
    if best is None:
        raise _nearest_error(refused)
    for warning in warned:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return decided(replace(best, shapes=tuple(shapes)), options, settings, stop)


def best_variant(program: Program, mesh: Mesh, options: Options, stop: Stop, settings: SearchSettings = DEFAULTS) -> Optimized:
    """The best solution in the requested number of micro-batches; the simulator decides between the search's proposals.

    Raises ConstraintError if a pipeline is requested: each of its stages is a solution of its own; UnfitError if none fits.
    """
    return decided(_best_variant(program, mesh, options, stop, settings), options, settings, stop)


def _best_variant(program: Program, mesh: Mesh, options: Options, stop: Stop, settings: SearchSettings) -> Optimized:
    """The solution of least price in the requested number of micro-batches.

    Raises ConstraintError if a pipeline is requested: each of its stages is a solution of its own.
    """
    if options.pipeline is not None:
        what = f"pipeline={options.pipeline!r} has to be planned in stages"
        raise ConstraintError(what, fix="ask the plans of its stages: autopar.plan(...).stages")
    settings = limited(settings, options)
    if options.microbatches == AUTO:
        best = _best_number(program, mesh, options, stop, settings)
    else:
        check_number(options.microbatches)
        best = _best_padded(microbatches(program, int(options.microbatches)), mesh, options, stop, settings)
    if options.strategy != "replicate":
        useless_axes(best.formulated.analysis, mesh, padding=options.strategy in PADDED)
    return best


def limited(settings: SearchSettings, options: Options) -> SearchSettings:
    """The settings with the requested time limit, which starts now, and handling of Ctrl-C; a deadline that they already have
    is kept.

    Raises ConstraintError if that is not a number of seconds.
    """
    seconds = options.time_limit
    if settings.deadline is not NEVER:
        return settings
    if seconds is None:
        return replace(settings, deadline=Deadline(interrupt=Interrupt()))
    check_seconds(seconds)
    return replace(settings, deadline=replace(Deadline.after(seconds), interrupt=Interrupt()))


def check_seconds(limit: object) -> None:
    """Raise ConstraintError for a time limit that is not a number of seconds."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < files.LARGEST:
        raise ConstraintError(f"time_limit={limit!r} is not a number of seconds", fix="time_limit=60, or None for no limit")


def check_number(runs: object) -> None:
    """Raise ConstraintError if the number of micro-batches is not an integer from 1 on."""
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise ConstraintError(f"microbatches={runs!r} is not a number of micro-batches", fix=f"1 or more, or {AUTO!r}")


def _best_number(program: Program, mesh: Mesh, options: Options, stop: Stop, settings: SearchSettings) -> Optimized:
    """The fastest solution over numbers of micro-batches, each at least twice the last, until one that fits is slower."""
    best: Optimized | None = None
    refused: list[UnfitError] = []
    unsolved: SolverError | None = None
    last = 0
    for runs in counts(program):
        if runs < 2 * last:
            continue
        if last and settings.deadline.passed:
            best = best and replace(best, stopped=settings.deadline.text)
            break
        try:
            part = microbatches(program, runs)
        except ConstraintError:  # it cannot be cut
            break
        known = settings.below if best is None else min(settings.below, best.solution.seconds)
        try:
            found = _best_padded(part, mesh, options, stop, replace(settings, below=known))
        except UnfitError as error:
            refused.append(error)
        except SlowerError as error:  # and so are more of them, as a rule
            unsolved = error
            break
        except SolverError as error:  # with other numbers it may find an answer
            unsolved = error
        except (ConstraintError, MeshError):  # a part of the batch cannot be split as it must be
            if runs == 1:
                raise
            continue
        else:
            if best is not None and found.solution.seconds >= best.solution.seconds:
                break
            best = found
        last = runs
    if best is None:
        raise unsolved if unsolved is not None and not refused else UnfitError.joined(refused)
    return best


def _best_padded(step: TrainingStep, mesh: Mesh, options: Options, stop: Stop, settings: SearchSettings) -> Optimized:
    """The solution for a fixed number of micro-batches, with padding if that is better or the only way."""
    best: Optimized | None = None
    refused: list[AutoparError] = []
    for rooms in _paddings(step.program, mesh, options).values():
        wide = padded(step, rooms)
        if best is not None and settings.deadline.passed:
            best = replace(best, stopped=settings.deadline.text)
            break
        try:
            analysis = analysed(wide, mesh, options)
            if best is None:
                without_rule(analysis, strict=options.strict)
                stop("analyse")
                best = solved(analysis, mesh, options, stop, settings=settings)
            elif _spent(best, wide.program) > settings.padding_gain * best.solution.seconds:
                best = cheaper(best, analysis, mesh, options, settings)
                stop("pad")
        except TimeLimitError:
            if best is None:
                raise
        except (BudgetError, ConstraintError, SlowerError) as error:
            refused.append(error)
    if best is None:
        raise _nearest_error(refused)
    return best


def least_padded(step: TrainingStep, mesh: Mesh, options: Options, settings: SearchSettings) -> PaddingExtent:
    """The padding with the lowest bound for a fixed number of micro-batches, in any memory; none if it wins less than
    `padding_gain`.
    """

    def least(padding: PaddingExtent) -> Seconds:
        try:
            bound = least_price(analysed(padded(step, ways[padding]), mesh, options), mesh, options, settings)
        except (ConstraintError, MeshError):
            return math.inf
        return (1 - settings.padding_gain) * bound if padding is PaddingExtent.NONE else bound

    ways = _paddings(step.program, mesh, options)
    return min(ways, key=least) if len(ways) > 1 else PaddingExtent.NONE


def _paddings(program: Program, mesh: Mesh, options: Options) -> dict[PaddingExtent, Rooms]:
    """The distinct paddings on a mesh: each that differs from the previous one."""
    found: dict[PaddingExtent, Rooms] = {}
    for padding in PaddingExtent if options.strategy in PADDED else (PaddingExtent.NONE,):
        rooms = padding.rooms(program, mesh)
        if rooms not in found.values():
            found[padding] = rooms
    return found


def _spent(best: Optimized, wide: Program) -> Seconds:
    """What a solution spends on values that are wider in another program: about the most that padding could save."""
    problem, solution, program = best.formulated.problem, best.solution, best.formulated.program
    both = program.values.keys() & wide.values.keys()
    wider = {name for name in both if program.values[name].shape != wide.values[name].shape}
    touching = {op.name for op in program.ops if not wider.isdisjoint((*op.operands, *(result.name for result in op.results)))}
    picks, arcs = zip(problem.choices, solution.picks, strict=True), zip(problem.edges, solution.arcs, strict=True)
    computed = [float(choice.seconds[pick]) for choice, pick in picks if choice.name in touching]
    sent = [float(edge.seconds[list(used)].sum()) for edge, used in arcs if edge.name in wider]
    return sum(computed) + sum(sent)


def _nearest_error(refused: Sequence[AutoparError]) -> AutoparError:
    """The error of several searches: of all that do not fit, or the first."""
    unfit = [error for error in refused if isinstance(error, UnfitError)]
    return UnfitError.joined(unfit) if unfit else refused[0]


__all__ = ["best_shape", "best_variant", "check_number", "check_seconds", "least_padded", "limited"]

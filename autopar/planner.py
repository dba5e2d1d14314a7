"""Planning: from a model and a mesh to a `Plan`.

capture -> passes -> analyse -> formulate -> merge followers -> solve, walk the memory, bound it, solve again -> plan
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from autopar.capture import Captured, capture
from autopar.cost_models import catalog, optimizers
from autopar.cost_models.links import connect
from autopar.cost_models.optimizers import Optimizer
from autopar.decisions import Decisions
from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError
from autopar.evidence import BUDGET, Figure
from autopar.ir import Output, Program
from autopar.mesh import Bytes, Device, Mesh, Seconds
from autopar.passes import normalise
from autopar.passes.microbatches import counts, microbatches
from autopar.passes.padding import padded, rooms
from autopar.passes.precision import DTYPES, MIXED, mixed, received, stored
from autopar.passes.strategies import constrained, demands
from autopar.plan import Collective, Plan, describe, paddings
from autopar.refusals import useless_axes, without_rule
from autopar.resize import varied
from autopar.sizes import Dims, Dynamic, Place, Size, declared
from autopar.solver.account import account, conversions
from autopar.solver.analysis import Analysis, analyse
from autopar.solver.budget import parse_bytes
from autopar.solver.formulate import Formulated, decisions, formulate
from autopar.solver.memory import Ledger
from autopar.solver.messages import Message, between, messages
from autopar.solver.problem import Solution, away_price, local_price
from autopar.solver.solve import PROVEN
from autopar.solver.within import smallest, within
from autopar.tables import size_text

AUTO = "auto"  # as many micro-batches as are best
SMALLEST = "smallest"  # what a BudgetError calls the smallest budget that works
ONCE = "zero1"
NAMED = ("ddp", ONCE, "zero2", "fsdp", "megatron", "replicate")
PADDED = ("auto", "megatron")  # what tries to pad dims: the others split the batch, and parameters as they are
PLENTY: Bytes = 1 << 60
WORTH = 5e-3  # of a step: the least that padding must win
Stop = Callable[[str], None]  # called with the name of each phase when it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user may ask of a plan; `budget` is bytes per device, a text like "80GB", or None for 90% of the device.

    `microbatches` is their number in a step, or "auto".
    """

    device: str | Device | None = None
    budget: Bytes | str | None = None
    strategy: str = "auto"
    optimizer: str = "adamw"
    constraints: Mapping[str, str] = field(default_factory=dict)
    outputs: str | None = None
    precision: str | None = None
    reduce: str | None = None
    strict: bool = False
    microbatches: int | str = 1
    offload: bool = True
    dynamic: Mapping[str, Dims | Dynamic] = field(default_factory=dict)

    def text(self) -> dict[str, str]:
        """The options as a plan keeps them; what was left to default is empty."""
        return {
            "strategy": self.strategy,
            "optimizer": self.optimizer,
            "budget": "" if self.budget is None else str(self.budget),
            "outputs": self.outputs or "",
            "precision": self.precision or "",
            "reduce": self.reduce or "",
            "constraints": "; ".join(f"{name}: {layout}" for name, layout in self.constraints.items()),
            "microbatches": "" if self.microbatches == 1 else str(self.microbatches),
            **({} if self.offload else {"offload": "no"}),
        }

    def under(self, plan: Plan | None) -> Options:
        """The options with the precision of a plan that was made before; another one that is asked for will not fit it."""
        found = plan.options if plan else {}
        return replace(
            self,
            precision=self.precision or found.get("precision") or None,
            reduce=self.reduce or found.get("reduce") or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A planning problem with its solution; the ledger holds both the problem and its memory."""

    ledger: Ledger
    solution: Solution
    optimizer: Optimizer

    @property
    def formulated(self) -> Formulated:
        return self.ledger.formulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with the program that it is for, the solution that it was made from, and how long each phase took (seconds)."""

    plan: Plan
    captured: Captured
    solved: Solved
    phases: Mapping[str, float]


class _Clock:
    """Seconds per phase; `tell` hears of the end of each."""

    def __init__(self, tell: Stop) -> None:
        self.phases: dict[str, float] = {}
        self._tell = tell
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now
        self._tell(phase)


def make_plan(
    model: nn.Module, sample_input: object, mesh: object, options: Options, stop: Stop = lambda phase: None
) -> Planned:
    """Capture a model and plan it; see `autopar.plan`. `stop` is called at the end of each phase."""
    clock = _Clock(stop)
    captured = read_program(model, sample_input, options.precision, options.reduce)
    sizes = declared(options.dynamic, captured.signature.shapes)
    clock.stop("capture")
    found = _solved(captured.program, located(mesh, options), options, clock.stop)
    plan = knowing(finish(found, options), sizes, captured.program, model, sample_input)
    clock.stop("write")
    captured = replace(captured, program=found.formulated.program)
    return Planned(plan=plan, captured=captured, solved=found, phases=clock.phases)


def read_program(
    model: nn.Module,
    sample_input: object,
    precision: str | None = None,
    reduce: str | None = None,
    places: Mapping[Place, int] | None = None,
) -> Captured:
    """Capture a model and bring its program into the form in which it is planned, and into the precision in which it runs.

    `places` are dims of the sample that get another size.
    """
    dtype = stored(precision, reduce)
    captured = capture(model, sample_input, dtype, places)
    program = normalise(captured.program)
    if dtype is not None:
        program = received(program, {planned.path: planned.dtype for planned in captured.signature.tensors})
    if precision == MIXED:
        program = mixed(program, DTYPES[reduce] if reduce else None)
    return replace(captured, program=program)


def knowing(plan: Plan, sizes: Sequence[Size], program: Program, model: nn.Module, sample_input: object) -> Plan:
    """The plan of a model's program with the sizes that may vary; raises CaptureError if the model is another one at others."""
    precision, reduce = plan.options["precision"] or None, plan.options["reduce"] or None
    return varied(plan, program, sizes, lambda places: read_program(model, sample_input, precision, reduce, places).program)


def located(mesh: object, options: Options) -> Mesh:
    """The mesh with its device and links: the mesh's own where it has them."""
    found = Mesh.of(mesh)
    wanted = options.device if options.device is not None else found.device
    device = catalog.device(wanted, processes=found.size)
    return connect(found, device if options.offload else replace(device, host=None))


def plan_program(program: Program, mesh: Mesh, options: Options, stop: Stop = lambda phase: None) -> Plan:
    """The plan of a captured program on a mesh with device and links."""
    plan = finish(_solved(program, mesh, options, stop), options)
    stop("write")
    return plan


def _solved(program: Program, mesh: Mesh, options: Options, stop: Stop) -> Solved:
    """The best solution in the number of micro-batches that is asked for; a program with a loop keeps its own."""
    if program.loop is None and options.microbatches == AUTO:
        return _best_number(program, mesh, options, stop)
    if program.loop is None:
        program = microbatches(program, _number(options.microbatches))
    return _solved_so(program, mesh, options, stop)


def _solved_so(program: Program, mesh: Mesh, options: Options, stop: Stop) -> Solved:
    """The solution for a program whose number of micro-batches is settled, padded where that is better or the only way."""
    best: Solved | None = None
    refused: list[AutoparError] = []
    for wide in _paddings(program, mesh, options):
        try:
            if best is None:
                best = _solved_as(wide, mesh, options, stop)
            else:
                best = _cheaper(best, wide, mesh, options)
                stop("pad")
        except (BudgetError, ConstraintError) as error:
            refused.append(error)
    if best is None:
        short = [error for error in refused if isinstance(error, BudgetError) and SMALLEST in error.details]
        raise _nearest(short) if short else refused[0]
    return best


def _nearest(refused: Sequence[BudgetError]) -> BudgetError:
    """The one that asks for the smallest budget."""
    return min(refused, key=lambda error: int(error.details[SMALLEST].removeprefix("budget=")))


def _paddings(program: Program, mesh: Mesh, options: Options) -> Iterator[Program]:
    """The program, the same with what can be stored in chunks padded, and with all that can be; what differs."""
    yield program
    if options.strategy not in PADDED or options.dynamic:
        return
    light = rooms(program, mesh.sizes)
    if light:
        yield padded(program, light)
    heavy = rooms(program, mesh.sizes, parts=True)
    if heavy != light:
        yield padded(program, heavy)


def _cheaper(best: Solved, wide: Program, mesh: Mesh, options: Options) -> Solved:
    """The better of a solution and that of a padded program, as far as this one is found soon.

    Raises ConstraintError if the padded program cannot run as is asked for.
    """
    analysis, outputs = analysed(wide, mesh, options), sharded(wide, options.outputs)
    wanted = demands(wide, mesh, options.strategy, options.constraints, analysis.fits)
    formulated = formulate(analysis, mesh, best.optimizer, demands=wanted, sharded_outputs=outputs)
    ledger, seconds = Ledger(formulated, best.optimizer), step_time(best.formulated, best.solution)
    found = within(formulated, ledger, parse_bytes(options.budget, mesh), cutoff=(1 - WORTH) * seconds, near=True)
    if found is None or step_time(formulated, found) >= seconds:
        return best
    return Solved(ledger=ledger, solution=found, optimizer=best.optimizer)


def _solved_as(program: Program, mesh: Mesh, options: Options, stop: Stop) -> Solved:
    """The solution for a program as it is."""
    analysis = analysed(program, mesh, options)
    without_rule(analysis, strict=options.strict)
    stop("analyse")
    return solved(analysis, mesh, options, stop)


def _number(asked: int | str) -> int:
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise ConstraintError(f"microbatches={asked!r} is no number", fix=f"how many a step has, or {AUTO!r}")
    return asked


def _best_number(program: Program, mesh: Mesh, options: Options, stop: Stop) -> Solved:
    """The fastest solution over the numbers of micro-batches, each at least twice the last, until one that fits is slower."""
    best: Solved | None = None
    refused: list[BudgetError] = []
    last = 0
    for runs in counts(program):
        if runs < 2 * last:
            continue
        try:
            part = microbatches(program, runs)
        except ConstraintError:  # it cannot be cut
            break
        try:
            found = _solved_so(part, mesh, options, stop)
        except BudgetError as error:
            if SMALLEST not in error.details:
                raise
            refused.append(error)
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
        raise _nearest(refused)
    return best


def analysed(program: Program, mesh: Mesh, options: Options) -> Analysis:
    """What is known of a program before any choice, where the constraints keep apart what they treat differently."""
    user = constrained(program, mesh, options.constraints)
    return analyse(program, mesh, apart=lambda name: str(user.get(name, "")))


def solved(
    analysis: Analysis, mesh: Mesh, options: Options, stop: Stop = lambda phase: None, *, patience: Seconds = math.inf
) -> Solved:
    """The solution for an analysed program.

    Raises ConstraintError, MeshError or BudgetError if there is none, SolverError after about `patience` without an answer.
    """
    program, limit = analysis.program, parse_bytes(options.budget, mesh)
    optimizer = optimizers.optimizer(options.optimizer)
    wanted = demands(program, mesh, options.strategy, options.constraints, analysis.fits)
    if options.strategy != "replicate":
        useless_axes(analysis, mesh)
    formulated = formulate(analysis, mesh, optimizer, demands=wanted, sharded_outputs=sharded(program, options.outputs))
    ledger = Ledger(formulated, optimizer)
    stop("formulate")
    solution = within(formulated, ledger, limit, patience=patience)
    if solution is None:
        raise _impossible(formulated, ledger, limit, options, patience)
    best = Solved(ledger=ledger, solution=solution, optimizer=optimizer)
    if options.strategy == "auto" and solution.gap > PROVEN:
        best = _with_free_layouts(best, limit)
    if options.strategy == "auto":
        shared = (ONCE,) if program.runs > 1 else ()  # micro-batches that share their weights are a program of their own
        best = _best_named(best, analysis, options, limit, NAMED if solution.gap > 0 else shared)
    stop("solve")
    return best


def finish(found: Solved, options: Options, chosen: Decisions | None = None) -> Plan:
    """The plan that a solution stands for, with its evidence; or that of `chosen`, which makes other things again."""
    formulated, solution = found.formulated, found.solution
    program, mesh, analysis = formulated.program, formulated.mesh, formulated.analysis
    chosen = chosen or decisions(formulated, solution)
    choices, layouts, routes, again = describe(program, chosen, analysis.fits, mesh.sizes)
    sent = list(messages(analysis, chosen, mesh))
    said = "90% of the device's memory" if options.budget is None else "asked for"
    limit = Figure(of=BUDGET, name="memory", value=parse_bytes(options.budget, mesh), unit="B", source=said)
    evidence = account(found.ledger, chosen, found.optimizer, limit)
    seconds = evidence.local + sum(message.seconds for message in sent)
    return Plan(
        hash=program.hash,
        axes=mesh.axes,
        sizes=mesh.sizes,
        links=tuple(link.name for link in mesh.links),
        device=mesh.device.name if mesh.device else "",
        options=options.text(),
        microbatches=program.runs,
        status=solution.status,
        gap=max(0.0, seconds - solution.bound) / seconds if seconds else 0.0,
        step_time=seconds,
        peak_memory=round(float(found.ledger.timeline.walk(chosen).max())),
        collectives=tuple(_collective(message, mesh) for message in sent),
        choices=choices,
        layouts=layouts,
        routes=routes,
        again=again,
        once=chosen.once,
        padded=paddings(program),
        evidence=evidence,
    )


def collectives_of(analysis: Analysis, chosen: Decisions, mesh: Mesh) -> Iterator[Collective]:
    """Every collective of one step, forward and backward; the weights of a bundle travel in one."""
    return (_collective(message, mesh) for message in messages(analysis, chosen, mesh))


def _collective(message: Message, mesh: Mesh) -> Collective:
    name, *more = message.values
    return Collective(
        value=name, more=tuple(more), axis=mesh.axes[message.axis], kind=message.kind, bytes=message.bytes,
        where=message.where, seconds=message.seconds,
    )  # fmt: skip


def _impossible(
    formulated: Formulated, ledger: Ledger, limit: Bytes, options: Options, patience: Seconds
) -> AutoparError:
    """Why there is no plan: the constraints leave none, or none fits into the limit."""
    least = smallest(formulated, ledger, patience=patience)
    if least is None:
        return ConstraintError(
            f"the strategy {options.strategy!r} and the constraints leave no way to run the model",
            constraints=options.text()["constraints"],
            fix="drop a constraint, or use strategy='auto'",
        )
    alive, runs = ledger.walk(least), formulated.program.runs
    peak, full = math.ceil(alive.max()), ledger.held(decisions(formulated, least), int(alive.argmax()))[:5]
    more = "" if options.microbatches == AUTO else f"microbatches={AUTO!r}, "
    return BudgetError(
        f"no plan fits into {size_text(limit)} per device; the smallest budget that works is {size_text(peak)}",
        strategy=options.strategy,
        microbatches=runs if runs > 1 else "",
        **{SMALLEST: f"budget={peak}"},
        filled="; ".join(f"{size_text(held.bytes)} {held}" for held in full),
        fix=f"more devices, {more}a smaller batch, a narrower dtype, or a budget above 90% of the device",
    )


def _with_free_layouts(best: Solved, limit: Bytes) -> Solved:
    """The better of a solution and of the layouts that are best where memory is plenty, with what must be made again then."""
    formulated, solution = best.formulated, best.solution
    free = within(formulated, best.ledger, PLENTY)
    if free is None:
        return best
    other = formulated.only(free)
    found = within(other, Ledger(other, best.optimizer), limit, cutoff=step_time(formulated, solution))
    if found is None:
        return best
    found = replace(found, picks=free.picks, bound=min(solution.bound, found.seconds), status="feasible")
    return min(best, replace(best, solution=found), key=lambda one: step_time(one.formulated, one.solution))


def _best_named(best: Solved, analysis: Analysis, options: Options, limit: Bytes, named: Sequence[str]) -> Solved:
    """The best of a solution and of named strategies, by what they really send."""
    program, mesh, bound = analysis.program, best.formulated.mesh, best.solution.bound
    for strategy in named:
        try:
            wanted = demands(program, mesh, strategy, options.constraints, analysis.fits)
            outputs = sharded(program, options.outputs)
            other = formulate(analysis, mesh, best.optimizer, demands=wanted, sharded_outputs=outputs)
        except ConstraintError:
            continue
        ledger, seconds = Ledger(other, best.optimizer), step_time(best.formulated, best.solution)
        found = within(other, ledger, limit, cutoff=seconds)
        if found is not None and step_time(other, found) < seconds:
            found = replace(found, bound=min(bound, found.seconds), status="feasible")
            best = replace(best, ledger=ledger, solution=found)
    return best


def step_time(formulated: Formulated, solution: Solution) -> Seconds:
    """Seconds of a step: the solver's price with the messages of conversions as they are sent, where it may miss a few."""
    analysis, chosen, mesh = formulated.analysis, decisions(formulated, solution), formulated.mesh
    sent = sum(message.seconds for message in between(analysis, chosen, mesh))
    own = local_price(formulated.problem, solution.picks, solution.again) + away_price(formulated.problem, solution.again)
    return own + conversions(analysis, chosen, mesh) + sent


def sharded(program: Program, outputs: str | None) -> Callable[[Output], bool]:
    """Which outputs may leave split: by default those that stand beside a scalar."""
    if outputs not in (None, "whole", "sharded"):
        raise ConstraintError(f"outputs={outputs!r} is unknown", fix='None, "whole" or "sharded"')
    ends = [program.values[o.value] for o in program.outputs]
    scalar = any(not value.shape and value.requires_grad for value in ends)
    split = outputs == "sharded" or (outputs is None and scalar)
    return lambda output: split and bool(program.values[output.value].shape)

"""Planning: from a model and a mesh to a `Plan`.

capture -> passes -> analyse -> formulate -> merge followers -> solve, walk the memory, bound it, solve again -> plan
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from autopar.capture import Captured, capture
from autopar.cost_models import catalog, optimizers
from autopar.cost_models.links import connect
from autopar.cost_models.optimizers import Optimizer
from autopar.decisions import Decisions
from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError, RuleError
from autopar.evidence import BUDGET, Figure
from autopar.ir import Op, Output, Program, writes
from autopar.mesh import Bytes, Device, Mesh, Seconds
from autopar.passes import normalise
from autopar.passes.strategies import constrained, demands
from autopar.plan import Collective, Plan, describe
from autopar.solver.account import account
from autopar.solver.analysis import Analysis, analyse
from autopar.solver.budget import parse_bytes
from autopar.solver.formulate import Formulated, decisions, formulate
from autopar.solver.memory import Ledger
from autopar.solver.messages import Message, messages
from autopar.solver.problem import Solution, local_price
from autopar.solver.within import smallest, within
from autopar.tables import size_text

NAMED = ("ddp", "zero2", "fsdp", "megatron", "replicate")
Stop = Callable[[str], None]  # called with the name of each phase when it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user may ask of a plan; `budget` is bytes per device, a text like "80GB", or None for 90% of the device."""

    device: str | Device | None = None
    budget: Bytes | str | None = None
    strategy: str = "auto"
    optimizer: str = "adamw"
    constraints: Mapping[str, str] = field(default_factory=dict)
    outputs: str | None = None
    strict: bool = False

    def text(self) -> dict[str, str]:
        """The options as a plan keeps them; what was left to default is empty."""
        return {
            "strategy": self.strategy,
            "optimizer": self.optimizer,
            "budget": "" if self.budget is None else str(self.budget),
            "outputs": self.outputs or "",
            "constraints": "; ".join(f"{name}: {layout}" for name, layout in self.constraints.items()),
        }


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
    captured = read_program(model, sample_input)
    clock.stop("capture")
    found = _solved(captured.program, located(mesh, options), options, clock.stop)
    plan = finish(found, options)
    clock.stop("write")
    return Planned(plan=plan, captured=captured, solved=found, phases=clock.phases)


def read_program(model: nn.Module, sample_input: object) -> Captured:
    """Capture a model and bring its program into the form in which it is planned."""
    captured = capture(model, sample_input)
    return replace(captured, program=normalise(captured.program))


def located(mesh: object, options: Options) -> Mesh:
    """The mesh with its device and links: the mesh's own where it has them."""
    found = Mesh.of(mesh)
    wanted = options.device if options.device is not None else found.device
    return connect(found, catalog.device(wanted, processes=found.size))


def plan_program(program: Program, mesh: Mesh, options: Options, stop: Stop = lambda phase: None) -> Plan:
    """The plan of a captured program on a mesh with device and links."""
    plan = finish(_solved(program, mesh, options, stop), options)
    stop("write")
    return plan


def _solved(program: Program, mesh: Mesh, options: Options, stop: Stop) -> Solved:
    analysis = analysed(program, mesh, options)
    _without_rule(analysis, strict=options.strict)
    stop("analyse")
    return solved(analysis, mesh, options, stop)


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
        _useless_axes(analysis, mesh)
    formulated = formulate(analysis, mesh, optimizer, demands=wanted, sharded_outputs=sharded(program, options.outputs))
    ledger = Ledger(formulated, optimizer)
    stop("formulate")
    solution = within(formulated, ledger, limit, patience=patience)
    if solution is None:
        raise _impossible(formulated, ledger, limit, options, patience)
    if options.strategy == "auto" and solution.gap > 0:
        solution, formulated = _best_named(program, analysis, mesh, options, limit, solution, formulated)
        ledger = Ledger(formulated, optimizer)
    stop("solve")
    return Solved(ledger=ledger, solution=solution, optimizer=optimizer)


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
        status=solution.status,
        gap=max(0.0, seconds - solution.bound) / seconds if seconds else 0.0,
        step_time=seconds,
        peak_memory=round(float(found.ledger.timeline.walk(chosen).max())),
        collectives=tuple(_collective(message, mesh) for message in sent),
        choices=choices,
        layouts=layouts,
        routes=routes,
        again=again,
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
    alive = ledger.walk(least)
    peak, full = math.ceil(alive.max()), ledger.held(decisions(formulated, least), int(alive.argmax()))[:5]
    return BudgetError(
        f"no plan fits into {size_text(limit)} per device; the smallest budget that works is {size_text(peak)}",
        strategy=options.strategy,
        smallest=f"budget={peak}",
        filled="; ".join(f"{size_text(held.bytes)} {held}" for held in full),
        fix="more devices, a smaller batch, a narrower dtype, or budget= if the device has more memory than 90% of its size",
    )


def _best_named(
    program: Program,
    analysis: Analysis,
    mesh: Mesh,
    options: Options,
    limit: Bytes,
    solution: Solution,
    formulated: Formulated,
) -> tuple[Solution, Formulated]:
    """The best of a solution that is not proven and the named strategies, by what they really send."""
    optimizer, seconds = optimizers.optimizer(options.optimizer), step_time(formulated, solution)
    for strategy in NAMED:
        try:
            wanted = demands(program, mesh, strategy, options.constraints, analysis.fits)
            other = formulate(analysis, mesh, optimizer, demands=wanted, sharded_outputs=sharded(program, options.outputs))
        except ConstraintError:
            continue
        found = within(other, Ledger(other, optimizer), limit, cutoff=seconds)
        if found is not None and step_time(other, found) < seconds:
            solution, formulated = replace(found, bound=min(solution.bound, found.seconds), status="feasible"), other
            seconds = step_time(formulated, solution)
    return solution, formulated


def step_time(formulated: Formulated, solution: Solution) -> Seconds:
    """Seconds of a step: the solver's price with the messages counted as they are sent, where it may miss a few."""
    sent = messages(formulated.analysis, decisions(formulated, solution), formulated.mesh)
    return local_price(formulated.problem, solution.picks, solution.again) + sum(message.seconds for message in sent)


def sharded(program: Program, outputs: str | None) -> Callable[[Output], bool]:
    """Which outputs may leave split: by default those that stand beside a scalar."""
    if outputs not in (None, "whole", "sharded"):
        raise ConstraintError(f"outputs={outputs!r} is unknown", fix='None, "whole" or "sharded"')
    ends = [program.values[o.value] for o in program.outputs]
    scalar = any(not value.shape and value.requires_grad for value in ends)
    split = outputs == "sharded" or (outputs is None and scalar)
    return lambda output: split and bool(program.values[output.value].shape)


def _useless_axes(analysis: Analysis, mesh: Mesh) -> None:
    """Raise MeshError for an axis over which nothing of the model can be split."""
    fits = [fitted for fitted in analysis.fits.values() if fitted]
    dims = {factor.size for fitted in fits for factor in fitted.factors if not factor.whole and factor.size > 1}
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        if size > 1 and all(dim % size for dim in dims):
            raise MeshError(
                f"no dim of the model can be split over the {size} devices of mesh axis {axis!r}",
                mesh=mesh,
                dims=", ".join(map(str, sorted(dims)[:12])),
                fix=f"axes whose sizes divide the dims of the model, or a batch that is a multiple of {size}",
            )


def _without_rule(analysis: Analysis, *, strict: bool) -> None:
    """Say which operators have no rule: once as a warning, or as an error in strict mode."""
    missing: dict[str, Op] = {}
    for op in analysis.program.ops:
        if analysis.fits[op.name] is None and not writes(op):  # what writes a buffer is whole on purpose
            missing.setdefault(op.target, op)
    if not missing:
        return
    op = next(iter(missing.values()))
    error = RuleError(
        f"no sharding rule for {', '.join(missing)}" + ("" if strict else ": planned whole on every device"),
        module=op.module,
        at=op.source,
        fix=f'a line in autopar/rules for "{op.target}", such as rule("... -> ...")',
    )
    if strict:
        raise error
    warnings.warn(str(error), stacklevel=4)

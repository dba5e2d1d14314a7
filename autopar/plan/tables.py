"""The sections of a printed plan that need only the plan, for `print(plan)` and the report of `autopar.explain`.

totals    what was planned for, the step time and the memory, and the cost parameters with their sources
layouts   the layouts of everything stored, passed in or returned, in the notation of constraints
time      the step, split into compute and each kind of communication
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.ir.device import Bytes, Seconds
from autopar.plan.breakdown import ACCURACY, BUDGET, DEVICE, OPTIMIZER, CostParameter, SimulatedStep
from autopar.plan.budget import RESERVED
from autopar.plan.pipeline_tables import pipeline_tables, summary
from autopar.plan.text import Part, alike, by_block, folded, grid, milliseconds, size_text

if TYPE_CHECKING:
    from autopar.plan.pipeline import Pipeline
    from autopar.plan.plan import Collective, Plan

COLLECTIVE = {
    **{name: name.replace("_", "-") for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")},
    "fetch": "copy from the host", "stow": "copy to the host", "read": "read from the disk", "write": "write to the disk",
}  # fmt: skip
UNITS: Mapping[str, Callable[[float], str]] = {  # how a cost parameter prints
    "B": size_text,
    "B/s": lambda value: f"{value / 1e9:.4g} GB/s",
    "op/s": lambda value: f"{value / 1e12:.4g} Tflop/s",
    "s": lambda value: f"{value * 1e6:.3g} us",
    "": lambda value: f"{value:g}",
}
LEGEND = "I: whole on every device of the axis; S(d): split along dim d; S(d/k): split within each of dim d's k blocks"
OF_MEMORIES = "memory: I, what is stored lies in the device's memory; H, in the host's; D, on the disk"


def tables(plan: Plan) -> Iterator[Part]:
    """The sections of `print(plan)`: totals, layouts and time; for a pipeline its stages and schedule."""
    yield from totals(plan)
    if plan.pipeline:
        yield ""
        yield from pipeline_tables(plan, plan.pipeline)
        return
    for section in (layouts, time):
        yield ""
        yield from section(plan)


def totals(plan: Plan) -> Iterator[Part]:
    """What the plan was made for, its costs, and the source of each cost parameter."""
    of: dict[str, list[CostParameter]] = defaultdict(list)
    for found in plan.breakdown.cost_parameters:
        of[found.of].append(found)
    (limit,), (optimizer,) = of[BUDGET], of[OPTIMIZER]
    apart = ("strategy", "optimizer", "budget", "microbatches", "pipeline", "stages", "schedule", "time_limit")
    table = grid("", "")
    table.add_row("plan", f"{plan.hash}, strategy {plan.options['strategy']}")
    for name, text in plan.options.items():
        if text and name not in apart:
            table.add_row(name, text)
    sent = seconds_of(plan.collectives)
    hidden = plan.breakdown.hidden
    parts = f"{milliseconds(plan.step_time - sent + hidden)} compute, {milliseconds(sent - hidden)} "
    parts += f"exposed communication ({milliseconds(hidden)} more hidden)" if hidden else "communication"
    if plan.pipeline:
        table.add_row("step", f"{milliseconds(plan.step_time)} ms predicted, by the exact time of the schedule;")
        table.add_row("", staged_proof(plan.gap, plan.pipeline))
        table.add_row("pipeline", summary(plan, plan.pipeline))
    else:
        among = ", among plans without stages" if plan.options.get("pipeline") else ""
        table.add_row("step", f"{milliseconds(plan.step_time)} ms predicted: {parts}; {proof(plan.gap, among)}")
        for name, text in simulation(plan.breakdown.simulated, plan.step_time):
            table.add_row(name, text)
        if plan.inference and (tokens := plan.breakdown.simulated.tokens):
            table.add_row("per token", f"{plan.step_time / tokens * 1e6:,.3f} us of a forward of {tokens:,} tokens")
    if plan.searched:
        table.add_row("searched", plan.searched)
    if plan.microbatches > 1 and not plan.pipeline:
        table.add_row("micro-batches", f"{plan.microbatches} per step, one after another; gradients accumulate")
    for varying in plan.dynamic:
        table.add_row("dynamic", str(varying))
    for place, (names, shapes) in enumerate(alike(plan.padded)):
        table.add_row("" if place else "padded", f"{folded(names)}: {shapes}")
    table.add_row("memory", f"{size_text(plan.peak_memory)} of {size_text(limit.value)} per device ({limit.source})")
    if plan.host_memory:
        table.add_row("", f"{size_text(plan.host_memory)} of the host's memory for each device")
    if plan.disk_memory:
        table.add_row("", f"{size_text(plan.disk_memory)} of the disk for each device")
    if plan.peak_reserved > plan.peak_memory:
        reserved = f"about {size_text(plan.peak_reserved)} reserved by torch's caching allocator"
        table.add_row("", f"{reserved} ({RESERVED:g} x measured); budgets are of allocated bytes")
    table.add_row(
        "mesh", f"{plan.mesh.size} devices, the last axis innermost" + ", but for the memories of each" * plan.mesh.has_memories
    )
    for axis, size, link in zip(plan.axes, plan.sizes, plan.links, strict=True):
        table.add_row(f"  {axis}={size}", f"{link}: {_sourced(of[axis])}")
    table.add_row("device", f"{plan.device}: {_sourced(of[DEVICE])}")
    for known in () if plan.pipeline else of[ACCURACY]:  # the runs that were compared have no stages
        off = f"{known.value:.1%} {known.name}" if known.value else known.name
        table.add_row("accuracy", f"{off} of predicted steps ({known.source})")
    state = f"{optimizer.value:g} tensors of state per parameter" if optimizer.value else "no state"
    if not plan.inference:
        table.add_row("optimizer", f"{optimizer.name}: {state} ({optimizer.source})")
    yield table


def simulation(step: SimulatedStep, predicted: Seconds) -> Iterator[tuple[str, str]]:
    """The simulator's figures for a step of this predicted length, with lower bounds for every schedule."""
    change = f" ({step.seconds / predicted - 1:+.1%})" if predicted else ""
    parts = f"{milliseconds(step.computing)} computing, {milliseconds(step.slowdown)} slowed down by messages beside it"
    yield "simulated", f"{milliseconds(step.seconds)} ms{change}: {parts}, {milliseconds(step.exposed)} waiting for messages"
    rates = [f"{rate:,.0f} {unit}" for unit, rate in step.rates.items()]
    yield "throughput", ", ".join([*rates, f"{step.mfu:.1%} of the devices' peak (MFU)"])
    bounds = [f"{milliseconds(step.at_peak)} ms by FLOPs at the peak", f"{milliseconds(step.memory)} by bytes of memory"]
    bounds += [f"{milliseconds(seconds)} by messages over {axis}" for axis, seconds in step.links.items()]
    yield "bounds", ", ".join(bounds)


def throughput(plan: Plan) -> dict[str, float]:
    """Samples and tokens per second, where known: from the simulator, or for stages from their clock."""
    return plan.breakdown.simulated.rates if not plan.pipeline else plan.breakdown.simulated.rates_in(plan.step_time)


def exposed(plan: Plan) -> Seconds:
    """The collectives' time that the predicted step waits for: the rest is hidden behind compute."""
    return seconds_of(plan.collectives) - plan.breakdown.hidden


def mfu(plan: Plan) -> float:
    """Model FLOPs utilization of a step of this length."""
    step = plan.breakdown.simulated
    if not plan.pipeline:
        return step.mfu
    return step.at_peak / plan.step_time if plan.step_time else 0.0


def proof(gap: float, among: str = "") -> str:
    """How far a plan may be from the optimum of all plans, or of those `among` which it is the best.

    >>> proof(0.015)
    'within 1.50% of the optimum under this cost model'
    """
    share = f"{gap:.2%}"
    return f"{'proven optimal' if share == '0.00%' else f'within {share} of the optimum'} under this cost model{among}"


def staged_proof(gap: float, pipeline: Pipeline) -> str:
    """How much faster a step with the same ranks, micro-batches and schedule could be."""
    return f"other cuts and layouts by {pipeline.schedule} save at most {gap:.1%} of it, under this cost model"


def _sourced(found: Sequence[CostParameter]) -> str:
    """The cost parameters of one subject, each source once."""
    sources = dict.fromkeys(entry.source for entry in found)
    return f"{', '.join(map(parameter_text, found))} ({'; '.join(sources)})"


def parameter_text(found: CostParameter) -> str:
    """A cost parameter in a readable unit.

    >>> parameter_text(CostParameter(of="device", name="memory bandwidth", value=3.35e12, unit="B/s", source="data sheet"))
    'memory bandwidth 3350 GB/s'
    """
    return f"{found.name} {UNITS[found.unit](found.value)}"


def layouts(plan: Plan) -> Iterator[Part]:
    """The layouts of inputs, parameters, buffers and outputs, with repeated blocks merged."""
    table = grid("layout", *plan.axes)
    for names, layout in alike(plan.placed):
        table.add_row(folded(names), *(entry.strip() for entry in layout.split(",")))
    yield table
    yield LEGEND
    if plan.mesh.has_memories:
        yield OF_MEMORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """A part of a step: its time; for collectives also how long the device waits for them, their number and bytes.

    `largest` names the most expensive values. `hidden` time counts negative.
    """

    name: str
    seconds: Seconds
    exposed: Seconds = 0.0
    number: int = 0
    bytes: Bytes = 0
    largest: str = ""


def time_rows(plan: Plan) -> Iterator[TimeRow]:
    """Where the predicted step goes, the most expensive communication first; they add up to the step."""
    breakdown = plan.breakdown
    parts = {
        "compute, forward": breakdown.forward,
        "compute, backward": breakdown.backward,
        "recomputation": breakdown.recomputed,
        "host offload": breakdown.offloaded,
        "optimizer": breakdown.optimizer,
        "copies, slices and pads": breakdown.conversions,
    }
    yield from (TimeRow(name=name, seconds=seconds) for name, seconds in parts.items() if seconds)
    for key, found in by_kind(plan.collectives).items():
        yield TimeRow(
            name=kind_text(*key),
            seconds=seconds_of(found),
            exposed=sum(entry.exposed for entry in found),
            number=len(found),
            bytes=bytes_of(found),
            largest=_largest(found),
        )
    if breakdown.hidden:
        yield TimeRow(name="hidden behind compute", seconds=-breakdown.hidden)


def time(plan: Plan) -> Iterator[Part]:
    """Where the predicted step goes, the most expensive communication first."""
    table = grid("step", "ms", "share", "exposed", "number", "bytes", "largest contributors", right=(1, 2, 3, 4, 5))
    rows = [*time_rows(plan)]
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("exposed", "number", "bytes")}
    for row in (*rows, TimeRow(name="total", seconds=plan.step_time, **sums)):
        share = row.seconds / plan.step_time if plan.step_time else 0.0
        sent = (milliseconds(row.exposed), str(row.number), size_text(row.bytes)) if row.number or row.name == "total" else ()
        table.add_row(row.name, milliseconds(row.seconds), f"{share:.1%}", *sent, row.largest)
    yield table
    if plan.collectives:
        yield "bytes: the larger buffer of each collective on one device; exposed: ms that the device waits for it, simulated"
    yield from kernels(plan.breakdown.simulated)


def kernels(step: SimulatedStep) -> Iterator[Part]:
    """For each kind of kernel its share of the computing time, and the share of the device's rates that it achieves."""
    if not step.kernels:
        return
    table = grid("kernels", "ms", "of the FLOPs' peak", "of the memory bandwidth", right=(1, 2, 3))
    for group in step.kernels:
        achieved = (f"{seconds / group.seconds:.1%}" for seconds in (group.at_peak, group.at_bandwidth))
        table.add_row(group.name, milliseconds(group.seconds), *achieved)
    yield ""
    yield table


def kind_text(kind: str, axis: str, where: str) -> str:
    """Collectives of one kind over one axis in one pass, in words."""
    return f"{COLLECTIVE[kind]} over {axis}, {where}"


def by_kind(collectives: Iterable[Collective]) -> dict[tuple[str, str, str], list[Collective]]:
    """Collectives by (kind, axis, pass), the most expensive first."""
    groups: dict[tuple[str, str, str], list[Collective]] = defaultdict(list)
    for entry in collectives:
        groups[entry.kind, entry.axis, entry.where].append(entry)
    return dict(sorted(groups.items(), key=lambda item: -seconds_of(item[1])))


def seconds_of(entries: Iterable[Collective]) -> Seconds:
    """Total time of some collectives."""
    return sum(entry.seconds for entry in entries)


def bytes_of(entries: Iterable[Collective]) -> Bytes:
    """Total size of the buffers of some collectives."""
    return sum(entry.bytes for entry in entries)


def _largest(entries: Sequence[Collective]) -> str:
    """The values that take the most time of some collectives, with repeated blocks merged."""
    of: dict[str, list[Collective]] = defaultdict(list)
    for entry in entries:
        of[entry.value].append(entry)
    groups = [[entry for name in names for entry in of[name]] for names in by_block(of)]
    most = max(groups, key=seconds_of)
    return folded([entry.value for entry in most]) + (" and others" if any(entry.more for entry in most) else "")

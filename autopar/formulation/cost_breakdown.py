"""The cost breakdown of an assignment: where its seconds and bytes go, as a plan keeps it.

Nothing is decided or priced here: the events of a step are grouped by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.analysis.analysis import Analysis
from autopar.cost_models.compute import dtype_of, peak
from autopar.cost_models.fidelity import fidelity
from autopar.cost_models.optimizers import Optimizer
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.step_time import EventKind, StepEvent
from autopar.ir.device import Bytes, Disk, Seconds
from autopar.ir.layout import D, H, Layout, State, blocks
from autopar.ir.mesh import Mesh
from autopar.ir.program import OUTPUT, Op, Program
from autopar.operators import OpSharding, ParallelForm, row_of
from autopar.operators.dim_labels import LabelSample, role, role_of_dim
from autopar.plan.breakdown import (
    ACCURACY,
    ADDENDS,
    DEVICE,
    HOSTED,
    INPUT,
    ON_DISK,
    OPTIMIZER,
    OWN_ROWS,
    REPEATED,
    WHOLE,
    Allocation,
    CostBreakdown,
    CostParameter,
    SimulatedStep,
)
from autopar.search_space.assignment import Assignment
from autopar.search_space.candidates import Candidate, Form

GRADIENTS, SAVED, RECOMPUTED, TEMPORARY = "gradients", "saved activations", "recomputed activations", "temporary"
DEFERRED = "deferred gradients of weights"
# What memory is for, in the order of the report; and that of the memory model's kinds, except what is stored all the time.
PURPOSES = ("parameters", GRADIENTS, "optimizer state", SAVED, RECOMPUTED, DEFERRED, TEMPORARY, "inputs", "buffers")
PURPOSE = {
    "gradient": GRADIENTS, "kept": SAVED, "internal": SAVED, "waiting": SAVED, "deferred": DEFERRED, "recompute": RECOMPUTED,
    "produced": TEMPORARY, "converted": TEMPORARY, "flowing": TEMPORARY, "flight": TEMPORARY, "transient": TEMPORARY,
}  # fmt: skip


def account(
    memory_model: MemoryModel,
    chosen: Assignment,
    events: Sequence[StepEvent],
    hidden: Seconds,
    limit: CostParameter,
    simulated: SimulatedStep,
) -> CostBreakdown:
    """The breakdown of an assignment whose step has these events, with `hidden` seconds of overlap; `limit` is the budget."""
    prices, analysis = memory_model.formulated.prices, memory_model.formulated.analysis
    moment = int(memory_model.liveness.walk(chosen).argmax())
    held, forward, backward = memory_model.held(chosen, moment), _by_name(events, "forward"), _by_name(events, "backward")
    recompute, offload = _by_name(events, "recompute"), _by_name(events, "offload")
    ops = [op.name for op in analysis.program.ops]
    elsewhere = memory_model.away(chosen)
    return CostBreakdown(
        cost_parameters=(*_figures(analysis.program, prices.mesh, prices.optimizer, bool(offload or analysis.places)), limit),
        compute={name: (forward[name], backward[name]) for name in ops if name in forward},
        recompute={name: recompute[name] for name in ops if name in recompute},
        conversions=sum(event.seconds for event in events if event.kind == "conversion"),
        optimizer=sum(event.seconds for event in events if event.kind == "optimizer"),
        memory=_memory(analysis.program, held, prices.optimizer),
        moment=moment_text(analysis.program, moment),
        fullest=tuple(held[:5]),
        runs=dict(_runs(analysis, chosen)),
        stored=dict(_stored(analysis, chosen)),
        tied={name: p.value.name for p in analysis.program.parameters for name in p.names if name != p.value.name},
        simulated=simulated,
        copies=analysis.copies,
        offload=offload,
        hidden=hidden,
        host=elsewhere[H] if analysis.places else {},
        disk=elsewhere.get(D, {}),
    )


def _by_name(events: Sequence[StepEvent], kind: EventKind) -> dict[str, Seconds]:
    """The seconds of the events of a kind, by op or value."""
    found: dict[str, Seconds] = {}
    for event in events:
        if event.kind == kind:
            found[event.name] = found.get(event.name, 0.0) + event.seconds
    return found


def _figures(program: Program, mesh: Mesh, optimizer: Optimizer, offload: bool) -> Iterator[CostParameter]:
    """The parameters behind the prices of a program."""
    device = mesh.device
    assert device is not None, "a mesh is priced with its device"
    source = device.source
    for dtype in dict.fromkeys(dtype_of(op, [program.values[n] for n in op.operands]) for op in program.ops):
        if dtype.is_floating_point:
            name = str(dtype).removeprefix("torch.")
            yield CostParameter(of=DEVICE, name=name, value=peak(dtype, device), unit="op/s", source=source)
    yield CostParameter(of=DEVICE, name="memory", value=device.memory, unit="B", source=source)
    yield CostParameter(of=DEVICE, name="memory bandwidth", value=device.bandwidth, unit="B/s", source=source)
    yield CostParameter(of=DEVICE, name="kernel launch", value=device.launch, unit="s", source=source)
    if device.interference < 1:
        yield CostParameter(of=DEVICE, name="interference", value=device.interference, unit="", source=source)
    if offload and device.host:
        yield CostParameter(
            of=DEVICE, name="host bandwidth", value=device.host.bandwidth, unit="B/s", source=device.host.source
        )
    if mesh.has_memories:
        for name, value, unit in (
            ("share of the host's memory", device.host_memory, "B"),
            ("share of the host's memory bandwidth", device.host_bandwidth, "B/s"),
        ):
            yield CostParameter(of=DEVICE, name=name, value=value, unit=unit, source=device.host_source)
        yield from _of_disk(device.disk) if device.disk else ()
    for axis, link in zip(mesh.axes, mesh.links, strict=True):
        yield CostParameter(of=axis, name="bandwidth", value=link.bandwidth, unit="B/s", source=link.source)
        yield CostParameter(of=axis, name="latency", value=link.latency, unit="s", source=link.source)
    yield CostParameter(of=OPTIMIZER, name=optimizer.name, value=optimizer.states, unit="", source=optimizer.source)
    compared = fidelity(mesh)
    if compared:
        yield CostParameter(of=ACCURACY, name=compared.name, value=compared.median, unit="", source=compared.source)


def _memory(program: Program, held: list[Allocation], optimizer: Optimizer) -> dict[str, Bytes]:
    """Bytes by purpose. The workspace of a backward is negative if its gradients never exist all at once; what other temporary
    memory does not absorb of it is subtracted from the gradients.
    """
    of, found = Purposes(program, optimizer), dict.fromkeys(PURPOSES, 0)
    for entry in held:
        for purpose, size in of(entry.kind, entry.name, entry.bytes):
            found[purpose] += size
    less = min(0, found[TEMPORARY])
    found |= {TEMPORARY: found[TEMPORARY] - less, GRADIENTS: found[GRADIENTS] + less}
    return {kind: size for kind, size in found.items() if size}


class Purposes:
    """The purposes of a program's allocations, among `PURPOSES`."""

    def __init__(self, program: Program, optimizer: Optimizer) -> None:
        self._trained = {p.value.name for p in program.parameters if p.value.requires_grad}
        self._parameters = {p.value.name for p in program.parameters}
        self._inputs = {value.name for value in program.inputs}
        self._tensors = 1 + optimizer.states

    def __call__(self, kind: str, name: str, size: Bytes) -> Iterator[tuple[str, Bytes]]:
        """The bytes of an allocation by purpose: a trained parameter is stored with its optimizer state."""
        if kind != "stored":
            yield PURPOSE[kind], size
        elif name in self._parameters:
            own = size // self._tensors if name in self._trained else size
            yield "parameters", own
            yield "optimizer state", size - own
        else:
            yield "inputs" if name in self._inputs else "buffers", size


def moment_text(program: Program, moment: int) -> str:
    """When a moment of the walk is."""
    count = len(program.ops)
    if moment == 2 * count:
        return "the optimizer's step"
    name = program.ops[moment if moment < count else 2 * count - 1 - moment].name
    return f"the {'forward' if moment < count else 'backward'} of {name}"


def _runs(analysis: Analysis, chosen: Assignment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is split, per axis, in every op that uses a parameter or is well known."""
    program, sample = analysis.program, LabelSample.of(analysis.program)
    for op in program.ops:
        if told(analysis, op):
            yield op.name, words(op, analysis.fits[op.name], chosen.ops[op.name], program, sample)


def told(analysis: Analysis, op: Op) -> bool:
    """Whether an op is interesting to people: it uses a parameter, or is well known."""
    read = any(name in analysis.weights for name in op.operands) and op.results[0].name not in analysis.copies
    return row_of(op).says is not None or read


def words(op: Op, fitted: OpSharding | None, candidate: Candidate, program: Program, sample: LabelSample) -> tuple[str, ...]:
    """What a candidate splits on each axis, in words."""

    def word(form: Form) -> str:
        kind, which, stride = form
        if kind == "D" and fitted is not None:
            first, *_ = fitted.factors_of(fitted.distributed[which])
            return role(op, fitted, first, stride, program.values, sample) + sent(fitted.distributed[which])
        if kind != "S" or fitted is None:
            return {"I": WHOLE, "R": REPEATED, "P": ADDENDS, "O": OWN_ROWS}[kind]
        return role(op, fitted, which, stride, program.values, sample)

    return tuple(map(word, candidate.forms))


def sent(form: ParallelForm) -> str:
    """What a distributed form sends, in words: " with 2 all-reduces inside"."""
    counts = Counter(message.kind.replace("_", "-") for message in (*form.forward, *form.backward))
    said = " and ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items())
    return f" with {said} inside" if said else ""


def _stored(analysis: Analysis, chosen: Assignment) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is split, per axis, in every parameter, argument and result."""
    program, sample = analysis.program, LabelSample.of(analysis.program)
    for parameter in program.parameters:
        name = parameter.value.name
        yield name, stored_words(analysis, name, chosen.given[name])
    passed = [
        (INPUT + value.name, value, chosen.given[value.name]) for value in program.inputs if value not in analysis.step.hoisted
    ]
    passed += [(OUTPUT + o.path, program.values[o.value], chosen.outputs[o.path]) for o in program.outputs]
    for name, value, layout in passed:
        yield name, tuple(sample.role(value, s.dim, s.stride) if s.kind == "S" else WHOLE for s in layout)


def stored_words(analysis: Analysis, name: str, layout: Layout) -> tuple[str, ...]:
    """What a parameter's stored layout splits on each axis, with dims named by an op that uses it."""
    names = [name, *(copy for copy, of in analysis.copies.items() if of == name)]
    readers = [(op, used) for used in names for op in analysis.readers[used]]
    known = [(op, used) for op, used in readers if row_of(op).says]
    op, used = (known or readers)[0] if readers else (None, name)
    fitted = analysis.fits[op.name] if op else None
    if op is None or fitted is None:
        return tuple(f"dim {s.dim}" if s.kind == "S" else unsplit(s) for s in layout)
    position, shape = op.operands.index(used), analysis.program.values[name].shape

    def word(axis: int) -> str:
        if layout[axis].kind != "S":
            return unsplit(layout[axis])
        found = role_of_dim(op, fitted, position, layout[axis].dim, analysis.program.values)
        count = blocks(layout, axis, shape, analysis.sizes)
        return found if count == 1 else f"{found} of each of {count} blocks"

    return tuple(map(word, range(len(layout))))


def unsplit(state: State) -> str:
    """The words for a stored tensor on an axis that does not split it."""
    return {H: HOSTED, D: ON_DISK}.get(state, WHOLE)


def _of_disk(disk: Disk) -> Iterator[CostParameter]:
    """The parameters of a disk in prices."""
    for name, value, unit in (("memory", disk.memory, "B"), ("reading", disk.read, "B/s"), ("writing", disk.write, "B/s")):
        yield CostParameter(of=DEVICE, name=f"share of the disk's {name}", value=value, unit=unit, source=disk.source)


__all__ = ["GRADIENTS", "PURPOSES", "TEMPORARY", "Purposes", "account", "moment_text", "stored_words", "told", "words"]

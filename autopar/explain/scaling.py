"""How a model scales: the fastest plan for each number of devices, and the fewest devices for a given step time.

Every number of devices trains the same global batch, the sample's (strong scaling). The devices of a node are one mesh axis,
and nodes are another one outside of it: 64 devices in nodes of 8 are planned on (8, 8), or in the fastest shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from autopar.cost_models import catalog
from autopar.cost_models.energy import BOARDS
from autopar.errors import AutoparError, BudgetError
from autopar.explain.energy import energy_of
from autopar.ir.device import Bytes, Seconds
from autopar.ir.mesh import AutoMesh
from autopar.ir.program import Program
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.text import Part, milliseconds, size_text
from autopar.planning.no_plan import SMALLEST
from autopar.planning.pipeline_search import plan_on
from autopar.planning.planner import connected_meshes

HOUR: Seconds = 3600.0
COLUMNS = ("devices", 9), ("mesh", 10), ("step ms", 12), ("speed-up", 10), ("efficiency", 12), ("MFU", 8), ("memory", 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStep:
    """The plan for a number of devices: step time, share of the devices' peaks (MFU), and peak memory of each.

    Without a plan these are 0, and `refusal` says why. `samples` and `tokens` are per step, 0 where unknown.
    """

    devices: int
    mesh: tuple[int, ...]
    step_time: Seconds = 0.0
    mfu: float = 0.0
    peak_memory: Bytes = 0
    samples: int = 0
    tokens: int = 0
    refusal: str = ""
    joules: float = 0.0  # of a step, at most; 0 where the device's power is not known, or of pipeline stages

    @property
    def rate(self) -> float:
        """Tokens per second, or samples per second if there are no tokens."""
        return (self.tokens or self.samples) / self.step_time if self.step_time else 0.0

    @property
    def per_million(self) -> Seconds:
        """Device seconds, summed over devices, for a million tokens or samples."""
        return 1e6 * self.devices / self.rate if self.rate else 0.0


def node_mesh(devices: int, per_node: int) -> tuple[int, ...]:
    """The mesh of so many devices: one axis inside a node; else nodes and devices per node, if nodes are full.

    >>> node_mesh(4, 8), node_mesh(64, 8), node_mesh(12, 8)
    ((4,), (8, 8), (12,))
    """
    return (devices // per_node, per_node) if devices > per_node and devices % per_node == 0 else (devices,)


def scaling(program: Program, counts: Iterable[int], options: Options, *, shapes: bool = False) -> Iterator[ScalingStep]:
    """The fastest plan of a captured program on each number of devices; each is planned on demand.

    With `shapes` the mesh shapes are searched too (`autopar.planning.mesh_shapes`).
    """
    per_node = catalog.device(options.device, processes=1).per_node
    for devices in counts:
        sizes = node_mesh(devices, per_node)
        try:
            meshes = connected_meshes(AutoMesh(devices) if shapes else sizes, options, program)
            plan = plan_on(program, meshes, options)
            sizes = plan.sizes if shapes else sizes
        except BudgetError as error:
            least = error.details.get(SMALLEST)
            needs = f": needs {size_text(float(least.removeprefix('budget=')))} per device" if least else ""
            yield ScalingStep(devices=devices, mesh=sizes, refusal=f"does not fit{needs}")
        except AutoparError as error:
            yield ScalingStep(devices=devices, mesh=sizes, refusal=error.what)
        else:
            yield _step(devices, sizes, plan)


def _step(devices: int, sizes: tuple[int, ...], plan: Plan) -> ScalingStep:
    step = plan.breakdown.simulated
    return ScalingStep(
        devices=devices,
        mesh=sizes,
        step_time=plan.step_time,
        mfu=step.at_peak / plan.step_time if plan.step_time else 0.0,
        peak_memory=plan.peak_memory,
        samples=step.samples,
        tokens=step.tokens,
        joules=energy_of(plan).total if plan.device in BOARDS and not plan.pipeline else 0.0,
    )


def fewest(steps: Iterable[ScalingStep], within: Seconds) -> ScalingStep | None:
    """The step on the fewest devices that takes at most so long; None if there is none."""
    fast = (step for step in steps if not step.refusal and step.step_time <= within)
    return min(fast, key=lambda step: step.devices, default=None)


def best(steps: Iterable[ScalingStep], objective: str, within: Seconds | None = None) -> ScalingStep | None:
    """The best step by "time", "energy" or "cost", which is device time; None if none has a plan.

    With `within`, among steps that take at most so long; ties go to the fewest devices. Steps of unknown energy do not count
    for "energy".
    """
    worth: dict[str, Callable[[ScalingStep], float]] = {
        "time": lambda step: step.step_time,
        "energy": lambda step: step.joules,
        "cost": lambda step: step.step_time * step.devices,
    }
    planned = [step for step in steps if not step.refusal and (within is None or step.step_time <= within)]
    known = [step for step in planned if objective != "energy" or step.joules]
    return min(known, key=lambda step: (worth[objective](step), step.devices), default=None)


def scaling_parts(
    steps: Iterable[ScalingStep], within: Seconds | None, price: float | None, objective: str | None = None
) -> Iterator[Part]:
    """The printed table, a row as soon as its plan is ready; then the answer to `within`, in seconds.

    With an `objective` it ends with the best number of devices by it.

    With `price`, of a device per hour, a row has the price of a million tokens or samples.
    """
    known: list[ScalingStep] = []
    for step in steps:
        if not known:
            yield _head(step, price)
        known.append(step)
        yield _row(step, next((other for other in known if not other.refusal), step), price)
    yield "the global batch is the same on all; speed-up and efficiency: relative to the first row that has a plan"
    if within is not None:
        yield _answer(known, within)
    if objective is not None:
        yield _best(known, objective, within, price)


def _head(step: ScalingStep, price: float | None) -> str:
    kind = "tokens" if step.tokens else "samples"
    head = "".join(f"{name:>{width}}" for name, width in (*COLUMNS, (f"{kind}/s", 14)))
    return head + (f"{f'price of 1M {kind}':>22}" if price is not None else "")


def _row(step: ScalingStep, first: ScalingStep, price: float | None) -> str:
    cells: Sequence[str] = (f"{step.devices}", "x".join(map(str, step.mesh)))
    if step.refusal:
        return _cells(cells) + f"  {step.refusal}"
    speed = first.step_time / step.step_time if step.step_time else 1.0
    cells = (
        *cells, milliseconds(step.step_time), f"{speed:.2f}", f"{speed * first.devices / step.devices:.1%}", f"{step.mfu:.1%}",
        size_text(step.peak_memory),
    )  # fmt: skip
    row = _cells(cells) + f"{step.rate:>14,.0f}"
    if price is None:
        return row
    return row + (f"{price * step.per_million / HOUR:>22.4g}" if step.rate else "")


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=False))


def _answer(known: Sequence[ScalingStep], within: Seconds) -> str:
    found = fewest(known, within)
    if found is not None:
        return f"{found.devices} devices are the fewest of these that take a step within {milliseconds(within)} ms"
    planned = [step for step in known if not step.refusal]
    if not planned:
        return "none of these has a plan"
    best = min(planned, key=lambda step: step.step_time)
    said = f"the fastest of them, {best.devices} devices, takes {milliseconds(best.step_time)} ms"
    return f"none of these takes a step within {milliseconds(within)} ms; {said}"


def _best(known: Sequence[ScalingStep], objective: str, within: Seconds | None, price: float | None) -> str:
    """The best of the steps, with its figures."""
    found = best(known, objective, within)
    if found is None:
        return f"none of these has a known {objective}" + (" within that time" if within is not None else "")
    spent = found.devices * found.step_time
    said = {
        "time": f"{milliseconds(found.step_time)} ms a step",
        "energy": f"at most {found.joules:,.4g} J a step (boards at their power limit, and the network)",
        "cost": f"{spent:,.4g} device seconds a step"
        + (f", {price * spent / HOUR:.4g} at the price" if price is not None else ""),
    }
    of = f" of those within {milliseconds(within)} ms" if within is not None else ""
    return f"{found.devices} devices are best by {objective}{of}: {said[objective]}"


def scaling_data(steps: Iterable[ScalingStep], within: Seconds | None, objective: str | None = None) -> dict[str, object]:
    """The table as data; with `within` also the fewest devices that are fast enough, with an `objective` the best; or None."""
    known = list(steps)
    found = fewest(known, within) if within is not None else None
    data: dict[str, object] = {"scaling": [asdict(step) for step in known]}
    if objective is not None:
        most = best(known, objective, within)
        data["best"] = most and most.devices
    return data | ({"fewest": found and found.devices} if within is not None else {})


__all__ = ["ScalingStep", "best", "fewest", "node_mesh", "scaling", "scaling_data", "scaling_parts"]

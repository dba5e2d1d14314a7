"""An upper bound on the energy of a step: boards at their power limit, plus the network between nodes.

A board's energy is its limit times the length of the step; the parts of its memory and of links inside the node are included,
and listed separately. Network cards and switches are not on the boards, and are added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models import catalog
from autopar.cost_models.energy import BOARDS, DRAM_SOURCE, LINK_SOURCE, Joules, Watts, between_systems, link_bit, sent
from autopar.errors import MeshError, PlanError
from autopar.plan.plan import Plan
from autopar.plan.text import Part, grid, size_text

KWH = 3.6e6  # joules
BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyUse:
    """The energy of one step on all devices: joules of boards while they compute and while they wait, and of data movement.

    `moved` is link -> (bytes, joules), "memory" among them. `network` is for links that leave the node. `samples` and `tokens`
    are those of a step, 0 where unknown.
    """

    devices: int
    watts: Watts
    computing: Joules
    waiting: Joules
    network: Joules
    moved: Mapping[str, tuple[float, Joules]]
    samples: int
    tokens: int
    source: str

    @property
    def total(self) -> Joules:
        """Boards and network."""
        return self.computing + self.waiting + self.network


def energy_of(plan: Plan) -> EnergyUse:
    """The energy of a plan's step. Raises MeshError for a device of unknown power, and PlanError for pipeline stages."""
    if plan.pipeline:
        raise PlanError(
            "the energy of pipeline stages is not known: their messages are not counted", fix="a plan without stages"
        )
    board = BOARDS.get(plan.device)
    if board is None:
        what = f"the power of the device {plan.device!r} is not known"
        raise MeshError(what, devices=", ".join(BOARDS), fix="plan for one of these")
    step, devices = plan.breakdown.simulated, plan.mesh.size
    moved: dict[str, tuple[float, Joules]] = {}
    reads = step.memory * catalog.DEVICES[plan.device].bandwidth * devices
    moved["memory"] = reads, reads * BITS * board.memory_bit
    over: dict[str, float] = defaultdict(float)
    for message in plan.collectives:
        places = plan.mesh.axes_named(message.axis)
        size = math.prod(plan.sizes[place] for place in places)
        total = sent(message.kind, message.bytes, size) * devices / size
        for place, share in zip(places, hops([plan.sizes[place] for place in places]), strict=True):
            over[plan.links[place]] += total * share
    moved |= {link: (count, count * BITS * link_bit(link)) for link, count in over.items()}
    waiting = step.exposed / step.seconds if step.seconds else 0.0
    boards = board.watts * devices * plan.step_time
    return EnergyUse(
        devices=devices,
        watts=board.watts,
        computing=boards * (1 - waiting),
        waiting=boards * waiting,
        network=sum(joules for link, (_, joules) in moved.items() if between_systems(link)),
        moved=moved,
        samples=step.samples,
        tokens=step.tokens,
        source=board.source,
    )


def hops(sizes: Sequence[int]) -> list[float]:
    """For each axis the share of a ring's hops in which it is the outermost to change, with ranks in the mesh's order.

    >>> hops((8, 4))  # of four hops one leaves a group of the inner axis
    [0.25, 0.75]
    """
    starts = [1 / math.prod(sizes[place + 1 :]) for place in range(len(sizes))]  # of hops that change this axis, or one outside
    return [start - before for before, start in zip((0.0, *starts), starts, strict=False)]


def energy_parts(use: EnergyUse, epoch: int | None) -> Iterator[Part]:
    """The printed tables; `epoch` is the number of samples in the data."""
    unit, count = ("token", use.tokens) if use.tokens else ("sample", use.samples)
    table = grid("energy, at most", "J per step", f"J per {unit}", "kWh per epoch", right=(1, 2, 3))
    rows = {
        "boards, computing": use.computing,
        "boards, waiting for messages": use.waiting,
        "network between nodes": use.network,
        "total": use.total,
    }
    for name, joules in rows.items():
        each = f"{joules / count:.4g}" if count else ""
        whole = f"{per_epoch(joules, use, epoch):,.4g}" if epoch and use.samples else ""
        table.add_row(name, f"{joules:,.4g}", each, whole)
    yield table
    yield f"boards: {use.devices} at their limit of {use.watts:g} W ({use.source}); they take less where they wait"
    if not epoch:
        yield "--epoch SAMPLES says how many samples the data have"
    yield ""
    moved = grid("moved in a step", "bytes", "J", "", right=(1, 2))
    for place, (count_, joules) in use.moved.items():
        where = "beside the boards" if between_systems(place) else "part of the boards'"
        moved.add_row(place, size_text(count_), f"{joules:,.4g}", where)
    yield moved
    yield f"by {DRAM_SOURCE}; links by {LINK_SOURCE}"


def per_epoch(joules: Joules, use: EnergyUse, epoch: int) -> float:
    """Kilowatt-hours for so many samples, from a step's joules."""
    return joules * epoch / use.samples / KWH


def energy_data(use: EnergyUse, epoch: int | None) -> dict[str, object]:
    """The tables as data, in joules and bytes."""
    moved = {place: {"bytes": count, "joules": joules} for place, (count, joules) in use.moved.items()}
    found: dict[str, object] = {
        "computing": use.computing, "waiting": use.waiting, "network": use.network, "total": use.total, "moved": moved,
    }  # fmt: skip
    if use.tokens:
        found["per_token"] = use.total / use.tokens
    if epoch and use.samples:
        found["kwh_per_epoch"] = per_epoch(use.total, use, epoch)
    return found


__all__ = ["EnergyUse", "energy_data", "energy_of", "energy_parts", "per_epoch"]

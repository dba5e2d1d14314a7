"""The parts of a plan worth comparing: totals, communication, stored layouts, and how ops are split.

A summary is small: repeated blocks are folded into one entry when written, as in {"h.0-11.mlp.c_fc.weight": "I, S(1)"}.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from autopar.files import typed
from autopar.ir.device import Bytes, Seconds
from autopar.plan.plan import Plan
from autopar.plan.tables import COLLECTIVE, by_kind, bytes_of, seconds_of
from autopar.plan.text import alike, folded

MOST = 1_000_000  # names in a file: a model of a thousand blocks has a tenth


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTotal:
    """All collectives of one kind over one axis in one pass; `bytes` is the total of their larger buffers on one rank."""

    kind: str
    axis: str
    where: str
    number: int
    bytes: Bytes
    seconds: Seconds

    @property
    def key(self) -> tuple[str, str, str]:
        """What these collectives have in common."""
        return self.kind, self.axis, self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSummary:
    """The stages of a plan, the modules in which they begin, and the bubble."""

    axis: str
    schedule: str
    stages: int
    microbatches: int
    modules: tuple[str, ...]
    bubble: float

    @staticmethod
    def of(plan: Plan) -> PipelineSummary | None:
        """The summary of a plan's pipeline, if it has one."""
        found = plan.pipeline
        if found is None:
            return None
        return PipelineSummary(
            axis=found.axis,
            schedule=found.schedule,
            stages=len(plan.stages),
            microbatches=plan.microbatches,
            modules=found.modules,
            bubble=found.timeline.bubble,
        )

    def __str__(self) -> str:
        found = f"{self.stages} stages over {self.axis}, {self.schedule}, {self.microbatches} micro-batches"
        return f"{found}, from {', '.join(name or 'the model' for name in self.modules)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals, communication by kind, axis and pass, layouts, and the dims that ops split, in words.

    `stored` has inputs, parameters, buffers and outputs; `runs` the ops that have parameters or are well known. With a
    `pipeline` these, and the collectives, are of all stages: no rank takes part in all of them.
    """

    hash: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    device: str
    options: Mapping[str, str]
    step_time: Seconds
    peak_memory: Bytes
    collectives: tuple[CommunicationTotal, ...]
    stored: Mapping[str, str]
    runs: Mapping[str, str]
    hidden: Seconds  # of the communication, by which the step is shorter
    simulated: Seconds  # what the step takes by the simulator, which judges its price; of stages by their clock
    pipeline: PipelineSummary | None = None

    @property
    def bytes_sent(self) -> Bytes:
        """Total bytes of the collectives of a step."""
        return sum(entry.bytes for entry in self.collectives)

    @property
    def communication(self) -> Seconds:
        """Total time of the collectives of a step."""
        return sum(entry.seconds for entry in self.collectives)

    @property
    def exposed(self) -> Seconds:
        """The part of that time that the step waits for: the rest is hidden behind compute."""
        return self.communication - self.hidden

    @property
    def off(self) -> float:
        """The fraction by which the simulated step is longer than its price; negative if it is shorter."""
        return self.simulated / self.step_time - 1

    @property
    def mesh(self) -> str:
        """The mesh in command-line notation: "dp=2,tp=4"."""
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    @staticmethod
    def of(plan: Plan) -> Summary:
        """The summary of a plan."""
        parts = plan.stages or (plan,)
        sent = tuple(
            CommunicationTotal(
                kind=kind, axis=axis, where=where, number=len(group), bytes=bytes_of(group), seconds=seconds_of(group)
            )
            for (kind, axis, where), group in sorted(by_kind(one for part in parts for one in part.collectives).items())
        )
        return Summary(
            hash=plan.hash,
            axes=plan.axes,
            sizes=plan.sizes,
            links=plan.links,
            device=plan.device,
            options=plan.options,
            step_time=plan.step_time,
            peak_memory=plan.peak_memory,
            collectives=sent,
            stored={name: layout for part in parts for name, layout in part.placed.items()},
            runs={op: ", ".join(words) for part in parts for op, words in part.breakdown.runs.items()},
            hidden=sum(part.breakdown.hidden for part in parts),
            simulated=plan.step_time if plan.pipeline else plan.breakdown.simulated.seconds,
            pipeline=PipelineSummary.of(plan),
        )

    def to_data(self) -> dict[str, object]:
        """The summary as JSON data."""
        data = asdict(self)
        for entry in data["collectives"]:
            entry["pass"] = entry.pop("where")
        if self.pipeline is None:
            del data["pipeline"]
        return {**data, "stored": fold(self.stored), "runs": fold(self.runs)}

    @staticmethod
    def from_data(data: Mapping[str, object]) -> Summary:
        """Read a summary from JSON data; raises ValueError, with the place, if they are invalid."""
        sent = data.get("collectives")
        rows = [_renamed(row, "pass", "where") for row in sent] if isinstance(sent, list) else sent
        made = typed(Summary, {**data, "collectives": rows} if "collectives" in data else dict(data))
        if not len(set(made.axes)) == len(made.axes) == len(made.sizes) == len(made.links):
            raise ValueError("axes, sizes and links have not one entry for each axis")
        totals = (made.peak_memory, made.hidden, *(total for row in made.collectives for total in (row.bytes, row.seconds)))
        if min(made.step_time, made.simulated) <= 0 or min(totals) < 0:
            raise ValueError("step_time and simulated are positive, and no other figure negative")
        if unknown := [row.kind for row in made.collectives if row.kind not in COLLECTIVE]:
            raise ValueError(f"there is no collective {unknown[0]!r}")
        return replace(made, stored=unfold(made.stored), runs=unfold(made.runs))


def _renamed(row: object, old: str, new: str) -> object:
    """A JSON object with one entry renamed."""
    return {new if name == old else name: held for name, held in row.items()} if isinstance(row, dict) else row


def fold(entries: Mapping[str, str]) -> dict[str, str]:
    """Merge names that differ only in block numbers and have the same text, if `unfold` can restore them all.

    >>> fold({"h.0.w": "I", "h.1.w": "I", "h.2.w": "S(0)"})
    {'h.0-1.w': 'I', 'h.2.w': 'S(0)'}
    """
    return {name: text for names, text in alike(entries) for name in _folded(names)}


def _folded(names: list[str]) -> list[str]:
    one = folded(names)
    return [one] if len(names) > 1 and sorted(unfolded(one)) == sorted(names) else [*map(_escaped, names)]


def _escaped(name: str) -> str:
    """A name escaped so that no part reads as a folded one."""
    return "".join(f"\\{part}" if _runs(part) or part.startswith("\\") else part for part in re.split(r"([.:])", name))


def unfold(entries: Mapping[str, str]) -> dict[str, str]:
    """Restore the entries that `fold` merged; raises ValueError for more of them than any model has."""
    if sum(map(_count, entries)) > MOST:
        raise ValueError(f"it stands for more than {MOST} names")
    return {name: text for names, text in entries.items() for name in unfolded(names)}


def unfolded(name: str) -> Iterator[str]:
    """The names that a folded one stands for.

    >>> list(unfolded("h.0-1,7.w"))
    ['h.0.w', 'h.1.w', 'h.7.w']
    """
    parts = [_numbers(part) for part in re.split(r"([.:])", name)]
    return ("".join(chosen) for chosen in itertools.product(*parts))


def _count(name: str) -> int:
    """How many names a folded one stands for, without making them."""
    runs = (_runs(part) for part in re.split(r"([.:])", name))
    return math.prod(sum(max(0, last - first + 1) for first, last in found) for found in runs if found)


def _numbers(part: str) -> list[str]:
    runs = [str(number) for first, last in _runs(part) for number in range(first, last + 1)]
    return runs or [part.removeprefix("\\")]


def _runs(part: str) -> list[tuple[int, int]]:
    """The ranges of block numbers that a part of a folded name consists of; empty for a part that is a name itself."""
    if not re.fullmatch(r"[0-9]{1,18}([-,][0-9]{1,18})+", part):
        return []
    runs = [[*map(int, run.split("-"))] for run in part.split(",")]
    return [(run[0], run[-1]) for run in runs] if all(len(run) <= 2 and run[0] <= run[-1] for run in runs) else []

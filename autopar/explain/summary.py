"""What of a plan is worth comparing with another: its totals, its communication, stored layouts, and how ops are split.

A summary is small: repeated blocks are folded into one entry where it is written, as in {"h.0-11.mlp.c_fc.weight": "I, S(1)"}.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autopar.ir.mesh import Bytes, Seconds
from autopar.plan.plan import Plan
from autopar.plan.tables import by_kind, bytes_of, seconds_of
from autopar.plan.text import alike, folded


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
class Summary:
    """Totals, communication by kind, axis and pass, layouts, and the dims that ops split, in words.

    `stored` has inputs, parameters, buffers and outputs; `runs` the ops that have parameters or are well known.
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
    hidden: Seconds = 0.0  # of the communication, by which the step is shorter

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
        """What the step takes of that time: the rest is hidden behind compute."""
        return self.communication - self.hidden

    @property
    def mesh(self) -> str:
        """The mesh as the command line takes it: "dp=2,tp=4"."""
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))

    @staticmethod
    def of(plan: Plan) -> Summary:
        """The summary of a plan."""
        sent = tuple(
            CommunicationTotal(
                kind=kind, axis=axis, where=where, number=len(group), bytes=bytes_of(group), seconds=seconds_of(group)
            )
            for (kind, axis, where), group in sorted(by_kind(plan.collectives).items())
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
            stored=plan.placed,
            runs={op: ", ".join(words) for op, words in plan.breakdown.runs.items()},
            hidden=plan.breakdown.hidden,
        )

    def to_data(self) -> dict[str, object]:
        """The summary as JSON has it."""
        data = asdict(self)
        if not self.hidden:
            del data["hidden"]
        for entry in data["collectives"]:
            entry["pass"] = entry.pop("where")
        return {**data, "stored": fold(self.stored), "runs": fold(self.runs)}

    @staticmethod
    def from_data(data: object) -> Summary:
        """The summary that JSON data denote; raises what indexing and converting raise where they do not denote one."""
        found: Any = data
        return Summary(
            hash=str(found["hash"]),
            device=str(found["device"]),
            axes=tuple(map(str, found["axes"])),
            sizes=tuple(map(int, found["sizes"])),
            links=tuple(map(str, found["links"])),
            options={str(name): str(text) for name, text in found["options"].items()},
            step_time=float(found["step_time"]),
            peak_memory=int(found["peak_memory"]),
            collectives=tuple(
                CommunicationTotal(
                    kind=str(entry["kind"]),
                    axis=str(entry["axis"]),
                    where=str(entry["pass"]),
                    number=int(entry["number"]),
                    bytes=int(entry["bytes"]),
                    seconds=float(entry["seconds"]),
                )
                for entry in found["collectives"]
            ),
            stored=unfold(found["stored"]),
            runs=unfold(found["runs"]),
            hidden=float(found.get("hidden", 0.0)),
        )


def fold(entries: Mapping[str, str]) -> dict[str, str]:
    """One entry for names that differ in block numbers only and have the same text, where `unfold` gives them all back.

    >>> fold({"h.0.w": "I", "h.1.w": "I", "h.2.w": "S(0)"})
    {'h.0-1.w': 'I', 'h.2.w': 'S(0)'}
    """
    return {name: text for names, text in alike(entries) for name in _folded(names)}


def _folded(names: list[str]) -> list[str]:
    one = folded(names)
    return [one] if sorted(unfolded(one)) == sorted(names) else names


def unfold(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries that `fold` made one of."""
    return {str(name): str(text) for names, text in entries.items() for name in unfolded(names)}


def unfolded(name: str) -> Iterator[str]:
    """The names that a folded one stands for.

    >>> list(unfolded("h.0-1,7.w"))
    ['h.0.w', 'h.1.w', 'h.7.w']
    """
    parts = [_numbers(part) if "-" in part or "," in part else [part] for part in re.split(r"([.:])", name)]
    return ("".join(chosen) for chosen in itertools.product(*parts))


def _numbers(part: str) -> list[str]:
    runs = [run.split("-") for run in part.split(",")]
    if not all(len(run) <= 2 and all(map(str.isdecimal, run)) for run in runs):
        return [part]
    return [str(number) for run in runs for number in range(int(run[0]), int(run[-1]) + 1)]

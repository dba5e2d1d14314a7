"""Compares two plans: the totals, then what makes the difference.

step time   12.345 ms, was 11.111 ms (+11.1%)
...
changed layouts
  h.0-11.mlp.c_fc.weight  I, I  (was I, S(1))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.explain.summary import CommunicationTotal, Summary
from autopar.plan.plan import Plan
from autopar.plan.tables import kind_text
from autopar.plan.text import alike, folded, milliseconds, size_text

ROWS = 6  # of one list
TIMES = 10.0  # a larger growth is told as a multiple
SAME = 1e-6  # sums of the same seconds in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """One figure of two plans, in seconds or bytes; less is better."""

    name: str
    unit: str  # "s" or "B"
    old: float
    new: float

    @property
    def growth(self) -> float:
        """The growth relative to the old figure: 0.1 for 10% more, infinite if that was zero."""
        if math.isclose(self.old, self.new, rel_tol=SAME):
            return 0.0
        return self.new / self.old - 1 if self.old else math.inf

    @property
    def now(self) -> str:
        """The new figure, and its growth, if any."""
        change = f" ({self._percent})" if self.growth and self.old else ""
        return f"{self._text(self.new)}{change}"

    def __str__(self) -> str:
        if not self.growth:
            return f"{self._text(self.new)}, unchanged"
        change = f" ({self._percent})" if self.old and self.new else ""
        return f"{self._text(self.new)}, was {self._text(self.old)}{change}"

    @property
    def _percent(self) -> str:
        return f"{self.growth:+.1%}" if self.growth < TIMES else f"{self.growth + 1:.0f} times"

    def _text(self, figure: float) -> str:
        return f"{milliseconds(figure)} ms" if self.unit == "s" else size_text(figure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Names of repeated blocks with the same change; "" if a plan lacks them."""

    names: tuple[str, ...]
    old: str
    new: str

    @property
    def name(self) -> str:
        """The names folded into one."""
        return folded(self.names)

    def __str__(self) -> str:
        return f"{self.new or 'removed'}  (was {self.old})" if self.old else f"{self.new}  (new)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs between two plans: totals, communication, stored layouts, and how ops are split."""

    old: Summary
    new: Summary

    @property
    def totals(self) -> tuple[Total, ...]:
        """Step time, peak memory, bytes communicated, and the simulated step."""
        old, new = self.old, self.new
        return (
            Total(name="step time", unit="s", old=old.step_time, new=new.step_time),
            Total(name="peak memory", unit="B", old=old.peak_memory, new=new.peak_memory),
            Total(
                name="bytes of collectives" if old.pipeline and new.pipeline else "bytes sent",  # without those between stages
                unit="B",
                old=old.bytes_sent,
                new=new.bytes_sent,
            ),
            Total(name="simulated", unit="s", old=old.simulated, new=new.simulated),
        )

    @property
    def parts(self) -> tuple[Total, ...]:
        """The step time, split into compute and exposed communication; with stages it is not such a sum."""
        old, new = self.old, self.new
        if old.pipeline or new.pipeline:
            return ()
        return (
            Total(name="compute", unit="s", old=old.step_time - old.exposed, new=new.step_time - new.exposed),
            Total(name="communication", unit="s", old=old.exposed, new=new.exposed),
        )

    @property
    def sent(self) -> tuple[tuple[CommunicationTotal, CommunicationTotal], ...]:
        """The collectives by kind, axis and pass whose number, bytes or time changed, old and new; the largest change first."""
        old, new = ({entry.key: entry for entry in summary.collectives} for summary in (self.old, self.new))
        none = {
            key: CommunicationTotal(kind=key[0], axis=key[1], where=key[2], number=0, bytes=0, seconds=0.0)
            for key in (*old, *new)
        }
        pairs = [(old.get(key, none[key]), new.get(key, none[key])) for key in none]
        return tuple(sorted(filter(_differ, pairs), key=lambda pair: -abs(pair[1].seconds - pair[0].seconds)))

    @property
    def stored(self) -> tuple[Changed, ...]:
        """Inputs, parameters, buffers and outputs whose layout changed."""
        return _changed(self.old.stored, self.new.stored)

    @property
    def runs(self) -> tuple[Changed, ...]:
        """Ops that split different dims."""
        return _changed(self.old.runs, self.new.runs)

    def lines(self) -> Iterator[str]:
        """The difference in readable form, at most a screenful."""
        yield from self.premises()
        for total in self.totals:
            yield f"{total.name:<11} {total}"
            if total.name == "step time" and total.growth:
                yield from (f"  {part.name:<15}{part}" for part in self.parts if part.growth)
        yield from _listed("changed communication", [(kind_text(*new.key), _sent_text(old, new)) for old, new in self.sent])
        yield from _listed("changed layouts", [(change.name, str(change)) for change in self.stored])
        yield from _listed("changed splits", [(change.name, str(change)) for change in self.runs])

    def premises(self) -> Iterator[str]:
        """Changes in what was planned for: the model, the mesh, the device, the options."""
        old, new = self.old, self.new
        if old.hash != new.hash:
            yield f"the model or its sample changed: the program is {new.hash}, was {old.hash}"
        pairs = {"mesh": (old.mesh, new.mesh), "links": (", ".join(old.links), ", ".join(new.links))}
        pairs |= {"device": (old.device, new.device)}
        pairs |= {"pipeline": (str(old.pipeline or ""), str(new.pipeline or ""))}
        names = [name for name in {**old.options, **new.options} if name != "pipeline"]
        pairs |= {name: (old.options.get(name, ""), new.options.get(name, "")) for name in names}
        yield from (f"{name:<11} {now or 'none'}, was {was or 'none'}" for name, (was, now) in pairs.items() if was != now)


def difference(old: Plan, new: Plan) -> Difference:
    """What differs between two plans, of the same program or of different ones."""
    return Difference(old=Summary.of(old), new=Summary.of(new))


def _differ(pair: tuple[CommunicationTotal, CommunicationTotal]) -> bool:
    old, new = pair
    return (old.number, old.bytes) != (new.number, new.bytes) or not math.isclose(old.seconds, new.seconds, rel_tol=SAME)


def _sent_text(old: CommunicationTotal, new: CommunicationTotal) -> str:
    if not old.number or not new.number:
        some = new if new.number else old
        text = f"{some.number}, {size_text(some.bytes)}, {milliseconds(some.seconds)} ms"
        return f"{text} (new)" if new.number else f"removed (was {text})"
    number = f"{new.number}" if old.number == new.number else f"{new.number}, was {old.number}"
    size = Total(name="bytes", unit="B", old=old.bytes, new=new.bytes)
    time = Total(name="time", unit="s", old=old.seconds, new=new.seconds)
    return f"{number}; {size}; {time}"


def _changed(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Changed, ...]:
    """The entries that differ, with repeated blocks merged, the most numerous first."""
    pairs = {name: (old.get(name, ""), new.get(name, "")) for name in {**new, **old}}
    changed = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    found = [Changed(names=tuple(names), old=was, new=now) for names, (was, now) in alike(changed)]
    return tuple(sorted(found, key=lambda change: -len(change.names)))


def _listed(title: str, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield title
    width = max((len(name) for name, _ in rows[:ROWS]), default=0)
    yield from (f"  {name:<{width}}  {text}" for name, text in rows[:ROWS])
    if len(rows) > ROWS:
        yield f"  ... and {len(rows) - ROWS} more"

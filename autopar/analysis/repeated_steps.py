"""Repeated steps: the iterations of a loop in `forward` are treated as one step with a count.

    h = zeros                                 first step: reads another kind of h
    select(x, 1, 0)  mul  add  select         step      select(x, 1, 1) mul add select     occurs T - 1 times
    select(x, 1, 1)  mul  add  select   ->
    select(x, 1, 2)  mul  add  select

Capture unrolls loops. An op does the same as the one p ops before it if both stand in the same module, have one signature, and
each of their operands is one of

    the same value                            a weight
    made p ops later                          what its own step computed, or the step before
    another result of the same op             an element of `unbind`
    a value of which that is known already    what another loop computed in its own steps

A run of ops that do the same as those p before, over two periods at least, is a loop of three steps or more. Steps that read
nothing of the step before must be many: what is done alike to queries, keys and values may well be split otherwise for each.
Smallest periods are tried first, and loops within the first step are found in their turn. What an op reads before the first
step, and what reads it after the last, does not matter: values are grouped by their readers (`repeated_blocks`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.analysis.signatures import signature
from autopar.ir.program import Op, Program

PERIODS = 500
"""How many periods are tried from one op: so often a step may do the same before it ends. Beyond, a loop stays unrolled."""

INDEPENDENT = 8
"""From how many steps on a loop is one whose steps read nothing of the step before. Queries, keys and values are three parts,
the gates of an LSTM four; a loop over time is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Ops `first` to `stop`, each of which from `first + period` on does the same as the one `period` before."""

    first: int
    period: int
    stop: int


def repeated_steps(program: Program) -> dict[str, str]:
    """For each op of a loop's later steps the op of its first step that does the same."""
    kinds = [_kind(op, program) for op in program.ops]
    if len(set(kinds)) == len(kinds):
        return {}
    return _Loops(program, kinds).found()


def _kind(op: Op, program: Program) -> str:
    """The module and the signature of an op."""
    return f"{op.name[: op.name.rindex(':') + 1]} {signature(op, program.values)}"


class _Loops:
    """The search for runs: `same` holds, for each op, the op that is known to do the same first."""

    def __init__(self, program: Program, kinds: list[str]) -> None:
        self.ops, self.kinds = program.ops, kinds
        self.same = list(range(len(kinds)))
        self.made = {result.name: (i, n) for i, op in enumerate(self.ops) for n, result in enumerate(op.results)}
        self.next: list[int | None] = [None] * len(kinds)  # the next op of the same kind
        places: dict[str, list[int]] = defaultdict(list)
        for i, kind in enumerate(kinds):
            if places[kind]:
                self.next[places[kind][-1]] = i
            places[kind].append(i)

    def found(self) -> dict[str, str]:
        """See `repeated_steps`."""
        waiting = [(0, len(self.ops))]
        while waiting:  # a loop within a step is searched for when the loop around it is known
            start, end = waiting.pop()
            for run in self._runs(start, end):
                for i in range(run.first + run.period, run.stop):
                    self.same[i] = self.same[i - run.period]
                waiting.append((run.first, run.first + run.period))
        names = {}
        for i, op in enumerate(self.ops):
            self.same[i] = self.same[self.same[i]]
            if self.same[i] != i:
                names[op.name] = self.ops[self.same[i]].name
        return names

    def _runs(self, start: int, end: int) -> Iterator[_Run]:
        """The runs among these ops, one after the other."""
        i = start
        while i < end:
            run = self._run(i, end)
            if run is not None:
                yield run
            i = i + 1 if run is None else run.stop

    def _run(self, first: int, end: int) -> _Run | None:
        """The run of the smallest period that begins with an op, if there is one of three steps."""
        later = self.next[first]
        for _ in range(PERIODS):
            if later is None or first + 3 * (later - first) > end:
                return None
            period, stop = later - first, later
            while stop < end and self._again(stop, period):
                stop += 1
            run = _Run(first=first, period=period, stop=stop)
            if stop - first >= (3 if self._recurrent(run) else INDEPENDENT) * period:
                return run
            later = self.next[later]
        return None

    def _recurrent(self, run: _Run) -> bool:
        """Whether the second step reads what the first one made."""
        second = run.first + run.period
        made = {result.name for op in self.ops[run.first : second] for result in op.results}
        return any(not made.isdisjoint(op.operands) for op in self.ops[second : second + run.period])

    def _again(self, i: int, period: int) -> bool:
        """Whether an op does the same as the one a period before."""
        if self.kinds[i] != self.kinds[i - period]:
            return False
        return all(
            self._follows(*pair, period) for pair in zip(self.ops[i].operands, self.ops[i - period].operands, strict=True)
        )

    def _follows(self, now: str, before: str, period: int) -> bool:
        """Whether an op reads now what stands for what it read before."""
        if now == before:
            return True
        if now not in self.made or before not in self.made:
            return False
        (i, result), (j, other) = self.made[now], self.made[before]
        return i == j or (result == other and (i - j == period or self.same[i] == self.same[j]))


__all__ = ["repeated_steps"]

"""Repeated steps: the iterations of a loop in `forward` are treated as one step with a count.

    h = zeros                                 first step: reads another kind of h
    select(x, 1, 0)  mul  add  select         step      select(x, 1, 1) mul add select     occurs T - 1 times
    select(x, 1, 1)  mul  add  select   ->
    select(x, 1, 2)  mul  add  select

Capture unrolls loops. An op repeats the one p ops before it if both are in the same module, have equal signatures, and each
pair of their operands is one of

    the same value                            a weight
    values made p ops apart                   computed in the same step, or in the step before
    results of the same op                    elements of `unbind`
    values already known to repeat            computed by another loop in its own steps

A run of ops that repeat those p before, for at least two periods, is a loop of three or more steps. Steps that read nothing
from the step before must be many, because ops that treat queries, keys and values alike may still be split differently for
each. Small periods are tried first; loops within the first step are found afterwards. What ops read before the first step, and
what reads them after the last, does not matter, because values are grouped by their readers (`repeated_blocks`).
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
    """Ops `first` to `stop`; from `first + period` on, each repeats the one `period` ops before it."""

    first: int
    period: int
    stop: int


def repeated_steps(program: Program) -> dict[str, str]:
    """For each op of a loop's later steps, the op of the first step that it repeats."""
    kinds = [_kind(op, program) for op in program.ops]
    if len(set(kinds)) == len(kinds):
        return {}
    return _Loops(program, kinds).found()


def _kind(op: Op, program: Program) -> str:
    """The module and the signature of an op."""
    return f"{op.name[: op.name.rindex(':') + 1]} {signature(op, program.values)}"


class _Loops:
    """The search for runs: `same` has, for each op, the first op that it is known to repeat."""

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
        while waiting:  # loops within a step are searched for once the loop around it is known
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
        """The run of smallest period that begins with an op, if there is one of three steps."""
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
        """Whether an op repeats the one a period before."""
        if self.kinds[i] != self.kinds[i - period]:
            return False
        return all(
            self._follows(*pair, period) for pair in zip(self.ops[i].operands, self.ops[i - period].operands, strict=True)
        )

    def _follows(self, now: str, before: str, period: int) -> bool:
        """Whether the operand `now` of an op corresponds to the operand `before` of the op that it repeats."""
        if now == before:
            return True
        if now not in self.made or before not in self.made:
            return False
        (i, result), (j, other) = self.made[now], self.made[before]
        return i == j or (result == other and (i - j == period or self.same[i] == self.same[j]))


__all__ = ["repeated_steps"]

"""Rematerialization: when the backward recomputes, gathers again, or fetches from the host.

The backward of an op needs what autograd saved of its forward. A value is recomputed at its first use in the backward, after
its inputs, and stays alive until its last use; inputs that were kept stay alive as long. All weights of a bucket that the
backward needs are gathered again in one message, which is issued when the bucket after it in the forward is first used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.analysis.saved_tensors import SavedTensors
from autopar.ir.program import Op, Program
from autopar.memory.prefetch import Node
from autopar.memory.schedule import DURING, ConversionEvent, Schedule, Step
from autopar.search_space.assignment import Assignment

SavedStorage = Node | str  # the home of a value, or the tensors that autograd saves inside an op, by the op's name


@dataclass(frozen=True, slots=True)
class HostFetch:
    """The copy of an offloaded value back from the host."""

    home: Node


Run = str | ConversionEvent | HostFetch  # how storage is restored: by rerunning an op, by conversions, or from the host


class Rematerialization:
    """The recomputations of one backward; `copied` are view ops that copy on a rank and rerun with their operand."""

    def __init__(
        self,
        program: Program,
        saved: Mapping[str, SavedTensors],
        chosen: Assignment,
        schedule: Schedule,
        home: Callable[[Node], Node],
        copied: frozenset[str],
    ) -> None:
        self.program, self.saved, self.chosen, self.schedule, self.home = program, saved, chosen, schedule, home
        self._runs: dict[SavedStorage, Run] = {}  # what restores a saved tensor
        self._sources: dict[Run, list[Node]] = {}
        for name, layout in chosen.recompute.offload:
            found = HostFetch(home((name, layout)))
            if chosen.given.get(found.home[0]) != found.home[1]:
                self._runs[found.home] = found
                self._sources[found] = []
        for _, event in schedule.events:
            self._record(event, copied)
        self._needed: set[SavedStorage] = set()
        self._direct: set[SavedStorage] = set()
        for _, event in reversed(schedule.events):
            self._mark_needed(event)
        self._last_use: dict[SavedStorage, int] = {}  # last use in the backward
        self._times: dict[Run, int] = {}  # in the backward
        self._issued: dict[Run, int] = {}
        self._order = [e for _, e in schedule.events if isinstance(e, ConversionEvent) and e.gathers and e in self._sources]
        self._place = {event: place for place, event in enumerate(self._order)}
        for time, event in reversed(schedule.events):
            if isinstance(event, Op):
                self._now = (back := schedule.mirror(time)) - DURING
                for tensor in self._saves(event):
                    self._use(tensor, back)
        self._alive_until: dict[SavedStorage, int] = dict(self._last_use)
        for _, event in reversed(schedule.events):
            self._extend(event)

    def live_range(self, tensor: SavedStorage) -> tuple[int, int] | None:
        """The interval in which the backward holds a recomputed tensor; None if it is not recomputed."""
        run = self._runs.get(tensor)
        if run is None or run not in self._times or tensor not in self._last_use:
            return None
        return self._times[run], self._last_use[tensor]

    def extended(self, last: Mapping[Node, int]) -> Iterator[tuple[Node, int]]:
        """Kept inputs of recomputations, each with the forward time to which it must live; `last` are last uses by home."""
        until: dict[Run, int] = {}
        for _, event in reversed(self.schedule.events):
            run: Run = event.name if isinstance(event, Op) else event
            if run in self._sources:
                ends = [last[tensor] for tensor in self._restores(run) if not isinstance(tensor, str)]
                end = max([until.get(run, -1), *ends])
                for source in self._sources[run]:
                    if source in self._runs:
                        until[self._runs[source]] = max(until.get(self._runs[source], -1), end)
                    else:
                        yield source, end

    def kept_until(self, home: Node) -> int:
        """The last use in the backward of a value that is kept; -1 if there is none."""
        return -1 if home in self._runs else self._alive_until.get(home, -1)

    def recomputed_at(self, run: Run) -> int | None:
        """The time at which something is recomputed in the backward; None if it is not."""
        return self._times.get(run)

    def gathered_again(self, event: ConversionEvent) -> tuple[list[Step], int, int]:
        """The weights of a bucket that are gathered again, and when their message is issued and has arrived."""
        if event not in self._times:
            return [], 0, 0
        steps = [(name, step) for name, step in event.steps if (name, step.target) in self._last_use]
        return steps, self._issued.get(event, self._times[event]), self._times[event]

    def _record(self, event: Op | ConversionEvent, copied: frozenset[str]) -> None:
        """Record what an event restores, and from which inputs, if the assignment may recompute it."""
        if isinstance(event, Op):
            operands = list(self._operands(event))
            recompute = event.name in self.chosen.recompute.ops
            if recompute or (event.name in copied and self.home(operands[0]) in self._runs):
                self._runs.update(dict.fromkeys([event.name, *self._results(event)], event.name))
                self._sources[event.name] = operands
            return
        steps = [(name, step) for name, step in event.steps if (name, step) in self.chosen.recompute.steps]
        targets = [node for name, step in steps if self.home(node := (name, step.target)) == node]
        if targets:
            self._runs.update(dict.fromkeys(targets, event))
            self._sources[event] = [self.home((name, step.source)) for name, step in steps]

    def _operands(self, op: Op) -> Iterator[Node]:
        return map(self.home, zip(op.operands, self.chosen.ops[op.name].operands, strict=True))

    def _results(self, op: Op) -> Iterator[Node]:
        nodes = zip((result.name for result in op.results), self.chosen.ops[op.name].results, strict=True)
        return (node for node in nodes if self.home(node) == node)

    def _saves(self, op: Op) -> list[SavedStorage]:
        """What autograd saves of an op, by home."""
        kept = self.saved.get(op.name)
        if kept is None:
            return []
        operands, candidate = list(self._operands(op)), self.chosen.ops[op.name]
        results = [self.home((op.results[p].name, candidate.results[p])) for p in kept.results]
        return [*(operands[p] for p in kept.operands), *results, *([op.name] if kept.internal else [])]

    def _restores(self, run: Run) -> list[SavedStorage]:
        if isinstance(run, HostFetch):
            return [run.home]
        if isinstance(run, ConversionEvent):
            return [(name, step.target) for name, step in run.steps if (name, step) in self.chosen.recompute.steps]
        return [run, *self._results(self.program.op[run])]

    def _needs(self, run: Run) -> list[Node]:
        """The inputs of a recomputation; for a bucket only those of weights that the backward needs."""
        if isinstance(run, ConversionEvent):
            return [self.home((name, step.source)) for name, step in run.steps if (name, step.target) in self._needed]
        return self._sources[run]

    def _mark_needed(self, event: Op | ConversionEvent) -> None:
        """Mark what the backward needs: what autograd saves, and the inputs of what is recomputed for it."""
        run: Run = event.name if isinstance(event, Op) else event
        if isinstance(event, Op):
            saves = self._saves(event)
            self._needed.update(saves)
            self._direct.update(saves)
        if run in self._sources and not self._needed.isdisjoint(self._restores(run)):
            self._needed.update(self._needs(run))
            if isinstance(event, Op):
                self._direct.update(self._needs(run))

    def _use(self, tensor: SavedStorage, until: int) -> None:
        """Use a saved tensor in the backward of an op, which ends at `until`; recompute it first if it was not kept."""
        run = self._runs.get(tensor)
        if run is not None:
            self._recompute(run)
            self._prefetch(run)
        self._last_use[tensor] = until

    def _recompute(self, run: Run) -> None:
        """Recompute, after whatever inputs must be recomputed first."""
        stack = [run]
        while stack:
            run = stack[-1]
            sources = self._needs(run) if run not in self._times else []
            missing = [other for source in sources if (other := self._runs.get(source)) and other not in self._times]
            stack += reversed(missing)
            if missing:
                continue
            stack.pop()
            if run not in self._times:
                self._now += 1
                self._times[run] = self._now
                self._last_use.update(dict.fromkeys(sources, self._now))
                if not isinstance(run, ConversionEvent):
                    for source in sources:
                        if source in self._runs:
                            self._prefetch(self._runs[source])

    def _prefetch(self, run: Run) -> None:
        """Issue the gather of the bucket that the backward needs next."""
        if isinstance(run, ConversionEvent) and run in self._place:
            for other in reversed(self._order[: self._place[run]]):
                if other not in self._times and not self._direct.isdisjoint(self._restores(other)):
                    self._issue(other)
                    return

    def _issue(self, run: ConversionEvent) -> None:
        if run not in self._issued:
            for source in self._needs(run):
                if source in self._runs:
                    self._recompute(self._runs[source])
            self._now += 1
            self._issued[run] = self._now

    def _extend(self, event: Op | ConversionEvent) -> None:
        """Keep the inputs of a recomputation alive until the last use of its results."""
        run: Run = event.name if isinstance(event, Op) else event
        if run in self._times:
            until = max(self._alive_until.get(tensor, -1) for tensor in self._restores(run))
            for source in self._needs(run):
                self._alive_until[source] = max(self._alive_until.get(source, -1), until)


__all__ = ["Rematerialization", "SavedStorage"]

"""When the backward asks for what, and when it makes again what was not kept.

An op of the backward asks for what autograd saved of its forward. What is made again is made when something first asks for
it, after what it is made from, and stays until it was last asked for; what it is made from is held, if it was kept, until then.
A bundle of weights is made again at once, all that will be asked for, and is sent for when the bundle after it in the forward
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.analysis.saved_tensors import SavedTensors
from autopar.ir.program import Op, Program
from autopar.memory.prefetch import Node
from autopar.memory.schedule import DURING, ConversionEvent, Schedule, Step
from autopar.search_space.assignment import Assignment

Thing = Node | str  # a value where it lies in memory, or what autograd keeps inside an op, by the op's name


@dataclass(frozen=True, slots=True)
class HostFetch:
    """Something that comes back from the host."""

    home: Node


Run = str | ConversionEvent | HostFetch  # what has something there again: an op that runs, conversions that are done together


class Rematerialization:
    """The requests of one backward; `copied` are ops that come back with their operand though they do not lie in it."""

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
        self._runs: dict[Thing, Run] = {}  # what makes a thing again
        self._sources: dict[Run, list[Node]] = {}
        for name, layout in chosen.recompute.offload:
            found = HostFetch(home((name, layout)))
            if chosen.given.get(found.home[0]) != found.home[1]:
                self._runs[found.home] = found
                self._sources[found] = []
        for _, event in schedule.events:
            self._find(event, copied)
        self._wanted: set[Thing] = set()
        self._direct: set[Thing] = set()
        for _, event in reversed(schedule.events):
            self._want(event)
        self._asked: dict[Thing, int] = {}  # when last
        self._made: dict[Run, int] = {}
        self._sent: dict[Run, int] = {}
        self._order = [e for _, e in schedule.events if isinstance(e, ConversionEvent) and e.gathers and e in self._sources]
        self._place = {done: place for place, done in enumerate(self._order)}
        for time, event in reversed(schedule.events):
            if isinstance(event, Op):
                self._now = (back := schedule.mirror(time)) - DURING
                for thing in self._saves(event):
                    self._ask(thing, back)
        self._held: dict[Thing, int] = dict(self._asked)
        for _, event in reversed(schedule.events):
            self._hold(event)

    def recompute(self, thing: Thing) -> tuple[int, int] | None:
        """From when to when something is there that was made again."""
        run = self._runs.get(thing)
        if run is None or run not in self._made or thing not in self._asked:
            return None
        return self._made[run], self._asked[thing]

    def holds(self, last: Mapping[Node, int]) -> Iterator[tuple[Node, int]]:
        """Until when in the forward what is kept is held by what may be made from it again; `last` are the last uses."""
        until: dict[Run, int] = {}
        for _, event in reversed(self.schedule.events):
            run: Run = event.name if isinstance(event, Op) else event
            if run in self._sources:
                ends = [last[thing] for thing in self._makes(run) if not isinstance(thing, str)]
                end = max([until.get(run, -1), *ends])
                for source in self._sources[run]:
                    if source in self._runs:
                        until[self._runs[source]] = max(until.get(self._runs[source], -1), end)
                    else:
                        yield source, end

    def kept(self, home: Node) -> int:
        """Until when something is there that is kept; -1 if nothing asks for it."""
        return -1 if home in self._runs else self._held.get(home, -1)

    def made(self, run: Run) -> int | None:
        """When something runs again."""
        return self._made.get(run)

    def flight(self, done: ConversionEvent) -> tuple[list[Step], int, int]:
        """What of a bundle is gathered again, when it is sent for and when it is there."""
        if done not in self._made:
            return [], 0, 0
        steps = [(name, step) for name, step in done.steps if (name, step.target) in self._asked]
        return steps, self._sent.get(done, self._made[done]), self._made[done]

    def _find(self, event: Op | ConversionEvent, copied: frozenset[str]) -> None:
        """What an event makes, if it may run again."""
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

    def _saves(self, op: Op) -> list[Thing]:
        """What autograd saves of an op."""
        kept = self.saved.get(op.name)
        if kept is None:
            return []
        operands, candidate = list(self._operands(op)), self.chosen.ops[op.name]
        results = [self.home((op.results[p].name, candidate.results[p])) for p in kept.results]
        return [*(operands[p] for p in kept.operands), *results, *([op.name] if kept.internal else [])]

    def _makes(self, run: Run) -> list[Thing]:
        if isinstance(run, HostFetch):
            return [run.home]
        if isinstance(run, ConversionEvent):
            return [(name, step.target) for name, step in run.steps if (name, step) in self.chosen.recompute.steps]
        return [run, *self._results(self.program.op[run])]

    def _needs(self, run: Run) -> list[Node]:
        """What a run reads of what will be asked for."""
        if isinstance(run, ConversionEvent):
            return [self.home((name, step.source)) for name, step in run.steps if (name, step.target) in self._wanted]
        return self._sources[run]

    def _want(self, event: Op | ConversionEvent) -> None:
        """What will be asked for: all that autograd saves, and what that is made from."""
        run: Run = event.name if isinstance(event, Op) else event
        if isinstance(event, Op):
            saves = self._saves(event)
            self._wanted.update(saves)
            self._direct.update(saves)
        if run in self._sources and not self._wanted.isdisjoint(self._makes(run)):
            self._wanted.update(self._needs(run))
            if isinstance(event, Op):
                self._direct.update(self._needs(run))

    def _ask(self, thing: Thing, until: int) -> None:
        """The backward of an op asks for something, which it has until it is over."""
        run = self._runs.get(thing)
        if run is not None:
            self._make(run)
            self._ahead(run)
        self._asked[thing] = until

    def _make(self, run: Run) -> None:
        """Make something, and before that all that it is made from."""
        waiting = [run]
        while waiting:
            run = waiting[-1]
            sources = self._needs(run) if run not in self._made else []
            lacking = [other for source in sources if (other := self._runs.get(source)) and other not in self._made]
            waiting += reversed(lacking)
            if lacking:
                continue
            waiting.pop()
            if run not in self._made:
                self._now += 1
                self._made[run] = self._now
                self._asked.update(dict.fromkeys(sources, self._now))
                if not isinstance(run, ConversionEvent):
                    for source in sources:
                        if source in self._runs:
                            self._ahead(self._runs[source])

    def _ahead(self, run: Run) -> None:
        """Send for the bundle that will be asked for next."""
        if isinstance(run, ConversionEvent) and run in self._place:
            for other in reversed(self._order[: self._place[run]]):
                if other not in self._made and not self._direct.isdisjoint(self._makes(other)):
                    self._send(other)
                    return

    def _send(self, run: ConversionEvent) -> None:
        if run not in self._sent:
            for source in self._needs(run):
                if source in self._runs:
                    self._make(self._runs[source])
            self._now += 1
            self._sent[run] = self._now

    def _hold(self, event: Op | ConversionEvent) -> None:
        """What a run reads is held until nobody asks for what it makes."""
        run: Run = event.name if isinstance(event, Op) else event
        if run in self._made:
            until = max(self._held.get(thing, -1) for thing in self._makes(run))
            for source in self._needs(run):
                self._held[source] = max(self._held.get(source, -1), until)


__all__ = ["Rematerialization", "Thing"]

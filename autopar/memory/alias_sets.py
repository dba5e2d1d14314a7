"""Values, and gradients of values, that may lie in the same memory: of those that are alive at once one is counted.

q, k, v = split(x, 3)     q, k and v lie in x, side by side
t = transpose(q, 0, 1)    t lies in q
z = add(x, y)             the gradients of x and y may be that of z
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.program import Program
from autopar.memory.live_ranges import LivenessInputs, SavedLiveRange


class AliasSets:
    """The families of a program.

    `free` are the values that take nothing of their own as they are produced, or of which that is not known: what is given or
    lies in it, and what is larger than what it lies in. `thin` are those whose gradient may be that of something smaller.
    """

    def __init__(self, program: Program, terms: LivenessInputs) -> None:
        self.program, self.lying = program, terms.lying
        self.free = {v.name for v in program.given}
        self._passed = {name: name for name in program.values}
        for op in program.ops:
            if op.name in self.lying:
                below = program.values[op.operands[0]]
                self.free.update(r.name for r in op.results if below.name in self.free or r.bytes > below.bytes)
        self.thin: set[str] = set()
        for op in reversed(program.ops):
            kept = terms.saved(op)
            for position in kept.through if kept else ():
                passed, given = program.values[op.operands[position]], op.results[0]
                self.thin.update([passed.name] if given.name in self.thin or passed.bytes > given.bytes else [])
                for name in (op.operands[position], *(result.name for result in op.results)):
                    self._passed[self._source(name)] = self._source(op.results[0].name)

    def gradients(self, now: Iterable[SavedLiveRange]) -> tuple[list[SavedLiveRange], list[SavedLiveRange]]:
        """Of the gradients that are there those that are surely apart: in known layouts, and on their way."""
        fresh = [life for life in now if life.kind == "fresh"]
        first: dict[str, SavedLiveRange] = {}
        order = {"gradient": 0, "waiting": 1}
        there = (life for life in now if life.kind in order and life.name not in self.thin)
        for life in sorted(there, key=lambda life: (order[life.kind], -self.program.values[life.name].bytes)):
            first.setdefault(self._source(life.name), life)
        known = [life for life in first.values() if life.kind == "gradient"]
        return [*fresh, *known], [life for life in first.values() if life.kind == "waiting"]

    def values(self, now: Iterable[SavedLiveRange]) -> tuple[set[str], list[SavedLiveRange]]:
        """Of the values that are there those that are surely apart: names of what is read or kept, and what is on its way."""
        there = dict.fromkeys(life.name for life in now if life.kind in ("read", "kept"))
        moving = {life.name: life for life in now if life.kind == "between" and life.name not in self.free}
        largest = sorted(there, key=lambda name: -self.program.values[name].bytes)
        found = self._apart([*largest, *(name for name in moving if name not in there)])
        return found & there.keys(), [life for name, life in moving.items() if name in found - there.keys()]

    def _source(self, name: str) -> str:
        """What names all gradients that may be one with that of a value."""
        while self._passed[name] != name:
            name = self._passed[name]
        return name

    def _apart(self, names: Sequence[str]) -> set[str]:
        """Of these values the first of all that may overlap."""
        found: set[str] = set()
        pieces: set[str] = set()
        around: set[str] = set()
        for name in names:
            chain = self._chain(name)
            piece = self._piece(chain)
            if piece not in around and pieces.isdisjoint(chain):
                found.add(name)
                pieces.add(piece)
                around.update(chain)
        return found

    def _chain(self, name: str) -> list[str]:
        """A value and those in which it lies."""
        chain = [name]
        while (op := self.program.producer.get(chain[-1])) is not None and op.name in self.lying:
            chain.append(op.operands[0])
        return chain

    def _piece(self, chain: list[str]) -> str:
        """The nearest of a chain whose memory is its own, or lies beside others' in something else."""
        producer = self.program.producer
        return next((name for name in chain[:-1] if len(producer[name].results) > 1), chain[-1])


__all__ = ["AliasSets"]

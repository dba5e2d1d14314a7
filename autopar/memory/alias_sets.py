"""Alias sets: values, or gradients, that may share storage. Only one of those alive at a moment is counted.

q, k, v = split(x, 3)     q, k and v are disjoint views of x
t = transpose(q, 0, 1)    t is a view of q
z = add(x, y)             the gradients of x and y may alias the gradient of z
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.ir.program import Program
from autopar.memory.live_ranges import LivenessInputs, SavedLiveRange


class AliasSets:
    """The alias sets of a program.

    `free` values need, or may need, no storage in their produced layout: inputs and parameters, their views, and results larger
    than the operand that they alias. `expanded` are values whose gradient may be expanded from a smaller buffer, which it
    aliases.
    """

    def __init__(self, program: Program, terms: LivenessInputs) -> None:
        self.program, self.views = program, terms.views
        self.free = {v.name for v in program.given}
        self._merged = {name: name for name in program.values}
        for op in program.ops:
            if op.name in self.views:
                below = program.values[op.operands[0]]
                self.free.update(r.name for r in op.results if below.name in self.free or r.bytes > below.bytes)
        self.expanded: set[str] = set()
        for op in reversed(program.ops):
            kept = terms.saved(op)
            for position in kept.through if kept else ():
                passed, given = program.values[op.operands[position]], op.results[0]
                self.expanded.update([passed.name] if given.name in self.expanded or passed.bytes > given.bytes else [])
                for name in (op.operands[position], *(result.name for result in op.results)):
                    self._merged[self._representative(name)] = self._representative(op.results[0].name)

    def gradients(self, now: Iterable[SavedLiveRange]) -> tuple[list[SavedLiveRange], list[SavedLiveRange]]:
        """A subset of the live gradients that cannot alias each other: first in known layouts, then in unknown ones."""
        fresh = [life for life in now if life.kind == "fresh"]
        first: dict[str, SavedLiveRange] = {}
        order = {"gradient": 0, "waiting": 1}
        live = (life for life in now if life.kind in order and life.name not in self.expanded)
        for life in sorted(live, key=lambda life: (order[life.kind], -self.program.values[life.name].bytes)):
            first.setdefault(self._representative(life.name), life)
        known = [life for life in first.values() if life.kind == "gradient"]
        return [*fresh, *known], [life for life in first.values() if life.kind == "waiting"]

    def values(self, now: Iterable[SavedLiveRange]) -> tuple[set[str], list[SavedLiveRange]]:
        """A subset of the live values that cannot alias each other: names of those read or kept, and ranges between readers."""
        live = dict.fromkeys(life.name for life in now if life.kind in ("read", "kept"))
        between = {life.name: life for life in now if life.kind == "between" and life.name not in self.free}
        largest = sorted(live, key=lambda name: -self.program.values[name].bytes)
        found = self._disjoint([*largest, *(name for name in between if name not in live)])
        return found & live.keys(), [life for name, life in between.items() if name in found - live.keys()]

    def _representative(self, name: str) -> str:
        """The representative of all values whose gradients may alias the gradient of this one."""
        while self._merged[name] != name:
            name = self._merged[name]
        return name

    def _disjoint(self, names: Sequence[str]) -> set[str]:
        """A subset of these values that cannot overlap; of any that may, the one named first."""
        found: set[str] = set()
        regions: set[str] = set()
        enclosing: set[str] = set()
        for name in names:
            chain = self._chain(name)
            region = self._region(chain)
            if region not in enclosing and regions.isdisjoint(chain):
                found.add(name)
                regions.add(region)
                enclosing.update(chain)
        return found

    def _chain(self, name: str) -> list[str]:
        """A value, the value that it is a view of, and so on to the owner of the storage."""
        chain = [name]
        while (op := self.program.producer.get(chain[-1])) is not None and op.name in self.views:
            chain.append(op.operands[0])
        return chain

    def _region(self, chain: list[str]) -> str:
        """The first value of a chain that owns its storage, or is one of several disjoint views of another."""
        producer = self.program.producer
        return next((name for name in chain[:-1] if len(producer[name].results) > 1), chain[-1])


__all__ = ["AliasSets"]

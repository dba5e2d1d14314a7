"""Fusion: which ops `torch.compile` merges into one kernel, and the cost that remains for each op.

    n = linear(x, w)                                            a product: a kernel of its own
    a = add(n, b)      level 1, reads n and b         \\
    g = gelu(a)        level 1, reads nothing          }        one kernel: reads n and b, writes g
    y = linear(g, v)                                  /
    s = add(b, y)      level 2, reads b and y

Inductor fuses an op that loops over its operands (pointwise, a reduction, a norm, a loss) into the kernel that produces them,
unless another kernel has to run in between. So every op has a level, the number of unfusible kernels on the longest path to it,
and ops of one level that read one another form a kernel. The kernel reads each outside value once and writes the values that
are read elsewhere. Views are free, and constants are made where they are read.

In the backward the same ops form a kernel again. It reads the gradients of the values written and, again, the values from which
it recomputes what autograd would have saved inside (Inductor's partitioner saves the kernel's inputs: H. He, "Min-cut
optimal(*) recomputation with AOTAutograd", 2022), and writes the gradients of the values read.

Conversions between layouts are not considered: if one separates two ops of a kernel, the cost of writing a value for it and
reading it again is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autopar.analysis.saved_tensors import saved
from autopar.ir.program import Fused, Op, Program
from autopar.operators import fusible, row_of, view_of, writes
from autopar.operators.call import Call
from autopar.operators.facts import OpKind


def fused(program: Program) -> Program:
    """The program with `Op.fused` set: what each op reads and writes as part of its kernel."""
    return _Fuser(program).fused()


class _Fuser:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.view = {op.name for op in program.ops if view_of(op, program.values) and not writes(op)}
        self.fusible = {op.name for op in program.ops if op.name not in self.view and fusible(op)}
        self.base = {name: name for name in program.values}  # the value that each value is a view of
        self.level: dict[str, int] = {}  # of each op except views
        for op in program.ops:
            if op.name in self.view:
                self.base |= {result.name: self.base[op.operands[0]] for result in op.results}
            else:
                self.level[op.name] = max((self._level_after(self.base[name]) for name in op.operands), default=0)
        self.inside = {op.name: frozenset(self._inside(op)) for op in program.ops if op.name in self.fusible}
        self.within = set[str]()  # values read within their kernel
        self.elsewhere = {self.base[output.value] for output in program.outputs}  # values read outside of their kernel
        for op in program.ops:
            if op.name not in self.view:
                here = self.inside.get(op.name, ())
                self.elsewhere |= {self.base[name] for p, name in enumerate(op.operands) if p not in here}
                self.within |= {self.base[op.operands[p]] for p in here}

    def _level_after(self, value: str) -> int:
        producer = self.program.producer.get(value)
        return self.level[producer.name] + (producer.name not in self.fusible) if producer else 0

    def _inside(self, op: Op) -> Iterator[int]:
        """Positions of the operands that an op's own kernel computes."""
        for position, name in enumerate(op.operands):
            producer = self.program.producer.get(self.base[name])
            if producer is None or producer.name not in self.fusible:
                continue
            if not producer.operands or self.level[producer.name] == self.level[op.name]:
                yield position

    def fused(self) -> Program:
        found = self._kernels() | dict(self._views())
        return replace(self.program, ops=tuple(replace(op, fused=found.get(op.name)) for op in self.program.ops))

    def _kernels(self) -> dict[str, Fused]:
        again, arriving = self._again(), self._arriving()
        read, read_again, written = set[tuple[str, int]](), set[tuple[str, int]](), set[tuple[str, int]]()
        found = {}

        def first(name: str, op: Op, known: set[tuple[str, int]]) -> bool:
            key = (name, self.level[op.name])
            fresh = key not in known
            known.add(key)
            return fresh

        for op in self.program.ops:
            if op.name not in self.fusible:
                continue
            outside = [(p, name) for p, name in enumerate(op.operands) if p not in self.inside[op.name]]
            arrive = arriving[op.results[0].name]
            handed = [p for p, _ in outside if p in self._handed_on(op)]
            alone = len(arrive) == 1 and op.results[0].name not in self.within  # the arriving gradient is handed on as it is
            found[op.name] = Fused(
                operands=tuple(p for p, name in outside if first(self.base[name], op, read)),
                results=tuple(p for p, result in enumerate(op.results) if result.name in self.elsewhere),
                arriving=tuple(p for p, result in enumerate(op.results) for _ in arriving[result.name]),
                again=tuple(p for p, name in outside if p in again[op.name] and first(self.base[name], op, read_again)),
                gradients=tuple(p for p, name in outside if p not in handed[0 if alone else 1 :] and first(name, op, written)),
            )
        return found

    def _handed_on(self, op: Op) -> frozenset[int]:
        """Positions of the operands whose gradient is the result's gradient, unchanged."""
        values, call = self.program.values, Call.of(op, self.program.values)
        handed = (p for name in row_of(op).hands_on for p in call.positions(name))
        return frozenset(p for p in handed if values[op.operands[p]].shape == op.results[0].shape)

    def _arriving(self) -> dict[str, set[object]]:
        """The kernels that send a gradient of each value: fused kernels by level, others by op name."""
        found: dict[str, set[object]] = defaultdict(set)
        for op in self.program.ops:
            if op.name not in self.view:
                kernel: object = self.level[op.name] if op.name in self.fusible else op.name
                for position, name in enumerate(op.operands):
                    if position not in self.inside.get(op.name, ()):
                        found[self.base[name]].add(kernel)
        return found

    def _again(self) -> dict[str, frozenset[int]]:
        """Operand positions that each fusible op's backward needs: saved operands, and the inputs to recompute the rest."""
        values, needed, found = self.program.values, set[str](), {}
        for op in reversed(self.program.ops):
            if op.name in self.fusible:
                kept = saved(op, values)
                wanted = not needed.isdisjoint(result.name for result in op.results)
                wanted |= any(op.results[p].name not in self.elsewhere for p in kept.results)
                wanted |= bool(kept.internal) and row_of(op).kind is not OpKind.DROPOUT
                found[op.name] = frozenset(range(len(op.operands))) if wanted else frozenset(kept.operands)
                needed |= {self.base[op.operands[p]] for p in found[op.name] & self.inside[op.name]}
        return found

    def _views(self) -> Iterator[tuple[str, Fused]]:
        """A view's gradient is part of a kernel, unless a hand-written kernel reads the view."""
        by_hand = {output.value for output in self.program.outputs}
        for op in reversed(self.program.ops):
            if op.name in self.view:
                alone = any(result.name in by_hand for result in op.results)
                by_hand |= {op.operands[0]} if alone else set()
                yield op.name, Fused(results=(0,) if alone else (), gradients=(0,) if alone else ())
            elif op.name not in self.fusible:
                by_hand.update(op.operands)


__all__ = ["fused"]

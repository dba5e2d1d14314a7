"""Pipeline stages: cuts a program into programs that run one after the other, each on its own ranks.

    program                         stage 0                   stage 1                     stage 2
    h = embedding(w, t)             h = embedding(w, t)       input t, h                  input t, h, b
    m = ne(t, 0)                ->  output h                  m = ne(t, 0)                m = ne(t, 0)
    a = linear(h, u)                                          a = linear(h, u)            c = add(attention(b, m), h)
    b = attention(a, m)                                       b = attention(a, m)         l = linear(c, w)
    c = add(attention(b, m), h)                               output h, b                 output l
    l = linear(c, w)

Cuts are between the regions of `passes.stage_regions`. Three kinds of values are needed behind a cut:

    made again   views and casts of parameters, and what depends on inputs and buffers alone (masks, positions, counts), as m:
                 each stage that needs them has its own, since inputs are on every rank
    sent         everything else, as b; what a later stage needs is relayed by those in between, as h by stage 1: an output that
                 is an input, so that messages pass between neighbours only and autograd adds up the gradients
    stored       parameters and buffers, by each stage that reads them, as w by 0 and 2: its gradient is the sum over them

What no operator reads, perhaps only those of evaluation do: the last stage stores it that runs a part of its module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import ConstraintError
from autopar.ir.program import Op, Output, Parameter, Program
from autopar.operators import writes
from autopar.passes.stage_regions import made_again


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The program of one stage, with the names of the whole.

    Its inputs are those of the whole that it reads, then the values `received` from the previous stage. Its outputs are the
    values `sent` to the next stage, under their names, or those of the whole in the last stage.
    """

    program: Program
    received: tuple[str, ...]
    sent: tuple[str, ...]


def cut(program: Program, starts: Sequence[int], hoisted: Program | None = None) -> tuple[Stage, ...]:
    """Cut a program into the stages that begin at these ops.

    Args:
        program: in normal form; of one micro-batch, where a step has several.
        starts: indices of ops, increasing, the first one 0.
        hoisted: the graph of the program's last inputs: a stage stores the buffers behind those that it reads.

    Raises ConstraintError for invalid starts, and if one stage writes a buffer that another reads.
    """
    if list(starts) != sorted(set(starts)) or list(starts[:1]) != [0] or starts[-1] >= len(program.ops):
        raise ConstraintError(
            f"the stages of a pipeline cannot begin with operators {', '.join(map(str, starts)) or 'none'}",
            operators=f"{len(program.ops)}, from 0",
            fix="increasing numbers, the first one 0",
        )
    return _Cutter(program, starts, hoisted).cut()


def shared_parameters(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """The stages that read each shared parameter, whose gradients must be summed."""
    users: dict[str, list[int]] = {}
    for place, stage in enumerate(stages):
        for held in stage.program.parameters:
            users.setdefault(held.value.name, []).append(place)
    return {name: tuple(places) for name, places in users.items() if len(places) > 1}


class _Cutter:
    """Cuts a program; `stage_of` has the stage of each op by name, except of those that every stage repeats for itself."""

    def __init__(self, program: Program, starts: Sequence[int], hoisted: Program | None) -> None:
        self.program, self.count = program, len(starts)
        self.ahead = _made_of(program, hoisted) if hoisted else {}
        self.hoisting = frozenset[str]().union(*self.ahead.values())
        again = made_again(program)
        self.stage_of = {
            op.name: bisect_right(starts, place) - 1 for place, op in enumerate(program.ops) if op.name not in again
        }
        run = [op for op in program.ops if op.name in self.stage_of and op.target != "aten.alias.default"]
        self.last = {path: self.stage_of[op.name] for op in run for path in (op.module, *_around(op.module))}
        self.order = {name: n for n, name in enumerate(program.values)}

    def cut(self) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        sent: tuple[str, ...] = ()
        for stage in reversed(range(self.count)):
            made = self._stage(stage, sent)
            stages.insert(0, made)
            sent = made.received
        self._refuse_shared_writes(stages)
        return tuple(stages)

    def _stage(self, stage: int, sent: tuple[str, ...]) -> Stage:
        """A stage, by what the one behind it receives."""
        outputs = tuple(Output(value=name, path=name) for name in sent)
        if stage == self.count - 1:
            outputs = self.program.outputs
        needed = {output.value for output in outputs}
        ops: list[Op] = []
        for op in reversed(self.program.ops):
            at = self.stage_of.get(op.name)
            if at == stage or (at is None and any(result.name in needed for result in op.results)):
                ops.append(op)
                needed.update(op.operands)
        made = {result.name for op in ops for result in op.results}
        needed.update(*(self.ahead[name] for name in self.ahead.keys() & needed))
        outside = sorted((name for name in needed - made if name in self.program.producer), key=self.order.__getitem__)
        received = tuple(self.program.values[name] for name in outside)
        program = Program(
            ops=tuple(reversed(ops)),
            inputs=(*(value for value in self.program.inputs if value.name in needed), *received),
            parameters=tuple(held for held in self.program.parameters if self._stores(stage, held, needed)),
            buffers=tuple(held for held in self.program.buffers if self._stores(stage, held, needed)),
            outputs=outputs,
        )
        return Stage(program=program, received=tuple(outside), sent=sent)

    def _stores(self, stage: int, held: Parameter, needed: set[str]) -> bool:
        if held.used or held.value.name in self.hoisting:
            return held.value.name in needed
        return next((self.last[path] for path in _around(held.value.name) if path in self.last), 0) == stage

    def _refuse_shared_writes(self, stages: Sequence[Stage]) -> None:
        held = [{buffer.value.name for buffer in stage.program.buffers} for stage in stages]
        for op in self.program.ops:
            for name in writes(op):
                readers = [place for place, names in enumerate(held) if name in names]
                if len(readers) > 1:
                    raise ConstraintError(
                        f"{name} is written by one stage of the pipeline and read by another",
                        module=op.module or "the model itself",
                        stages=", ".join(map(str, readers)),
                        at=op.source,
                        fix="a cut elsewhere: stages= modules, so that one stage has all of its readers; or a buffer for each",
                    )


def _made_of(program: Program, hoisted: Program) -> dict[str, frozenset[str]]:
    """The buffers of which each hoisted input of a program is made."""
    made = {buffer.value.name: frozenset([buffer.value.name]) for buffer in hoisted.buffers}
    for op in hoisted.ops:
        of = frozenset[str]().union(*(made.get(name, ()) for name in op.operands))
        made |= {result.name: of for result in op.results}
    inputs = program.inputs[len(hoisted.inputs) :]
    return {value.name: made.get(output.value, frozenset()) for value, output in zip(inputs, hoisted.outputs, strict=True)}


def _around(name: str) -> Iterator[str]:
    """The modules around a tensor or a module, innermost first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


__all__ = ["Stage", "cut", "shared_parameters"]

"""Repeated blocks: ops and parameters at the same position of equal blocks share one decision.

    h.0: ln attn mlp                      class  h.*: ln attn mlp    members h.0, h.1, h.2
    h.1: ln attn mlp        ->
    h.2: ln attn mlp

A block is a module that the model repeats (`block_names`). Two siblings are equal if their ops agree one by one in target,
static arguments, shapes and dtypes. Only blocks with at least two matrix products are folded, since in a sequence of linear
layers each must be free to be either side of a column-row pair. Steps of a loop are folded too (`repeated_steps`), within a
block or around blocks. Nothing is approximated: values between classes are grouped by producer and by every consumer
(`ValueClass`), and each group is priced as often as it occurs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.analysis.block_names import PRODUCTS, block_names, without_numbers
from autopar.analysis.fits import own_rows_of
from autopar.analysis.interchangeable import operand_places, result_places
from autopar.analysis.repeated_steps import repeated_steps
from autopar.analysis.signatures import kind_of, signature
from autopar.ir.program import OUTPUT, Op, Program
from autopar.operators import row_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueClass:
    """Values with the same producer class and the same consumers; `consumers` are (op class or output, operand position).

    Interchangeable results, and operand positions, are represented by the first of them (`interchangeable`).
    """

    producer: str
    result: int
    consumers: tuple[tuple[str, int], ...]
    members: tuple[str, ...]

    @property
    def example(self) -> str:
        return self.members[0]

    def renamed(self, new: Mapping[str, str]) -> ValueClass:
        """This class in a program whose values, ops and outputs have new names."""
        return replace(
            self,
            producer=new[self.producer],
            consumers=tuple((new[name], position) for name, position in self.consumers),
            members=tuple(new[name] for name in self.members),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """`of[name]` is the class of an op, input, parameter, buffer or output: the name of its first member."""

    of: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]
    values: tuple[ValueClass, ...]
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # op classes with interchangeable operands

    def end(self, name: str, position: int) -> tuple[str, int]:
        """An op or output with one of its operand positions, as a consumer in a `ValueClass`."""
        name = self.of[name]
        return name, self.places[name][position] if name in self.places else position


def fold(program: Program, *, apart: Callable[[str], str] = lambda value: "", repeated: bool = True) -> Classes:
    """Group the ops, given tensors and values of a program by repeated blocks.

    Values with different `apart` labels are never in one class; with `repeated=False` every op is a class of its own.
    """
    folded, step = (_folded_blocks(program, apart), repeated_steps(program)) if repeated else ({}, {})
    names = block_names(program)
    first: dict[tuple[str, str], str] = {}
    of: dict[str, str] = {}
    members: dict[str, list[str]] = defaultdict(list)

    def wild(name: str) -> str:
        block = names.of(name)
        return folded[block] + name.removeprefix(block) if block in folded else name

    def assign(name: str, signature: str) -> None:
        of[name] = first.setdefault((wild(step.get(name, name)), signature), name)
        members[of[name]].append(name)

    for given in program.given:
        assign(given.name, kind_of(given) + apart(given.name))
    for op in program.ops:
        assign(op.name, _row(op, program, apart))
    for output in program.outputs:
        assign(OUTPUT + output.path, "")
    leaders = [op for op in program.ops if step and of[op.name] == op.name]  # without loops, few ops join many tensors
    operands = {op.name: places for op in leaders if (places := operand_places(program, op))}
    results = {op.name: places for op in leaders if (places := result_places(program, op))}
    classes = Classes(of=of, members={name: tuple(m) for name, m in members.items()}, values=(), places=operands)
    return replace(classes, values=_value_classes(program, classes, results, once=bool(step)))


def _value_classes(
    program: Program, classes: Classes, places: Mapping[str, tuple[int, ...]], *, once: bool
) -> tuple[ValueClass, ...]:
    """The classes of values; `places` maps interchangeable results to the first. With `once`, equal consumers count once."""
    consumers: dict[str, list[tuple[str, int]]] = {name: [] for name in program.values}
    for op in program.ops:
        for position, operand in enumerate(op.operands):
            consumers[operand].append(classes.end(op.name, position))
    for output in program.outputs:
        consumers[output.value].append(classes.end(OUTPUT + output.path, 0))
    produced = {value.name: (classes.of[value.name], 0) for value in program.given}
    for op in program.ops:
        leader = classes.of[op.name]
        stand = places.get(leader, range(len(op.results)))
        produced |= {result.name: (leader, place) for result, place in zip(op.results, stand, strict=True)}
    groups: dict[tuple[str, int, tuple[tuple[str, int], ...]], list[str]] = defaultdict(list)
    for name in program.values:
        uses = dict.fromkeys(consumers[name]) if once else consumers[name]
        groups[*produced[name], tuple(uses)].append(name)
    return tuple(
        ValueClass(producer=producer, result=result, consumers=uses, members=tuple(names))
        for (producer, result, uses), names in groups.items()
    )


def _row(op: Op, program: Program, apart: Callable[[str], str]) -> str:
    names = (*op.operands, *(r.name for r in op.results))
    return f"{signature(op, program.values)}{own_rows_of(program).get(op.name, '')}{''.join(map(apart, names))}"


def blocks(program: Program) -> dict[str, list[Op]]:
    """The ops of every block that has at least two matrix products, by the block's name."""
    found: dict[str, list[Op]] = defaultdict(list)
    names = block_names(program)
    for op in program.ops:
        if block := names.of(op.name):
            found[block].append(op)
    return {block: ops for block, ops in found.items() if sum(row_of(op).contracts for op in ops) >= PRODUCTS}


def _folded_blocks(program: Program, apart: Callable[[str], str]) -> dict[str, str]:
    """`"h.3"` -> `"h.*/1"` for every block that has an equal sibling."""
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for block, ops in blocks(program).items():
        rows = (op.name.removeprefix(block) + _row(op, program, apart) for op in ops)
        kinds[without_numbers(block), *rows].append(block)
    wild: dict[str, str] = {}
    for number, alike in enumerate(kinds.values()):
        if len(alike) > 1:
            wild |= dict.fromkeys(alike, f"{alike[0]}*{number}")
    return wild

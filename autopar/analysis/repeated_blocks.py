"""Repeated blocks: ops and parameters at the same position of equal blocks share one decision.

    h.0: ln attn mlp                      class  h.*: ln attn mlp    members h.0, h.1, h.2
    h.1: ln attn mlp        ->
    h.2: ln attn mlp

A block is everything under one index of a container ("h.3."). Two siblings are equal if their ops agree one by one in target,
static arguments, shapes and dtypes. Only blocks with at least two matrix products are folded: in a sequence of linear layers
each must be free to be either side of a column-row pair. Nothing is approximated: values between classes are grouped by
producer and by every consumer (`ValueClass`), and each group is priced as often as it occurs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir.program import OUTPUT, Op, Program, Ref, Static, Value, substitute, text
from autopar.operators import row_of

INDEX = re.compile(r"^(.*?(?:^|\.))(\d+)((?:\.|:).*|)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueClass:
    """Values with the same producer class and the same consumers; `consumers` are (op class or output, operand position)."""

    producer: str
    result: int
    consumers: tuple[tuple[str, int], ...]
    members: tuple[str, ...]

    @property
    def example(self) -> str:
        return self.members[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """`of[name]` is the class of an op, input, parameter, buffer or output: the name of its first member."""

    of: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]
    values: tuple[ValueClass, ...]


def fold(program: Program, *, apart: Callable[[str], str] = lambda value: "", repeated: bool = True) -> Classes:
    """Group the ops, given tensors and values of a program by repeated blocks.

    Values with different `apart` labels are never in one class; with `repeated=False` every op is a class of its own.
    """
    folded = _folded_prefixes(program, apart) if repeated else {}
    first: dict[tuple[str, str], str] = {}
    of: dict[str, str] = {}
    members: dict[str, list[str]] = defaultdict(list)

    def assign(name: str, signature: str) -> None:
        of[name] = first.setdefault((_wild(name, folded), signature), name)
        members[of[name]].append(name)

    for given in program.given:
        assign(given.name, _kind(given) + apart(given.name))
    for op in program.ops:
        assign(op.name, _row(op, program, apart))
    for output in program.outputs:
        assign(OUTPUT + output.path, "")
    return Classes(of=of, members={name: tuple(m) for name, m in members.items()}, values=_value_classes(program, of))


def _value_classes(program: Program, of: Mapping[str, str]) -> tuple[ValueClass, ...]:
    consumers: dict[str, list[tuple[str, int]]] = {name: [] for name in program.values}
    for op in program.ops:
        for position, operand in enumerate(op.operands):
            consumers[operand].append((of[op.name], position))
    for output in program.outputs:
        consumers[output.value].append((of[OUTPUT + output.path], 0))
    groups: dict[tuple[str, int, tuple[tuple[str, int], ...]], list[str]] = defaultdict(list)
    for name in program.values:
        producer = program.producer.get(name)
        place = 0 if producer is None else [r.name for r in producer.results].index(name)
        groups[of[name if producer is None else producer.name], place, tuple(consumers[name])].append(name)
    return tuple(
        ValueClass(producer=producer, result=result, consumers=uses, members=tuple(names))
        for (producer, result, uses), names in groups.items()
    )


def _row(op: Op, program: Program, apart: Callable[[str], str]) -> str:
    names = (*op.operands, *(r.name for r in op.results))
    return signature(op, program.values) + "".join(map(apart, names))


def block_of(name: str) -> str:
    """The outermost module with an index that contains an op, "h.3"; empty if there is none."""
    match = INDEX.match(name)
    return match[1] + match[2] if match else ""


def blocks(program: Program) -> dict[str, list[Op]]:
    """The ops of every block, by its name: of every module with an index that has at least two matrix products."""
    found: dict[str, list[Op]] = defaultdict(list)
    for op in program.ops:
        if block := block_of(op.name):
            found[block].append(op)
    return {block: ops for block, ops in found.items() if sum(row_of(op).contracts for op in ops) >= 2}


def _folded_prefixes(program: Program, apart: Callable[[str], str]) -> dict[str, str]:
    """`"h.3"` -> `"h.*/1"` for every block that has an equal sibling."""
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for prefix, ops in blocks(program).items():
        container = prefix[: prefix.rindex(".") + 1] if "." in prefix else ""
        rows = (op.name.removeprefix(prefix) + _row(op, program, apart) for op in ops)
        kinds[container, *rows].append(prefix)
    wild: dict[str, str] = {}
    for number, prefixes in enumerate(kinds.values()):
        if len(prefixes) > 1:
            wild |= dict.fromkeys(prefixes, f"{prefixes[0]}*{number}")
    return wild


def _wild(name: str, folded: Mapping[str, str]) -> str:
    match = INDEX.match(name)
    if match and match[1] + match[2] in folded:
        return folded[match[1] + match[2]] + match[3]
    return name


def signature(op: Op, values: Mapping[str, Value]) -> str:
    """Everything that decides the candidates of an op and their prices: target, static arguments, operand and result kinds."""

    def describe(leaf: Ref | Static) -> str:
        return _kind(values[leaf.name]) if isinstance(leaf, Ref) else text(leaf)

    arguments = [text(substitute(a, describe)) for a in op.args]
    arguments += [f"{name}={text(substitute(a, describe))}" for name, a in op.kwargs]
    return f"{op.target}({', '.join(arguments)}) -> {', '.join(map(_kind, op.results))}"


def _kind(value: Value) -> str:
    return f"{value.dtype}{list(value.shape)}{'+' if value.requires_grad else ''}"

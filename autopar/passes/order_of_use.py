"""Reorders independent parts of one module's operators by when their results are first needed.

    for kind in set(config.layer_types):                  sliding, full            or full, sliding
        embedded[kind] = self.rotary(positions, kind)     -> always the one that the first layer takes
        masks[kind] = make_mask[kind](positions)          -> always the one that the first layer takes

The order of a set of strings depends on the hash seed of the process, so that ranks, and processes that read a saved plan,
would have programs that differ in names alone. Parts are found in an unbroken run of a module's operators: calls of the same
operators, none of which reads what another computes; or operators that lead to one of several alike results, after those that
lead to more than one.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import networkx as nx

from autopar.ir.program import Op, Program, Ref, with_operands
from autopar.operators import row_of, writes


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive operators of a run; parts of one kind may be reordered."""

    ops: Sequence[Op]
    kind: object = None


def in_order_of_use(program: Program) -> Program:
    """The program with such parts in that order, renumbered; the same program if they are in order already. It must have no
    dead code.
    """
    runs = [list(run) for _, run in itertools.groupby(program.ops, key=lambda op: op.module)]
    read = Counter(name for op in program.ops for name in op.operands) + Counter(output.value for output in program.outputs)
    parts = {number: found for number, run in enumerate(runs) if (found := _calls(run) or _alike(run, read))}
    needed, ops, new = _needed(program) if parts else {}, list[Op](), dict[Ref, Ref]()
    for number, run in enumerate(runs):
        ordered = _ordered(parts[number], needed) if number in parts else run
        names = defaultdict[str, deque[str]](deque)
        for op in run:
            names[_stem(op)].append(op.name)
        for op in ordered:
            name = names[_stem(op)].popleft()
            results = tuple(replace(made, name=name + made.name.removeprefix(op.name)) for made in op.results)
            new |= {Ref(before.name): Ref(made.name) for before, made in zip(op.results, results, strict=True)}
            ops.append(op if name == op.name else replace(op, name=name, results=results))
    if ops == list(program.ops):
        return program
    outputs = tuple(replace(output, value=new.get(ref := Ref(output.value), ref).name) for output in program.outputs)
    return replace(program, ops=tuple(with_operands(op, new) for op in ops), outputs=outputs)


def _stem(op: Op) -> str:
    return op.name.rpartition("#")[0]


def _ordered(parts: Sequence[_Part], needed: dict[str, int]) -> list[Op]:
    """The operators of parts, with the parts of one kind sorted by when they are first needed."""
    waiting = defaultdict[object, deque[_Part]](deque)
    for part in sorted(parts, key=lambda part: min(needed[op.name] for op in part.ops)):
        waiting[part.kind].append(part)
    return [op for part in parts for op in waiting[part.kind].popleft().ops]


def _needed(program: Program) -> dict[str, int]:
    """When each op is first needed: by the results of the program, and then by what is written, from left to right."""
    found, made = dict[str, int](), program.producer
    waiting = [*(output.value for output in program.outputs), *made][::-1]
    while waiting:
        op = made.get(name := waiting.pop())
        if op is None or op.name in found:
            continue
        before = [operand for operand in op.operands if operand in made and made[operand].name not in found]
        if before:
            waiting += [name, *reversed(before)]
        else:
            found[op.name] = len(found)
    return found


def _calls(run: Sequence[Op]) -> list[_Part]:
    """The calls that make up an unbroken run of a module's ops; none if it is a single call."""
    maker = _makers(run)
    graph = nx.Graph()
    graph.add_nodes_from(op.name for op in run)
    graph.add_edges_from((op.name, maker[name]) for op in run for name in op.operands if name in maker)
    part = {name: number for number, names in enumerate(nx.connected_components(graph)) for name in names}
    calls = [list(call) for _, call in itertools.groupby(run, key=lambda op: part[op.name])]
    kinds = {tuple((op.target, len(op.results)) for op in call) for call in calls}
    if len(calls) == 1 or len(calls) != len(set(part.values())) or len(kinds) > 1 or _has_effects(run):
        return []
    return [_Part(call) for call in calls]


def _alike(run: Sequence[Op], read: Counter[str]) -> list[_Part]:
    """The ops shared by several results of a run, then those of each result alone, if some results have one shape and dtype;
    `read` counts the readers of each value in the whole program.
    """
    maker, inside = _makers(run), Counter(name for op in run for name in op.operands)
    last = {op.name: op for op in run if any(read[made.name] > inside[made.name] for made in op.results)}
    kinds = {name: tuple((made.shape, made.dtype) for made in op.results) for name, op in last.items()}
    if len(set(kinds.values())) == len(kinds) or _has_effects(run):
        return []
    leads = {op.name: {op.name} & last.keys() for op in run}  # the results that depend on an op
    for op in reversed(run):
        for name in op.operands:
            if name in maker:
                leads[maker[name]] |= leads[op.name]
    shared, alone = [op for op in run if len(leads[op.name]) > 1], [op for op in run if len(leads[op.name]) == 1]
    found = [(name, list(ops)) for (name,), ops in itertools.groupby(alone, key=lambda op: leads[op.name])]
    if len({name for name, _ in found}) < len(found):
        return []
    return [*([_Part(shared, "shared")] if shared else []), *(_Part(ops, kinds[name]) for name, ops in found)]


def _makers(run: Sequence[Op]) -> dict[str, str]:
    """The op that produces each value of a run."""
    return {made.name: op.name for op in run for made in op.results}


def _has_effects(run: Sequence[Op]) -> bool:
    """Whether ops must keep their order: they draw random numbers or write in place."""
    return any(row_of(op).random or any(writes(op)) for op in run)


__all__ = ["in_order_of_use"]

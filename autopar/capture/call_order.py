"""Independent calls of one module, one after the other, in the order in which what they return is first needed.

    for kind in set(config.layer_types):                  sliding, full            or full, sliding
        embedded[kind] = self.rotary(positions, kind)     -> always the one that the first layer takes

Python orders a set of words by a seed of each process, so that ranks, and processes that read a saved plan, would have
programs that differ in names alone. Calls are told apart by what they compute with: parts of an unbroken run of a module's
operators, all of the same operators, of which none reads what another computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx

from autopar.ir.program import Op, Program, Ref, with_operands
from autopar.operators import row_of, writes


def in_order_of_use(program: Program) -> Program:
    """The program with such calls in that order, and names to match; the same one where they have it already."""
    runs = [list(run) for _, run in itertools.groupby(program.ops, key=lambda op: op.module)]
    calls = {number: found for number, run in enumerate(runs) if (found := _calls(run))}
    needed, ops, new = _needed(program) if calls else {}, list[Op](), dict[Ref, Ref]()
    for number, run in enumerate(runs):
        ordered = sorted(calls.get(number, [run]), key=lambda call: min(needed.get(op.name, 0) for op in call))
        for place, op in zip(run, itertools.chain(*ordered), strict=True):
            names = [result.name for result in place.results]
            new |= {Ref(made.name): Ref(name) for made, name in zip(op.results, names, strict=True) if made.name != name}
            results = tuple(replace(made, name=name) for made, name in zip(op.results, names, strict=True))
            ops.append(op if op is place else replace(op, name=place.name, results=results))
    if not new:
        return program
    outputs = tuple(replace(output, value=new.get(ref := Ref(output.value), ref).name) for output in program.outputs)
    return replace(program, ops=tuple(with_operands(op, new) for op in ops), outputs=outputs)


def _needed(program: Program) -> dict[str, int]:
    """When each op is first needed, as the results of the program, and then what no result needs, are computed from left to
    right."""
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


def _calls(run: Sequence[Op]) -> list[list[Op]]:
    """The calls that an unbroken run of a module's ops consists of, if it is several."""
    maker = {result.name: op.name for op in run for result in op.results}
    graph = nx.Graph()
    graph.add_nodes_from(op.name for op in run)
    graph.add_edges_from((op.name, maker[name]) for op in run for name in op.operands if name in maker)
    part = {name: number for number, names in enumerate(nx.connected_components(graph)) for name in names}
    calls = [list(call) for _, call in itertools.groupby(run, key=lambda op: part[op.name])]
    kinds = {tuple((op.target, len(op.results)) for op in call) for call in calls}
    if len(calls) == 1 or len(calls) != len(set(part.values())) or len(kinds) > 1:
        return []
    ordered = (row_of(op).random or any(writes(op)) for op in run)  # by the generator, or by what is written
    return [] if any(ordered) else calls


__all__ = ["in_order_of_use"]

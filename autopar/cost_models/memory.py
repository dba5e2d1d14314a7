"""What may be alive when, whatever the layouts and whatever is made again: what the rows of the integer program are made of.

Kinds and times are those of `solver.timeline`, which knows the decisions and is exact; here what depends on them is left
out, so that a row says at most what the timeline does. Beside its kinds there is

    rerun        an operand of an op that may run again                         from its last use until nobody asks for the
    op's results
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.saved import Saved
from autopar.ir import Op, Program
from autopar.rules import view_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """Something takes memory from `start` to `stop` (both included): `weight` times its bytes.

    `name` is a value, or an op for internal; `consumer` is the (op, operand position) that keeps or consumes the value.
    Until `needed` what is made again is not there.
    """

    kind: str
    name: str
    start: int
    stop: int
    weight: float = 1.0
    needed: int = 0
    consumer: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What lifetimes depend on: what autograd saves of an op, the optimizer's tensors per parameter, the values with gradients,
    the parameters and their views, the ops that may run again (or lie in what does), the last op of each op's region
    (`passes.regions`), and whether gathered weights are dropped."""

    saved: Callable[[Op], Saved | None]
    states: int
    backward: frozenset[str]
    weights: frozenset[str]
    reruns: frozenset[str]
    regions: Sequence[int]
    dropped: bool


def lifetimes(program: Program, terms: Terms) -> Iterator[Lifetime]:
    """Every lifetime of a step."""
    n, backward = len(program.ops), terms.backward
    uses, last = _uses(program)
    place = {op.name: i for i, op in enumerate(program.ops)}
    for parameter in (*program.parameters, *program.buffers):
        name = parameter.value.name
        trained = name in backward
        yield Lifetime(kind="stored", name=name, start=0, stop=2 * n, weight=1 + terms.states * trained)
        if trained:
            yield Lifetime(kind="gradient", name=name, start=0 if program.runs > 1 else 2 * n - 1 - last[name], stop=2 * n)
    for value in program.inputs:
        yield Lifetime(kind="stored", name=value.name, start=0, stop=2 * n)
    given = {p.value.name for p in (*program.parameters, *program.buffers)} | {v.name for v in program.inputs} | terms.weights
    outputs = {o.value for o in program.outputs}
    for name in program.values:
        if uses[name] or name in outputs:
            first = uses[name][0] if uses[name] else n - 1
            end = n - 1 if name in outputs else last[name]
            yield Lifetime(kind="converted", name=name, start=first, stop=end)
            op = program.producer.get(name)
            if op is not None and not view_of(op):
                yield Lifetime(kind="produced", name=name, start=place[op.name], stop=end)
                if name in backward:
                    yield Lifetime(kind="flowing", name=name, start=2 * n - 1 - last[name], stop=2 * n - 1 - place[op.name])
    for i, op in enumerate(program.ops):
        kept, now = terms.saved(op), 2 * n - 1 - i
        if kept is None:
            continue
        if kept.internal_bytes:
            yield Lifetime(kind="internal", name=op.name, start=i, stop=now, needed=2 * n - 1 - terms.regions[i])
        for position, name in enumerate(op.operands):
            again = position in kept.operands and name in terms.weights and terms.dropped
            if (weight := (name in backward) + again) and not view_of(op):
                yield Lifetime(kind="transient", name=name, start=now, stop=now, weight=weight, consumer=(op.name, position))
    yield from _for_backward(program, terms, given - (frozenset() if terms.dropped else terms.weights), uses, last)


def _for_backward(
    program: Program, terms: Terms, given: set[str], uses: Mapping[str, list[int]], last: Mapping[str, int]
) -> Iterator[Lifetime]:
    """What is kept of values, and what would be if the ops that read them ran again."""
    n = len(program.ops)
    keepers: dict[str, list[tuple[int, tuple[str, int] | None]]] = {name: [] for name in program.values}
    for i, op in enumerate(program.ops):
        kept = terms.saved(op)
        if kept is not None:
            for position in kept.operands:
                keepers[op.operands[position]].append((i, (op.name, position)))
            for position in kept.results:
                keepers[op.results[position].name].append((i, None))
    root = {r.name: op.operands[0] for op in program.ops if view_of(op) for r in op.results}
    for name, found in keepers.items():
        below, first = root.get(name), min((i for i, _ in found), default=n)
        while below is not None and min((i for i, _ in keepers[below]), default=n) > first:
            below = root.get(below)
        if name in given or not found or below is not None:  # what lies in something that is kept as long needs nothing
            continue
        latest = max(i for i, _ in found)  # a weight is gathered again by itself, everything else with its region
        needed = 2 * n - 1 - (latest if name in terms.weights else terms.regions[latest])
        for i, consumer in found:
            stop = 2 * n - 1 - i
            yield Lifetime(kind="kept", name=name, start=last[name] + 1, stop=stop, needed=needed, consumer=consumer)
    for i, op in enumerate(program.ops):
        if op.name not in terms.reruns:
            continue
        kept, now = terms.saved(op), 2 * n - 1 - i
        own = kept is not None and (kept.internal_bytes or kept.results)
        readers = [j for r in op.results for j in uses[r.name]]
        saved = [j for r in op.results for j, _ in keepers[r.name]]
        stop = now if own else 2 * n - 1 - min(saved or readers, default=i)
        for position, name in enumerate(op.operands):
            if name not in given:
                latest = i if name in terms.weights else max((j for j, _ in keepers[name]), default=i)
                needed = 2 * n - 1 - terms.regions[latest]
                yield Lifetime(
                    kind="rerun", name=name, start=last[name] + 1, stop=stop, needed=needed, consumer=(op.name, position)
                )


def _uses(program: Program) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Where each value is read, and its last use, its views' included."""
    uses: dict[str, list[int]] = {name: [] for name in program.values}
    last: dict[str, int] = dict.fromkeys(program.values, 0)
    for i, op in enumerate(program.ops):
        for result in op.results:
            last[result.name] = i
        for name in op.operands:
            uses[name].append(i)
            last[name] = max(last[name], i)
    for op in reversed(program.ops):
        if view_of(op):
            root = op.operands[0]
            last[root] = max(last[root], *(last[r.name] for r in op.results))
    return uses, last

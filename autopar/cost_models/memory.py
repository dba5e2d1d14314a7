"""Memory over a training step: what is alive when, independent of any layout.

Time counts ops: op i runs forward at time i and backward at time 2n-1-i, the optimizer steps at time 2n. Alive are

    stored       parameters and buffers with their optimizer state, inputs       the whole step
    gradient     of a parameter, as stored                                      from the backward of its last use on
    produced     a value as its producer leaves it                              until its last use
    converted    its other layouts                                              from its first to its last use
    kept         what autograd saves for a consumer                             from its last use to that backward
    internal     what autograd saves beside operands and results                until that backward
    flowing      gradients of values, as produced                               between backward of last use and producer
    transient    gradients as consumed, weights gathered again                  one backward

A view shares the memory of what it is a view of, and lengthens its life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.saved import Saved
from autopar.ir import Op, Program
from autopar.rules import view_of

KINDS = ("stored", "gradient", "produced", "converted", "kept", "internal", "flowing", "transient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """Something takes memory from `start` to `stop` (both included): `weight` times its bytes.

    `name` is a value, or an op for internal; `consumer` is the (op, operand position) that keeps or consumes the value.
    """

    kind: str
    name: str
    start: int
    stop: int
    weight: float = 1.0
    consumer: tuple[str, int] | None = None


def lifetimes(
    program: Program, saved: Callable[[Op], Saved | None], states: int, backward: frozenset[str], weights: frozenset[str]
) -> Iterator[Lifetime]:
    """Every lifetime of a step.

    `states` counts the optimizer's tensors per parameter; `backward` names values with gradients, `weights` the parameters
    and their views.
    """
    n = len(program.ops)
    uses, last = _uses(program)
    place = {op.name: i for i, op in enumerate(program.ops)}
    for parameter in (*program.parameters, *program.buffers):
        name = parameter.value.name
        trained = name in backward
        yield Lifetime(kind="stored", name=name, start=0, stop=2 * n, weight=1 + states * trained)
        if trained:
            yield Lifetime(kind="gradient", name=name, start=2 * n - 1 - last[name], stop=2 * n)
    for value in program.inputs:
        yield Lifetime(kind="stored", name=value.name, start=0, stop=2 * n)
    given = {p.value.name for p in (*program.parameters, *program.buffers)} | {v.name for v in program.inputs} | weights
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
        yield from _of_backward(program, op, i, saved(op), last, given, weights, backward)


def _of_backward(
    program: Program,
    op: Op,
    i: int,
    kept: Saved | None,
    last: Mapping[str, int],
    given: set[str],
    weights: frozenset[str],
    backward: frozenset[str],
) -> Iterator[Lifetime]:
    """What the backward of one op keeps and needs."""
    if kept is None:
        return
    now = 2 * len(program.ops) - 1 - i
    if kept.internal_bytes:
        yield Lifetime(kind="internal", name=op.name, start=i, stop=now)
    for position, name in enumerate(op.operands):
        saves = position in kept.operands
        if saves and name not in given:
            yield Lifetime(kind="kept", name=name, start=last[name] + 1, stop=now, consumer=(op.name, position))
        weight = (name in backward) + (saves and name in weights)
        if weight and not view_of(op):
            yield Lifetime(kind="transient", name=name, start=now, stop=now, weight=weight, consumer=(op.name, position))
    for position in kept.results:
        name = op.results[position].name
        yield Lifetime(kind="kept", name=name, start=last[name] + 1, stop=now, consumer=None)


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

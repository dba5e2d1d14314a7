"""Consistency of the ranks when a module is built: the captured program, and rank 0's plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import PlanError
from autopar.ir.program import Argument, Op, Program, Ref, Static, Value, substitute, text, without_devices
from autopar.runtime.lost_ranks import exchanging
from autopar.runtime.world import Context, on_ranks

T = TypeVar("T")
COMPARED = "the comparison of the ranks' programs"
ORDERED = (
    "PYTHONHASHSEED=0 in the environment of every process, where forward goes through a set of words "
    "(set(config.layer_types), say), which each process orders by itself"
)
SAMPLE = (
    "give every rank the same sample, of the whole batch: load the data alike (no DistributedSampler), and pad to one length; "
    'inputs="sharded" takes parts in calls, and a whole sample too'
)


def from_rank_0(make: Callable[[], str], context: Context) -> str:
    """Broadcast what rank 0 makes (a plan, as JSON; nothing, where it writes) to every rank; if rank 0 fails, every rank raises
    its error."""
    if context.device_mesh is None:
        return make()
    box: list[str | Exception] = [""]
    if not any(context.coordinates):
        try:
            box = [make()]
        except Exception as error:
            box = [error]
    with exchanging("what rank 0 makes"):
        dist.broadcast_object_list(box, src=0, device=context.device)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def check_program(program: Program, context: Context, *, sharded_inputs: bool = False) -> None:
    """Raise PlanError on every rank if a rank has captured a different program than rank 0, or takes its inputs otherwise.

    The error shows what every rank passed for the first input that differs, or else where the programs first differ.
    """
    if context.device_mesh is None:
        return
    found = _gathered((program.hash, "sharded" if sharded_inputs else "whole"), context)
    if len({taken for _, taken in found}) > 1:
        raise PlanError(f"the ranks differ in inputs=: {on_ranks([taken for _, taken in found])}", fix="the same on every rank")
    other = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if not other:
        return
    _check_samples({value.name: _kind(value) for value in program.inputs}, context)
    mine = _rows(program)
    first, second = (_broadcast(mine, rank, context) for rank in (0, other[0]))
    apart = next((pair for pair in zip(first, second, strict=False) if pair[0][0] != pair[1][0]), (("", "", ""),) * 2)
    same = Counter(kind for _, _, kind in first) == Counter(kind for _, _, kind in second)
    raise PlanError(
        "the ranks captured different programs" + (": the same operators in another order" if same else ""),
        ranks=f"{other} differ from rank 0",
        **{"rank 0": apart[0][0], f"rank {other[0]}": apart[1][0]},
        at=apart[0][1],
        fix=ORDERED if same else "build the same model in the same mode on every rank",
    )


def _check_samples(mine: Mapping[str, str], context: Context) -> None:
    """Raise PlanError on every rank if the inputs of the ranks differ; `mine` has the dtype and shape of each, by name."""
    every = _gathered(mine, context)
    for name in dict.fromkeys(name for given in every for name in given):
        texts = [given.get(name, "nothing") for given in every]
        if len(set(texts)) > 1:
            raise PlanError(f"the samples of the ranks differ in {name}: {on_ranks(texts)}", fix=SAMPLE)


def _rows(program: Program) -> list[tuple[str, str, str]]:
    """The rows to compare, one per parameter, buffer and op in order: text, source line, and text independent of position."""
    held = [str(stored.value) for stored in (*program.parameters, *program.buffers)]
    ops = [(str(without_devices(op)), op.source, _anywhere(op)) for op in program.ops]
    return [*((line, "", line) for line in held), *ops]


def _anywhere(op: Op) -> str:
    """An op as text, without the names of the values that it reads."""

    def drop(leaf: Ref | Static) -> Argument:
        return None if isinstance(leaf, Ref | torch.device) else leaf

    fixed = (substitute(argument, drop) for argument in (*op.args, *(argument for _, argument in op.kwargs)))
    return " ".join((op.module, op.target, *map(text, fixed), *map(_kind, op.results)))


def _kind(value: Value) -> str:
    return str(value).removeprefix(f"{value.name}: ")


def _broadcast(mine: T, rank: int, context: Context) -> T:
    box = [mine]
    with exchanging(COMPARED):
        dist.broadcast_object_list(box, src=rank, device=context.device)
    return box[0]


def _gathered(mine: T, context: Context) -> list[T]:
    box: list[T] = [mine] * context.mesh.size
    with exchanging(COMPARED):
        dist.all_gather_object(box, mine)
    return box

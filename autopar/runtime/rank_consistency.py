"""Consistency of the ranks when a module is built: the captured program, and rank 0's plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autopar.errors import PlanError
from autopar.ir.program import Program, without_devices
from autopar.runtime.world import Context

T = TypeVar("T")
ORDERED = (
    "PYTHONHASHSEED=0 in the environment of every process, where forward goes through a set of words "
    "(set(config.layer_types), say), which each process orders by itself"
)


def from_rank_0(make: Callable[[], str], context: Context) -> str:
    """What rank 0 makes (a plan, as JSON), on every rank; where it fails, every rank raises its error."""
    if context.device_mesh is None:
        return make()
    box: list[str | Exception] = [""]
    if not any(context.coordinates):
        try:
            box = [make()]
        except Exception as error:
            box = [error]
    dist.broadcast_object_list(box, src=0, device=context.device)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def check_program(program: Program, context: Context) -> None:
    """Raise PlanError on every rank if a rank has captured a different program than rank 0, with where they first differ."""
    if context.device_mesh is None:
        return
    found = _gathered(program.hash, context)
    other = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if not other:
        return
    mine = [(str(without_devices(op)), op.source, f"{op.module} {op.target}") for op in program.ops]
    first, second = (_broadcast(mine, rank, context) for rank in (0, other[0]))
    apart = next((pair for pair in zip(first, second, strict=False) if pair[0][0] != pair[1][0]), (("", "", ""),) * 2)
    same = Counter(kind for _, _, kind in first) == Counter(kind for _, _, kind in second)
    raise PlanError(
        "the ranks captured different programs" + (": the same operators in another order" if same else ""),
        ranks=f"{other} differ from rank 0",
        **{"rank 0": apart[0][0], f"rank {other[0]}": apart[1][0]},
        at=apart[0][1],
        fix=ORDERED if same else "build the same model with the same sample shapes, in the same mode, on every rank",
    )


def _broadcast(mine: T, rank: int, context: Context) -> T:
    box = [mine]
    dist.broadcast_object_list(box, src=rank, device=context.device)
    return box[0]


def _gathered(mine: T, context: Context) -> list[T]:
    box: list[T] = [mine] * context.mesh.size
    dist.all_gather_object(box, mine)
    return box

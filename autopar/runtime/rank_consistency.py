"""Consistency of the ranks when a module is built: the captured program, and rank 0's plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from autopar.errors import PlanError
from autopar.runtime.world import Context

T = TypeVar("T")


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


def check_program(digest: str, context: Context) -> None:
    """Raise PlanError on every rank if a rank has captured a different program than rank 0."""
    if context.device_mesh is None:
        return
    found = _gathered(digest, context)
    other = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if other:
        raise PlanError(
            "the ranks captured different programs",
            ranks=f"{other} differ from rank 0",
            fix="build the same model with the same sample shapes, in the same mode, on every rank",
        )


def _gathered(mine: T, context: Context) -> list[T]:
    box: list[T] = [mine] * context.mesh.size
    dist.all_gather_object(box, mine)
    return box

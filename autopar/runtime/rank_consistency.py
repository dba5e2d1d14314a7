"""Consistency checks between ranks: the captured program, rank 0's plan, the inputs of the first call."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from autopar.errors import InputError, PlanError
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


def check_alike(inputs: Mapping[str, torch.Tensor], context: Context) -> None:
    """Raise InputError on every rank if the ranks' inputs differ: every rank takes the global batch."""
    if context.device_mesh is None:
        return
    found = _gathered({name: _digest(tensor) for name, tensor in inputs.items()}, context)
    for name in inputs:
        other = [rank for rank, theirs in enumerate(found) if theirs[name] != found[0][name]]
        if other:
            raise InputError(
                f"the ranks were given different values for {name}",
                ranks=f"{other} differ from rank 0",
                fix="give every rank the whole batch: seed the data loader alike, and do not shard it (no DistributedSampler)",
            )


def _gathered(mine: T, context: Context) -> list[T]:
    box: list[T] = [mine] * context.mesh.size
    dist.all_gather_object(box, mine)
    return box


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()

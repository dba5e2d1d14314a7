"""The ranks of a mesh axis as threads of this process, joined by gloo: runs a parallel operator without other processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from autopar.runtime.parallel_ops import PARALLEL_OPS
from autopar.runtime.world import Axis

T = TypeVar("T")
PATIENCE = timedelta(seconds=20)  # until a collective fails because a rank has stopped
_NUMBERS = itertools.count()  # for unique names of process groups


def ranks(form: str, size: int, run: Callable[[int, Callable[..., object]], T]) -> list[T]:
    """The results of `run(rank, function)` on `size` concurrent ranks; `function` is the parallel operator on that rank's axis.

    Raises the first error of any rank.
    """
    store, name = HashStore(), f"threaded_ranks_{next(_NUMBERS)}"
    groups: list[dist.ProcessGroup] = []  # a rank that sends nothing may be done before the others are connected

    def rank_runs(rank: int) -> T:
        axis = Axis(name="axis", size=size, index=rank, group=f"{name}.{rank}")
        group = _joined(store, axis)
        groups.append(group)
        _register_process_group(GroupName(axis.group), group)
        try:
            return run(rank, functools.partial(PARALLEL_OPS[form], axis))
        finally:
            _unregister_process_group(GroupName(axis.group))

    with ThreadPoolExecutor(size) as threads:
        waiting = [threads.submit(rank_runs, rank) for rank in range(size)]
        done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in waiting]


def _joined(store: Store, axis: Axis) -> dist.ProcessGroup:
    """A process group of this thread's own."""
    group = dist.ProcessGroup(store, axis.index, axis.size)
    gloo = dist.ProcessGroupGloo(store, axis.index, axis.size, PATIENCE)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(GroupName(axis.group))
    return group

"""Runs a parallel operator or module in one process: the ranks of a mesh are threads, joined by gloo.

    ranks("expert_parallel_grouped_mm", 4, run)        [run(0, operator), run(1, operator), ...]: one operator over one axis
    with ThreadedRanks() as world:
        world.run(mesh, run)                           [run(context of rank 0), ...]: a whole module

If a rank fails, the ranks that wait for it fail too; the first error is the one raised.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from autopar.ir.mesh import Mesh
from autopar.runtime.parallel_ops import PARALLEL_OPS
from autopar.runtime.world import Axis, Context, FlattenedAxes

T = TypeVar("T")
PATIENCE = timedelta(seconds=20)  # until a collective fails because a rank has stopped
_NUMBERS = itertools.count()  # for unique names of process groups


def ranks(form: str, size: int, run: Callable[[int, Callable[..., object]], T]) -> list[T]:
    """The results of `run(rank, function)` on `size` concurrent ranks; `function` is the parallel operator on that rank's axis.

    Raises the first error of any rank.
    """
    with ThreadedRanks() as world:
        return world.operator(form, size, run)


class ThreadedRanks:
    """Threads as ranks of meshes; process groups are kept from run to run until one fails."""

    def __init__(self) -> None:
        self._meshes: dict[Mesh, list[Context]] = {}
        self._groups: dict[Mesh, list[dist.ProcessGroup]] = {}

    def run(self, mesh: Mesh, function: Callable[[Context], T]) -> list[T]:
        """The results of `function(context)` on every rank of a mesh; raises the first error of any rank.

        The contexts have no `device_mesh`: every rank gets whole tensors and keeps its part as a plain tensor.
        """
        with ThreadPoolExecutor(mesh.size) as threads:
            if mesh not in self._meshes:
                self._connect(mesh, threads)
            waiting = [threads.submit(function, context) for context in self._meshes[mesh]]
            done, late = wait(waiting, return_when=FIRST_EXCEPTION)
            failed = next((error for future in waiting if future in done and (error := future.exception())), None)
            if failed is None:
                return [future.result() for future in waiting]
            self._forget(mesh, abort=bool(late))
            raise failed

    def operator(self, form: str, size: int, run: Callable[[int, Callable[..., object]], T]) -> list[T]:
        """The results of `run(rank, function)` on ranks of one axis; `function` is the parallel operator on it."""
        mesh = Mesh(axes=("axis",), sizes=(size,))
        return self.run(mesh, lambda own: run(own.axes[0].index, functools.partial(PARALLEL_OPS[form], own.axes[0])))

    def close(self) -> None:
        """End the groups of all meshes."""
        for mesh in list(self._meshes):
            self._forget(mesh)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _connect(self, mesh: Mesh, threads: ThreadPoolExecutor) -> None:
        """Join the ranks of a mesh along its axes, each in its own thread, since they wait for each other."""
        store, name = HashStore(), f"threaded_ranks_{next(_NUMBERS)}"
        self._groups[mesh] = groups = []

        def group(here: tuple[int, ...], places: tuple[int, ...]) -> str:
            """Join the ranks that differ from this one in these places only; returns the name of this thread's group."""
            sizes, index = [mesh.sizes[place] for place in places], [here[place] for place in places]
            others = ".".join("*" if place in places else str(at) for place, at in enumerate(here))
            rank, size = int(np.ravel_multi_index(index, sizes)), math.prod(sizes)
            if size == 1:
                return ""
            made = _joined(PrefixStore(others, store), f"{name}.{others}.{rank}", rank, size)
            groups.append(made)
            return str(made.group_name)

        def joined(rank: int) -> Context:
            here = tuple(map(int, np.unravel_index(rank, mesh.sizes)))
            axes = tuple(
                Axis(name=axis, size=size, index=index, group=group(here, (place,)))
                for place, (axis, size, index) in enumerate(zip(mesh.axes, mesh.sizes, here, strict=True))
            )
            over = FlattenedAxes(mesh.name_of, axes, functools.partial(group, here))
            return Context(mesh=mesh, device_mesh=None, axes=axes, over=over, device=torch.device("cpu"))

        self._meshes[mesh] = list(threads.map(joined, range(mesh.size)))

    def _forget(self, mesh: Mesh, *, abort: bool = False) -> None:
        for context in self._meshes.pop(mesh):
            for axis in context.known_axes:
                if axis.group:
                    _unregister_process_group(GroupName(axis.group))
        for group in self._groups.pop(mesh):
            if abort:  # ranks that wait for one that failed
                group.abort()


@functools.cache
def _device() -> object:
    """The gloo device that all groups share, since each device has a thread that wakes up 100 times a second."""
    return dist.ProcessGroupGloo.create_default_device()


def _joined(store: Store, name: str, rank: int, size: int) -> dist.ProcessGroup:
    """A process group for this thread alone, registered under its name."""
    group = dist.ProcessGroup(store, rank, size)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [_device()], PATIENCE
    gloo = dist.ProcessGroupGloo(store, rank, size, options)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._set_group_name(GroupName(name))
    _register_process_group(GroupName(name), group)
    return group

"""The mesh over running processes: process groups for its axes, and this rank's position on each axis."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.lost_ranks import exchanging, listen
from autopar.runtime.process_environment import ProcessEnvironment, join_world, world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis from the point of view of this rank; emitted code passes it to every collective.

    Plain data (the process group's name, not the group), so that it can be copied, compared and traced.
    """

    name: str
    size: int
    index: int  # this rank's coordinate
    group: str  # name of the process group of the ranks that differ in this coordinate only; "" on an axis of size 1

    def __repr__(self) -> str:
        return f"{self.name}[{self.index} of {self.size}]"


class FlattenedAxes:
    """Several axes flattened into one; all ranks create its process groups together, when code is first emitted over it.

    Args:
        name_of: names the flattened axis.
        axes: the mesh's axes.
        group: creates the process group of the ranks that differ only in the axes at these positions; returns its name.
    """

    def __init__(
        self, name_of: Callable[[Sequence[int]], str], axes: Sequence[Axis], group: Callable[[tuple[int, ...]], str]
    ) -> None:
        self._name_of, self._axes, self._group = name_of, tuple(axes), group
        self.made: dict[tuple[int, ...], Axis] = {}

    def __call__(self, places: tuple[int, ...]) -> Axis:
        """The axis at these positions of the mesh, flattened if they are several; its ranks are in the mesh's order.

        Raises MeshError if another axis has its name, since emitted code finds axes by name.
        """
        if len(places) == 1:
            return self._axes[places[0]]
        if places not in self.made:
            index, name = 0, self._name_of(places)
            if any(axis.name == name for axis in (*self._axes, *self.made.values())):
                what = f"the plan sends messages over several axes at once that are called {name!r}, as others are"
                raise MeshError(what, fix="other names of the mesh's axes")
            for axis in (self._axes[place] for place in places):
                index = index * axis.size + axis.index
            size = math.prod(self._axes[place].size for place in places)
            self.made[places] = Axis(name=name, size=size, index=index, group=self._group(places))
        return self.made[places]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A mesh over the running processes. A mesh of one device needs no process groups and has no `device_mesh`."""

    mesh: Mesh
    device_mesh: DeviceMesh | None
    axes: tuple[Axis, ...]  # in mesh order
    device: torch.device  # of this rank
    over: FlattenedAxes  # flattened axes, created as code is emitted
    control: dist.ProcessGroup | None = None  # all ranks, on the host, for control messages
    disk: str = ""  # the folder for weights on disk; empty for the temporary folder

    def axis(self, name: str) -> Axis:
        """The mesh axis of this name."""
        return self.axes[self.mesh.axes.index(name)]

    @property
    def known_axes(self) -> tuple[Axis, ...]:
        """The mesh's axes, and the flattened ones over which code was emitted."""
        return (*self.axes, *self.over.made.values())

    def __deepcopy__(self, memo: dict[int, object]) -> Context:
        """Return this object itself: a copied module runs in the same processes."""
        return self

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The coordinates of this rank, one per axis."""
        return tuple(axis.index for axis in self.axes)


def connect(mesh: Mesh, *, device: str | None = None, device_mesh: DeviceMesh | None = None) -> Context:
    """Create the process groups of a mesh; every rank calls it, with equal meshes.

    The default process group is initialised from the environment of torchrun, Slurm or Open MPI if there is none (gloo on
    CPU, nccl on CUDA).

    Args:
        mesh: axis names and sizes.
        device: "cpu" or "cuda"; by default the type of `device_mesh`, else CUDA if available.
        device_mesh: an existing mesh of these devices, whose process groups are used if it has these axes.

    Raises:
        MeshError: the size of the mesh is not the number of processes, the ranks have different meshes, this process has no
            GPU, or the ranks of `device_mesh` are ordered differently along one row of an axis than along the next.
        RankError: a rank has died.
    """
    kind = device_mesh.device_type if device_mesh else device or ("cuda" if torch.cuda.is_available() else "cpu")
    if mesh.size == 1 and device_mesh is None:
        axes = tuple(Axis(name=name, size=1, index=0, group="") for name in mesh.axes)
        return without_processes(mesh, axes, torch.device(kind))
    _check_world(mesh)
    here = torch.device(kind)
    if kind == "cuda":
        here = _own_gpu()
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        join_world("nccl" if kind == "cuda" else "gloo")
    _check_agreed(f"{mesh} of {kind}")
    grid = device_mesh or init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axes)
    if tuple(grid.shape) != mesh.sizes:
        grid = DeviceMesh(kind, grid.mesh.reshape(mesh.sizes), mesh_dim_names=mesh.axes)
    grid = _ascending(grid)
    axes = tuple(_axis(mesh, grid, place) for place in range(len(mesh.sizes)))
    listen()
    over = FlattenedAxes(mesh.name_of, axes, functools.partial(_flattened_group, grid))
    return Context(mesh=mesh, device_mesh=grid, axes=axes, over=over, device=here, control=dist.new_group(backend="gloo"))


def without_processes(mesh: Mesh, axes: tuple[Axis, ...], device: torch.device) -> Context:
    """The context of a rank without process groups; its axes only have names."""
    return Context(mesh=mesh, device_mesh=None, axes=axes, over=FlattenedAxes(mesh.name_of, axes, mesh.name_of), device=device)


def _ascending(grid: DeviceMesh) -> DeviceMesh:
    """A mesh with the same process groups whose ranks ascend along every axis. torch's checkpoints use a rank's coordinates,
    collectives its position in the group; on such a mesh the two agree.

    Raises MeshError if there is none.
    """
    ranks = ordered = grid.mesh
    for place in range(ranks.dim()):
        ordered = ordered.sort(dim=place).values
    if ordered.equal(ranks):
        return grid
    for place in range(ranks.dim()):
        before, after = (sorted(map(sorted, _groups(one, (place,)))) for one in (ranks, ordered))
        if before != after:
            what = f"the ranks {ranks.tolist()} stand in another order along one row of an axis than along the next"
            raise MeshError(what, fix="a DeviceMesh whose ranks ascend along each axis, such as that of init_device_mesh")
    return DeviceMesh(grid.device_type, ordered, mesh_dim_names=grid.mesh_dim_names)


def _groups(ranks: torch.Tensor, places: tuple[int, ...]) -> list[list[int]]:
    """All groups of ranks that differ only in the axes at these positions of the mesh."""
    rows = ranks.movedim(places, tuple(range(-len(places), 0))).flatten(start_dim=-len(places))
    return [row.tolist() for row in rows.flatten(end_dim=-2).unbind()] if rows.dim() > 1 else [rows.tolist()]


def _flattened_group(grid: DeviceMesh, places: tuple[int, ...]) -> str:
    """The process group of the ranks that differ from this one only in the axes at these positions of the mesh.

    All ranks of the mesh create all such groups together. If only the members created a group, torch would name it by how many
    groups each of them is in; where these numbers differ, the ranks would wait for each other forever.

    Raises MeshError, on every rank, if the ranks of a group do not ascend in the mesh's order, as those of a process group do.
    """
    groups = _groups(grid.mesh, places)
    for ranks in groups:
        if ranks != sorted(ranks):
            what = f"the plan sends messages over several axes at once, and the ranks {ranks} there do not ascend"
            raise MeshError(what, fix="a plan made for this mesh, or ranks in ascending order")
    group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    assert group is not None, "this rank is in the mesh"
    return str(group.group_name)


def _axis(mesh: Mesh, grid: DeviceMesh, place: int) -> Axis:
    size = mesh.sizes[place]
    group = str(grid.get_group(place).group_name) if size > 1 else ""
    return Axis(name=mesh.axes[place], size=size, index=grid.get_local_rank(place), group=group)


def _own_gpu() -> torch.device:
    """The GPU with this process's local rank. Raises MeshError if the machine has fewer."""
    local, count = ProcessEnvironment.of(os.environ).local, torch.cuda.device_count()
    if local >= count:
        there = "is 1" if count == 1 else f"are {count}"
        raise MeshError(
            f"process {local} of this machine (counted from 0) has no GPU of its own: there {there}",
            fix="as many processes on each machine as it has GPUs; or CUDA_VISIBLE_DEVICES='' to run on the CPU",
        )
    return torch.device("cuda", local)


def _check_world(mesh: Mesh) -> None:
    """Raise MeshError if the mesh's size is not the world's, before any process group is created."""
    world = world_size()
    if world != mesh.size:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} devices, but {world} process{'es run' if world > 1 else ' runs'}",
            fix=f"launch the script with torchrun --nproc-per-node {mesh.size} (autopar.plan needs no processes)",
        )


def _check_agreed(mine: str) -> None:
    """Raise MeshError on every rank if ranks have different meshes, whose process groups would wait for each other."""
    every = [mine] * dist.get_world_size()
    with exchanging("the comparison of the ranks' meshes"):
        dist.all_gather_object(every, mine)
    if len(set(every)) > 1:
        raise MeshError(f"the ranks have different meshes: {on_ranks(every)}", fix="the same mesh on every rank")


def on_ranks(texts: Sequence[str]) -> str:
    """What each rank has, by rank: "8 on ranks 0, 1; 4 on rank 2"."""
    ranks = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
    return "; ".join(f"{text} on {_numbered(found)}" for text, found in ranks.items())


def _numbered(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"

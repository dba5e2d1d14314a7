"""The mesh over running processes: process groups for its axes, and this rank's position on each axis."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.lost_ranks import listen
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A mesh over the running processes. A mesh of one device needs no process groups and has no `device_mesh`."""

    mesh: Mesh
    device_mesh: DeviceMesh | None
    axes: tuple[Axis, ...]  # in mesh order
    device: torch.device  # of this rank
    control: dist.ProcessGroup | None = None  # of all ranks, on the host: what they agree on beside the model's messages
    disk: str = ""  # the folder for weights on the disk; empty for that of temporary files

    def axis(self, name: str) -> Axis:
        """The mesh axis of this name."""
        return self.axes[self.mesh.axes.index(name)]

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
        MeshError: the size of the mesh is not the number of processes, or this one has no GPU.
    """
    kind = device_mesh.device_type if device_mesh else device or ("cuda" if torch.cuda.is_available() else "cpu")
    if mesh.size == 1 and device_mesh is None:
        axes = tuple(Axis(name=name, size=1, index=0, group="") for name in mesh.axes)
        return Context(mesh=mesh, device_mesh=None, axes=axes, device=torch.device(kind))
    _check_world(mesh)
    here = torch.device(kind)
    if kind == "cuda":
        here = _own_gpu()
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        join_world("nccl" if kind == "cuda" else "gloo")
    grid = device_mesh or init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axes)
    if tuple(grid.shape) != mesh.sizes:
        grid = DeviceMesh(kind, grid.mesh.reshape(mesh.sizes), mesh_dim_names=mesh.axes)
    axes = tuple(_axis(mesh, grid, place) for place in range(len(mesh.sizes)))
    listen()
    return Context(mesh=mesh, device_mesh=grid, axes=axes, device=here, control=dist.new_group(backend="gloo"))


def _axis(mesh: Mesh, grid: DeviceMesh, place: int) -> Axis:
    size = mesh.sizes[place]
    group = str(grid.get_group(place).group_name) if size > 1 else ""
    return Axis(name=mesh.axes[place], size=size, index=grid.get_local_rank(place), group=group)


def _own_gpu() -> torch.device:
    """The GPU of this process: that of its number on this machine. Raises MeshError if there are fewer."""
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

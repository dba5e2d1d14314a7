"""The world of processes: how a mesh becomes process groups, and what a collective must know about its axis."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis as this rank sees it: the handle that emitted code passes to every collective.

    It is plain data (the group is named, not held), so it can be copied, compared and traced.
    """

    name: str
    size: int
    index: int  # this rank's coordinate
    group: str  # name of the process group of the ranks that differ in this coordinate only; "" on an axis of one

    def __repr__(self) -> str:
        return f"{self.name}[{self.index} of {self.size}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A mesh laid over the running processes. A mesh of one device needs no processes and has no `device_mesh`."""

    mesh: Mesh
    device_mesh: DeviceMesh | None
    axes: tuple[Axis, ...]  # in mesh order
    device: torch.device  # of this rank

    def axis(self, name: str) -> Axis:
        """The axis of this name."""
        return self.axes[self.mesh.axes.index(name)]

    def __deepcopy__(self, memo: dict[int, object]) -> Context:
        """The processes cannot be copied: a copied module runs in the same ones."""
        return self

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Where this rank stands: one coordinate per axis."""
        return tuple(axis.index for axis in self.axes)


def connect(mesh: Mesh, *, device: str | None = None, device_mesh: DeviceMesh | None = None) -> Context:
    """Lay a mesh over the running processes; every rank calls it, with equal meshes.

    The process group is initialised from torchrun's environment if there is none (gloo on CPU, nccl on CUDA). `device` is
    "cpu" or "cuda", by default what `device_mesh` says, else CUDA where there is one. Raises MeshError when the mesh is
    not as large as the world.
    """
    kind = device_mesh.device_type if device_mesh else device or ("cuda" if torch.cuda.is_available() else "cpu")
    if mesh.size == 1 and device_mesh is None:
        axes = tuple(Axis(name=name, size=1, index=0, group="") for name in mesh.axes)
        return Context(mesh=mesh, device_mesh=None, axes=axes, device=torch.device(kind))
    _check_world(mesh)
    here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    grid = device_mesh or init_device_mesh(kind, mesh.sizes, mesh_dim_names=mesh.axes)
    axes = tuple(_axis(mesh, grid, place) for place in range(len(mesh.sizes)))
    return Context(mesh=mesh, device_mesh=grid, axes=axes, device=here)


def _axis(mesh: Mesh, grid: DeviceMesh, place: int) -> Axis:
    size = mesh.sizes[place]
    group = str(grid.get_group(place).group_name) if size > 1 else ""
    return Axis(name=mesh.axes[place], size=size, index=grid.get_local_rank(place), group=group)


def _check_world(mesh: Mesh) -> None:
    """Refuse a mesh that is not as large as the world, before any process group is made."""
    environment = os.environ.get("WORLD_SIZE")
    world = dist.get_world_size() if dist.is_initialized() else int(environment) if environment else 1
    if world != mesh.size:
        raise MeshError(
            f"the mesh {mesh} has {mesh.size} devices, but {world} process{'es run' if world > 1 else ' runs'}",
            fix=f"launch the script with torchrun --nproc-per-node {mesh.size} (autopar.plan needs no processes)",
        )

"""The mesh: named axes of devices, with the links along each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from autopar.errors import MeshError, printable
from autopar.ir.device import Device, Link
from autopar.ir.field_types import check_fields
from autopar.ir.layout import numbered_axes

# The axis of a device's memories, of size 1: what is stored is in state H on it, on the host, in D, on the disk, or I, on the
# device.
MEMORY = "memory"
MOST_DEVICES = 2**31 - 1
STAGES = "_stages"  # what the axis of a pipeline is called that was cut off another one, after that


def check_devices(number: int) -> None:
    """Raise MeshError for more devices than supported."""
    if number > MOST_DEVICES:
        said = number if number < 10**15 else "too many to print"
        raise MeshError(f"a mesh has at most {MOST_DEVICES} devices, not {said}", fix="the devices that there are")


@dataclass(frozen=True, slots=True)
class AutoMesh:
    """A number of devices whose axes are searched for the fastest step (`autopar.planning.mesh_shapes`)."""

    devices: int

    def __post_init__(self) -> None:
        check_devices(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes, outermost first; the devices of the last, innermost axis are next to each other.

    `links[i]` connects the devices along axis i; empty until a device is known (`autopar.cost_models.links.connect`). Each link
    in `flattened` connects the devices of several adjacent axes as one group, over which messages may go too.

    >>> Mesh.of((2, 4))
    Mesh(axis0=2, axis1=4)
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...] = ()
    device: Device | None = None
    flattened: tuple[tuple[tuple[int, ...], Link], ...] = ()
    # Whether ranks ascend in the mesh's order: only then are they in it in a process group over flattened axes.
    ascending: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.sizes, tuple) and not (self.sizes and all(type(size) is int and size > 0 for size in self.sizes)):
            fix = "the number of devices along every axis, as in mesh=(2, 4)"
            raise MeshError(f"a mesh needs axes of at least one device each, not {self.sizes}", fix=fix)
        check_fields("a mesh's", self)
        check_devices(self.size)
        if len(set(self.axes)) != len(self.sizes):
            raise MeshError(f"a mesh needs one name per axis, not {self.axes} for sizes {self.sizes}")
        if self.axes == (MEMORY,) and self.size == 1:
            raise MeshError(f"a mesh axis is called {MEMORY!r}, which is that of the device's memories", fix="another name")
        if not all(self.axes):
            raise MeshError(f"an axis of the mesh {self.axes} has no name", fix='names such as "dp" and "tp"')
        if self.links and len(self.links) != len(self.sizes):
            raise MeshError(f"a mesh needs one link per axis, not {len(self.links)} for axes {self.axes}")

    @staticmethod
    def of(mesh: object) -> Mesh:
        """A mesh from a `Mesh`, a size, a tuple of sizes, a dict name -> size, or a torch `DeviceMesh`."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Integral):
            mesh = (mesh,)
        if isinstance(mesh, Mapping):
            return Mesh(axes=tuple(map(str, mesh)), sizes=tuple(map(_plain, mesh.values())))
        if isinstance(mesh, (tuple, list)):
            return Mesh(axes=tuple(f"axis{i}" for i in range(len(mesh))), sizes=tuple(map(_plain, mesh)))
        names, ranks = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
        if ranks is None:
            raise MeshError(
                f"cannot make a mesh of {mesh!r}",
                fix="give a tuple of sizes, a dict name -> size, an autopar.Mesh or a DeviceMesh",
            )
        sizes = tuple(ranks.shape)
        flat = ranks.flatten().tolist()
        axes = tuple(names or (f"axis{i}" for i in range(len(sizes))))
        return Mesh(axes=axes, sizes=sizes, ascending=flat == sorted(flat))

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.sizes)

    @property
    def has_memories(self) -> bool:
        """Whether its last axis is the memory axis: weights may be stored on the host or the disk."""
        return self.axes[-1] == MEMORY and self.sizes[-1] == 1

    @property
    def places(self) -> tuple[str, ...]:
        """The states on the memory axis for weights stored outside of device memory; none without such an axis."""
        if not self.has_memories:
            return ()
        known = {"H": self.device is None or self.device.host_memory, "D": self.device is None or self.device.disk}
        return tuple(place for place, there in known.items() if there)

    @property
    def devices(self) -> Mesh:
        """The mesh without its memory axis.

        >>> Mesh.of({"dp": 4, "memory": 1}).devices
        Mesh(dp=4)
        """
        if not self.has_memories or len(self.axes) == 1:
            return self
        flattened = tuple((axes, link) for axes, link in self.flattened if axes[-1] < len(self.axes) - 1)
        return replace(self, axes=self.axes[:-1], sizes=self.sizes[:-1], links=self.links[:-1], flattened=flattened)

    @property
    def bare(self) -> Mesh:
        """The mesh without its device and links."""
        return replace(self, links=(), device=None, flattened=())

    def without(self, axis: str) -> Mesh:
        """The mesh of the devices at one position of an axis; one device if there is no other axis."""
        if len(self.axes) == 1:
            return replace(self, sizes=(1,), flattened=())
        at = self.axes.index(axis)
        axes, sizes, links = ((*kept[:at], *kept[at + 1 :]) for kept in (self.axes, self.sizes, self.links))
        flattened = tuple(
            (tuple(place - (place > at) for place in places), link) for places, link in self.flattened if at not in places
        )
        return replace(self, axes=axes, sizes=sizes, links=links, flattened=flattened)

    def without_latency(self) -> Mesh:
        """The mesh with links on which an empty message takes no time."""
        flattened = tuple((places, link.without_latency()) for places, link in self.flattened)
        return replace(self, links=tuple(link.without_latency() for link in self.links), flattened=flattened)

    def axes_over(self, axis: int) -> tuple[int, ...]:
        """The axes with this number: one axis, or those that a flattened axis is made of."""
        return numbered_axes(len(self.sizes))[axis]

    def ranks_over(self, axis: int) -> int:
        """The number of devices in a group over an axis, plain or flattened (`autopar.ir.layout.numbered_axes`)."""
        return math.prod(self.sizes[place] for place in self.axes_over(axis))

    def link_over(self, axis: int) -> Link:
        """The link over an axis, plain or flattened. Raises MeshError if it is unknown."""
        if axis < len(self.links):
            return self.links[axis]
        axes = self.axes_over(axis)
        found = next((link for places, link in self.flattened if places == axes), None)
        if found is None:
            what = f"nothing is known of messages over {self.name_of(axes)} at once"
            raise MeshError(what, mesh=self, fix="a plan made for this mesh")
        return found

    def name_of(self, axes: Sequence[int]) -> str:
        """The name of an axis, plain or flattened, as torch names it.

        >>> Mesh.of({"node": 2, "gpu": 4}).name_of((0, 1))
        'node_gpu'
        """
        return "_".join(self.axes[axis] for axis in axes)

    def axes_named(self, name: str) -> tuple[int, ...]:
        """The axis with this name, or the axes that a flattened one is made of; empty if there is none.

        >>> Mesh.of({"node": 2, "gpu": 4}).axes_named("node_gpu")
        (0, 1)
        """
        if name in self.axes:
            return (self.axes.index(name),)
        for start in range(len(self.axes)):
            for stop in range(start + 2, len(self.axes) + 1):
                found = self.name_of(range(start, stop))
                if found == name:
                    return tuple(range(start, stop))
                if not name.startswith(found):
                    break
        return ()

    def with_memories(self, link: Link | None) -> Mesh:
        """The mesh with a memory axis added as its last; the link connects the memories."""
        links = (*self.links, link) if self.links and link is not None else ()
        return replace(self, axes=(*self.axes, MEMORY), sizes=(*self.sizes, 1), links=links)

    def merged(self, runs: Sequence[int]) -> Mesh:
        """The mesh with runs of adjacent axes merged, each named as torch names flattened dims; without links.

        Args:
            runs: how many axes each merged axis takes, from the outermost on; they add up to the number of axes.

        >>> Mesh.of((2, 2, 8)).merged((2, 1))
        Mesh(axis0_axis1=4, axis2=8)
        """
        ends = list(itertools.accumulate(runs, initial=0))
        parts = [slice(*ends) for ends in itertools.pairwise(ends)]
        return Mesh(
            axes=tuple("_".join(self.axes[part]) for part in parts),
            sizes=tuple(math.prod(self.sizes[part]) for part in parts),
            device=self.device,
            ascending=self.ascending,
        )

    def merges(self, mesh: Mesh) -> bool:
        """Whether this mesh is the other one, perhaps with some adjacent axes merged."""
        left = list(zip(mesh.axes, mesh.sizes, strict=True))
        for axis, size in zip(self.axes, self.sizes, strict=True):
            runs = (n for n in range(1, len(left) + 1) if "_".join(name for name, _ in left[:n]) == axis)
            run = next(runs, 0)
            if not run or math.prod(one for _, one in left[:run]) != size:
                return False
            left = left[run:]
        return not left

    def cut(self, parts: int) -> Mesh:
        """The mesh with its outermost axis cut in two: the number of parts as a new first axis, the rest as the second.

        >>> Mesh.of({"node": 8, "gpu": 4}).cut(2)
        Mesh(node_stages=2, node=4, gpu=4)
        >>> Mesh.of({"node": 8, "gpu": 4}).cut(8)
        Mesh(node_stages=8, gpu=4)

        Raises MeshError if the axis cannot be cut into so many equal parts.
        """
        (axis, *axes), (size, *sizes) = self.axes, self.sizes
        if size % parts:
            raise MeshError(f"the {size} devices of mesh axis {axis!r} cannot be cut into {parts} equal parts", mesh=self)
        kept = 1 if parts == size else 2
        return Mesh(
            axes=(*(f"{axis}{STAGES}", axis)[:kept], *axes),
            sizes=(*(parts, size // parts)[:kept], *sizes),
            links=(*(self.links[0], self.links[0])[:kept], *self.links[1:]) if self.links else (),
            device=self.device,
            ascending=self.ascending,
        )

    @property
    def joined(self) -> Mesh:
        """The mesh that this one was `cut` from; itself if it was not."""
        axis = self.axes[0].removesuffix(STAGES)
        if axis == self.axes[0]:
            return self
        split = self.axes[1:2] == (axis,)
        first = self.sizes[0] * (self.sizes[1] if split else 1)
        axes, sizes = (axis, *self.axes[1 + split :]), (first, *self.sizes[1 + split :])
        return Mesh(axes=axes, sizes=sizes, device=self.device, ascending=self.ascending)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank: one per axis, row-major."""
        where = []
        for size in reversed(self.sizes):
            rank, here = divmod(rank, size)
            where.append(here)
        return tuple(reversed(where))

    def __str__(self) -> str:
        return printable(f"({', '.join(f'{a}={s}' for a, s in zip(self.axes, self.sizes, strict=True))})")

    def __repr__(self) -> str:
        return f"Mesh{self}"


def _plain(size: Any) -> Any:
    """Convert an integer of another library to Python's own."""
    return int(size) if isinstance(size, Integral) and not isinstance(size, bool) else size

"""The mesh shapes that `mesh="auto"` searches for a number of devices, given their nodes.

    nodes of 8     8 devices    (8,)  (2, 4)  (4, 2)
                  32 devices    (4, 8)  (8, 4)  (16, 2)  (32,)  and  (4, 2, 4)  (4, 4, 2)
                  12 devices    (3, 4)  (6, 2)  (12,)

If a node has several devices, the innermost of several axes lies within a node. What is left of the devices is the outer axis,
which `pipeline="auto"` may cut for stages; or the nodes are, and their devices are two axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.cost_models import catalog
from autopar.cost_models.links import connect
from autopar.errors import ConstraintError, MeshError
from autopar.ir.device import Device
from autopar.ir.mesh import AutoMesh, Mesh
from autopar.plan.options import AUTO, Options
from autopar.planning.memories import with_memories

LARGE = 1000  # ops of a program that is not searched to the end
NAMES = {1: ("device",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}


def shapes(devices: int, per_node: int, *, axes: int = 3) -> Iterator[tuple[int, ...]]:
    """The sizes of meshes of so many devices, of so many axes at most; first those with the longest inner axis.

    >>> list(shapes(16, 8, axes=2)), list(shapes(4, 1))
    ([(2, 8), (4, 4), (8, 2), (16,)], [(4,), (2, 2)])
    """
    within = devices if devices <= per_node or per_node == 1 else math.gcd(devices, per_node)
    inner = [size for size in range(within, 0, -1) if within % size == 0]
    yield from dict.fromkeys(tuple(size for size in (devices // one, one) if size > 1) or (1,) for one in inner)
    if axes > 2 and devices > per_node and within == per_node:
        yield from ((devices // per_node, per_node // one, one) for one in inner[1:-1])


def connected_shapes(mesh: AutoMesh, options: Options, ops: int) -> tuple[Mesh, ...]:
    """The meshes to search for a program of so many ops, with device and links.

    Raises MeshError if the device has no links for any of them, or an axis is named; ConstraintError for constraints.
    """
    check_axes(options)
    device = replace(catalog.device(options.device, processes=mesh.devices), compiled=options.compiled)
    found: list[Mesh] = []
    refused: list[MeshError] = []
    for sizes in shapes(mesh.devices, device.per_node, axes=3 if ops <= LARGE else 2):
        try:
            found.append(_connected(sizes, device, options))
        except MeshError as error:  # a profile without the links of such groups
            refused.append(error)
    if not found:
        raise refused[0]
    return tuple(found)


def _connected(sizes: tuple[int, ...], device: Device, options: Options) -> Mesh:
    mesh = Mesh(axes=NAMES[len(sizes)], sizes=sizes)
    return with_memories(connect(mesh, device if options.offload else replace(device, host=None)), options)


def check_axes(options: Options) -> None:
    """Raise MeshError or ConstraintError for options that name axes, since axes are searched."""
    if options.pipeline not in (None, AUTO):
        what = f"mesh={AUTO!r} has no axis {options.pipeline!r} for the pipeline"
        raise MeshError(what, fix=f"pipeline={AUTO!r}, or a mesh with that axis")
    if options.constraints:
        name, line = next(iter(options.constraints.items()))
        what = f"the constraint {name!r} names a layout on each axis, and mesh={AUTO!r} chooses how many axes there are"
        raise ConstraintError(what, layout=line, fix="a mesh, as plan.mesh of a plan without constraints, or no constraints")


__all__ = ["LARGE", "check_axes", "connected_shapes", "shapes"]

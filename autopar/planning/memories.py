"""Heterogeneous memory: the mesh with an axis of memories, where what is stored may lie on the host.

offload=True      saved activations may go to the host, nothing that is stored
offload="host"    parameters, their gradients and the optimizer's state, too, weight by weight
offload="auto"    as "host" where the host's memory is known, else as True
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.catalog import system_memory
from autopar.errors import BudgetError, ConstraintError, MeshError
from autopar.ir.mesh import MEMORY, Bytes, Device, Mesh
from autopar.plan.budget import SHARE, byte_count
from autopar.plan.options import AUTO, HOST, Options
from autopar.plan.plan import Plan
from autopar.plan.text import size_text


def with_memories(mesh: Mesh, options: Options) -> Mesh:
    """A mesh with device and links, and an axis of memories if the options let the host store weights.

    The device then has its share of the host: of memory and bandwidth as much as each of the devices of a node that the mesh
    uses. Raises MeshError where there is no such host, or an axis has the name of memories; ConstraintError for options that
    contradict each other.
    """
    device = mesh.device
    assert device is not None, "a mesh is priced with its device"
    if options.offload not in (HOST, AUTO):
        if options.host_memory is not None:
            what = f"host_memory={options.host_memory!r} says how much the host may store, and offload={options.offload!r}"
            raise ConstraintError(what, fix=f"offload={HOST!r}, or leave host_memory= out")
        return mesh
    if options.pipeline is not None:
        raise ConstraintError(f"offload={options.offload!r} beside a pipeline is not known", fix="offload=True, or no stages")
    sharing = min(mesh.size, device.per_node)
    memory = _memory(device, options)
    if device.host is None or not memory or not device.host_bandwidth:
        if options.offload == AUTO and options.host_memory is None:
            return mesh
        raise _lacking(device, options)
    if MEMORY in mesh.axes:
        raise MeshError(f"a mesh axis is called {MEMORY!r}, which is that of the device's memories", fix="another name")
    shared = replace(device, host_memory=memory // sharing, host_bandwidth=device.host_bandwidth / sharing)
    return replace(mesh.with_memories(device.host), device=shared)


def check_host(plan: Plan, ranks: int) -> None:
    """Raise BudgetError if this machine's memory is less than what so many ranks of a plan have there."""
    needed, there = ranks * plan.host_memory, system_memory()
    if needed > there:
        raise BudgetError(
            f"the plan has {size_text(needed)} in this host's memory, which has {size_text(there)}",
            ranks=f"{ranks}, of {size_text(plan.host_memory)} each",
            fix=f'plan with host_memory="{there // 10**9}GB" or less',
        )


def _memory(device: Device, options: Options) -> Bytes:
    """What a node's host may store."""
    if options.host_memory is None:
        return int(SHARE * device.host_memory)
    return byte_count(options.host_memory, "an amount of the host's memory")


def _lacking(device: Device, options: Options) -> MeshError:
    """What is not known of a device's host."""
    own = "an autopar.Device with host, host_memory and host_bandwidth"
    if device.host is None:
        what = f"offload={options.offload!r} needs a host, and the device {device.name} has no link to one"
        return MeshError(what, fix=f"a device of the catalog that has one, or {own}")
    missing, fix = ("memory", 'host_memory="512GB", of one node') if device.host_bandwidth else ("bandwidth", own)
    what = f"offload={options.offload!r} needs to know the {missing} of the host of {device.name}"
    return MeshError(what, fix=fix)


__all__ = ["check_host", "with_memories"]

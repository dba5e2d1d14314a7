"""Heterogeneous memory: a mesh with a memory axis, so that weights may be stored on the host or the disk.

offload=True      saved activations may go to the host, weights may not
offload="host"    parameters, their gradients and the optimizer's state too, weight by weight
offload="disk"    the same, on the host or on the disk
offload="auto"    as "disk" where `disk_memory` says how much, as "host" where the host's memory is known, else as True
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from autopar.cost_models.catalog import system_memory
from autopar.errors import BudgetError, ConstraintError, DiskError, MeshError
from autopar.ir.device import Bytes, Device, Disk, Link
from autopar.ir.mesh import MEMORY, Mesh
from autopar.plan.budget import SHARE, byte_count
from autopar.plan.options import AUTO, DISK, HOST, Options
from autopar.plan.plan import Plan
from autopar.plan.text import size_text


def with_memories(mesh: Mesh, options: Options) -> Mesh:
    """A mesh with device and links, and a memory axis if the options let the host or the disk store weights.

    The device then gets its share of both: memory and bandwidth divided by the devices of a node that the mesh uses. Raises
    MeshError if the host or disk is unknown, or an axis is named like the memory axis; ConstraintError for contradictory
    options.
    """
    device = mesh.device
    assert device is not None, "a mesh is priced with its device"
    _check_said(options)
    if options.offload not in (HOST, DISK, AUTO):
        return mesh
    if options.pipeline is not None:
        raise ConstraintError(f"offload={options.offload!r} beside a pipeline is not known", fix="offload=True, or no stages")
    disk = _disk(device, options)
    memory = _memory(device, options, least=0 if disk else 1)
    if disk is None and not (device.host and memory and device.host_bandwidth):
        if options.offload == AUTO and options.host_memory is None and options.disk_memory is None:
            return mesh
        raise _lacking(device, options)
    if MEMORY in mesh.axes:
        raise MeshError(f"a mesh axis is called {MEMORY!r}, the name of the memory axis", fix="another name")
    own = Link(name="memory", latency=0.0, bandwidth=device.bandwidth, source=device.source)  # of a CPU beside a disk
    return replace(
        mesh.with_memories(device.host or own), device=_shared(device, memory, disk, min(mesh.size, device.per_node))
    )


def _shared(device: Device, memory: Bytes, disk: Disk | None, sharing: int) -> Device:
    """The device with its share of its node's memory, bandwidth and disk."""
    own = disk and replace(disk, memory=disk.memory // sharing, read=disk.read / sharing, write=disk.write / sharing)
    stored = memory // sharing if device.host_bandwidth else 0
    return replace(device, host_memory=stored, host_bandwidth=device.host_bandwidth / sharing, disk=own)


def _check_said(options: Options) -> None:
    """Raise ConstraintError for an amount of memory in a place that may store nothing."""
    for name, place, allowed in (("host_memory", HOST, (HOST, DISK, AUTO)), ("disk_memory", DISK, (DISK, AUTO))):
        amount = getattr(options, name)
        if amount is not None and options.offload not in allowed:
            what = f"{name}={amount!r} says how much the {place} may store, and offload={options.offload!r}"
            raise ConstraintError(what, fix=f"offload={place!r}, or leave {name}= out")


def check_host(plan: Plan, ranks: int) -> None:
    """Raise BudgetError if this machine's memory is too small for so many ranks of a plan."""
    needed, there = ranks * plan.host_memory, system_memory()
    if needed > there:
        raise BudgetError(
            f"the plan needs {size_text(needed)} of this host's memory, which has {size_text(there)}",
            ranks=f"{ranks}, of {size_text(plan.host_memory)} each",
            fix=f'plan with host_memory="{there // 10**9}GB" or less',
        )


def check_disk(plan: Plan, ranks: int, folder: str) -> None:
    """Raise DiskError if no file can be created in the folder, BudgetError if it lacks room for so many ranks."""
    if not Path(folder).is_dir():
        raise DiskError(f"the folder {folder} for weights on the disk does not exist", fix="make it, or name another as disk=")
    try:
        tempfile.TemporaryFile(dir=folder).close()
        there = shutil.disk_usage(folder).free
    except OSError as error:
        raise DiskError(
            f"no file can be created in {folder}, the folder for weights on the disk", error=error, fix=DiskError.another
        ) from error
    needed = ranks * plan.disk_memory
    if needed > there:
        raise BudgetError(
            f"the plan needs {size_text(needed)} on this disk, which has {size_text(there)} left",
            folder=folder,
            ranks=f"{ranks}, of {size_text(plan.disk_memory)} each",
            fix=f'plan with disk_memory="{there // 10**9}GB" or less, or {DiskError.another}',
        )


def _memory(device: Device, options: Options, *, least: Bytes) -> Bytes:
    """Bytes that a node's host may store; raises BudgetError for less than the minimum."""
    if options.host_memory is None:
        return int(SHARE * device.host_memory)
    return byte_count(options.host_memory, "an amount of the host's memory", per="node", least=least)


def _disk(device: Device, options: Options) -> Disk | None:
    """The disk of a node, if the options let it store weights. Raises MeshError if it is unknown."""
    if options.offload != DISK and options.disk_memory is None:
        return None
    if device.disk is None:
        what = f"offload={options.offload!r} needs to know the rates of the disk of {device.name}"
        raise MeshError(
            what,
            fix="measure it, python -m autopar.profile ... --disk FOLDER; or an autopar.Device with disk=autopar.Disk(...)",
        )
    if options.disk_memory is not None:
        return replace(device.disk, memory=byte_count(options.disk_memory, "an amount of the disk", per="node"))
    if not device.disk.memory:
        what = f"offload={options.offload!r} needs to know how much the disk of {device.name} may store"
        raise MeshError(what, fix='disk_memory="2TB", of one node')
    return replace(device.disk, memory=int(SHARE * device.disk.memory))


def _lacking(device: Device, options: Options) -> MeshError:
    """What is unknown about a device's host."""
    own = "an autopar.Device with host, host_memory and host_bandwidth"
    if device.host is None:
        what = f"offload={options.offload!r} needs a host, and the device {device.name} has no link to one"
        return MeshError(what, fix=f"a device of the catalog that has one, or {own}")
    missing, fix = ("memory", 'host_memory="512GB", of one node') if device.host_bandwidth else ("bandwidth", own)
    what = f"offload={options.offload!r} needs to know the {missing} of the host of {device.name}"
    return MeshError(what, fix=fix)


__all__ = ["check_disk", "check_host", "with_memories"]

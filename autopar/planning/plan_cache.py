"""Plans kept in a folder, so that what was planned once for a program and a mesh is not planned again."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from autopar.cost_models.cost_model import CATALOG
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.plan.options import Options
from autopar.plan.plan import VERSION, Plan
from autopar.plan.stages import read_any

LOG = logging.getLogger("autopar")


def cached(folder: Path, program: Program, meshes: Sequence[Mesh], options: Options, make: Callable[[], Plan]) -> Plan:
    """The plan that is kept for this, or else the one that `make` makes, which is kept then.

    A file that is no plan of the program is replaced. Prices of a cost model of the user's own are not known by a name: its
    plans are made anew. So are those of a folder that cannot be written, with a warning.
    """
    if options.cost_model is not CATALOG:
        return make()
    path = folder / f"{fingerprint(program, meshes, options)}.json"
    if path.exists():
        try:
            found = Plan.load(path)
            read_any(found, program, found.mesh)
            LOG.info("the plan is that of %s", path)
            return found
        except PlanError as error:
            LOG.warning("%s: %s; it is made again", path, error.what)
    plan = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    except OSError as error:
        LOG.warning("the plan is not kept: %s", error)
    return plan


def fingerprint(program: Program, meshes: Sequence[Mesh], options: Options) -> str:
    """What a plan depends on, in 32 digits: the program's hash, meshes with devices and links, options, the version."""
    named = {one.name: getattr(options, one.name) for one in fields(Options) if one.name != "cost_model"}
    asked = sorted((named | {"optimizer": options.stepped}).items())  # what it costs: a function's text is its address
    devices = [(mesh.axes, mesh.sizes, mesh.links, mesh.device, mesh.flattened) for mesh in meshes]
    key = repr((version("autopar"), VERSION, program.hash, devices, asked))
    return hashlib.sha256(key.encode()).hexdigest()[:32]


__all__ = ["cached", "fingerprint"]

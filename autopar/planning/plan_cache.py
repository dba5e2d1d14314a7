"""Caches plans in a folder, so that a program is planned only once for a mesh."""

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
    """Return the cached plan for this, or call `make` and cache its plan.

    A file that is not a plan of the program is replaced. Plans under a user's own cost model are not cached, because its prices
    have no name. If the folder cannot be written, plans are made again, with a warning.
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
    """A hash of 32 digits of what a plan depends on: the program, meshes with devices and links, options, the version."""
    named = {one.name: getattr(options, one.name) for one in fields(Options) if one.name != "cost_model"}
    asked = sorted((named | {"optimizer": options.stepped}).items())  # what it costs: a function's text is its address
    devices = [(mesh.axes, mesh.sizes, mesh.links, mesh.device, mesh.flattened) for mesh in meshes]
    key = repr((version("autopar"), VERSION, program.hash, devices, asked))
    return hashlib.sha256(key.encode()).hexdigest()[:32]


__all__ = ["cached", "fingerprint"]

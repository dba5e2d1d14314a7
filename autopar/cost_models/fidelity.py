"""Errors of predicted steps against published measurements, by device and scale.

Figures are those of `benchmarks/results/fidelity.txt`, "by device and nodes", which `python -m benchmarks.fidelity --save`
writes; `tests/benchmarks/test_fidelity.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.catalog import DEVICES
from autopar.ir.mesh import Mesh

ONE_NODE, SEVERAL_NODES = "one node", "several nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """Median error of predicted step times, relative to the measured ones; 0 if nothing was compared."""

    name: str
    median: float
    source: str


# By device and scale: how many runs were compared, the median error and the mean error.
MEASURED: Mapping[tuple[str, str], tuple[int, float, float]] = {
    ("h100", ONE_NODE): (20, 0.008, 0.011),
    ("a100-80gb", ONE_NODE): (57, 0.019, 0.026),
    ("a100-80gb", SEVERAL_NODES): (8, 0.032, 0.031),
    ("a100-40gb", ONE_NODE): (46, 0.022, 0.033),
    ("a100-40gb", SEVERAL_NODES): (29, 0.019, 0.022),
    ("v100-32gb", ONE_NODE): (18, 0.068, 0.077),
    ("l4", ONE_NODE): (5, 0.063, 0.070),
}


def fidelity(mesh: Mesh) -> Fidelity | None:
    """The error of prices on meshes of this kind; None unless the device is an unmodified catalog entry."""
    device = mesh.device
    if device is None or DEVICES.get(device.name) != device:
        return None
    scale = ONE_NODE if mesh.size <= device.per_node else SEVERAL_NODES
    where = f"on {scale} of {device.name}"
    if (device.name, scale) not in MEASURED:
        return Fidelity(name="unknown error", median=0.0, source=f"compared with no published run {where}")
    runs, median, mean = MEASURED[device.name, scale]
    source = f"{runs} published runs {where}; mean {mean:.1%}; docs/prices.md"
    return Fidelity(name="median error", median=median, source=source)


__all__ = ["MEASURED", "ONE_NODE", "SEVERAL_NODES", "Fidelity", "fidelity"]

"""The code emitted for a plan on rank 0; generated without processes, with fake process groups."""

from __future__ import annotations

import torch

from autopar.codegen import emit
from autopar.plan.resolved import ResolvedPlan
from autopar.planning.planner import Planned
from autopar.runtime.world import Axis, without_processes


def code(planned: Planned) -> str:
    """The emitted module's code on rank 0."""
    return code_of(planned.resolved)


def code_of(resolved: ResolvedPlan) -> str:
    """The code that the first rank of a plan's mesh runs."""
    mesh, analysis = resolved.plan.mesh, resolved.analysis
    axes = tuple(Axis(name=name, size=size, index=0, group=name) for name, size in zip(mesh.axes, mesh.sizes, strict=True))
    device = torch.device("cpu") if resolved.plan.device.startswith("cpu") else torch.device("cuda", 0)
    graph = emit(analysis.step, resolved.assignment, dict(analysis.fits), without_processes(mesh, axes, device))
    return graph.python_code("self").src

"""Threads as ranks, in place of worker processes, for `verify`: no start-up, no copies, and the plan is read once.

They do not cover what only processes have: stored DTensors, payloads, ports. tests/verify/test_equal_numbers.py covers those
for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.codegen import OutputLayout, ParallelModule
from autopar.ir.layout import Layout, shard
from autopar.ir.mesh import Mesh
from autopar.parallelize import assembled
from autopar.pipelining import assembled_stages
from autopar.plan.resolved import ResolvedPlan, read_plan
from autopar.plan.stages import read_pipeline
from autopar.runtime.recorder import recorded
from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Context
from autopar.verify.execution import error, results
from autopar.verify.reference import loss_weights
from autopar.verify.verification import RankResult, _loss

CHECK = "autopar.verify.verification:check"


class Threads(WorkerPool):
    """What `verify` asks of a pool, and no more of it: it runs `verification.check`."""

    def __init__(self, world: ThreadedRanks) -> None:
        self.threads = world

    def run(
        self, function: str, payload: Any = None, *, ranks: int | None = None, timeout: float = 300.0, keep: bool = False
    ) -> list[object]:
        """The errors and issued collectives of every rank."""
        assert function == CHECK
        plan, program = payload.plan, payload.captured.program
        if plan.pipeline:
            return self._in_stages(payload)
        resolved = read_plan(plan, program, plan.mesh)

        def rank(context: Context) -> RankResult:
            module = assembled(payload.captured, payload.tensors, resolved, context)
            ends = module.autopar.outputs
            with recorded(context.known_axes) as log:
                found = results(module, program, payload.inputs, lambda outputs: sum_of_parts(outputs, ends, context))
            layouts = {key: layout(key, module, resolved) for key in found}
            errors = {
                key: error(found[key].detach(), part(tensor, layouts[key], context))
                for key, tensor in payload.reference.items()
                if key in found
            }
            return errors, list(log)

        return [*self.threads.run(Mesh(axes=plan.axes, sizes=plan.sizes), rank)]

    def _in_stages(self, payload: Any) -> list[object]:
        """The same of a plan in pipeline stages."""
        plan, program = payload.plan, payload.captured.program
        found, loss = read_pipeline(plan, program), _loss(plan, program)

        def rank(context: Context) -> RankResult:
            module = assembled_stages(payload.captured, payload.tensors, found, context)
            with recorded(context.known_axes) as log:
                here = results(module, program, payload.inputs, loss)
            stages = [(stage.module, found.resolved[number]) for number, stage in module.autopar.stages.stages.items()]
            on, errors = stages[0][0].autopar.context, {}
            for key, tensor in here.items():
                of = (layout(key, *stage) for stage in stages if key[0] != "output" or stage[0].autopar.outputs)
                errors[key] = error(tensor.detach(), part(payload.reference[key], next(filter(None, of), ()), on))
            return errors, list(log)

        return [*self.threads.run(Mesh(axes=plan.axes, sizes=plan.sizes), rank)]


def part(tensor: torch.Tensor, layout: Layout, context: Context) -> torch.Tensor:
    """A rank's part of a tensor; () is the layout of what every rank has whole."""
    return shard(tensor, layout, context.mesh.sizes, context.coordinates) if layout else tensor


def sum_of_parts(outputs: Sequence[torch.Tensor], ends: Sequence[OutputLayout], context: Context) -> torch.Tensor | None:
    """A rank's part of `differentiated_sum`."""
    found = [(output, end) for output, end in zip(outputs, ends, strict=True) if output.requires_grad]
    found = [(output, end) for output, end in found if not output.ndim] or found
    terms = []
    for place, (output, end) in enumerate(found):
        weights = loss_weights(end.shape, place + 1, output.dtype)
        total = (output * part(weights, end.layout if end.split else (), context)).sum()
        terms.append(total.real if total.is_complex() else total)
    return torch.stack(terms).sum() if terms else None


def layout(key: tuple[str, str], module: ParallelModule, resolved: ResolvedPlan) -> Layout:
    """How a result of a rank is split; () where every rank has the whole."""
    what, name = key
    if what == "output":
        ends = zip(resolved.program.outputs, module.autopar.outputs, strict=True)
        return next((end.layout for output, end in ends if output.path == name and end.split), ())
    stored = {n: p.value.name for p in (*resolved.program.parameters, *resolved.program.buffers) for n in p.names}
    return resolved.assignment.given[stored[name]] if name in stored else ()

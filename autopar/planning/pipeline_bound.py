"""The least that a step in pipeline stages takes, wherever the program is cut and whatever the layouts: proven without a cut.

Let B(m) bound from below the price of m micro-batches in one stage, the whole program on the mesh without the pipeline's axis,
in whatever memory. Stages share its work, and what crosses a cut, runs in several stages or is stored by several comes on top:
with t the seconds of all stages for one micro-batch and o what they do once, m t + o >= B(m). Of p ranks

    (mean)   T >= (m t + o) / p                                    one of them has so much to do
    (path)   T >= C t,  C = 1 / (1 - (1 - 1/m)^p)                    each with one stage, backwards in one piece

where (path) is the sum of the bound of `pipeline.stage_search` of that name over the stages, so weighted that all count alike.
The n-fold of t is bounded with them: (mean) times p C / (p C + n) and (path) times the rest say that, for every n,

    T >= C B(m + n) / (p C + n)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.ir.layout import I
from autopar.ir.mesh import Mesh, Seconds
from autopar.ir.training_step import MicrobatchLoop, TrainingStep
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.schedule import PipelineSchedule
from autopar.plan.options import Options
from autopar.plan.stages import StageSteps
from autopar.planning.optimize import analysed, least_price
from autopar.solver.settings import SearchSettings

WEIGHT = 64  # n in units of p C: what is done once counts for one part in so many


def least_step(
    step: TrainingStep,
    mesh: Mesh,
    schedule: PipelineSchedule,
    known: Sequence[StageSeconds],
    options: Options,
    settings: SearchSettings,
) -> Seconds:
    """Seconds that a step takes at least in stages by a schedule, over all cuts and layouts.

    Args:
        step: the whole one, of the program of a micro-batch.
        mesh: of one stage, without the pipeline's axis.
        schedule: of the stages.
        known: what stages take that were found: they decide which of the bounds is the larger one.
        options, settings: as the stages were planned.
    """
    ranks, runs = len(schedule.ranks), schedule.microbatches
    path = 1 / (1 - (1 - 1 / runs) ** ranks) if schedule.stages == ranks and not schedule.deferred else 0.0
    work, once = sum(one.busy for one in known), sum(one.once for one in known)
    more = math.ceil(WEIGHT * ranks * path) if ranks * path * work > runs * work + once else 0
    whole = StageSteps(step, (0,)).made(0, {})
    price = least_price(analysed(repeated(whole, runs + more), mesh, options), mesh, options, settings, exact=True)
    return path * price / (ranks * path + more) if more else price / ranks


def repeated(step: TrainingStep, runs: int) -> TrainingStep:
    """The step with so many micro-batches in the place of its own."""
    ends = (I,) * len(step.program.inputs), (I,) * len(step.program.outputs)
    loop = step.loop or MicrobatchLoop(count=1, hoisted=None, inputs=ends[0], outputs=ends[1])
    return step if runs == loop.count else replace(step, loop=replace(loop, count=runs))


__all__ = ["least_step"]

"""The prediction for a published run: two and three blocks are planned, and what the third adds is counted for all others.

    step(L) = step(2) + (L - 2) (step(3) - step(2))

A block in the middle costs what every other in the middle costs, and the first and the last are in step(2), so that this is
what the whole model is priced at (`tests/benchmarks/test_fidelity.py` compares it with a plan of all layers). A run in pipeline
stages is planned with all of its blocks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import autopar
from autopar.cost_models import catalog
from autopar.cost_models.kernel_rates import MEGATRON_SOFTMAX, MPT_TRITON
from autopar.ir.device import Bytes, Device, Seconds
from benchmarks.fidelity.models import Decoder, Recompute
from benchmarks.fidelity.tables import Run

# A step of many nodes waits for the slowest: half a percent for each doubling of their number, from the rows of LLM Foundry's
# table on 1 to 16 nodes of A100.
STRAGGLERS = 0.005

PLENTY = "1000TB"  # nothing is recomputed for want of memory: the run says what is
PRODUCTS, ATTENTION, OTHERS, MESSAGES, REST = PARTS = ("products", "attention", "others", "messages", "rest")
KINDS = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"), PRODUCTS),
    "scaled_dot_product_attention": ATTENTION,
}
OPERATOR = re.compile(r":(\w+)#")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted for a run: seconds of a step, peak bytes on a device, and seconds by part, one after the other.

    What runs side by side makes `seconds` less than the sum of the parts.
    """

    run: Run
    seconds: Seconds
    memory: Bytes
    parts: Mapping[str, Seconds]

    @property
    def error(self) -> float:
        """By which share of the measured time the prediction is off; negative if too fast."""
        return self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float:
        """By which share of the measured memory the prediction is off; nan if none was measured."""
        return self.memory / self.run.memory - 1 if self.run.memory else math.nan

    def utilization(self, seconds: Seconds) -> float:
        """Model FLOPs utilization if the step takes so long."""
        run = self.run
        peak = catalog.device(run.device).flops[str(run.decoder.compute).removeprefix("torch.")]
        return run.decoder.flops(run.sequences) / (seconds * run.devices * peak)


def predict(run: Run) -> Prediction:
    """The prediction for a run, from plans of two and three of its blocks."""
    if run.stages:
        return _of(run, _step(run, run.decoder))
    few, more = (_step(run, replace(run.decoder, layers=layers)) for layers in (2, 3))

    def whole(two: float, three: float) -> float:
        return two + (run.decoder.layers - 2) * (three - two)

    parts = {part: whole(few.parts[part], more.parts[part]) for part in PARTS}
    seconds, memory = whole(few.seconds, more.seconds), round(whole(few.memory, more.memory))
    return _of(run, _Step(seconds=seconds, memory=memory, parts=parts))


def _of(run: Run, step: _Step) -> Prediction:
    """The prediction of a step with what its nodes and its harness add."""
    late = STRAGGLERS * math.log2(run.nodes)
    return Prediction(
        run=run,
        seconds=step.seconds * (1 + late) + run.host,
        memory=step.memory,
        parts={part: step.parts[part] for part in PARTS}
        | {REST: step.parts[REST] + late * sum(step.parts.values()) + run.host},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What one plan says."""

    seconds: Seconds
    memory: Bytes
    parts: Mapping[str, Seconds]


def _step(run: Run, decoder: Decoder) -> _Step:
    """The step of a decoder under the run's strategy; of every other block recomputed, the mean of all and of none."""
    if run.recompute == "alternate":
        none, all_of = _planned(run, decoder, "none"), _planned(run, decoder, "blocks")
        return _Step(
            seconds=(none.seconds + all_of.seconds) / 2,
            memory=(none.memory + all_of.memory) // 2,
            parts={part: (none.parts[part] + all_of.parts[part]) / 2 for part in PARTS},
        )
    return _planned(run, decoder, run.recompute)


def _planned(run: Run, decoder: Decoder, recompute: Recompute) -> _Step:
    """The step of a decoder. Megatron's weights are in half precision, the optimizer's in single: it casts once a step.

    The parts are those of the slowest stage; that ranks wait for each other, and for messages between them, is the rest.
    """
    plan = _plan(run, replace(decoder, stored=decoder.compute) if run.megatron else decoder, recompute)
    held = _plan(run, decoder, recompute) if run.megatron and run.memory else plan
    slowest = max(plan.stages, key=lambda stage: stage.step_time, default=plan)
    made = slowest.breakdown.recompute.items()
    spared = {
        op: seconds for op, seconds in made if (run.recomputed and not op.endswith(run.recomputed)) or op.endswith(run.kept)
    }
    parts = _parts(slowest)
    parts[REST] += plan.step_time - slowest.step_time
    for op, seconds in spared.items():
        parts[_kind(op)] -= seconds
    return _Step(seconds=plan.step_time - sum(spared.values()), memory=held.peak_memory, parts=parts)


def _plan(run: Run, decoder: Decoder, recompute: Recompute) -> autopar.Plan:
    tokens = torch.empty(run.sequences, decoder.length, dtype=torch.long, device="meta")
    begins = list(itertools.accumulate(run.stages))[:-1]
    staged = {"pipeline": "pp", "schedule": "1f1b", "stages": [f"blocks.{first}" for first in begins]} if run.stages else {}
    return autopar.plan(
        decoder.module(), (tokens, tokens), run.mesh, device=device_of(run), strategy=run.strategy,
        microbatches=run.microbatches, budget=PLENTY, offload=False, recompute=recompute, **staged,
    )  # fmt: skip


def device_of(run: Run) -> Device:
    """The device, with the attention kernel or the softmax of the run's program."""
    device = catalog.device(run.device)
    if run.table == "mpt":
        return replace(device, attention=MPT_TRITON[run.device])
    if run.megatron:
        return replace(device, achieved={**device.achieved, "softmax": MEGATRON_SOFTMAX[run.device]})
    return device


def _parts(plan: autopar.Plan) -> Counter[str]:
    """The seconds of a plan by part."""
    costs, parts = plan.breakdown, Counter[str]()
    for op, (forward, backward) in costs.compute.items():
        parts[_kind(op)] += forward + backward
    for op, seconds in costs.recompute.items():
        parts[_kind(op)] += seconds
    parts[MESSAGES] = sum(sent.seconds for sent in plan.collectives)
    parts[REST] = costs.conversions + costs.optimizer
    return parts


def _kind(op: str) -> str:
    found = OPERATOR.search(op)
    return KINDS.get(found[1] if found else "", OTHERS)


__all__ = ["PARTS", "Prediction", "device_of", "predict"]

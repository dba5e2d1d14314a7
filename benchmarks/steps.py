"""What the benchmark's processes run: all variants side by side, their steps interleaved."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import theirs
import torch
import torch.distributed as dist
from models import make
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.memory_tracker import Peak
from autopar.runtime.recorder import Issued, Occurrence, timed
from autopar.verify.testing import peak

RATE = 1e-4  # the learning rate
WARM = 3  # steps before anything is measured, in which torch.compile compiles
COMPILED = "+compiled"  # behind the name of a variant that torch.compile compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run: `variants` maps a name to a plan as JSON, empty for torch's own."""

    model: str
    variants: Mapping[str, str]
    rounds: int
    optimizer: str  # a key of OPTIMIZERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each round of one variant, the slowest rank's, and the global loss of its first step."""

    loss: float
    warm: float  # CPU seconds of the first steps on rank 0: what is compiled is compiled there
    step: tuple[float, ...]
    update: tuple[float, ...]  # the optimizer's part


# "single" is torch's default on a CPU (one parameter after the other), "fused" one kernel per parameter.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "single": lambda module: torch.optim.AdamW(_groups(module), lr=RATE),
    "fused": lambda module: torch.optim.AdamW(_groups(module), lr=RATE, fused=True),
}


def _groups(module: nn.Module) -> list[dict[str, object]]:
    """Plain and distributed parameters apart, since one fused kernel does not take both (torch-tp leaves some plain)."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": held} for held in kinds.values()]


class Step:
    """One variant, ready to train."""

    def __init__(self, job: Job, name: str) -> None:
        model, batch = make(job.model)
        plan, compiled = job.variants[name], name.endswith(COMPILED)
        name = name.removesuffix(COMPILED)
        if plan:
            found = autopar.Plan.from_json(plan)
            self.module, self.batch = autopar.parallelize(model, batch, found.mesh, plan=found), batch
            if compiled:
                self.module.compile()
            self.context = torch.enable_grad
            self.split = False
        else:
            self.module, self.batch, self.context = theirs.build(name, model, batch, compiled=compiled)
            self.split = name not in ("torch-tp", "torch-ddp-whole")
        optimizer = OPTIMIZERS[job.optimizer](self.module)
        self.optimizer = autopar.step_locally(optimizer) if plan else optimizer

    def __call__(self) -> tuple[torch.Tensor, float, float]:
        """The loss, seconds of the whole step, and of the optimizer's part."""
        start = time.perf_counter()
        with self.context():
            loss = self.module(**self.batch).loss
            loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        return loss, end - start, end - middle

    def warm(self) -> float:
        """Run the steps that are not measured; the loss over the global batch of the first."""
        loss, *_ = [self()[0] for _ in range(WARM)]
        whole = loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach().clone()
        if self.split:
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        return whole.item()


def interleaved(job: Job) -> dict[str, Times]:
    """Every variant's step once per round, each after a barrier."""
    steps = {name: Step(job, name) for name in job.variants}
    warmed = {name: _timed(step.warm) for name, step in steps.items()}
    rows: dict[str, list[list[float]]] = {name: [] for name in steps}
    gc.disable()  # a collection would fall on one variant or another
    for _ in range(job.rounds):
        for name, step in steps.items():
            dist.barrier()
            _, whole, update = step()
            slowest = torch.tensor([whole, update], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rows[name].append(slowest.tolist())
        gc.collect()
    return {
        name: Times(loss=loss, warm=warm, step=tuple(r[0] for r in rows[name]), update=tuple(r[1] for r in rows[name]))
        for name, (loss, warm) in warmed.items()
    }


def _timed(run: Callable[[], float]) -> tuple[float, float]:
    """What a function returns, and its CPU seconds on this rank, with those of compilers; nothing is cached before."""
    with torch._inductor.config.patch(compile_threads=1), fresh_cache():
        before = os.times()
        found, after = run(), os.times()
    return found, sum(after[:4]) - sum(before[:4])


def timed_steps(job: Job) -> list[tuple[list[Issued], list[Occurrence]]]:
    """What this rank issues, awaits and runs in each round of the one variant, forward and backward, after a barrier."""
    (name,) = job.variants
    step = Step(job, name)
    for _ in range(WARM):
        step()
    found = []
    for _ in range(job.rounds):
        step.optimizer.zero_grad()
        dist.barrier()
        with timed(step.module.autopar.context.known_axes) as seen:
            step.module(**step.batch).loss.backward()
        found.append(seen)
    return found


def resident(job: Job) -> dict[str, int]:
    """Peak bytes of resident memory that a process with this one variant takes beyond an idle one, over three steps."""
    dist.barrier()
    idle = _status("VmRSS")
    (name,) = job.variants
    step = Step(job, name)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew: building is not training
    for _ in range(3):
        step()
    peak = torch.tensor(_status("VmHWM") - idle)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {name: int(peak)}


def alive(job: Job) -> Peak:
    """The most bytes of tensor storage on this rank during a step of the one variant, the optimizer's state being there."""
    (name,) = job.variants
    step = Step(job, name)
    return peak(step.module, step.optimizer, step.batch.values(), step)


def _status(key: str) -> int:
    """An entry of /proc/self/status in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def profiled(job: Job) -> str:
    """torch.profiler's table of three steps of one variant."""
    (name,) = job.variants
    step = Step(job, name)
    for _ in range(WARM):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            step()
    return str(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))

"""A pipeline rank, in its own process, whose stage fails in its third action."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.codegen.pipeline_module import ParallelModule
from autopar.errors import RankError
from tests.support.forked import prints_into


class Loss(nn.Sequential):
    """Layers, and the sum of what they give."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = super().forward(x)
        return found.sum()


def step(log: Path, environment: dict[str, str], failing: int, then: str, data: int) -> None:
    """One step, in which a rank fails by an error or by `sys.exit(0)`, or lives on after its error."""
    prints_into(log)
    os.environ |= environment
    torch.set_num_threads(1)
    model, x = Loss(*[nn.Linear(8, 8) for _ in range(4)]), torch.ones(8, 8)
    mesh = {"pp": 2, "dp": data}
    parallel = autopar.parallelize(model, x, mesh, pipeline="pp", stages=["2"], microbatches=4, strategy="fsdp")
    once, runs = ParallelModule._once, list[int]()

    def fails(self: ParallelModule, inputs: list[torch.Tensor]) -> object:
        runs.append(1)
        if torch.distributed.get_rank() == failing and len(runs) == 3:
            if then == "exits":
                sys.exit(0)
            raise ValueError("out of luck")
        return once(self, inputs)

    ParallelModule._once = fails  # type: ignore[method-assign, assignment]
    try:
        parallel.step(x)
    except RankError:
        if then == "lives on" and torch.distributed.get_rank() == failing:
            time.sleep(60)
        raise

"""A plan in one sentence: named strategies are called by name, and idle axes may be left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.explain.headline import headline, waste
from autopar.plan.plan import Plan


def planned(strategy: str, mesh: object, batch: int = 64) -> Plan:
    """Two wide layers with a loss on H100s, on which every scheme has something to split."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    return autopar.plan(model, torch.empty(batch, 1024), mesh, strategy=strategy, device="h100")


@pytest.mark.parametrize(
    "strategy, said",
    [
        ("ddp", "8-fold batch over node and gpu"),
        ("fsdp", "8-fold batch over node and gpu, weights ZeRO-3 over all 8"),
        ("hsdp", "8-fold batch over node and gpu, weights ZeRO-3 over gpu"),
        ("zero1", "8-fold batch over node and gpu, weights ZeRO-1 over all 8"),
        ("zero2", "8-fold batch over node and gpu, weights ZeRO-2 over all 8"),
        ("megatron", "2-fold batch over node, tensor parallel over gpu"),
        ("replicate", "nothing is split: every device does all of the work"),
    ],
)
def test_a_named_strategy_is_called_what_it_is(strategy: str, said: str) -> None:
    assert headline(planned(strategy, {"node": 2, "gpu": 4})) == said


def test_idle_axes_can_be_left_out() -> None:
    """The mesh that is proposed instead takes as long with as much memory."""
    whole, proposed = planned("replicate", {"node": 2, "gpu": 4}), planned("replicate", (1,))
    assert waste(whole) == ["node and gpu are idle: all their 8 devices do the same; try mesh (1,)"]
    assert (proposed.step_time, proposed.peak_memory) == (whole.step_time, whole.peak_memory)


def test_the_axis_of_memories_is_none_of_the_users() -> None:
    plan = autopar.plan(nn.Linear(64, 64), torch.empty(2, 64), (2,), device="h100", strategy="replicate", offload="host")
    assert plan.mesh.has_memories
    assert waste(plan) == ["axis0 is idle: all its 2 devices do the same; try mesh (1,)"]


def test_of_two_axes_the_idle_one_can_be_left_out() -> None:
    def forced(mesh: object, layout: str) -> Plan:
        model, sample = nn.Linear(64, 64, bias=False), torch.empty(2, 64)
        return autopar.plan(model, sample, mesh, device="h100", constraints={"weight": layout})

    whole, proposed = forced({"node": 2, "gpu": 4}, "I, S(0)"), forced({"gpu": 4}, "S(0)")
    assert waste(whole)[0] == "node is idle: all its 2 devices do the same; try mesh gpu=4"
    assert (proposed.step_time, proposed.peak_memory) == (whole.step_time, whole.peak_memory)


def test_a_plan_that_splits_all_its_work_wastes_no_axis() -> None:
    assert not [said for said in waste(planned("ddp", (2, 4))) if "axis" in said]

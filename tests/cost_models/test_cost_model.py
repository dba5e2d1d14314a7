"""The laws of cost models; a user's own cost model decides the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import autopar
from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.cost_model import CATALOG, CatalogCostModel, CostModel
from autopar.cost_models.links import LINKS
from autopar.cost_models.optimizers import OPTIMIZERS
from autopar.cost_models.profile_file import measured_link
from autopar.ir.conversion import COLLECTIVES
from autopar.ir.device import Device, Link

MEASURED = measured_link(4, dict.fromkeys(COLLECTIVES, (3e-05, 2e-10)), "made up")


class SlowCollectives(CatalogCostModel):
    """The catalog, with collectives that take a thousand times as long."""

    name = "slow collectives"

    def collective_seconds(self, kind: str, size: NDArray[np.float64], ranks: int, link: Link) -> NDArray[np.float64]:
        return 1000 * super().collective_seconds(kind, size, ranks, link)


class FreeCollectives(CatalogCostModel):
    """The catalog, with collectives that take no time."""

    name = "free collectives"

    def collective_seconds(self, kind: str, size: NDArray[np.float64], ranks: int, link: Link) -> NDArray[np.float64]:
        return 0.0 * size


models = st.sampled_from([CATALOG, SlowCollectives(), FreeCollectives()])
kinds, links = st.sampled_from(COLLECTIVES), st.sampled_from([*LINKS.values(), MEASURED])
devices, bytes_moved = st.sampled_from(list(DEVICES.values())), st.integers(0, 2**36).map(float)


def sent(model: CostModel, kind: str, sizes: list[float], ranks: int, link: Link) -> list[float]:
    return [float(seconds) for seconds in model.collective_seconds(kind, np.array(sizes), ranks, link)]


@given(models, kinds, bytes_moved, bytes_moved, st.integers(1, 512), links)
def test_a_collective_is_affine_in_bytes(model: CostModel, kind: str, one: float, other: float, n: int, link: Link) -> None:
    empty, first, second, both = sent(model, kind, [0.0, one, other, one + other], n, link)
    assert first + second - empty == pytest.approx(both, rel=1e-9)


@given(models, kinds, bytes_moved, bytes_moved, st.integers(1, 512), links)
def test_a_collective_is_monotone_in_bytes_and_nonnegative(
    model: CostModel, kind: str, one: float, other: float, n: int, link: Link
) -> None:
    less, more = sent(model, kind, sorted((one, other)), n, link)
    assert 0 <= less <= more


@given(models, kinds, bytes_moved, links)
def test_a_collective_on_an_axis_of_one_device_is_free(model: CostModel, kind: str, size: float, link: Link) -> None:
    assert sent(model, kind, [size], 1, link) == [0.0]


@given(models, bytes_moved, devices)
def test_copies_offloading_and_optimizer_steps_take_no_less_than_no_time(model: CostModel, size: float, device: Device) -> None:
    assert model.copy_seconds(np.array([size]), device)[0] >= 0
    assert model.offload_seconds(size, device) >= 0
    assert all(model.optimizer_seconds(size, optimizer, device) >= 0 for optimizer in OPTIMIZERS.values())


def layers() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)), torch.empty(256, 2048)


def planned(model: CostModel) -> autopar.Plan:
    return autopar.plan(*layers(), {"devices": 8}, device="h100", cost_model=model)


def test_where_collectives_are_expensive_a_plan_sends_less_and_says_which_model_priced_it() -> None:
    cheap, dear = planned(FreeCollectives()), planned(SlowCollectives())
    assert sum(c.bytes for c in dear.collectives) < sum(c.bytes for c in cheap.collectives)
    assert dear.options["cost_model"] == "slow collectives"
    assert "cost_model" not in planned(CATALOG).options


def test_a_plan_is_no_faster_under_a_cost_model_that_is_slower_everywhere() -> None:
    free, catalog, slow = (planned(model).step_time for model in (FreeCollectives(), CATALOG, SlowCollectives()))
    assert free <= catalog <= slow

"""Seconds of regions estimated from seconds of stages: equal regions take the same, and stages keep their totals."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.pipeline.clock import StageSeconds
from autopar.planning.region_seconds import region_seconds

ROUGH = {"embed": (1.0, 1.0), "attn": (4.0, 9.0), "mlp": (5.0, 10.0), "head": (6.0, 12.0)}
TRUE = {
    "embed": (0.1, 0.2, 0.0, 6.0),
    "attn": (1.3, 2.3, 0.3, 0.5),
    "mlp": (1.5, 1.7, 1.3, 1.9),
    "head": (5.0, 6.8, 3.7, 8.7),
}  # forward, both halves of the backward, once
NAMES = ["embed", *["attn", "mlp"] * 6, "head"]


def stages_of(cuts: list[int], beside: list[float]) -> list[StageSeconds]:
    found = []
    for place, more in enumerate(beside):
        sums = more * np.array([TRUE[name] for name in NAMES[cuts[place] : cuts[place + 1]]]).sum(axis=0)
        forward, backward_input, backward_weight, once = sums.tolist()
        found.append(StageSeconds(forward=forward, backward_input=backward_input, backward_weight=backward_weight, once=once))
    return found


def prices() -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    return np.array([ROUGH[name] for name in NAMES]).T, np.ones(len(NAMES))


def test_what_is_alike_takes_the_same_as_stages_tell_it_apart() -> None:
    """By rough prices of other proportions: half a block more or less says what each half takes."""
    rough, sent = prices()
    cuts = [0, 3, 6, 9, 13, len(NAMES)]
    found = region_seconds(rough, sent, tuple(cuts), stages_of(cuts, [1.0] * 5))
    for name, true in TRUE.items():
        places = [place for place, one in enumerate(NAMES) if one == name]
        assert pytest.approx(np.array([true[:3]] * len(places)), rel=0.1, abs=0.03) == found[:3, places].T


@pytest.mark.parametrize("seed", range(20))
def test_the_regions_of_a_stage_take_what_it_takes(seed: int) -> None:
    draw = random.Random(seed)
    rough, sent = prices()
    cuts = [0, *sorted(draw.sample(range(1, len(NAMES)), 4)), len(NAMES)]
    stages = stages_of(cuts, [draw.uniform(0.8, 1.3) for _ in range(5)])
    found = region_seconds(rough, sent, tuple(cuts), stages)
    sums = np.add.reduceat(found, cuts[:-1], axis=1)
    expected = [[one.forward, one.backward_input, one.backward_weight, one.once] for one in stages]
    assert pytest.approx(np.array(expected), rel=1e-9) == sums.T
    assert found.min() >= 0


def test_what_takes_no_time_has_no_price() -> None:
    rough, sent = prices()
    cuts = (0, 7, len(NAMES))
    nothing = [StageSeconds(forward=0.0, backward_input=0.0)] * 2
    assert not region_seconds(rough, sent, cuts, nothing).any()
    assert not region_seconds(0 * rough, sent, cuts, nothing).any()

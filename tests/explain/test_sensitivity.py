"""The loss of a plan at other prices equals that of planning with such links; break-even points between layouts are found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.cost_models.cost_model import CATALOG
from autopar.cost_models.scaled import ScaledCostModel
from autopar.errors import MeshError
from autopar.explain import main
from autopar.explain.sensitivity import Sensitivity, sensitivity, sensitivity_parts
from autopar.ir.device import Link
from autopar.ir.mesh import Mesh
from autopar.plan.options import Options
from autopar.plan.text import plain
from autopar.planning.planner import Planned, make_plan
from tests.support.planning import mesh

LINK = Link(name="link", latency=3e-6, bandwidth=10e9, source="made up")
BATCHES = (64, 256, 1024)  # a smaller one splits weights, a larger one the batch


def network(batch: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)), torch.empty(batch, 1024)


def planned(batch: int, on: Mesh) -> Planned:
    return make_plan(*network(batch), on, Options())


def at(batch: int, what: str, speed: float) -> Sensitivity:
    found = sensitivity(planned(batch, mesh((8,), LINK)), Options())
    return next(one for one in found if (one.what, one.speed) == (what, speed))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("speed", [0.8, 1.2])
def test_the_best_at_other_prices_is_the_plan_on_a_mesh_whose_links_are_like_that(batch: int, speed: float) -> None:
    other = replace(LINK, bandwidth=speed * LINK.bandwidth, latency=LINK.latency / speed)
    found = at(batch, "links", speed)
    assert found.best == pytest.approx(planned(batch, mesh((8,), other)).plan.step_time)
    assert found.bound <= found.best <= found.step_time


@pytest.mark.parametrize("batch", BATCHES)
def test_the_plan_at_other_prices_takes_what_its_parts_take(batch: int) -> None:
    """Of the report: links divide what is sent, kernels all else, where messages and computing do not overlap."""
    on = mesh((8,), LINK)
    assert on.device is not None
    on = replace(on, device=replace(on.device, interference=1.0))
    plan = planned(batch, on)
    sent = sum(c.seconds for c in plan.plan.collectives)
    computed = plan.plan.step_time - sent
    for one in sensitivity(plan, Options()):
        links, kernels = (one.speed, 1.0) if one.what == "links" else (1.0, one.speed)
        assert one.step_time == pytest.approx(sent / links + computed / kernels)


def test_near_the_turn_from_one_layout_to_another_a_plan_loses_and_far_from_it_nothing() -> None:
    """The plan of 64 rows splits weights and loses where links are slower; that of 256 splits the batch and loses elsewhere."""
    small, large = (
        {(one.what, one.speed): one.lost for one in sensitivity(planned(batch, mesh((8,), LINK)), Options())}
        for batch in (64, 256)
    )
    assert small["links", 0.8] > 0.05 < large["links", 1.2]
    assert small["links", 1.2] == 0 == large["links", 0.8]


def test_a_speed_is_positive_and_finite() -> None:
    for speed in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(MeshError, match="not a positive finite number"):
            ScaledCostModel(CATALOG, links=speed)


def test_the_sentence_names_the_worst_case() -> None:
    better = Sensitivity(what="links", speed=1.2, step_time=1.0, best=1.0, bound=1.0)
    worse = Sensitivity(what="kernels", speed=0.8, step_time=1.0, best=0.95, bound=0.9)
    said = plain(sensitivity_parts([better, worse]))
    assert "kernels are 20% slower" in said
    assert "cost this plan 11.1% of the step at most" in said
    said = plain(sensitivity_parts([replace(worse, bound=None)]))
    assert "cost this plan 5.3% of the step, as far as is known" in said


def test_the_command_prints_a_row_per_case_and_the_same_as_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(64, 64)), torch.ones(32, 64)\n"
    )
    asked = [f"{tmp_path}/made.py:build", "--mesh", "4", "--device", "h100", "--sensitivity"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert all(f"{what} are 20% {how}" in said for what in ("links", "kernels") for how in ("faster", "slower"))
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sensitivity"]
    assert [(row["what"], row["speed"]) for row in rows] == [(w, s) for w in ("links", "kernels") for s in (1.2, 0.8)]

"""Energy of a plan: power of boards and links, computed by hand; the best number of devices by time, energy and cost."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.energy import BOARDS, link_bit
from autopar.cost_models.links import LINKS
from autopar.errors import MeshError
from autopar.explain.command import main
from autopar.explain.energy import energy_of, per_epoch
from autopar.explain.scaling import ScalingStep, best
from autopar.plan.plan import Plan


def plan(mesh: tuple[int, ...], device: str = "h100", **options: object) -> Plan:
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.empty(512, 256)
    return autopar.plan(model, batch, mesh, device=device, strategy="fsdp", **options)  # type: ignore[arg-type]


def test_every_device_of_the_catalog_has_a_limit_with_a_source() -> None:
    assert BOARDS.keys() == DEVICES.keys()
    assert all(board.source and 50 <= board.watts <= 1000 for board in BOARDS.values())
    assert all(link_bit(name) in (10e-12, 250e-12) for name in LINKS)


def test_a_board_takes_its_limit_for_the_length_of_the_step() -> None:
    found = plan((8,))
    use = energy_of(found)
    assert use.computing + use.waiting == pytest.approx(8 * 700 * found.step_time)
    assert use.network == 0
    assert use.total == use.computing + use.waiting
    assert per_epoch(use.total, use, 512_000) == pytest.approx(1000 * use.total / 3.6e6)


def test_what_is_sent_over_each_link_is_the_sum_over_its_collectives() -> None:
    found = plan((2, 8))
    use = energy_of(found)
    expected = {"nvlink4": 0.0, "ib-ndr": 0.0}
    rings = {
        "axis0": [[rank, rank + 8] for rank in range(8)], "axis1": [list(range(8)), list(range(8, 16))],
        "axis0_axis1": [list(range(16))],
    }  # fmt: skip
    assert "axis0_axis1" in {one.axis for one in found.collectives}
    for one in found.collectives:
        for ring in rings[one.axis]:
            sent = (2 if one.kind == "all_reduce" else 1) * (len(ring) - 1) / len(ring) * one.bytes
            for rank, following in itertools.pairwise([*ring, ring[0]]):
                expected["nvlink4" if rank // 8 == following // 8 else "ib-ndr"] += sent
    assert {link: count for link, (count, _) in use.moved.items() if link != "memory"} == {
        link: pytest.approx(count) for link, count in expected.items() if count
    }
    assert use.network == pytest.approx(8 * 250e-12 * expected["ib-ndr"])
    assert use.network > 0


def test_a_device_of_unknown_power_is_refused() -> None:
    with pytest.raises(MeshError, match="the power of the device 'cpu' is not known"):
        energy_of(plan((2,), device="cpu"))


STEPS = [
    ScalingStep(devices=8, mesh=(8,), step_time=1.0, joules=9.0),
    ScalingStep(devices=16, mesh=(16,), step_time=0.5, joules=11.0),
    ScalingStep(devices=32, mesh=(32,), step_time=0.4, joules=14.0),
    ScalingStep(devices=64, mesh=(64,), refusal="does not fit"),
]


@pytest.mark.parametrize(
    "objective, within, devices",
    [("time", None, 32), ("energy", None, 8), ("cost", None, 8), ("cost", 0.7, 16), ("energy", 0.45, 32), ("cost", 0.1, None)],
)
def test_the_best_number_of_devices(objective: str, within: float | None, devices: int | None) -> None:
    found = best(STEPS, objective, within)
    assert (found and found.devices) == devices


def test_without_a_known_power_none_is_best_by_energy() -> None:
    assert best([replace(step, joules=0.0) for step in STEPS], "energy") is None


MODEL = """
import torch
from torch import nn


def build():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.empty(512, 256)
"""


def test_the_command_says_the_same_of_a_model_and_of_its_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, saved = tmp_path / "energy_model.py", tmp_path / "plan.json"
    file.write_text(MODEL)
    asked = ["--energy", "--epoch", "1000000"]
    assert main([f"{file}:build", "--mesh", "2,8", "--device", "h100", "--save", str(saved), *asked]) == 0
    text = capsys.readouterr().out
    assert main([str(saved), *asked]) == 0
    assert capsys.readouterr().out == text
    assert "boards: 16 at their limit of 700 W (H100 SXM5 data sheet, 2023)" in text
    assert main([str(saved), *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["energy"]["total"] == energy_of(Plan.load(saved)).total
    assert main([str(saved), "--epoch", "5"]) == 2
    assert "only with --energy" in capsys.readouterr().err


def test_the_command_says_which_number_of_devices_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "energy_model_of_counts.py"
    file.write_text(MODEL)
    words = [f"{file}:build", "--devices", "1,2", "--device", "h100", "--price", "3.6", "--objective"]
    found = {}
    for objective in ("time", "energy", "cost"):
        assert main([*words, objective]) == 0
        found[objective] = capsys.readouterr().out.splitlines()[-1]
    assert found["cost"].startswith("1 devices are best by cost: ")
    assert "J a step" in found["energy"]
    assert main([f"{file}:build", "--mesh", "2", "--objective", "cost"]) == 2
    assert "only with --devices" in capsys.readouterr().err

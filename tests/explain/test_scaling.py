"""Scaling: each row is the plan that a user gets on that mesh; the fewest devices that meet a time are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import autopar
from autopar.explain.command import main
from autopar.explain.scaling import ScalingStep, fewest, scaling_parts
from tests.support.planning import Layers

BUILD = """
import torch
from tests.support.planning import Layers

def build():
    return Layers((1024, 4096, 1024)).bfloat16(), torch.empty(4096, 1024, dtype=torch.bfloat16)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("scaling") / "own.py"
    path.write_text(BUILD)
    return f"{path}:build"


def test_a_row_is_the_plan_on_its_mesh(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target, "--devices", "4..32", "--device", "h100", "--json", "--within", "1us"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fewest"] is None
    assert [(row["devices"], row["mesh"]) for row in found["scaling"]] == [(4, [4]), (8, [8]), (16, [2, 8]), (32, [4, 8])]
    for row in found["scaling"]:
        with torch.device("meta"):
            model, x = Layers((1024, 4096, 1024)).bfloat16(), torch.empty(4096, 1024, dtype=torch.bfloat16)
        plan = autopar.plan(model, x, tuple(row["mesh"]), device="h100")
        assert (row["step_time"], row["peak_memory"]) == (plan.step_time, plan.peak_memory)
        assert (row["samples"], row["tokens"], row["refusal"]) == (4096, 0, "")


def test_the_fewest_devices_in_time_are_named_and_a_price_is_that_of_all_devices(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([target, "--devices", "8,4", "--device", "h100", "--within", "1s", "--price", "3"]) == 0
    head, first, second, *_, last = capsys.readouterr().out.splitlines()
    assert head.split()[-4:] == ["price", "of", "1M", "samples"]
    assert [line.split()[0] for line in (first, second)] == ["4", "8"]
    rate, price = (float(text.replace(",", "")) for text in first.split()[-2:])
    assert price == pytest.approx(3 / 3600 * 4 / rate * 1e6, rel=1e-3)
    assert last == "4 devices are the fewest of these that take a step within 1000.000 ms"


def test_what_does_not_fit_says_what_it_needs(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target, "--devices", "2,4", "--device", "h100", "--budget", "1MiB", "--within", "1s"]) == 0
    head, *rows, _, last = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["devices", "mesh"]
    assert all("does not fit: needs " in row for row in rows)
    assert last == "none of these has a plan"


def test_the_first_plan_is_what_speed_up_and_efficiency_are_relative_to() -> None:
    steps = [
        ScalingStep(devices=1, mesh=(1,), refusal="does not fit"),
        ScalingStep(devices=2, mesh=(2,), step_time=0.4, samples=8),
        ScalingStep(devices=4, mesh=(4,), step_time=0.25, samples=8),
    ]
    _, _, two, four, *_, last = map(str, scaling_parts(steps, 0.2, None))
    assert (two.split()[3:5], four.split()[3:5]) == (["1.00", "100.0%"], ["1.60", "80.0%"])
    assert last == "none of these takes a step within 200.000 ms; the fastest of them, 4 devices, takes 250.000 ms"
    assert fewest(steps, 0.4) == steps[1]
    assert fewest(steps, 0.1) is None


@pytest.mark.parametrize(
    "said", ["", "0", "8..4", "0..8", "-1", "8..", "a", "1,,2", "9999999999", "8...16", ",".join(["8"] * 3) + ",x"]
)
def test_what_is_no_number_of_devices_is_refused(target: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target, f"--devices={said}", "--device", "h100"]) == 2
    assert "is not a number of devices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--within", "2"], "'2' is not a time"),
        (["--within", "0s"], "'0s' is not a time"),
        (["--within", "nan s"], "is not a time"),
        (["--price", "-1"], "is not a price"),
        (["--price", "nan"], "is not a price"),
        (["--mesh", "2,4"], "--mesh"),
        (["--code"], "--code"),
        (["--why", "x"], "--why"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    target: str, more: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([target, "--devices", "8", "--device", "h100", *more]) == 2
    assert why in capsys.readouterr().err


def test_without_numbers_of_devices_there_is_no_time_to_meet(
    target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([target, "--mesh", "8", "--device", "h100", "--within", "2s"]) == 2
    assert "no numbers of devices: --within only with --devices" in capsys.readouterr().err
    saved = tmp_path / "plan.json"
    saved.write_text("{}")
    assert main([str(saved), "--devices", "8"]) == 2
    assert "is a saved plan" in capsys.readouterr().err

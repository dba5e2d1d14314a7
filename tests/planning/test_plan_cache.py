"""Plans cached in a folder: found again for the same program, mesh and options, and for nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_models.cost_model import CATALOG
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.plan_cache import cached, fingerprint
from autopar.planning.planner import connected_mesh, make_plan, read_program

ASKED = Options(device="h100")
MODEL, SAMPLE = nn.Linear(16, 16), torch.empty(8, 16)


def test_a_plan_is_made_once_and_a_damaged_one_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program, mesh = read_program(MODEL, SAMPLE).program, connected_mesh((2,), ASKED)
    made: list[Plan] = []

    def make() -> Plan:
        made.append(make_plan(MODEL, SAMPLE, (2,), ASKED).plan)
        return made[-1]

    folder = tmp_path / "plans"
    first, second = (cached(folder, program, [mesh], ASKED, make) for _ in range(2))
    assert len(made) == 1
    assert second == first
    (file,) = folder.iterdir()
    file.write_text(file.read_text()[:100])
    assert cached(folder, program, [mesh], ASKED, make) == first
    assert len(made) == 2
    assert "is damaged; it is made again" in caplog.text
    assert Plan.load(file) == first
    file.write_text(file.read_text().replace(":linear#0", ":linear#1"))  # a plan, and not of this program
    assert cached(folder, program, [mesh], ASKED, make) == first
    assert len(made) == 3
    assert f"{file}: the plan is" in caplog.text


def test_another_program_mesh_device_or_option_has_another_fingerprint() -> None:
    program, mesh = read_program(MODEL, SAMPLE).program, connected_mesh((2,), ASKED)
    other = read_program(nn.Linear(16, 8), SAMPLE).program
    asked = [
        (program, mesh, ASKED),
        (other, mesh, ASKED),
        (program, connected_mesh((4,), ASKED), ASKED),
        (program, connected_mesh((2,), Options(device="a100-80gb")), ASKED),
        (program, mesh, replace(ASKED, strategy="fsdp")),
        (program, mesh, replace(ASKED, constraints={"weight": "I"})),
    ]
    found = [fingerprint(one, [there], options) for one, there, options in asked]
    assert len({*found}) == len(asked)
    assert found == [fingerprint(one, [there], options) for one, there, options in asked]
    one, two, sgd = (
        fingerprint(program, [mesh], replace(ASKED, optimizer=given))
        for given in (torch.optim.AdamW, lambda parameters: torch.optim.AdamW(parameters, lr=1.0), torch.optim.SGD)
    )
    assert one == two == found[0]  # by what it costs, not by where a function lies in memory
    assert sgd not in found


class Dearer(type(CATALOG)):  # type: ignore[misc]  # the class of the catalog's prices
    """Prices of the user's own."""


def test_plans_at_own_prices_are_not_kept_and_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program, mesh = read_program(MODEL, SAMPLE).program, connected_mesh((2,), ASKED)
    plan = make_plan(MODEL, SAMPLE, (2,), ASKED).plan
    assert cached(tmp_path, program, [mesh], replace(ASKED, cost_model=Dearer()), lambda: plan) is plan
    assert not [*tmp_path.iterdir()]
    (tmp_path / "file").write_text("no folder")
    assert cached(tmp_path / "file", program, [mesh], ASKED, lambda: plan) is plan
    assert "the plan is not kept" in caplog.text


def test_parallelize_finds_the_plan_that_it_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    first, second = (autopar.parallelize(MODEL, SAMPLE, (1,), device="h100", plans=tmp_path) for _ in range(2))
    (file,) = tmp_path.iterdir()
    assert f"the plan is that of {file}" in caplog.text
    assert torch.equal(first(torch.ones(8, 16)), second(torch.ones(8, 16)))

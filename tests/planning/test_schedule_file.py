"""Pipeline schedules from files: planned unchanged, or refused with the way out if they are invalid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autopar
from autopar.errors import ConstraintError
from autopar.pipeline.named_schedules import named
from autopar.plan.plan import Plan
from autopar.planning import schedule_file
from autopar.planning.schedule_file import read_schedule
from tests.support.pipeline_checkpoints import batch, model


def planned(path: Path, **options: object) -> Plan:
    return autopar.plan(model(), batch(), {"pp": 2}, device="h100", pipeline="pp", schedule=str(path), **options)  # type: ignore[arg-type]


def test_a_file_is_planned_like_the_schedule_that_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(str(named("interleaved", 2, 4, chunks=2)).replace(",", " ,, ") + "\n\n")
    found = planned(path)
    alike = autopar.plan(
        model(), batch(), {"pp": 2}, device="h100", pipeline="pp", schedule="interleaved", stages=4, microbatches=4
    )
    assert found.pipeline is not None
    assert alike.pipeline is not None
    assert (found.pipeline.ranks, found.microbatches) == (alike.pipeline.ranks, 4)
    assert found.pipeline.schedule == str(path)
    assert found.step_time == alike.step_time


@pytest.mark.parametrize(
    "text, said",
    [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1", "lacks 1B1"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1B1", "repeats 1B1"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0,0F2", "runs on rank 0 and on rank 1"),
        ("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1", "runs micro-batch 0 after a later one"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "hangs"),
        ("0F0,0F999999,0B0\n1F0,1B0", "lacks 0F1"),
        ("0F0,0F1000000,0B0\n1F0,1B0", "'0F1000000' is not an action"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "'0SEND_F0' is not an action"),
        ("0F0,__import__('os'),0B0\n1F0,1B0", "is not an action"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2B0,2F1,2B1", "has 3 ranks, and 2 are asked for"),
        ("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2", "3"),
        ("0F0,0I0,0F1,0I1,0W0\n1F0,1B0,1F1,1B1", "lacks 0W1"),
        ("0F0,0F1,0W0,0I0,0I1,0W1\n1F0,1B0,1F1,1B1", "hangs"),
        ("", "empty"),
        ("\x00", "is not"),
    ],
)
def test_what_is_no_schedule_of_the_mesh_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ConstraintError, match=re.escape(said)) as refused:
        planned(path)
    assert refused.value.details.get("fix") or refused.value.details.get("at")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConstraintError, match="cannot read the pipeline schedule"):
        read_schedule(str(tmp_path / "none.csv"))
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ConstraintError, match="cannot read the pipeline schedule"):
        read_schedule(str(path))
    monkeypatch.setattr(schedule_file, "LARGEST", 2)
    with pytest.raises(ConstraintError, match="it has more than 2 bytes"):
        read_schedule(str(path))


def test_a_file_of_a_million_actions_is_refused_unread(tmp_path: Path) -> None:
    """Its parsing and checks took half a minute."""
    path = tmp_path / "table.csv"
    path.write_text("0F0," * 2**20)
    with pytest.raises(ConstraintError, match="cannot read the pipeline schedule") as refused:
        read_schedule(str(path))
    assert "it has more than 2097152 bytes" in str(refused.value)


def test_numbers_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(str(named("1f1b", 2, 4)))
    with pytest.raises(ConstraintError, match="has 4 micro-batches, and 2 are asked for"):
        planned(path, microbatches=2)
    with pytest.raises(ConstraintError, match="has 2 stages, and 4 are asked for"):
        planned(path, stages=4)

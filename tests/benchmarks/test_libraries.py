"""The trial of libraries: missing packages are skipped, and a model that does not run by itself is no fault of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import libraries, library_models, library_tables
from benchmarks.trials import NotBuilt, Trial, known_of, outcome


def test_names_are_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_models, "_installed", lambda library: library == "diffusers")
    assert library_models.names() == [f"diffusers/{name}" for name in library_tables.DIFFUSERS]


def test_a_model_is_built_of_its_row_and_tried() -> None:
    """By a class that every machine has."""
    made, told = library_tables.made("torch.nn.Linear", 4, 2), []
    library_tables.OTHERS["torch/Linear"] = made, {"input": library_tables.floats(4, 4)}
    try:
        libraries.trial("torch/Linear", Trial({}, lambda found: told.append(dict(found))))
    finally:
        del library_tables.OTHERS["torch/Linear"]
    assert torch.get_default_dtype() is torch.float32
    assert [one["stage"] for one in told] == ["built", "captured", "same", "planned", "planned", "planned", "equal"]


def test_what_does_not_run_is_not_tried(tmp_path: Path) -> None:
    with pytest.raises(NotBuilt):
        library_models.built("nobody/knows")
    found = outcome("nobody/knows", libraries.trial)
    assert (found["stage"], found["reason"]) == ("", "NotBuilt: unknown")
    assert known_of(tmp_path / "none.jsonl") == {}

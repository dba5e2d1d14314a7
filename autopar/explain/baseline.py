"""Baselines: what a plan cost, kept in a file next to the code.

    {"baseline": 1, "target": "models.py:gpt2", "hash": ..., "axes": ["dp", "tp"], "sizes": [2, 4], "device": "h100", ...}

A file holds one baseline or a list of them, or a saved plan. A target in a file is named as seen from the baseline's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.explain.summary import Summary
from autopar.files import write as save
from autopar.plan.options import Options
from autopar.plan.plan import Plan

FORMAT = 1
REWRITE = "delete it and write it again: --update with its TARGET, or pytest --update-plan-costs"


class BaselineError(AutoparError):
    """A baseline is missing or damaged, or does not say what it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the plan of a target cost; the target is empty if the caller makes the plan."""

    target: str
    summary: Summary

    def __str__(self) -> str:
        strategy = self.summary.options.get("strategy", "auto")
        scheme = "" if strategy == "auto" else f" as {strategy}"
        return f"{self.target} on {self.summary.mesh} of {self.summary.device}{scheme}"

    @property
    def options(self) -> Options:
        """What was asked for when the plan was made. Raises BaselineError if an option is damaged or unknown."""
        texts = {name: text for name, text in self.summary.options.items() if text}
        pairs = [entry.rpartition(": ") for entry in texts.pop("constraints", "").split("; ") if entry]
        try:
            made = Options(device=self.summary.device, constraints={name: layout for name, _, layout in pairs}, **texts)  # type: ignore[arg-type]
        except TypeError as error:
            raise BaselineError(f"the baseline of {self} has options that do not exist", error=error) from error
        if made.text() != {**dict.fromkeys(made.text(), ""), **self.summary.options}:
            raise BaselineError(f"the baseline of {self} has damaged options", constraints=self.summary.options["constraints"])
        return made


def files(path: Path) -> list[Path]:
    """The files of baselines that a path names, itself or those in a folder. Raises BaselineError if there is no such file."""
    found = sorted(path.glob("*.json")) if path.is_dir() else [path] * path.is_file()
    if not found:
        what, name = (f"in {path}", path / "NAME.json") if path.is_dir() else (str(path), path)
        fix = f"python -m autopar.explain TARGET --mesh ... --check {name} --update writes one"
        raise BaselineError(f"there is no baseline {what}", fix=fix)
    return found


def read(path: Path) -> tuple[Baseline, ...]:
    """The baselines of a file. Raises BaselineError if it is damaged, PlanError if it is a damaged plan."""
    data = _data(path)
    try:
        return tuple(_baselines(data, path))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, error) from error


def holds_plan(path: Path) -> bool:
    """Whether a file is a saved plan."""
    return _is_plan(_data(path))


def write(path: Path, baselines: Sequence[Baseline]) -> None:
    """Write a file of baselines. Raises BaselineError if it cannot be written."""
    data = [{"baseline": FORMAT, "target": b.target, **b.summary.to_data()} for b in baselines]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path, json.dumps(data if len(data) > 1 else data[0], indent=1) + "\n")
    except OSError as error:
        raise BaselineError(f"cannot write {path}", error=error) from error


def seen_from(target: str, folder: Path) -> str:
    """A target as a baseline in a folder names it: "" for a saved plan, a file relative to the folder."""
    place, colon, name = target.rpartition(":")
    if not colon:
        return ""
    return f"{Path(os.path.relpath(place, folder)).as_posix()}:{name}" if place.endswith(".py") else target


def found_from(target: str, folder: Path) -> str:
    """A target that a baseline in a folder names, as seen from here."""
    place, _, name = target.rpartition(":")
    return f"{folder / place}:{name}" if place.endswith(".py") else target


def _baselines(data: object, path: Path) -> Iterator[Baseline]:
    if _is_plan(data):
        yield Baseline(target="", summary=Summary.of(Plan.load(path)))
        return
    entries: list[Any] = data if isinstance(data, list) else [data]
    for entry in entries:
        if entry["baseline"] != FORMAT:
            raise BaselineError(f"{path} has format {entry['baseline']}, but this autopar reads {FORMAT}", fix=REWRITE)
        yield Baseline(target=str(entry["target"]), summary=Summary.from_data(entry))


def _is_plan(data: object) -> bool:
    return isinstance(data, dict) and "baseline" not in data


def _data(path: Path) -> object:
    try:
        found: object = json.loads(path.read_text())
    except OSError as error:
        raise BaselineError(f"cannot read {path}", error=error) from error
    except ValueError as error:  # not JSON, or not text
        raise _damaged(path, error) from error
    return found


def _damaged(path: Path, error: Exception) -> BaselineError:
    return BaselineError(f"the baseline {path} is damaged", error=f"{type(error).__name__}: {error}", fix=REWRITE)

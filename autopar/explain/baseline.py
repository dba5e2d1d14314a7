"""Baselines: the cost of a plan, kept in a file next to the code.

    {"baseline": 2, "target": "models.py:gpt2", "hash": ..., "axes": ["dp", "tp"], "sizes": [2, 4], "device": "h100", ...}

A file holds one baseline or a list of them, or a saved plan. A target in a file is named relative to the baseline's folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import AutoparError
from autopar.explain.summary import Summary
from autopar.files import parse
from autopar.files import read as read_file
from autopar.files import write as save
from autopar.plan.options import Options
from autopar.plan.plan import Plan

FORMAT = 2
OPTIONS = {
    "mode", "strategy", "optimizer", "budget", "outputs", "precision", "reduce", "microbatches", "recompute", "pipeline",
    "stages", "schedule", "compiled",
}  # fmt: skip
REWRITE = "delete it and write it again: --update with its TARGET, or pytest --update-plan-costs"


class BaselineError(AutoparError):
    """A baseline is missing, damaged or incomplete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The cost of a target's plan; the target is empty if the caller makes the plan."""

    target: str
    summary: Summary

    def __str__(self) -> str:
        strategy = self.summary.options.get("strategy", "auto")
        scheme = "" if strategy == "auto" else f" as {strategy}"
        stages = f" in {self.summary.pipeline.stages} stages" if self.summary.pipeline else ""
        return f"{self.target} on {self.summary.mesh} of {self.summary.device}{scheme}{stages}"

    @property
    def options(self) -> Options:
        """The options that the plan was made with. Raises BaselineError if one is damaged or unknown."""
        given = {name for name, text in self.summary.options.items() if text and name != "constraints"}
        if unknown := sorted(given - OPTIONS):
            raise BaselineError(f"the baseline of {self} has options that do not exist", options=", ".join(unknown))
        made = Options.read(self.summary.options, device=self.summary.device)
        if made.schedule.endswith(".csv"):
            fix = "python -m autopar.explain TARGET --schedule FILE ... --check BASELINE, which names the file"
            raise BaselineError(f"the baseline of {self} names a file of a pipeline schedule", schedule=made.schedule, fix=fix)
        if made.text() != {**dict.fromkeys(made.text(), ""), **self.summary.options}:
            raise BaselineError(
                f"the baseline of {self} has damaged options", constraints=self.summary.options.get("constraints")
            )
        return made


def files(path: Path) -> list[Path]:
    """The baseline files at a path: the file itself, or those in the folder. Raises BaselineError if there are none."""
    found = sorted(path.glob("*.json")) if path.is_dir() else [path] * path.is_file()
    if not found:
        what, name = (f"in {path}", path / "NAME.json") if path.is_dir() else (str(path), path)
        fix = f"python -m autopar.explain TARGET --mesh ... --check {name} --update writes one"
        raise BaselineError(f"there is no baseline {what}", fix=fix)
    return found


def read(path: Path) -> tuple[Baseline, ...]:
    """The baselines of a file, at least one. Raises BaselineError if it is damaged, PlanError if it is a damaged plan."""
    data = _data(path)
    try:
        found = tuple(_baselines(data, path))
    except ValueError as error:
        raise _damaged(path, error) from error
    if not found:
        raise BaselineError(f"there is no baseline in {path}", fix=REWRITE)
    return found


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
    """A target in the notation of a baseline in a folder: "" for a saved plan, a file relative to the folder."""
    place, colon, name = target.rpartition(":")
    if not colon:
        return ""
    return f"{Path(os.path.relpath(place, folder)).as_posix()}:{name}" if place.endswith(".py") else target


def found_from(target: str, folder: Path) -> str:
    """A target named by a baseline in a folder, relative to the working directory.

    Raises BaselineError unless it is a function of a file below the folder or the working directory, since it will be run.
    """
    place, _, name = target.rpartition(":")
    fix = "run only what you have read: python -m autopar.explain TARGET --mesh ... --check BASELINE names it"
    if not place.endswith(".py"):
        raise BaselineError(f"a baseline in {folder} names {target}, which may be any code that can be imported", fix=fix)
    found = (folder / place).resolve()
    if not any(found.is_relative_to(tree) for tree in (folder.resolve(), Path.cwd())):
        what = f"a baseline in {folder} names {place}, which is neither below that folder nor below the working directory"
        raise BaselineError(what, fix=fix)
    return f"{folder / place}:{name}"


def _baselines(data: object, path: Path) -> Iterator[Baseline]:
    if _is_plan(data):
        yield Baseline(target="", summary=Summary.of(Plan.load(path)))
        return
    for entry in data if isinstance(data, list) else [data]:
        if not isinstance(entry, dict) or not isinstance(entry.get("target"), str):
            raise ValueError("it is not a baseline: it has no target")
        if (version := entry.get("baseline")) != FORMAT:
            raise BaselineError(f"{path} has format {version!r:.20}, but this autopar reads {FORMAT}", fix=REWRITE)
        summary = {name: held for name, held in entry.items() if name not in ("baseline", "target")}
        yield Baseline(target=entry["target"], summary=Summary.from_data(summary))


def _is_plan(data: object) -> bool:
    return isinstance(data, dict) and "baseline" not in data


def _data(path: Path) -> object:
    try:
        return parse(read_file(path))
    except OSError as error:
        raise BaselineError(f"cannot read {path}", error=error) from error
    except ValueError as error:  # not JSON, or not text
        raise _damaged(path, error) from error


def _damaged(path: Path, error: ValueError) -> BaselineError:
    return BaselineError(f"the baseline {path} is damaged", error=error, fix=REWRITE)

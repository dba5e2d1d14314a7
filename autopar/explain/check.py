"""Checks whether a plan costs more than its baseline.

python -m autopar.explain --check baselines/                               every baseline of a folder, or of a file
python -m autopar.explain model.py:build --mesh 2,4 --check plan.json      one target against a saved plan
... --update                                                               write the current costs
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.errors import AutoparError, printable
from autopar.explain.baseline import Baseline, files, found_from, holds_plan, read, seen_from, write
from autopar.explain.cli_arguments import UsageError, built
from autopar.explain.difference import Difference, Total
from autopar.explain.summary import Summary
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.pipeline_search import plan_pipeline
from autopar.planning.planner import connected_mesh, plan_program, read_program

TOLERANCE = 0.01
OF_CAPTURE = ("mode", "precision", "reduce")  # the options of a baseline by which its TARGET is captured
OK, BETTER, WORSE, FAILED = "ok", "better", "WORSE", "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCost:
    """The cost of a plan before and now; `error` says why there is no plan now."""

    name: str
    old: Summary
    new: Summary | None = None
    error: AutoparError | None = None
    tolerance: float = TOLERANCE

    @property
    def difference(self) -> Difference | None:
        """The difference, if there is a plan."""
        return Difference(old=self.old, new=self.new) if self.new else None

    @property
    def totals(self) -> list[Total]:
        """The figures that differ by more than the tolerance, worse ones first."""
        totals = self.difference.totals if self.difference else ()
        return sorted((t for t in totals if abs(t.growth) > self.tolerance), key=lambda total: total.growth < 0)

    @property
    def status(self) -> str:
        """One of OK, BETTER, WORSE (if any figure is worse) and FAILED."""
        if self.new is None:
            return FAILED
        if not self.totals:
            return OK
        return BETTER if self.totals[0].growth < 0 else WORSE

    def lines(self) -> Iterator[str]:
        """One line, and below it the reason if it is worse or failed, or the premises of the plan if they changed."""
        what, *reason = str(self.error).splitlines()
        if self.totals:
            what = ", ".join(f"{total.name} {total}" for total in self.totals)
        elif self.difference:
            what = ", ".join(f"{total.name} {total.now}" for total in self.difference.totals)
        if self.difference:
            reason = list(self.difference.lines() if self.status == WORSE else self.difference.premises())
        yield f"{self.status:<8}{self.name}: {what}"
        yield from (f"        {line}" for line in reason)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the check."""
    what = "compare step time, peak memory and bytes sent with a saved plan or a folder of baselines; exit 1 if any is worse"
    parser.add_argument("--check", metavar="BASELINE", type=Path, help=what)
    worse = f"with --check: the fraction by which a figure may be worse, by default {TOLERANCE}"
    parser.add_argument("--tolerance", type=fraction, metavar="FRACTION", help=worse)
    parser.add_argument("--update", action="store_true", help="with --check: write the present costs into the baselines")


def fraction(text: str) -> float:
    """Parse a non-negative fraction; raises ValueError for anything but a number, ArgumentTypeError for other numbers."""
    found = float(text)
    if not (found >= 0 and math.isfinite(found)):
        raise argparse.ArgumentTypeError(f"{text} is not a fraction such as 0.01")
    return found


def run(options: argparse.Namespace, planned: Callable[[], Plan]) -> int:
    """Check what the command line names, print the result, update if requested; returns the exit code.

    `planned` makes the plan of the TARGET, if one is given. Raises UsageError, BaselineError, and whatever `planned` raises.
    """
    path: Path = options.check
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    if options.target:
        return _one(path, options.target, planned, tolerance, update=options.update)
    return _all(path, tolerance, update=options.update)


def _one(path: Path, target: str, planned: Callable[[], Plan], tolerance: float, *, update: bool) -> int:
    """Check a target against one baseline; with `update`, write a new baseline if there is none."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder, whose baselines name targets", fix=f"no TARGET, or --check {path}/NAME.json")
    old = read(*files(path)) if path.exists() or not update else ()
    if len(old) > 1:
        raise UsageError(f"{path} holds {len(old)} baselines, which name their targets", fix="leave out TARGET")
    plan = planned()
    new = Baseline(target=seen_from(target, path.parent), summary=Summary.of(plan))
    outcomes = [CheckedCost(name=str(new), old=was.summary, new=new.summary, tolerance=tolerance) for was in old]
    for outcome in outcomes:
        print("\n".join(map(printable, outcome.lines())))
    if not update:
        return int(outcomes[0].status == WORSE)
    if old and holds_plan(path):
        plan.save(path)
    else:
        write(path, [new])
    print(f"written {path}")
    return 0


def _all(path: Path, tolerance: float, *, update: bool) -> int:
    """Check every baseline of a folder or file; each target is captured once."""
    held = [(file, baseline) for file in files(path) for baseline in read(file)]
    targets: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, (file, baseline) in enumerate(held):
        if not baseline.target:
            fix = "a saved plan needs its TARGET before --check, a baseline of the fixture plan_cost its test"
            raise UsageError(f"{file} does not name a TARGET", fix=fix)
        asked = baseline.summary.options
        targets[found_from(baseline.target, file.parent), *(asked.get(name, "") for name in OF_CAPTURE)].append(place)
    outcomes: dict[int, CheckedCost] = {}
    for (target, *_), places in targets.items():
        found = _outcomes(target, [held[place][1] for place in places], tolerance)
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome
            print("\n".join(map(printable, outcome.lines())), flush=True)
    if update:
        _update(held, outcomes)
    return _verdict([outcome.status for outcome in outcomes.values()], update=update)


def _outcomes(target: str, baselines: Sequence[Baseline], tolerance: float) -> Iterator[CheckedCost]:
    """Compare the baselines of one target, captured alike, with the current costs of its plans."""
    program: Program | AutoparError
    try:
        asked = {name: baselines[0].summary.options.get(name, "") for name in OF_CAPTURE}
        with redirect_stdout(sys.stderr):
            program = read_program(*built(target), Options.read(asked)).program
    except AutoparError as error:
        program = error
    for baseline in baselines:
        outcome = CheckedCost(name=str(baseline), old=baseline.summary, tolerance=tolerance)
        try:
            yield replace(outcome, new=_summary(program, baseline))
        except AutoparError as error:
            yield replace(outcome, error=error)


def _summary(program: Program | AutoparError, baseline: Baseline) -> Summary:
    if isinstance(program, AutoparError):
        raise program
    options = baseline.options
    mesh = Mesh(axes=baseline.summary.axes, sizes=baseline.summary.sizes)
    if options.pipeline is None:
        return Summary.of(plan_program(program, connected_mesh(mesh, options), options))
    return Summary.of(plan_pipeline(program, connected_mesh(mesh.joined, options), options))


def _update(held: Sequence[tuple[Path, Baseline]], outcomes: Mapping[int, CheckedCost]) -> None:
    """Write the files with a baseline that differs from the current plan."""
    files: dict[Path, list[int]] = defaultdict(list)
    for place, (file, _) in enumerate(held):
        files[file].append(place)
    for file, places in files.items():
        now = [replace(held[place][1], summary=outcomes[place].new or held[place][1].summary) for place in places]
        if now != [held[place][1] for place in places]:
            write(file, now)
            print(f"written {file}")


def _verdict(statuses: Sequence[str], *, update: bool) -> int:
    """Print how many baselines have each status; returns the exit code."""
    counted = Counter(statuses)
    print(f"{len(statuses)} compared: " + ", ".join(f"{counted[s]} {s}" for s in (OK, BETTER, WORSE, FAILED) if counted[s]))
    if not update and counted[WORSE] + counted[BETTER]:
        print("if this change is intended: --update writes the new costs")
    return int(not statuses or counted[FAILED] > 0 or (counted[WORSE] > 0 and not update))

"""Verify the whole table of equal numbers: every model and mesh under the named strategies and ten random plans.

    python benchmarks/verify_all.py                       all of it
    python benchmarks/verify_all.py --model gpt2 --model t5 --mesh 2,4
    python benchmarks/verify_all.py --stages              models in pipeline stages, under every schedule and three strategies
    python benchmarks/verify_all.py --stages --model t5 --ranks 4

Ranks of stages are threads that gloo joins, as many as the mesh has. One line per model and mesh; what differs or fails stands
below its line. Exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the models are those of the tests

from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.runtime.workers import WorkerPool
from autopar.verify.report import Report
from tests.support import stage_table
from tests.support.models import MODELS
from tests.support.table import MESHES, cases, rows, verified
from tests.support.threads import Threads

T = TypeVar("T")

LINE = "{:<8}{:<12}{:>8}{:>14}{:>10}"


def main() -> int:
    """Run the table; returns the exit code."""
    options = arguments()
    if options.stages:
        return in_stages(options.model or stage_table.MODELS, options.ranks or stage_table.RANKS)
    wanted = [row for row in rows() if row[0] in (options.model or MODELS) and row[1] in (options.mesh or MESHES)]
    print(LINE.format("model", "mesh", "plans", "max error", "seconds"), flush=True)
    with WorkerPool(8, preload=["autopar.verify.verification"]) as pool:
        return summed(row(model, str(sizes), cases(model, sizes), lambda case: verified(case, pool)) for model, sizes in wanted)


def in_stages(models: Iterable[str], ranks: Iterable[int]) -> int:
    """Run the table of models in pipeline stages; returns the exit code."""
    print(LINE.format("model", "mesh", "plans", "max error", "seconds"), flush=True)
    with ThreadedRanks() as world:
        threads = Threads(world)
        rows = itertools.product(models, ranks)
        return summed(
            row(model, f"pp={p}, 2", stage_table.cases(model, p), lambda case: stage_table.verified(case, threads))
            for model, p in rows
        )


def summed(rows: Iterable[tuple[int, float, int]]) -> int:
    """Print the sum of all rows; returns the exit code."""
    begin, count, worst, failed = time.perf_counter(), 0, 0.0, 0
    for equal, error, wrong in rows:
        count, worst, failed = count + equal, max(worst, error), failed + wrong
    print(LINE.format("all", "", count, f"{worst:.1e}", f"{time.perf_counter() - begin:.0f}"))
    print(f"{failed} plans are NOT equal" if failed else "all plans are equal")
    return 1 if failed else 0


def row(model: str, mesh: str, cases: Iterable[T], verified: Callable[[T], Report]) -> tuple[int, float, int]:
    """Verify and print one row; how many plans are equal, the largest error of those, how many are not."""
    begin = time.perf_counter()
    equal, worst, wrong = 0, 0.0, []
    for case in cases:
        error, complaint = one(case, verified)
        if complaint:
            wrong.append(f"{case}: {complaint}")
        else:
            equal, worst = equal + 1, max(worst, error)
    print(LINE.format(model, mesh, equal, f"{worst:.1e}", f"{time.perf_counter() - begin:.0f}"), flush=True)
    show(wrong)
    return equal, worst, len(wrong)


def one(case: T, verified: Callable[[T], Report]) -> tuple[float, str]:
    """The error of one plan, and what is wrong with it, if anything."""
    try:
        report = verified(case)
    except Exception:  # whatever it is, the table goes on
        return 0.0, traceback.format_exc()
    return report.max_error, "" if report.ok else str(report)


def show(complaints: Iterable[str]) -> None:
    for complaint in complaints:
        print("  " + complaint.rstrip().replace("\n", "\n  "), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Verify the whole table of equal numbers.")
    known = [*MODELS, *(name for name in stage_table.MODELS if name not in MODELS)]
    parser.add_argument("--model", action="append", choices=known, help="only this model (may be repeated)")
    parser.add_argument("--mesh", action="append", type=sizes_of, help="only this mesh, as in 2,4 (may be repeated)")
    parser.add_argument("--stages", action="store_true", help="models in pipeline stages")
    parser.add_argument("--ranks", action="append", type=int, choices=stage_table.RANKS, help="only so many ranks in stages")
    return parser.parse_args()


def sizes_of(text: str) -> tuple[int, ...]:
    """ "2,4" as (2, 4), if the table has it."""
    sizes = tuple(map(int, text.split(",")))
    if sizes not in MESHES:
        raise argparse.ArgumentTypeError(f"the table has {', '.join(map(str, MESHES))}")
    return sizes


if __name__ == "__main__":
    sys.exit(main())

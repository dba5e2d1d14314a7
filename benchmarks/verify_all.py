"""Verify the whole table of equal numbers: every model and mesh under the named strategies and ten random plans.

    python benchmarks/verify_all.py                       all of it
    python benchmarks/verify_all.py --model gpt2 --model t5 --mesh 2,4

One line per model and mesh; what differs or fails stands below its line. Exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the models are those of the tests

from autopar.runtime.workers import WorkerPool
from tests.support.models import MODELS
from tests.support.table import MESHES, Case, cases, rows, verified

LINE = "{:<8}{:<12}{:>8}{:>14}{:>10}"


def main() -> int:
    """Run the table; returns the exit code."""
    options = arguments()
    wanted = [row for row in rows() if row[0] in (options.model or MODELS) and row[1] in (options.mesh or MESHES)]
    print(LINE.format("model", "mesh", "plans", "max error", "seconds"), flush=True)
    begin, count, worst, failed = time.perf_counter(), 0, 0.0, 0
    with WorkerPool(8, preload=["autopar.verify.verification"]) as pool:
        for model, sizes in wanted:
            equal, error, wrong = row(model, sizes, pool)
            count, worst, failed = count + equal, max(worst, error), failed + wrong
    print(LINE.format("all", "", count, f"{worst:.1e}", f"{time.perf_counter() - begin:.0f}"))
    print(f"{failed} plans are NOT equal" if failed else "all plans are equal")
    return 1 if failed else 0


def row(model: str, sizes: tuple[int, ...], pool: WorkerPool) -> tuple[int, float, int]:
    """Verify and print one row; how many plans are equal, the largest error of those, how many are not."""
    begin = time.perf_counter()
    equal, worst, wrong = 0, 0.0, []
    for case in cases(model, sizes):
        error, complaint = one(case, pool)
        if complaint:
            wrong.append(f"{case}: {complaint}")
        else:
            equal, worst = equal + 1, max(worst, error)
    print(LINE.format(model, str(sizes), equal, f"{worst:.1e}", f"{time.perf_counter() - begin:.0f}"), flush=True)
    show(wrong)
    return equal, worst, len(wrong)


def one(case: Case, pool: WorkerPool) -> tuple[float, str]:
    """The error of one plan, and what is wrong with it, if anything."""
    try:
        report = verified(case, pool)
    except Exception:  # whatever it is, the table goes on
        return 0.0, traceback.format_exc()
    return report.max_error, "" if report.ok else str(report)


def show(complaints: Iterable[str]) -> None:
    for complaint in complaints:
        print("  " + complaint.rstrip().replace("\n", "\n  "), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Verify the whole table of equal numbers.")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this model (may be repeated)")
    parser.add_argument("--mesh", action="append", type=sizes_of, help="only this mesh, as in 2,4 (may be repeated)")
    return parser.parse_args()


def sizes_of(text: str) -> tuple[int, ...]:
    """ "2,4" as (2, 4), if the table has it."""
    sizes = tuple(map(int, text.split(",")))
    if sizes not in MESHES:
        raise argparse.ArgumentTypeError(f"the table has {', '.join(map(str, MESHES))}")
    return sizes


if __name__ == "__main__":
    sys.exit(main())

"""Predicted beside measured: step times and memory that others have published, at autopar's own prices.

python -m benchmarks.fidelity --save              every row that can be expressed; eight minutes of one core
python -m benchmarks.fidelity --table titan       one table
python -m benchmarks.fidelity --every 10          every tenth row
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autopar import files
from benchmarks.fidelity.predict import Prediction, predict
from benchmarks.fidelity.report import report
from benchmarks.fidelity.tables import READERS, Run, Skipped, TableError, runs

RESULTS = Path(__file__).parents[1] / "results" / "fidelity.txt"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", choices=READERS, help="default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth row of those that can be expressed")
    parser.add_argument("--save", action="store_true", help=f"write the report to {RESULTS.parent.name}/{RESULTS.name}")
    return parser


def main() -> int:
    options = _parser().parse_args()
    try:
        rows = list(runs(tables=tuple(options.table or READERS)))
    except TableError as error:
        print(error, file=sys.stderr)
        return 1
    chosen = [row for row in rows if isinstance(row, Run)][:: max(1, options.every)]
    if not chosen:
        print(
            "no row of these tables can be expressed",
            *sorted({row.reason for row in rows if isinstance(row, Skipped)}),
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    predictions: list[Prediction] = []
    for number, run in enumerate(chosen, 1):
        predictions.append(predict(run))
        print(
            f"{number}/{len(chosen)} {run.table}:{run.line} {run.name}: {predictions[-1].error:+.1%}",
            file=sys.stderr,
            flush=True,
        )
    some = [f"Every {options.every}th row only.", ""] if options.every > 1 else []
    lines = "\n".join(some + list(report(predictions, [row for row in rows if isinstance(row, Skipped)])))
    print(lines)
    if options.save:
        files.write(RESULTS, lines + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

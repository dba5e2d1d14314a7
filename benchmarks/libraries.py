"""Models of other libraries than transformers: which are captured, planned, and equal to the user's own module.

    python benchmarks/libraries.py                      every model of what is installed; goes on where it stopped
    python benchmarks/libraries.py --only timm smp      those whose names begin so, again
    python benchmarks/libraries.py --save               the table to benchmarks/results/libraries.txt

Each is built small (benchmarks/library_models.py), in train mode, and tried beside its plans (benchmarks/trials.py). No library
is a dependency: what is tried is what `pip install timm diffusers x-transformers vit-pytorch ...` has put there. What was found
is kept as lines of JSON in the file that `--log` names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar import files
from benchmarks import library_models
from benchmarks.hub_report import report
from benchmarks.trials import Trial, known_of, outcome

ROOT = Path(__file__).resolve().parent.parent
RESULTS, LOG = ROOT / "benchmarks" / "results" / "libraries.txt", ROOT / "build" / "libraries.jsonl"


def trial(name: str, one: Trial) -> None:
    """Try one model."""
    module, sample = library_models.built(name)
    with contextlib.redirect_stdout(sys.stderr):
        one.run(module, sample, head=type(module).__name__)


def main() -> int:
    """Try what is left, and print the table; returns 1 if a number is wrong."""
    options = arguments()
    options.log.parent.mkdir(exist_ok=True)
    known, there = known_of(options.log), library_models.names()
    chosen = [name for name in there if name.startswith(tuple(options.only))] if options.only else None
    for name in chosen if chosen is not None else [name for name in there if name not in known]:
        found = {**outcome(name, trial), "family": name.partition("/")[0]}
        known[name] = found
        with open(options.log, "a") as log:
            log.write(json.dumps(found) + "\n")
        print(name, found["stage"], found.get("reason", ""), sep="  ", file=sys.stderr, flush=True)
    text = report(list(known.values()), ["torch", *_packages(name.partition("/")[0] for name in known)])
    print(text)
    if options.save:
        files.write(RESULTS, text + "\n")
    return 1 if any(one.get("wrong") for one in known.values()) else 0


def _packages(libraries: Iterable[str]) -> Iterator[str]:
    """The distributions that have libraries."""
    of = importlib.metadata.packages_distributions() | {"pykan": ["pykan"]}
    yield from sorted({package for library in set(libraries) for package in of.get(library, ())[:1]})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Capture, plan and run models of libraries.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models whose names begin so, again")
    parser.add_argument("--log", type=Path, default=LOG, help="lines of JSON (default: build/libraries.jsonl)")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/libraries.txt")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

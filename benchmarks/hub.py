"""The architectures of transformers, family by family: which are captured, planned, and equal to the user's own module.

    python benchmarks/hub.py                       every model type that the library has a model of; goes on where it stopped
    python benchmarks/hub.py --limit 100           a hundred more of them, of every family by turns
    python benchmarks/hub.py --only llava swin     these again
    python benchmarks/hub.py --save                the table to benchmarks/results/hub.txt

Each is built small from its configuration (benchmarks/hub_models.py), in train mode, and tried beside its plans
(benchmarks/trials.py). What was found is kept as lines of JSON in the file that `--log` names.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from zoo_models import MODELS as ZOO

from autopar import files
from autopar.plan.options import Options
from benchmarks import hub_families, hub_models
from benchmarks.hub_report import report
from benchmarks.trials import Trial, known_of, outcome

ROOT = Path(__file__).resolve().parent.parent
RESULTS, LOG = ROOT / "benchmarks" / "results" / "hub.txt", ROOT / "build" / "hub.jsonl"


def trial(kind: str, one: Trial) -> None:
    """Try one architecture."""
    built = hub_models.built(kind)
    static = tuple(filter(hub_models.GRIDS.search, built.sample))
    one.run(built.module, built.sample, Options(static=static), head=built.head, size=built.size)


def by_turns(kinds: list[str]) -> Iterator[str]:
    """The types, of every family by turns."""
    families = defaultdict(list)
    for kind in kinds:
        families[hub_families.family(kind)].append(kind)
    return (kind for row in itertools.zip_longest(*families.values()) for kind in row if kind)


def main() -> int:
    """Try what is left, and print the table; returns 1 if a number is wrong."""
    options = arguments()
    transformers.logging.set_verbosity_error()
    options.log.parent.mkdir(exist_ok=True)
    known = known_of(options.log)
    kinds = options.only or [kind for kind in by_turns(hub_families.kinds()) if kind not in known and kind not in ZOO]
    for kind in kinds[: options.limit]:
        found = {**outcome(kind, trial), "family": hub_families.family(kind)}
        known[kind] = found
        with open(options.log, "a") as log:
            log.write(json.dumps(found) + "\n")
        print(kind, found["stage"], found.get("reason", ""), sep="  ", file=sys.stderr, flush=True)
    text = report(list(known.values()))
    print(text)
    if options.save:
        files.write(RESULTS, text + "\n")
    return 1 if any(one.get("wrong") for one in known.values()) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Capture, plan and run the architectures of transformers.")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types, again")
    parser.add_argument("--limit", type=int, help="at most so many more (0: only the table)")
    parser.add_argument("--log", type=Path, default=LOG, help="lines of JSON (default: build/hub.jsonl)")
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/hub.txt")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Allocate a cluster's devices to jobs from the command line; needs neither processes nor weights.

    python -m autopar.allocate cluster.toml
    python -m autopar.allocate cluster.toml --goal completion --json

cluster.toml:

    devices = 16
    device = "h100"
    goal = "completion"                       # or throughput, samples, deadlines

    [[jobs]]
    name = "large"
    target = "train.py:large"                 # a function that returns (model, sample_input)
    steps = 20_000
    options = { precision = "bf16-mixed" }
    present = 4                               # devices that it uses now
    migration = 60                            # seconds lost by a change

    [[jobs]]
    name = "measured"
    steps = 5_000
    curve = { 1 = 0.9, 2 = 0.5, 4 = 0.3 }     # seconds per step by number of devices

Exit code 0 for an allocation; 1 if there is none; 2 if the command line or the file is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from autopar.allocate.allocation import ClusterAllocation, allocate
from autopar.allocate.cluster_file import read
from autopar.allocate.goals import GOALS, check_goal
from autopar.explain.cli_arguments import errors_of_usage
from autopar.explain.exit_code import exit_code
from autopar.runtime.progress import progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return exit_code(lambda: _run(parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    found = _allocated(options.file, options.goal)
    print(found.to_json() if options.json else found)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options of `python -m autopar.allocate`."""
    found = argparse.ArgumentParser(
        prog="python -m autopar.allocate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("file", metavar="CLUSTER.toml", help="the devices and the jobs")
    found.add_argument("--goal", help=f"{', '.join(GOALS)}; by default that of the file, else throughput")
    found.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return found


def _allocated(path: str, goal: str | None) -> ClusterAllocation:
    found = read(path)
    with redirect_stdout(sys.stderr), progress("building the models") as tell:
        with errors_of_usage():
            check_goal(goal := found.goal if goal is None else goal)
            cluster = found.cluster
            if cluster.device is not None:
                cluster.hardware()
            jobs = [entry.job() for entry in found.jobs]
        tell("planning the jobs")
        return allocate(jobs, cluster, goal=goal)

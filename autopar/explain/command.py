"""Print the plan of a model from the command line; needs neither processes nor weights.

    python -m autopar.explain train.py:build --mesh 2,4 --device h100       build() returns (model, sample_input)
    python -m autopar.explain package.models:small --mesh dp=2,tp=4 --save plan.json
    python -m autopar.explain plan.json

Exit code 0 for a plan, 1 if there is none, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from autopar.errors import AutoparError
from autopar.explain.target import HOW, UsageError, built, parse_constraint, parse_mesh
from autopar.passes.strategies import STRATEGIES
from autopar.plan import Plan
from autopar.planner import Options, make_plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        plan = _saved(options) if options.target.endswith(".json") else _planned(options)
        if options.save:
            _save(plan, options.save)
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    show(plan)
    return 0


def show(plan: Plan) -> None:
    """Print a plan: with colours and as wide as the terminal if there is one, as plain text otherwise."""
    if not sys.stdout.isatty():
        print(plan)
        return
    console = Console(highlight=False)
    for part in plan.tables():
        console.print(part)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", help=HOW)
    parser.add_argument("--mesh", help="sizes of the axes, the last one innermost: 2,4 or dp=2,tp=4")
    parser.add_argument("--device", help="an entry of the catalog, such as h100; by default this machine's")
    parser.add_argument("--budget", help="memory per device, such as 24GiB; by default 90%% of the device")
    parser.add_argument("--strategy", help=", ".join(STRATEGIES))
    parser.add_argument("--optimizer", help="adamw, sgd, ...: for the memory of its state")
    constraint = '"*.wte.weight=I, S(0)"; may be given several times'
    parser.add_argument("--constraint", metavar="NAME=LAYOUT", action="append", default=[], help=constraint)
    parser.add_argument("--save", metavar="PLAN.json", help="write the plan to a file")
    return parser


def _saved(options: argparse.Namespace) -> Plan:
    """A plan that was saved before; it is printed as it is."""
    names = ("mesh", "device", "budget", "strategy", "optimizer", "constraint")
    given = [f"--{name}" for name in names if getattr(options, name)]
    if given:
        raise UsageError(
            f"{options.target} is a saved plan: {', '.join(given)} cannot change it", fix="give the model to plan it again"
        )
    if not Path(options.target).is_file():
        raise UsageError(f"there is no file {options.target}", fix=HOW)
    return Plan.load(options.target)


def _planned(options: argparse.Namespace) -> Plan:
    if not options.mesh:
        raise UsageError("on which mesh? A plan is for one mesh", fix="--mesh 2,4 or --mesh dp=2,tp=4")
    mesh = parse_mesh(options.mesh)
    constraints = dict(map(parse_constraint, options.constraint))
    if len(constraints) < len(options.constraint):
        raise UsageError("one name has two constraints", given="; ".join(options.constraint))
    asked = {name: getattr(options, name) for name in ("device", "budget", "strategy", "optimizer")}
    given = {name: value for name, value in asked.items() if value is not None}
    model, sample = built(options.target)
    return make_plan(model, sample, mesh, Options(constraints=constraints, **given)).plan


def _save(plan: Plan, path: str) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}", error=error) from error

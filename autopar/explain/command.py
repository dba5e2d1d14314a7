"""Explain the plan of a model on the command line; needs neither processes nor weights.

    python -m autopar.explain train.py:build --mesh 2,4 --device h100       build() returns (model, sample_input)
    python -m autopar.explain package.models:small --mesh dp=2,tp=4 --save plan.json
    python -m autopar.explain plan.json
    python -m autopar.explain train.py:build --mesh 2,4 --why "*.mlp.c_fc" --why-not "*.mlp.c_fc.weight=*, S(0)"
    python -m autopar.explain train.py:build --mesh 2,4 --trace step.json
    python -m autopar.explain train.py:build --mesh pp=4,dp=2 --pipeline pp --schedule 1f1b --microbatches 16
    python -m autopar.explain train.py:build --mesh auto --devices 64 --device h100
    python -m autopar.explain train.py:build --devices 8..1024 --device h100 --within 2s
    python -m autopar.explain train.py:build --devices 8..64 --device h100 --price 2.5 --objective cost
    python -m autopar.explain train.py:build --mesh 2,4 --device h100 --energy --epoch 1000000
    python -m autopar.explain train.py:build --mesh 2,4 --html report.html --devices 8..64 --budget-sweep
    python -m autopar.explain --diff a.json b.json
    python -m autopar.explain --check baselines/

Exit code 0 for an answer; 1 if there is no plan, no such name, or a cost above its baseline; 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console

from autopar import files
from autopar.explain import check
from autopar.explain.cli_arguments import HOW, UsageError, built, parse_seconds
from autopar.explain.cli_options import (
    COUNTS,
    ENERGY,
    MODEL,
    PLANNING,
    constraints,
    counts,
    mesh_of,
    parser,
    planning_options,
    price_of,
    refuse,
    several_meshes,
)
from autopar.explain.cli_values import check_names_axes
from autopar.explain.difference import difference
from autopar.explain.exit_code import exit_code
from autopar.explain.explanation import Explanation, explained, explained_before
from autopar.explain.html_report import Questions, html_report, require
from autopar.explain.output import CommandOutput, of_difference, of_energy, of_model, of_page, of_plan, of_scaling, of_stages
from autopar.explain.scaling import scaling
from autopar.explain.staged import StagedExplanation, trace_of
from autopar.plan.options import AUTO
from autopar.plan.plan import Plan
from autopar.plan.text import literal_part, plain
from autopar.planning.planner import read_program
from autopar.runtime.progress import phases, progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return exit_code(lambda: _run(parser(__doc__).parse_args(arguments)))


def _run(options: argparse.Namespace) -> int:
    _refuse_lost_files(options)
    if options.check:
        return _checked(options)
    refuse(options, ("tolerance", "update"), "nothing is checked", "only with --check")
    with redirect_stdout(sys.stderr):  # what the user's own code prints is no part of the answer
        answer = _answer(options)
    _print(answer, json=options.json)
    return 0


def _refuse_lost_files(options: argparse.Namespace) -> None:
    """Refuse to write two answers to one file, to overwrite a plan that is read, or to overwrite Python code."""
    sources = [options.plan, *(options.diff or ()), *(options.target or "").split(":")[:1]]
    read, written = {os.path.realpath(path) for path in sources if path}, set[str]()
    for name in ("save", "trace", "html"):
        path = getattr(options, name)
        if path is None:
            continue
        if not path:
            raise UsageError(f"--{name} names no file", fix=f"--{name} and a path, or leave it out")
        file = os.path.realpath(path)
        if file in written or path.endswith(".py") or (file in read and name != "save"):
            what = f"--{name} {path} would write over what this command reads or writes, or over Python code"
            raise UsageError(what, fix="another file")
        written.add(file)


def _checked(options: argparse.Namespace) -> int:
    """Compare plans with their baselines; returns the exit code."""
    refuse(options, (*MODEL, *ENERGY, "html", *COUNTS[1:], "plan", "diff", "json"), "--check prints no report")
    if options.mesh != AUTO:
        refuse(options, ("devices",), "--check compares one plan", fix="--mesh, or --mesh auto --devices 64")
    if not options.target:
        what, fix = "baselines name their own", "add TARGET, or leave these options out"
        refuse(options, (*PLANNING, "devices", "save"), what, "only with a TARGET", fix)
    return check.run(options, lambda: _plan(options))


def _print(answer: CommandOutput, *, json: bool) -> None:
    """Print an answer part by part, as the parts come."""
    if json:
        print(answer.json)
        return
    console = Console(highlight=False, markup=False, emoji=False) if sys.stdout and sys.stdout.isatty() else None
    for part in answer.parts():
        if console:
            console.print(literal_part(part))
        else:
            print(plain([part]), flush=True)


def _answer(options: argparse.Namespace) -> CommandOutput:
    if options.diff:
        refuse(
            options, (*PLANNING, *MODEL, *ENERGY, *COUNTS, "target", "plan", "save", "html"), "--diff compares two saved plans"
        )
        return of_difference(difference(*map(_loaded, options.diff)))
    if options.plan is not None and not options.plan:
        raise UsageError("--plan names no file", fix="--plan and a path, or leave it out")
    if not options.target:
        raise UsageError("no TARGET given", fix=f"TARGET: {HOW}")
    if options.html:
        refuse(options, ("why", "sensitivity", "code", "within", "objective", "json", *ENERGY), "--html writes a page")
        require()
    if several_meshes(options):
        return _scaled(options)
    if options.devices is None:
        refuse(options, COUNTS[1:], "no numbers of devices", "only with --devices")
    if not options.energy:
        refuse(options, ("epoch",), "no energy is asked for", "only with --energy")
    elif options.epoch is not None and options.epoch < 1:
        raise UsageError(f"--epoch {options.epoch} is not a number of samples", fix="1 or more")
    plan, answer = (_saved if options.target.endswith(".json") else _explained)(options)
    if options.save is not None:
        _save(plan, options.save)
    return answer


def _saved(options: argparse.Namespace) -> tuple[Plan, CommandOutput]:
    """A saved plan and its report."""
    saved = f"{options.target} is a saved plan"
    refuse(options, PLANNING, saved, "cannot change it", "name the model to plan it again")
    refuse(options, ("plan",), saved, "names another one", f"MODEL --plan {options.target}")
    plan = _loaded(options.target)
    needed = [name for name in (*MODEL, "devices") if not (name == "trace" and plan.pipeline)]  # a clock needs only the plan
    fix = f"MODEL --plan {options.target}, with the model that it was planned for"
    if plan.pipeline:
        fix = "MODEL with the options of the plan, which is then made again: it has pipeline stages"
    refuse(options, needed, saved, "cannot be answered without the model", fix)
    if options.trace:
        _write(options.trace, trace_of(plan))
    if options.energy:
        return plan, of_energy(plan, options.epoch)
    if not options.html:
        return plan, of_plan(plan)
    _write(options.html, html_report(plan))
    return plan, of_page(plan, options.html)


def _scaled(options: argparse.Namespace) -> CommandOutput:
    """The plans of a model on several numbers of devices."""
    shapes = options.mesh == AUTO
    alone = *(() if shapes else ("mesh",)), "constraint", "dynamic", "plan", "diff", "save", *MODEL, *ENERGY
    refuse(options, alone, "--devices plans for several meshes")
    if options.target.endswith(".json"):
        raise UsageError(f"{options.target} is a saved plan: --devices plans a model", fix=HOW)
    numbers, within, price = counts(options), parse_seconds(options.within) if options.within else None, price_of(options)
    with progress("capturing the model"):
        model, sample = built(options.target)
        asked = planning_options(options)
        program = read_program(model, sample, asked).program
    return of_scaling(scaling(program, numbers, asked, shapes=shapes), within, price, options.objective)


def _loaded(path: str) -> Plan:
    """Load a saved plan."""
    if not Path(path).is_file():
        raise UsageError(f"no such file: {path}", fix=HOW)
    return Plan.load(path)


def _explained(options: argparse.Namespace) -> tuple[Plan, CommandOutput]:
    """Plan a model and answer the questions about it."""
    forced, questions = constraints(options.why_not), _questions(options)
    with progress("building the model") as tell:
        found = _planned(options, tell)
        tell(_question(options))
        if options.trace:
            _write(options.trace, found.trace)
        if options.energy:
            refuse(options, MODEL, "--energy says what a plan takes", "are other questions: ask one at a time")
            return found.plan, of_energy(found.plan, options.epoch)
        if options.html:
            _write(options.html, questions.page(found, planning_options(options)))
            return found.plan, of_page(found.plan, options.html)
        asked_for = {"code": options.code, "sweep": options.budget_sweep, "sensitivity": options.sensitivity}
        if isinstance(found, StagedExplanation):
            return found.plan, of_stages(found, options.why, forced, **asked_for)
        return found.plan, of_model(found, options.why, forced, **asked_for)


def _questions(options: argparse.Namespace) -> Questions:
    """The additional questions of a page; the only number of an open mesh belongs to the plan itself."""
    numbers, shapes = counts(options), options.mesh == AUTO
    if shapes and len(numbers) == 1 and options.price is None:
        numbers = []
    return Questions(
        budgets=options.budget_sweep,
        devices=numbers,
        shapes=shapes,
        price=price_of(options),
        why_not=constraints(options.why_not),
    )


def _question(options: argparse.Namespace) -> str:
    """What is computed after planning, in the words of the progress line."""
    if options.html:
        return "planning strategies, and what else the page shows"
    if options.why_not:
        return "planning with the layouts forced"
    if options.why:
        return "pricing the alternatives"
    if options.sensitivity:
        return "planning at other prices"
    if options.code or options.budget_sweep:
        return "answering"
    return "planning the named strategies"


def _plan(options: argparse.Namespace) -> Plan:
    """Make only the TARGET's plan, and save it if requested."""
    if options.target.endswith(".json"):
        refuse(options, PLANNING, f"{options.target} is a saved plan", "cannot change it", "name the model to plan it again")
        return _loaded(options.target)
    with redirect_stdout(sys.stderr), progress("building the model") as tell:
        plan = _planned(options, tell).plan
    if options.save is not None:
        _save(plan, options.save)
    return plan


def _planned(options: argparse.Namespace, tell: Callable[[str], None]) -> Explanation | StagedExplanation:
    """Plan the model of the command line, with its options or by a saved plan."""
    if options.plan:
        others = [name for name in PLANNING if name != "device"]
        refuse(options, (*others, "devices"), f"{options.plan} is a saved plan", "cannot change it", "leave it out, or --plan")
        tell("building the model")
        plan = _loaded(options.plan)
        if plan.pipeline:
            what, fix = (
                f"{options.plan} is a plan in pipeline stages",
                f"{options.plan} --html REPORT.html, alone",
            )
            refuse(options, ("trace", "html"), what, "needs no model", fix)
        model, sample = built(options.target)
        return explained_before(plan, model, sample, options.device, phases(tell))
    mesh, asked = mesh_of(options), planning_options(options)
    check_names_axes(asked, mesh)
    model, sample = built(options.target)
    tell("capturing the model")
    return explained(model, sample, mesh, asked, phases(tell))


def _save(plan: Plan, path: str) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}", error=error) from error


def _write(path: str, text: str) -> None:
    try:
        files.write(path, text + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}", error=error) from error

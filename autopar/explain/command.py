"""Explain the plan of a model from the command line; needs neither processes nor weights.

    python -m autopar.explain train.py:build --mesh 2,4 --device h100       build() returns (model, sample_input)
    python -m autopar.explain package.models:small --mesh dp=2,tp=4 --save plan.json
    python -m autopar.explain plan.json
    python -m autopar.explain train.py:build --mesh 2,4 --why "*.mlp.c_fc" --why-not "*.mlp.c_fc.weight=*, S(0)"
    python -m autopar.explain train.py:build --mesh 2,4 --trace step.json
    python -m autopar.explain train.py:build --mesh pp=4,dp=2 --pipeline pp --schedule 1f1b --microbatches 16
    python -m autopar.explain train.py:build --mesh auto --devices 64 --device h100
    python -m autopar.explain train.py:build --devices 8..1024 --device h100 --within 2s
    python -m autopar.explain --diff a.json b.json
    python -m autopar.explain --check baselines/

Exit code 0 for an answer; 1 if there is no plan, no such name, or a cost above its baseline; 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from autopar import files
from autopar.analysis.recompute_policy import POLICIES
from autopar.api import options_of
from autopar.errors import AutoparError
from autopar.explain import check
from autopar.explain.cli_arguments import (
    HOW,
    UsageError,
    built,
    parse_answer,
    parse_constraint,
    parse_devices,
    parse_dynamic,
    parse_mesh,
    parse_seconds,
    parse_stages,
)
from autopar.explain.difference import difference
from autopar.explain.explanation import Explanation, explained
from autopar.explain.output import CommandOutput, of_difference, of_model, of_plan, of_scaling, of_stages
from autopar.explain.progress import progress
from autopar.explain.scaling import scaling
from autopar.explain.staged import StagedExplanation, trace_of
from autopar.ir.mesh import AutoMesh
from autopar.passes.precision import PRECISIONS
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.plan.text import literal_part, plain
from autopar.planning.planner import read_program
from autopar.search_space.schemes import STRATEGIES

OPTIONS = (
    "device", "budget", "strategy", "optimizer", "precision", "reduce", "microbatches", "recompute", "pipeline", "stages",
    "schedule", "time_limit",
)  # fmt: skip
PLANNING = ("mesh", *OPTIONS, "constraint", "dynamic", "static", "assume")  # options that make another plan
MODEL = ("why", "why_not", "budget_sweep", "sensitivity", "code", "trace")  # what a plan without its model cannot answer

NEXT = {  # what follows a phase of planning
    "capture": "analysing the program",
    "analyse": "formulating the integer program",
    "formulate": "solving",
    "solve": "trying padding and micro-batches",
    "pad": "trying padding and micro-batches",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.check:
            _refuse(options, (*MODEL, "diff", "json"), "--check prints no report")
            return check.run(options, lambda: _plan(options))
        _refuse(options, ("tolerance", "update"), "nothing is checked", "only with --check")
        _print(_answer(options), json=options.json)
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _print(answer: CommandOutput, *, json: bool) -> None:
    """Print an answer part by part, as the parts come."""
    if json:
        print(answer.json)
        return
    console = Console(highlight=False, markup=False, emoji=False) if sys.stdout.isatty() else None
    for part in answer.parts():
        if console:
            console.print(literal_part(part))
        else:
            print(plain([part]), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=HOW)
    parser.add_argument("--mesh", help="sizes of the axes, the last one innermost: 2,4 or dp=2,tp=4; or auto")
    parser.add_argument("--device", help="a device of the catalog, such as h100; by default that of this machine")
    parser.add_argument("--budget", help="memory per device, such as 24GiB; by default 90%% of the device")
    parser.add_argument("--strategy", help=", ".join(STRATEGIES))
    parser.add_argument("--optimizer", help="adamw, sgd, ...: for the time of its step and the memory of its state")
    precision = "by default that of the model; bf16-mixed computes and all-gathers in bf16 over fp32 shards"
    parser.add_argument("--precision", help=f"{', '.join(PRECISIONS)}: {precision}")
    parser.add_argument("--reduce", help="bf16: reduce gradients in that dtype, with --precision bf16-mixed")
    number = "micro-batches per step, run one after another: a number, or auto"
    parser.add_argument("--microbatches", type=lambda text: int(text) if text.isdecimal() else text, help=number)
    again = "activations that the backward recomputes; by default auto, what is best within the budget"
    parser.add_argument("--recompute", help=f"{', '.join(POLICIES)}: {again}")
    axis = "the mesh axis whose ranks have pipeline stages, or auto: the outermost axis is cut for stages if that is faster"
    parser.add_argument("--pipeline", metavar="AXIS", help=axis)
    cuts = "their number, or the modules at which all but the first begin: 4, or transformer.h.2,transformer.h.4"
    parser.add_argument("--stages", type=parse_stages, help=cuts)
    order = "gpipe, 1f1b, 1f1b+2 with so many forwards ahead, interleaved, zb-h1, zb-v, or a file.csv; by default the fastest"
    parser.add_argument("--schedule", help=order)
    end = "end the search after so many seconds with the best plan so far; by default no clock decides which plan is chosen"
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help=end)
    constraint = 'force a layout: "*.wte.weight=I, S(0)"; may be given several times'
    parser.add_argument("--constraint", metavar="NAME=LAYOUT", action="append", default=[], help=constraint)
    varies = "a size that may differ between calls: batch=0, or batch=input_ids:0,labels:0; may be given several times"
    constant = "an integer input that is a size or a flag, as a constant of the plan; may be repeated"
    parser.add_argument("--static", metavar="NAME", action="append", default=[], help=constant)
    answer = "what a line of forward asks: True, False or an integer, compared in every call; may be repeated"
    parser.add_argument("--assume", metavar="FILE:LINE=ANSWER", action="append", default=[], help=answer)
    parser.add_argument("--dynamic", metavar="NAME=DIM", action="append", default=[], help=varies)
    parser.add_argument("--save", metavar="PLAN.json", help="write the plan to a file")
    trace = "write the simulated step, which https://ui.perfetto.dev draws: what a device computes and sends, and when it waits"
    parser.add_argument("--trace", metavar="STEP.json", help=trace)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    ask = parser.add_argument_group("questions, answered instead of the report")
    why = "the candidates of an operator or a parameter, with their prices; * matches any part of the name"
    ask.add_argument("--why", metavar="NAME", action="append", default=[], help=why)
    why_not = "plan again with this layout forced, and say what changes and what it costs; may be given several times"
    ask.add_argument("--why-not", metavar="NAME=LAYOUT", action="append", default=[], help=why_not)
    ask.add_argument("--budget-sweep", action="store_true", help="the step time within smaller and smaller budgets")
    far = "what this plan loses if links or kernels are 20%% faster or slower than their prices say"
    ask.add_argument("--sensitivity", action="store_true", help=far)
    more = (
        "the step on each of these numbers of devices, instead of on a mesh: 8..1024, doubled from the first on, or 8,12,16; "
        "with --mesh auto the shape of the mesh is searched, and a single number is answered like a mesh"
    )
    ask.add_argument("--devices", metavar="FIRST..LAST", help=more)
    ask.add_argument("--within", metavar="TIME", help="with --devices: the fewest that take a step in that time: 2s, 150ms")
    hour = "with --devices: what a device costs for an hour; prints the price of a million tokens or samples"
    ask.add_argument("--price", type=float, metavar="PER_HOUR", help=hour)
    ask.add_argument("--code", action="store_true", help="the emitted module, as rank 0 runs it")
    ask.add_argument("--diff", nargs=2, metavar=("OLD.json", "NEW.json"), help="what differs between two saved plans")
    check.add_arguments(parser)
    return parser


def _answer(options: argparse.Namespace) -> CommandOutput:
    if options.diff:
        _refuse(options, (*PLANNING, *MODEL, "target", "save"), "--diff compares two saved plans")
        return of_difference(difference(*map(_loaded, options.diff)))
    if not options.target:
        raise UsageError("no TARGET given", fix=f"TARGET: {HOW}")
    if options.devices is not None and not _open_mesh(options):
        return _scaled(options)
    _refuse(options, ("within", "price"), "no numbers of devices", "only with --devices")
    if options.target.endswith(".json"):
        saved = f"{options.target} is a saved plan"
        _refuse(options, PLANNING, saved, "cannot change it", "name the model to plan it again")
        plan = _loaded(options.target)
        needed = [name for name in MODEL if not (name == "trace" and plan.pipeline)]  # a clock needs no more than the plan
        _refuse(options, needed, saved, "need the model", "name the model, and the mesh that it was planned for")
        answer = of_plan(plan)
        if options.trace:
            _write(options.trace, trace_of(plan))
    else:
        plan, answer = _explained(options)
    if options.save:
        _save(plan, options.save)
    return answer


def _scaled(options: argparse.Namespace) -> CommandOutput:
    """The plans of a model on several numbers of devices."""
    shapes = options.mesh == AUTO
    alone = *(() if shapes else ("mesh",)), "constraint", "dynamic", "diff", "save", *MODEL
    _refuse(options, alone, "--devices plans for several meshes")
    if options.target.endswith(".json"):
        raise UsageError(f"{options.target} is a saved plan: --devices plans a model", fix=HOW)
    counts, within = parse_devices(options.devices), parse_seconds(options.within) if options.within else None
    if options.price is not None and not (math.isfinite(options.price) and options.price >= 0):
        raise UsageError(f"--price {options.price} is no price", fix="what a device costs for an hour: 2.5")
    with progress("capturing the model"):
        model, sample = built(options.target)
        asked = _options(options)
        program = read_program(model, sample, asked.precision, asked.reduce, assumptions=asked.assumptions).program
    return of_scaling(scaling(program, counts, asked, shapes=shapes), within, options.price)


def _open_mesh(options: argparse.Namespace) -> AutoMesh | None:
    """The devices whose mesh is searched for one plan: one number of them, which nothing is asked of that needs several."""
    if options.mesh != AUTO:
        return None
    if options.devices is None:
        raise UsageError("--mesh auto does not say how many devices there are", fix="--mesh auto --devices 64")
    counts = parse_devices(options.devices)
    return AutoMesh(counts[0]) if len(counts) == 1 and options.within is None and options.price is None else None


def _refuse(
    options: argparse.Namespace, names: Sequence[str], what: str, why: str = "cannot be combined with it", fix: str = ""
) -> None:
    """Raise UsageError if one of these options was given."""
    given = [name if name == "target" else f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if given:
        raise UsageError(f"{what}: {', '.join(given)} {why}", fix=fix)


def _loaded(path: str) -> Plan:
    """A plan that was saved before."""
    if not Path(path).is_file():
        raise UsageError(f"no such file: {path}", fix=HOW)
    return Plan.load(path)


def _explained(options: argparse.Namespace) -> tuple[Plan, CommandOutput]:
    """The plan of a model and the answer to what was asked about it."""
    forced = _constraints(options.why_not)
    with progress("building the model") as tell:
        found = _planned(options, tell)
        tell(_question(options))
        if options.trace:
            _write(options.trace, found.trace)
        if isinstance(found, StagedExplanation):
            _refuse(options, ("budget_sweep", "sensitivity"), "the plan has pipeline stages", "are not answered for these yet")
            return found.plan, of_stages(found, options.why, forced, code=options.code)
        asked_for = {"code": options.code, "sweep": options.budget_sweep, "sensitivity": options.sensitivity}
        return found.plan, of_model(found, options.why, forced, **asked_for)


def _question(options: argparse.Namespace) -> str:
    """What is done once the plan is there, as the line of progress says it."""
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
    """The plan of the TARGET alone, saved if that is asked for."""
    if options.target.endswith(".json"):
        _refuse(options, PLANNING, f"{options.target} is a saved plan", "cannot change it", "name the model to plan it again")
        return _loaded(options.target)
    with progress("building the model") as tell:
        plan = _planned(options, tell).plan
    if options.save:
        _save(plan, options.save)
    return plan


def _planned(options: argparse.Namespace, tell: Callable[[str], None]) -> Explanation | StagedExplanation:
    """The model that the command line names, planned as it asks."""
    if not options.mesh:
        raise UsageError("no mesh given", fix="--mesh 2,4 or --mesh dp=2,tp=4")
    mesh = _open_mesh(options) or parse_mesh(options.mesh)
    asked = _options(options)
    model, sample = built(options.target)
    tell("capturing the model")
    return explained(model, sample, mesh, asked, lambda phase: tell(NEXT.get(phase, phase)))


def _options(options: argparse.Namespace) -> Options:
    """The options of planning that the command line gives."""
    named = {name: getattr(options, name) for name in OPTIONS}
    given = {name: value for name, value in named.items() if value is not None}
    dynamic = dict(map(parse_dynamic, options.dynamic))
    given |= {"constraints": _constraints(options.constraint), "dynamic": dynamic, "static": options.static}
    given |= {"assume": dict(map(parse_answer, options.assume))}
    return Options(**options_of(given))  # type: ignore[arg-type]


def _constraints(texts: Sequence[str]) -> dict[str, str]:
    found = dict(map(parse_constraint, texts))
    if len(found) < len(texts):
        raise UsageError("two constraints for one name", given="; ".join(texts))
    return found


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

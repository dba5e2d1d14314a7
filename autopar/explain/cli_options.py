"""Command-line options: their definition, their meaning, and which cannot be combined."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.analysis.recompute_policy import POLICIES
from autopar.explain import check
from autopar.explain.cli_arguments import (
    HOW,
    UsageError,
    parse_answer,
    parse_constraint,
    parse_count,
    parse_devices,
    parse_dynamic,
    parse_mesh,
    parse_offload,
    parse_stages,
)
from autopar.explain.cli_values import options_of_values
from autopar.ir.mesh import AutoMesh, Mesh
from autopar.passes.precision import PRECISIONS
from autopar.plan.options import AUTO, Options
from autopar.search_space.schemes import STRATEGIES

T = TypeVar("T")
OPTIONS = (
    "device", "budget", "mode", "strategy", "optimizer", "precision", "reduce", "microbatches", "recompute", "pipeline",
    "stages", "schedule", "time_limit", "compiled", "offload", "host_memory", "disk_memory",
)  # fmt: skip
PLANNING = ("mesh", *OPTIONS, "constraint", "dynamic", "static", "assume")  # options that make another plan
ENERGY = ("energy", "epoch")
OBJECTIVES = ("time", "energy", "cost")
MODEL = ("why", "why_not", "budget_sweep", "sensitivity", "code", "trace")  # what a plan without its model cannot answer
COUNTS = ("devices", "within", "price", "objective")  # what asks for plans on several numbers of devices


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of `python -m autopar.explain`."""
    parser = argparse.ArgumentParser(
        prog="python -m autopar.explain", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help=HOW)
    _add_planning(parser)
    _add_inputs(parser)
    _add_results(parser)
    _add_questions(parser.add_argument_group("questions, answered instead of the report"))
    check.add_arguments(parser)
    return parser


def _add_planning(parser: argparse.ArgumentParser) -> None:
    """Add options that determine the plan."""
    parser.add_argument("--mesh", help="sizes of the axes, the last one innermost: 2,4 or dp=2,tp=4; or auto")
    parser.add_argument("--device", help="a device of the catalog, such as h100; by default that of this machine")
    parser.add_argument("--budget", help="memory per device, such as 24GiB; by default 90%% of the device")
    parser.add_argument("--mode", help="training, by default; or inference: a forward alone, of a model in eval()")
    parser.add_argument("--strategy", help=", ".join(STRATEGIES))
    parser.add_argument("--optimizer", help="adamw, sgd, ...: for the time of its step and the memory of its state")
    precision = "by default that of the model; mixed ones compute and all-gather in half precision over fp32 shards"
    parser.add_argument("--precision", help=f"{', '.join(PRECISIONS)}: {precision}")
    parser.add_argument("--reduce", help="bf16, fp16: reduce gradients in that dtype, with a mixed --precision")
    number = "micro-batches per step, run one after another: a number, or auto"
    parser.add_argument("--microbatches", type=parse_count, help=number)
    again = "activations that the backward recomputes; by default auto, what is best within the budget"
    parser.add_argument("--recompute", help=f"{', '.join(POLICIES)}: {again}")
    away = "what may lie in the host's memory: activations, by default; host: weights, gradients and optimizer state, too; "
    away += "disk: these on the host or the disk; auto: so where their memory is known; no: nothing"
    parser.add_argument("--offload", help=away)
    parser.add_argument(
        "--host-memory", help="what the host of one node may store, such as 512GB; by default 90%% of the catalog's"
    )
    parser.add_argument("--disk-memory", help="what the disk of one node may store, such as 2TB")
    axis = "the mesh axis whose ranks have pipeline stages, or auto: the outermost axis is cut for stages if that is faster"
    parser.add_argument("--pipeline", metavar="AXIS", help=axis)
    cuts = "their number, or the modules at which all but the first begin: 4, or transformer.h.2,transformer.h.4"
    parser.add_argument("--stages", type=parse_stages, help=cuts)
    order = "gpipe, 1f1b, zb-h1, either +2 for so many forwards ahead, interleaved, zb-v, or a file.csv; by default the fastest"
    parser.add_argument("--schedule", help=order)
    end = "end the search after so many seconds with the best plan so far; by default no clock decides which plan is chosen"
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help=end)
    kernels = "price the step as torch.compile runs it, which fuses what goes over memory into few kernels"
    parser.add_argument("--compiled", action="store_true", default=None, help=kernels)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add options on named layouts, inputs and lines, which may be repeated."""
    constraint = 'force a layout: "*.wte.weight=I, S(0)"; may be given several times'
    parser.add_argument("--constraint", metavar="NAME=LAYOUT", action="append", default=[], help=constraint)
    varies = "a size that may differ between calls: batch=0, or batch=input_ids:0,labels:0; may be given several times"
    parser.add_argument("--dynamic", metavar="NAME=DIM", action="append", default=[], help=varies)
    constant = "an integer input that is a size or a flag, as a constant of the plan; may be repeated"
    parser.add_argument("--static", metavar="NAME", action="append", default=[], help=constant)
    answer = "what a line of forward asks: True, False or an integer, compared in every call; may be repeated"
    parser.add_argument("--assume", metavar="FILE:LINE=ANSWER", action="append", default=[], help=answer)


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add options on what is read and written, and how the answer is printed."""
    before = "a plan that was saved: questions about TARGET are answered for it, at the prices of today, and nothing is planned"
    parser.add_argument("--plan", metavar="PLAN.json", help=before)
    parser.add_argument("--save", metavar="PLAN.json", help="write the plan to a file")
    trace = "write the simulated step, which https://ui.perfetto.dev draws: what a device computes and sends, and when it waits"
    parser.add_argument("--trace", metavar="STEP.json", help=trace)
    page = "write the report as a page for a browser, one file, with what --budget-sweep, --devices and --why-not ask"
    parser.add_argument("--html", metavar="REPORT.html", help=page)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _add_questions(ask: argparse._ArgumentGroup) -> None:
    """Add questions that are answered instead of the report."""
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
    least = "with --devices: which of them is best, alone or of those that are --within a time; by default the fewest are"
    ask.add_argument("--objective", choices=OBJECTIVES, help=least)
    joules = "what a step takes at most, in joules, and the bytes that it moves over each link"
    ask.add_argument("--energy", action="store_true", help=joules)
    ask.add_argument("--epoch", type=int, metavar="SAMPLES", help="with --energy: how many samples an epoch has")
    ask.add_argument("--code", action="store_true", help="the emitted module, as rank 0 runs it")
    ask.add_argument("--diff", nargs=2, metavar=("OLD.json", "NEW.json"), help="what differs between two saved plans")


def refuse(
    options: argparse.Namespace, names: Sequence[str], what: str, why: str = "cannot be combined with it", fix: str = ""
) -> None:
    """Raise UsageError if one of these options was given."""
    given = [name if name == "target" else f"--{name.replace('_', '-')}" for name in names if _given(getattr(options, name))]
    if given:
        raise UsageError(f"{what}: {', '.join(given)} {why}", fix=fix)


def _given(value: object) -> bool:
    return value is not None and value is not False and value != []


def several_meshes(options: argparse.Namespace) -> bool:
    """Whether a table of plans is requested instead of one plan; `--mesh auto` with one number of devices gives one plan."""
    if options.devices is None or options.html:
        return False
    return options.mesh != AUTO or len(counts(options)) > 1 or any(_given(getattr(options, name)) for name in COUNTS[1:])


def mesh_of(options: argparse.Namespace) -> Mesh | AutoMesh:
    """The mesh of one plan; for an open mesh its devices, on a page the first of the requested numbers."""
    if not options.mesh:
        raise UsageError("no mesh given", fix="--mesh 2,4 or --mesh dp=2,tp=4")
    if options.mesh != AUTO:
        return parse_mesh(options.mesh)
    if options.devices is None:
        raise UsageError("--mesh auto does not say how many devices there are", fix="--mesh auto --devices 64")
    first, *others = counts(options)
    if others and not options.html:
        raise UsageError(f"--devices {options.devices} is several meshes: one plan is compared", fix=f"--devices {first}")
    return AutoMesh(first)


def counts(options: argparse.Namespace) -> list[int]:
    """The requested numbers of devices, if any."""
    return parse_devices(options.devices) if options.devices is not None else []


def price_of(options: argparse.Namespace) -> float | None:
    """The price of a device per hour, if given."""
    price: float | None = options.price
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UsageError(f"--price {price} is not a price", fix="what a device costs for an hour: 2.5")
    return price


def planning_options(options: argparse.Namespace) -> Options:
    """The planning options on the command line."""
    named = {name: getattr(options, name) for name in OPTIONS}
    given = {name: value for name, value in named.items() if value is not None}
    if options.offload is not None:
        given["offload"] = parse_offload(options.offload)
    given |= {"constraints": constraints(options.constraint), "static": options.static}
    given |= {
        "dynamic": _by_name("sizes of", parse_dynamic, options.dynamic),
        "assume": _by_name("answers to", parse_answer, options.assume),
    }
    return options_of_values(given)


def constraints(texts: Sequence[str]) -> dict[str, str]:
    return _by_name("constraints for", parse_constraint, texts)


def _by_name(what: str, parse: Callable[[str], tuple[str, T]], texts: Sequence[str]) -> dict[str, T]:
    """What was said of each name. Raises UsageError if something was said twice."""
    found = dict(map(parse, texts))
    if len(found) < len(texts):
        raise UsageError(f"two {what} one name", given="; ".join(texts))
    return found


__all__ = [
    "COUNTS", "ENERGY", "MODEL", "PLANNING", "constraints", "counts", "mesh_of", "parser", "planning_options", "price_of",
    "refuse", "several_meshes",
]  # fmt: skip

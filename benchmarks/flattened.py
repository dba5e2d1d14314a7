"""Steps of FSDP on two mesh axes, whose weights travel over both at once or over one after the other, beside one axis of all.

    python benchmarks/flattened.py                          GPT-2 and Llama on four gloo processes
    python benchmarks/flattened.py gpt2 --rounds 30

All three live in the same processes, one thread each, and take a step in turn. A ratio is the median over rounds, with its
quartiles, of a step over that of one axis in the same round; beside it what the profile of such processes predicts. Loopback
has one link, so that this judges copies and messages, not what a slow outer axis costs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from models import MODELS, make
from rounds import count, quartiles
from steps import Job
from training import machine

import autopar
from autopar.plan.options import Options
from autopar.planning.pipeline_search import plan_on
from autopar.planning.planner import connected_mesh, read_program
from autopar.runtime.workers import WorkerPool

PROFILE = str(Path(__file__).with_name("results") / "machine_4.json")
SHAPES = {"one axis": (4,), "flattened": (2, 2), "single axes": (2, 2)}


def plan_of(model: str, variant: str) -> autopar.Plan:
    """The plan of FSDP of one variant."""
    module, batch = make(model)
    options = Options(device=PROFILE, strategy="fsdp")
    mesh = connected_mesh(SHAPES[variant], options)
    if variant == "single axes":
        mesh = replace(mesh, flattened=())
    return plan_on(read_program(module, batch, options).program, (mesh,), options)


def run(model: str, pool: WorkerPool, rounds: int) -> None:
    """Print the three rows of one model."""
    plans = {variant: plan_of(model, variant) for variant in SHAPES}
    job = Job(model=model, variants={name: plan.to_json() for name, plan in plans.items()}, rounds=rounds, optimizer="single")
    found = pool.run("steps:interleaved", job, timeout=1800)[0]
    assert isinstance(found, dict)
    for variant, plan in plans.items():
        ratios = [a / b for a, b in zip(found[variant].step, found["one axis"].step, strict=True)]
        low, middle, high = quartiles(ratios)
        sent = Counter(one.axis for one in plan.collectives)
        said = ", ".join(f"{number} over {axis}" for axis, number in sorted(sent.items()))
        measured = f"{quartiles(found[variant].step)[1] * 1e3:>9.1f}{middle:>8.2f}  {f'{low:.2f} .. {high:.2f}':<13}"
        predicted = f"{plan.step_time * 1e3:>10.1f}{plan.step_time / plans['one axis'].step_time:>8.2f}"
        print(f"{model:>8}  {variant:<12}{measured}{predicted}  {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; default: gpt2 and llama")
    parser.add_argument("--rounds", type=count, default=15)
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS)
    if unknown:
        parser.error(f"no model is called {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    print(machine())
    print(f"{'model':>8}  {'weights':<12}{'step ms':>9}{'ratio':>8}  {'quartiles':<13}{'predicted':>10}{'ratio':>8}  messages")
    with WorkerPool(4, preload=("transformers", "autopar")) as pool:
        for model in options.models or ("gpt2", "llama"):
            run(model, pool, options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

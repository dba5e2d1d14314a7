"""Planning within budgets that bind, by a checkout from before the redesign (29786cc) and by this one, at equal prices.

    python benchmarks/budgets_beside.py PATH              GPT-2, Llama and ViT of benchmarks/budgets.py, on (4,) and (2, 4)
    python benchmarks/budgets_beside.py PATH gpt2 2,4     one of them

Kernels run at the peaks of an H100 and hide no message, links have one latency and one bandwidth: so both price a plan alike,
and their answers can be compared. Budgets divide the way from the peak of the best plan to the least memory that the checkout
knows. "faster" is how much sooner the plan of now is done with a step, "found" the CPU seconds of its search beside those of
before.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
MODELS, MESHES = ("gpt2", "llama", "vit"), ((4,), (2, 4))
LINKS = {"node": (3e-6, 450e9), "network": (14e-6, 50e9)}  # latency in seconds, bytes per second
Answer = tuple[float, float]  # seconds of a step, infinite where no plan fits; CPU seconds


def here(model: str, sizes: tuple[int, ...], budgets: Sequence[int]) -> tuple[list[int], list[Answer]]:
    """The budgets, made up where none are given, and the answers of the package and benchmarks that Python finds."""
    import torch

    made: Any = importlib.import_module("benchmarks.budgets")
    before = not hasattr(made, "to_plan")
    ir: Any = importlib.import_module("autopar.mesh" if before else "autopar.ir.mesh")
    with torch.device("meta"):
        module, batch, _ = made.MODELS[model]()
    program, options = (
        made.read_program(module.bfloat16().train(), batch).program,
        made.Options(device="h100", budget=made.PLENTY),
    )
    on = (made.located if before else made.connected_mesh)(sizes, options)
    node, network = (ir.Link(name=name, latency=a, bandwidth=b, source="made up") for name, (a, b) in LINKS.items())
    on = replace(on, links=(*[network] * (len(sizes) > 1), node), device=on.device if before else on.device.at_peak())
    analysis = made.analysed(program if before else made.TrainingStep(program=program), on, options)
    free = made.solved(analysis, on, options)
    memory = free.ledger if before else free.memory_model
    least = made.MARGIN * float(memory.walk(made.smallest(free.formulated, memory)).max())
    most = float(memory.walk(free.solution).max())

    def answer(budget: int) -> Answer:
        start = time.process_time()
        try:
            found = made.solved(analysis, on, replace(options, budget=budget))
        except made.BudgetError:
            return math.inf, time.process_time() - start
        spent = time.process_time() - start
        return (made.finish if before else made.to_plan)(found, options).step_time, spent

    budgets = budgets or [round(least + share * (most - least)) for share in SHARES]
    return list(budgets), [answer(budget) for budget in budgets]


def asked(checkout: Path, model: str, sizes: tuple[int, ...], budgets: Sequence[int]) -> tuple[list[int], list[Answer]]:
    """What `here` finds in a process of its own, by a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, str(checkout), model, ",".join(map(str, sizes)), "--here", json.dumps(list(budgets))]
    ran = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE)
    found, answers = json.loads(ran.stdout.splitlines()[-1])
    return found, [(seconds, spent) for seconds, spent in answers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="PATH", help="a checkout of 29786cc")
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("mesh", nargs="?", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--here", type=json.loads, metavar="BUDGETS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here is not None:
        sys.path[0] = str(options.checkout)  # its benchmarks, not those beside this file
        print(json.dumps(here(options.model, options.mesh, options.here)))
        return 0
    ratios, gains = [], []
    for model in [options.model] if options.model else MODELS:
        for sizes in [options.mesh] if options.mesh else MESHES:
            budgets, before = asked(options.checkout.resolve(), model, sizes, [])
            _, now = asked(ROOT, model, sizes, budgets)
            print(
                f"{model} on {'x'.join(map(str, sizes))}\n{'budget':>12}{'ms before':>12}{'now':>12}{'faster':>9}{'found':>16}"
            )
            for budget, (old, spent), (new, took) in zip(budgets, before, now, strict=True):
                gains.append(1 - new / old if new < math.inf else 0.0 if old == math.inf else -math.inf)
                ratios.append(took / spent)
                found = f"{took:.1f} / {spent:.1f} s"
                print(f"{budget:>12}{1e3 * old:>12.4f}{1e3 * new:>12.4f}{gains[-1]:>9.2%}{found:>16}", flush=True)
    print(f"median of CPU seconds now / before: {median(ratios):.2f}; the worst answer is {min(gains):.3%} faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Planning within budgets that bind, by a checkout from before the redesign (29786cc) and by this one, at equal prices.

    python benchmarks/budgets_beside.py PATH              GPT-2, Llama and ViT of benchmarks/budgets.py, on (4,) and (2, 4)
    python benchmarks/budgets_beside.py PATH gpt2 2,4     one of them

Kernels run at the peaks of an H100 and hide no message, links have one latency and one bandwidth: so both mean the same by a
step's seconds. Budgets divide the way from the peak of the best plan to the least memory that the checkout knows. The plans of
before are priced, and their memory counted, by the code of now: where all messages in flight need more than the budget
("holds"), it is not an answer that the one of now is held against. "faster" is how much sooner the plan of now is done with a
step, "found" the CPU seconds of its search beside those of before.
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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
MODELS, MESHES = ("gpt2", "llama", "vit"), ((4,), (2, 4))
LINKS = {"node": (3e-6, 450e9), "network": (14e-6, 50e9)}  # latency in seconds, bytes per second
Answer = tuple[float, float, Any]  # seconds of a step, infinite where no plan fits; CPU seconds; the plan as lists


def here(
    model: str, sizes: tuple[int, ...], earlier: Mapping[str, Any]
) -> tuple[dict[int, Answer], dict[int, tuple[float, float]]]:
    """Answers of the package and benchmarks that Python finds, by budget, and what this code says of the earlier ones: seconds
    and bytes.

    Args:
        model, sizes: of the table.
        earlier: plans as lists by budget; the budgets are made up where there are none.
    """
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
            return math.inf, time.process_time() - start, None
        spent = time.process_time() - start
        if not before:
            return made.to_plan(found, options).step_time, spent, None
        assignment = importlib.import_module("autopar.solver.formulate").decisions(found.ledger.formulated, found.solution)
        return made.finish(found, options).step_time, spent, as_lists(assignment)

    def counted(plan: Any) -> tuple[float, float]:
        chosen = from_lists(plan, free.formulated)
        return made.to_plan(free, options, chosen).step_time, float(memory.liveness.walk(chosen).max())

    budgets = list(map(int, earlier)) or [round(least + share * (most - least)) for share in SHARES]
    return {budget: answer(budget) for budget in budgets}, {int(b): counted(plan) for b, plan in earlier.items() if plan}


def as_lists(chosen: Any) -> Any:
    """What 29786cc decides, as lists: its layouts and conversions are not tuples."""

    def layout(of: Any) -> list[list[Any]]:
        return [[state.kind, state.dim, state.stride] for state in of]

    def step(of: Any) -> list[Any]:
        return [of.axis, layout(of.source), layout(of.target)]

    return {
        "ops": {name: [list(map(layout, one.operands)), list(map(layout, one.results))] for name, one in chosen.ops.items()},
        "given": {name: layout(of) for name, of in chosen.given.items()},
        "outputs": {path: layout(of) for path, of in chosen.outputs.items()},
        "routes": {name: list(map(step, steps)) for name, steps in chosen.routes.items()},
        "reruns": sorted(chosen.again.ops),
        "reconverts": [[name, step(of)] for name, of in chosen.again.steps],
        "offload": [[name, layout(of)] for name, of in chosen.again.away],
        "once": chosen.once,
    }


def from_lists(plan: Any, formulated: Any) -> Any:
    """The assignment that lists stand for."""
    space = importlib.import_module("autopar.search_space.assignment")
    state, conversion = (
        importlib.import_module("autopar.ir.layout").State,
        importlib.import_module("autopar.ir.conversion").Conversion,
    )
    candidates = {
        (name, one.operands, one.results): one
        for name, found in zip(formulated.names, formulated.candidates, strict=True)
        for one in found
    }

    def layout(of: Any) -> Any:
        return tuple(state(*one) for one in of)

    def step(of: Any) -> Any:
        return conversion(axis=of[0], source=layout(of[1]), target=layout(of[2]))

    def layouts(of: Any) -> Any:
        return tuple(map(layout, of))

    of = formulated.analysis.classes.of
    return space.Assignment(
        ops={name: candidates[of[name], layouts(wants), layouts(makes)] for name, (wants, makes) in plan["ops"].items()},
        given={name: layout(of) for name, of in plan["given"].items()},
        outputs={path: layout(of) for path, of in plan["outputs"].items()},
        routes={name: tuple(map(step, steps)) for name, steps in plan["routes"].items()},
        recompute=space.RecomputeChoice(
            ops=frozenset(plan["reruns"]),
            steps=frozenset((name, step(of)) for name, of in plan["reconverts"]),
            offload=frozenset((name, layout(of)) for name, of in plan["offload"]),
        ),
        once=plan["once"],
    )


def asked(
    checkout: Path, model: str, sizes: tuple[int, ...], earlier: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `here` finds in a process of its own, by a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, str(checkout), model, ",".join(map(str, sizes)), "--here"]
    ran = subprocess.run(
        command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, input=json.dumps(earlier).encode()
    )
    found, counted = json.loads(ran.stdout.splitlines()[-1])
    return found, counted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="PATH", help="a checkout of 29786cc")
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("mesh", nargs="?", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        sys.path[0] = str(options.checkout)  # its benchmarks, not those beside this file
        print(json.dumps(here(options.model, options.mesh, json.load(sys.stdin))))
        return 0
    ratios, gains = [], []
    for model in [options.model] if options.model else MODELS:
        for sizes in [options.mesh] if options.mesh else MESHES:
            before, _ = asked(options.checkout.resolve(), model, sizes, {})
            now, counted = asked(ROOT, model, sizes, {budget: plan for budget, (_, _, plan) in before.items()})
            print(
                f"{model} on {'x'.join(map(str, sizes))}\n"
                f"{'budget':>12}{'ms before':>12}{'now':>12}{'faster':>9}{'found':>16}{'holds':>13}"
            )
            for budget, (old, spent, _) in before.items():
                new, took, _ = now[budget]
                old, holds = counted.get(budget, (old, 0))
                gains.append(1 - new / old if new < math.inf else 0.0 if old == math.inf else -math.inf)
                ratios.append(took / spent)
                found, more = f"{took:.1f} / {spent:.1f} s", f"{holds:.0f}" if holds > int(budget) else ""
                print(
                    f"{budget:>12}{1e3 * old:>12.4f}{1e3 * new:>12.4f}{gains[-1]:>9.2%}{found:>16}{more:>13}".rstrip(),
                    flush=True,
                )
                if more:
                    gains.pop()
    print(f"median of CPU seconds now / before: {median(ratios):.2f}; the worst answer is {min(gains):.3%} faster")
    return 0


if __name__ == "__main__":
    sys.exit(main())

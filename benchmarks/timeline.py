"""A real step's timeline beside the simulated one: how long a rank waits for messages, kind by kind.

    python benchmarks/timeline.py --model gpt2 --processes 2 --variants ddp,fsdp,megatron
    python benchmarks/timeline.py --model gpt2 --processes 2 --variants fsdp --trace folder     for https://ui.perfetto.dev

Every op and every collective of rank 0 is timed while it runs, which costs some microseconds each; forward and backward only.
The waits are the medians over rounds. A message that a process is late for is waited for by the others: on a machine that runs
more processes than it has cores, waits measure that more than the link.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from models import MODELS, make
from rounds import count
from steps import Job
from training import machine, plan_of, profiled, spearman

import autopar
from autopar import files
from autopar.cost_models.optimizers import OPTIMIZERS
from autopar.formulation.prices import Prices
from autopar.formulation.step_time import StepPrices
from autopar.memory.liveness import Liveness
from autopar.plan.options import Options
from autopar.plan.resolved import read_plan
from autopar.planning.planner import connected_mesh, read_program
from autopar.runtime.recorder import Issued, Occurrence
from autopar.runtime.workers import WorkerPool
from autopar.simulator.instructions import simulated
from autopar.simulator.timeline import Interval, Timeline
from autopar.simulator.trace import trace

Round = tuple[list[Issued], list[Occurrence]]
Key = tuple[str, str, str]  # kind, axis, pass


def simulated_step(plan: autopar.Plan, model: str, device: str) -> Timeline:
    """The step of a plan as the simulator has it."""
    mesh = connected_mesh(plan.mesh, Options(device=device))
    resolved = read_plan(plan, read_program(*make(model)).program, mesh)
    liveness = Liveness(resolved.analysis, OPTIMIZERS["adamw"])
    return simulated(liveness, StepPrices(resolved.analysis, Prices(mesh=mesh)), resolved.assignment)


def waits(rounds: Iterable[Round]) -> dict[Key, float]:
    """Seconds for which a rank waits for the messages of each kind, median over rounds."""
    found: dict[Key, list[float]] = defaultdict(list)
    for log, times in rounds:
        spent: dict[Key, float] = {(sent.kind, sent.axis, sent.where): 0.0 for sent in log}
        for one in times:
            if one.what == "wait":
                sent = log[one.number]
                spent[sent.kind, sent.axis, sent.where] += one.stop - one.start
        for key, seconds in spent.items():
            found[key].append(seconds)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def exposed(timeline: Timeline) -> dict[Key, float]:
    """Seconds for which the simulated device waits for the messages of each kind."""
    found: dict[Key, float] = defaultdict(float)
    for sent in timeline.sent:
        message = sent.transfer.message
        if message is not None:
            found[message.kind, sent.transfer.channel, message.where] += sent.exposed
    return dict(found)


def measured(one: Round) -> Timeline:
    """What a rank did, as a timeline without channels: when a message is complete is known only if it is waited for."""
    _, times = one
    begun = min(time.start for time in times)
    kinds = {"compute": "computing", "issue": "issue", "wait": "wait"}
    rows = [Interval(name=t.name, kind=kinds[t.what], start=t.start - begun, stop=t.stop - begun) for t in times]
    return Timeline(
        computing=tuple(row for row in rows if row.kind != "wait"),
        waiting=tuple(row for row in rows if row.kind == "wait"),
        sent=(),
        work=sum(row.seconds for row in rows if row.kind == "computing"),
    )


def table(title: str, said: Mapping[Key, float], seen: Mapping[Key, float], rounds: Sequence[Round], plan: autopar.Plan) -> str:
    """Waits, simulated beside measured, and the step without its optimizer."""
    lines = [title, f"{'waiting for':<44}{'simulated ms':>14}{'measured ms':>14}"]
    for key in sorted({*said, *seen}):
        lines.append(f"{' '.join(key):<44}{1e3 * said.get(key, 0.0):>14.2f}{1e3 * seen.get(key, 0.0):>14.2f}")
    lines.append(f"{'all messages':<44}{1e3 * sum(said.values()):>14.2f}{1e3 * sum(seen.values()):>14.2f}")
    took = statistics.median(times[-1].stop - times[0].start for _, times in rounds)
    predicted = plan.breakdown.simulated.seconds - plan.breakdown.optimizer
    lines.append(f"{'forward and backward':<44}{1e3 * predicted:>14.2f}{1e3 * took:>14.2f}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--processes", action="append", type=int, help="default: 2 and 4")
    parser.add_argument("--variants", default="ddp,fsdp,megatron,auto", help="default: %(default)s")
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--device", help="of the plans: a catalog entry or a profile; default: this machine is measured first")
    parser.add_argument("--trace", type=Path, help="a folder for the traces of every variant, simulated and measured")
    return parser


def main() -> int:
    options = _parser().parse_args()
    print(machine(), flush=True)
    points: list[tuple[float, float]] = []
    for processes in options.processes or (2, 4):
        device = options.device or profiled(processes, options.model or list(MODELS))
        with WorkerPool(processes, preload=("transformers", "autopar")) as pool:
            for model in options.model or MODELS:
                for variant in options.variants.split(","):
                    plan = plan_of(model, processes, variant, device)
                    assert plan is not None, "torch's own variants have no plan to simulate"
                    job = Job(model=model, variants={variant: plan.to_json()}, rounds=options.rounds, optimizer="single")
                    rounds = pool.run("steps:timed_steps", job, timeout=1800)[0]
                    assert isinstance(rounds, list)
                    timeline = simulated_step(plan, model, device)
                    said, seen = exposed(timeline), waits(rounds)
                    title = f"{model} on {processes} processes, {variant}"
                    print("\n" + table(title, said, seen, rounds, plan), flush=True)
                    points.append((sum(said.values()), sum(seen.values())))
                    if options.trace:
                        options.trace.mkdir(parents=True, exist_ok=True)
                        for name, one in (("simulated", timeline), ("measured", measured(rounds[-1]))):
                            path = options.trace / f"{model}-{processes}-{variant}-{name}.json"
                            files.write(path, trace(one, f"{title}, {name}") + "\n")
    if len(points) > 2:
        rank = spearman(*np.array(points).T)
        print(f"\nwaits: Spearman's rank correlation {rank:.3f} over {len(points)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())

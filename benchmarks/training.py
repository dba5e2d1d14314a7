"""Step time and memory beside torch's own parallel training, and beside what the plan said.

    python benchmarks/training.py --memory --save                    all models on 2 and 4 processes, the table of the results
    python benchmarks/training.py --model gpt2 --processes 2 --variants ddp,torch-ddp --rounds 10
    python benchmarks/training.py --model gpt2 --processes 2 --variants ddp --profile        where the time goes
    python benchmarks/training.py --compiled --model gpt2 --model llama --processes 2 --save eager and compiled
    python benchmarks/training.py --workloads --save    these models, and those for which no scheme by hand is the best

All variants of a row live in the same gloo processes, one thread each, and take a step in turn: what disturbs the machine
disturbs all. A step is forward, backward, AdamW and zero_grad, timed on the slowest rank, after a barrier. Quartiles are over
rounds; a ratio is the median over rounds of the two steps of one round. Memory is that of a process that runs the one variant
only, beyond an idle one. `NAME+compiled` is a variant under torch.compile with Inductor. The CPU seconds of three steps before
those that are timed stand beside each: there it compiles, with empty caches.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
import transformers
from models import EVERY, MODELS, WORKLOADS, make
from rounds import count, quartiles
from steps import COMPILED, OPTIMIZERS, Job, Times

import autopar
from autopar import files
from autopar.cost_models.profile_file import save
from autopar.plan.options import Options
from autopar.planning.planner import connected_mesh, read_program
from autopar.profile import profile
from autopar.runtime.workers import WorkerPool
from autopar.verify.testing import random_plan

RESULTS = Path(__file__).with_name("results") / "training.txt"
KINDS = {"compiled": "compiled.txt", "workloads": "workloads.txt"}  # the results of these flags
PAIRS = {"ddp": "torch-ddp", "torch-ddp-whole": "torch-ddp", "fsdp": "torch-fsdp", "megatron": "torch-tp"}
VARIANTS = ("ddp", "torch-ddp", "torch-ddp-whole", "fsdp", "torch-fsdp", "megatron", "torch-tp", "auto")
BY_HAND = tuple(name for name in VARIANTS if name != "torch-tp")  # of models without a plan of torch's by hand
EAGER_AND_COMPILED = tuple(name + how for name in VARIANTS for how in ("", COMPILED))
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant: its plan (None for torch's), its times, and its peak memory in bytes (0: not measured)."""

    model: str
    processes: int
    variant: str
    plan: autopar.Plan | None
    times: Times
    memory: int

    @property
    def median(self) -> float:
        return statistics.median(self.times.step)


def plan_of(model: str, processes: int, variant: str, device: str | None) -> autopar.Plan | None:
    """The plan of one of our variants: a strategy, or random0, random1, ...; None for torch's own."""
    variant = variant.removesuffix(COMPILED)
    if variant.startswith("torch-"):
        return None
    module, batch = make(model)
    if variant.startswith("random"):
        mesh = connected_mesh((processes,), Options(device=device))
        return random_plan(module, batch, mesh, seed=int(variant.removeprefix("random")))
    return autopar.plan(module, batch, (processes,), strategy=variant, device=device)


def profiled(processes: int, models: Sequence[str]) -> str:
    """The file of a profile of this machine, measured now with the operators of these models."""
    file = RESULTS.with_name(f"machine_{processes}.json")
    print(f"measuring {processes} processes: {file.name}", flush=True)
    device, noise = profile([read_program(*make(model)).program for model in models], processes)
    print(noise, flush=True)
    save(device, file)
    return str(file)


def measured(model: str, pool: WorkerPool, device: str, options: argparse.Namespace) -> list[Row]:
    """The rows of one model on one number of processes."""
    plans = {variant: plan_of(model, pool.world, variant, device) for variant in options.variants}
    texts = {variant: plan.to_json() if plan else "" for variant, plan in plans.items()}
    job = Job(model=model, variants=texts, rounds=options.rounds, optimizer=options.optimizer)
    found = pool.run("steps:interleaved", job, timeout=1800)[0]
    assert isinstance(found, dict)
    memory: dict[str, int] = {}
    for variant, text in texts.items() if options.memory else ():
        (peak,) = pool.run("steps:resident", replace(job, variants={variant: text}))[:1]
        assert isinstance(peak, dict)
        memory |= peak
    return [
        Row(model=model, processes=pool.world, variant=v, plan=plans[v], times=times, memory=memory.get(v, 0))
        for v, times in found.items()
    ]


COLUMNS = f"{'step ms':>9}  {'quartiles':<17}{'adamw':>7}{'warm s':>9}{'predicted':>11}{'MiB':>8}{'predicted':>11}  ratio"
HEAD = f"{'variant':<20}{COLUMNS}"


def table(rows: Sequence[Row]) -> str:
    """The rows of one model on one number of processes."""
    losses = [row.times.loss for row in rows]
    same = max(losses) - min(losses) < 1e-4
    title = f"{rows[0].model} on {rows[0].processes} processes; first loss {losses[0]:.5f}, "
    title += "the same in all" if same else f"NOT the same: {', '.join(f'{r.variant} {r.times.loss:.6f}' for r in rows)}"
    return "\n".join((title, HEAD, *(_line(row, {r.variant: r for r in rows}) for row in rows)))


def _line(row: Row, rows: Mapping[str, Row]) -> str:
    low, middle, high = (1e3 * q for q in quartiles(row.times.step))
    spread = f"{low:.1f} .. {high:.1f}"
    line = f"{row.variant:<20}{middle:>9.1f}  {spread:<17}{1e3 * statistics.median(row.times.update):>7.1f}"
    line += f"{row.times.warm:>9.1f}"
    line += f"{1e3 * row.plan.step_time:>11.1f}" if row.plan else f"{'':>11}"
    line += f"{row.memory / MIB:>8.0f}" if row.memory else f"{'':>8}"
    line += f"{row.plan.peak_memory / MIB:>11.0f}" if row.plan else f"{'':>11}"
    other = _rival(row, rows)
    if other:
        low, middle, high = _ratio(row, other)
        line += f"  {middle:.2f} of {other.variant} ({low:.2f} .. {high:.2f})"
    if alike := [r.variant for r in rows.values() if _name(row) == "auto" and _same_plan(r, row)]:
        line += f"; the plan of {', '.join(alike)}"
    return line.rstrip()


def _ratio(row: Row, other: Row) -> Sequence[float]:
    """The quartiles, over the rounds, of one variant's step over another's."""
    return quartiles([a / b for a, b in zip(row.times.step, other.times.step, strict=True)])


def _name(row: Row) -> str:
    return row.variant.removesuffix(COMPILED)


def _same_plan(row: Row, other: Row) -> bool:
    """Whether two variants run the same program, both compiled or both not."""
    if not row.plan or not other.plan or row is other or row.variant.endswith(COMPILED) != other.variant.endswith(COMPILED):
        return False
    one, two = ((plan.choices, plan.layouts, plan.routes, plan.recompute, plan.microbatches) for plan in (row.plan, other.plan))
    return one == two


def _rival(row: Row, rows: Mapping[str, Row]) -> Row | None:
    """What a row is held against: torch's counterpart, and for auto the fastest of all others, but for random plans and those
    that are the same as auto's."""
    name, how = _name(row), COMPILED * row.variant.endswith(COMPILED)
    if name == "auto":
        others = [r for r in rows.values() if r.variant.endswith(COMPILED) == bool(how) and not r.variant.startswith("random")]
        return min((r for r in others if r is not row and not _same_plan(r, row)), key=lambda r: r.median, default=None)
    return rows.get(PAIRS.get(name, "") + how)


def standing(rows: Sequence[Row]) -> str:
    """How `auto` stands over all tables, eager and compiled."""
    found = []
    for how in ("", COMPILED):
        held = [(row, {r.variant: r for r in rows if (r.model, r.processes) == (row.model, row.processes)}) for row in rows]
        pairs = [(row, _rival(row, beside)) for row, beside in held if row.variant == "auto" + how]
        ratios = [_ratio(row, other)[1] for row, other in pairs if other]
        if len(ratios) > 1:
            most = f"{min(ratios):.2f} .. {max(ratios):.2f}"
            found.append(f"auto{how} over {len(ratios)} tables: {statistics.median(ratios):.2f} of the fastest other, {most}")
    return "\n".join(found)


def agreement(rows: Sequence[Row]) -> str:
    """How well prediction and measurement agree over all planned rows.

    Rows of different models are not interleaved, so that what else the machine does while one of them runs stands in their
    medians; it stands least in the fastest round.
    """
    eager = [row for row in rows if row.plan and not row.variant.endswith(COMPILED)]
    planned = [(row.plan.step_time, row.median, min(row.times.step)) for row in eager if row.plan]
    if len(planned) < 3:
        return ""
    predicted, *measured = np.array(planned).T
    said = [
        f"{name}: Spearman's rank correlation {spearman(predicted, one):.3f}, "
        f"median absolute error {np.median(np.abs(predicted - one) / one):.0%}"
        for name, one in zip(("median", "fastest round"), measured, strict=True)
    ]
    return "\n".join((f"predicted beside measured over {len(planned)} rows", *said))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of the ranks, equal values sharing theirs."""
    ranks = [np.array([(v < x).sum() + ((v == x).sum() - 1) / 2 for x in v]) for v in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def machine() -> str:
    """Date, processor and versions."""
    info = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return (
        f"{date.today()}, {name[1] if name else platform.processor()}, {cores} cores, gloo over loopback, one thread each; "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=EVERY, help="default: all that have a plan by hand")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--compiled", action="store_true", help=f"eager and compiled, for {KINDS['compiled']}")
    kind.add_argument("--workloads", action="store_true", help=f"more models, for {KINDS['workloads']}")
    parser.add_argument("--processes", action="append", type=int, help="default: 2 and 4")
    parser.add_argument("--variants", help=f"default: {','.join(VARIANTS)}; random0, random1, ... as well, NAME{COMPILED}")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="single", help="which AdamW; default: %(default)s")
    parser.add_argument("--device", help="of the plans: a catalog entry or a profile; default: this machine is measured first")
    parser.add_argument("--memory", action="store_true", help="measure peak memory too")
    parser.add_argument(
        "--save", action="store_true", help=f"write the tables to {RESULTS.parent.name}/{RESULTS.name}, or {KINDS}"
    )
    parser.add_argument("--profile", action="store_true", help="torch.profiler's table of the first variant instead")
    return parser


def _variants(options: argparse.Namespace) -> Sequence[str]:
    if options.compiled:
        return EAGER_AND_COMPILED
    return BY_HAND if options.workloads else VARIANTS


def main() -> int:
    options = _parser().parse_args()
    options.variants = options.variants.split(",") if options.variants else _variants(options)
    models = options.model or [*MODELS, *(WORKLOADS if options.workloads else ())]
    print(machine(), flush=True)
    rows: list[Row] = []
    tables: list[str] = []
    for processes in options.processes or (2, 4):
        device = options.device or profiled(processes, models)
        with WorkerPool(processes, preload=("transformers", "autopar")) as pool:
            for model in models:
                if options.profile:
                    variant = options.variants[0]
                    plan = plan_of(model, processes, variant, device)
                    text = {variant: plan.to_json() if plan else ""}
                    job = Job(model=model, variants=text, rounds=0, optimizer=options.optimizer)
                    print(pool.run("steps:profiled", job)[0])
                    continue
                found = measured(model, pool, device, options)
                rows += found
                tables.append(table(found))
                print("\n" + tables[-1], flush=True)
    said = [text for text in (standing(rows), agreement(rows)) if text]
    print("\n" + "\n\n".join(said))
    if options.save:
        results = next((RESULTS.with_name(file) for kind, file in KINDS.items() if vars(options)[kind]), RESULTS)
        files.write(results, "\n\n".join((machine(), *tables, *said)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

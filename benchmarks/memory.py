"""The peak memory of a step, counted on every rank, beside what the plan said.

    python benchmarks/memory.py --save                                           all models on 2 and 4 processes
    python benchmarks/memory.py --model gpt2 --processes 2 --plans fsdp --alive  what is alive at either peak

Counted are the storages of tensors (`autopar.live`): weights, gradients, AdamW's state, the batch, and all that
forward, backward and optimizer make. The plans are for this machine's CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from models import EVERY
from steps import Job
from training import MIB, machine, plan_of

import autopar
from autopar import files
from autopar.runtime.memory_tracker import Peak
from autopar.runtime.workers import WorkerPool

RESULTS = Path(__file__).with_name("results") / "memory.txt"
PLANS = ("ddp", "fsdp", "megatron", "auto", "random0", "random1")
WIDE = 0.05  # a difference that is marked
LINE = "{:<8}{:>9}  {:<10}{:>12}{:>12}{:>9}"


def row(model: str, plan: autopar.Plan, name: str, peaks: list[Peak]) -> str:
    """One plan: its prediction, the largest and (if it differs) the smallest rank's peak, and how far the prediction is off."""
    most, least = max(peak.bytes for peak in peaks), min(peak.bytes for peak in peaks)
    line = LINE.format(model, len(peaks), name, _mib(plan.peak_memory), _mib(most), f"{off(plan, peaks):+.1%}")
    line += " !" if abs(off(plan, peaks)) > WIDE else ""
    return line + (f"  least {_mib(least)}" if least != most else "")


def off(plan: autopar.Plan, peaks: list[Peak]) -> float:
    """By which share of the measured peak, of the rank with the largest, the prediction is off."""
    return plan.peak_memory / max(peak.bytes for peak in peaks) - 1


def detail(plan: autopar.Plan, peak: Peak) -> Iterator[str]:
    """What the plan and a rank have alive at their peaks."""
    yield f"  the plan, in {plan.breakdown.moment}: " + ", ".join(f"{k} {_mib(v)}" for k, v in plan.breakdown.memory.items())
    yield from (f"    {_mib(held.bytes):>9}  {held}" for held in plan.breakdown.fullest)
    yield f"  measured, in {peak.made}:"
    for alike, count, size in peak.alive[:40]:
        shape = "x".join(map(str, alike.shape)) or "scalar"
        yield f"    {_mib(size):>9}  {count:>4} {str(alike.dtype).removeprefix('torch.')} {shape}  {alike.made}"


def _mib(size: int) -> str:
    return f"{size / MIB:.2f}"


def measured(model: str, pool: WorkerPool, name: str, device: str) -> tuple[autopar.Plan, list[Peak]]:
    """A plan, and the peak of every rank."""
    plan = plan_of(model, pool.world, name, device)
    assert plan is not None
    job = Job(model=model, variants={name: plan.to_json()}, rounds=0, optimizer="single")
    peaks = pool.run("steps:alive", job)
    return plan, [peak for peak in peaks if isinstance(peak, Peak)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=EVERY, help="default: all")
    parser.add_argument("--processes", action="append", type=int, help="default: 2 and 4")
    parser.add_argument("--plans", default=",".join(PLANS), help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="of the plans: a catalog entry or a profile; default: %(default)s")
    parser.add_argument("--alive", action="store_true", help="what is alive at the peaks too")
    parser.add_argument("--save", action="store_true", help=f"write the table to {RESULTS.parent.name}/{RESULTS.name}")
    return parser


def main() -> int:
    options = _parser().parse_args()
    lines = [machine(), "", LINE.format("model", "processes", "plan", "predicted", "MiB measured", "off")]
    print("\n".join(lines), flush=True)
    wrong = []
    for processes in options.processes or (2, 4):
        with WorkerPool(processes, preload=("transformers", "autopar")) as pool:
            for model in options.model or EVERY:
                for name in options.plans.split(","):
                    plan, peaks = measured(model, pool, name, options.device)
                    lines.append(row(model, plan, name, peaks))
                    wrong.append(abs(off(plan, peaks)))
                    print(lines[-1], flush=True)
                    if options.alive:
                        print("\n".join(detail(plan, peaks[0])), flush=True)
    lines += ["", f"{sum(w <= WIDE for w in wrong)} of {len(wrong)} plans within {WIDE:.0%}, the farthest {max(wrong):.1%} off"]
    print("\n".join(lines[-2:]))
    if options.save:
        files.write(RESULTS, "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

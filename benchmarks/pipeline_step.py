"""A step of a GPT-2 in four stages beside torch's own pipeline, and stages that sleep beside their clock.

    python benchmarks/pipeline_step.py --save          both, and the table of the results
    python benchmarks/pipeline_step.py --rounds 5
    python benchmarks/pipeline_step.py --compiled      both compiled by Inductor; steps alone

The stages are cut alike: for torch by hand, as its tutorial does (`torch.distributed.pipelining.Schedule1F1B`), for autopar at
the same modules. Both live in the same four gloo processes, one thread each, and take a step in turn: 1f1b, then AdamW. A step
is timed on the slowest rank after a barrier; CPU time is that of all ranks together, which others on the machine disturb least.
A ratio is the median over rounds of the two steps of one round. Memory is what tensors take at the peak of a step on the
fullest rank, in processes that run one of the two only.

Stages that sleep take no processor, so that ranks may be more than cores: their step is what the schedule makes of it. The
shortest of three is told, as others on the machine can only delay it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from rounds import count, quartiles
from sleeping_stages import CASES
from torch_pipeline import LAYERS, MICROBATCHES, RANKS, SHAPE, Rounds

from autopar import files
from autopar.runtime.workers import WorkerPool

RESULTS = Path(__file__).with_name("results")
MIB = 2**20
ASKED = 1.05  # of torch's step


def beside_torch(rounds: int, *, compiled: bool) -> str:
    """The table of the two steps; with memory, if they are eager."""
    with WorkerPool(RANKS) as pool:
        found: Rounds = pool.run("torch_pipeline:interleaved", (rounds, compiled), timeout=3600)[0]  # type: ignore[assignment]
        memory: dict[str, int] = {}
        for name in () if compiled else found.steps:
            memory |= pool.run("torch_pipeline:alive", name, timeout=600)[0]  # type: ignore[arg-type]
    ratio, share = (_ratio(seconds) for seconds in (found.steps, found.processors))
    rows, length, width = SHAPE
    step = f"batch {rows} x {length} in {MICROBATCHES} micro-batches, 1f1b{', compiled' if compiled else ''}"
    lines = [
        f"GPT-2 of {LAYERS} layers, width {width}, {RANKS} stages, {step}",
        f"first loss: {', '.join(f'{name} {loss:.6f}' for name, loss in found.losses.items())}",
        f"{'variant':<20}{'step ms':>9}  {'quartiles':<19}{'CPU ms':>8}{'MiB' if memory else '':>6}".rstrip(),
    ]
    for name, seconds in found.steps.items():
        low, middle, high = (1e3 * q for q in quartiles(seconds))
        spread, used = f"{low:.1f} .. {high:.1f}", 1e3 * statistics.median(found.processors[name])
        lines.append(f"{name:<20}{middle:>9.1f}  {spread:<19}{used:>8.0f}" + (f"{memory[name] / MIB:>6.0f}" if memory else ""))
    more = f"; memory {memory['autopar'] / memory['torch']:.3f} of torch's" if memory else ""
    lines.append(f"median ratio {ratio:.3f} (asked: at most {ASKED}), of CPU time {share:.3f}{more}")
    return "\n".join(lines)


def _ratio(seconds: Mapping[str, list[float]]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(*seconds.values(), strict=True))


def beside_the_clock() -> str:
    """The table of the schedules whose stages sleep."""
    lines = [f"{'schedule':<24}{'stages':<10}{'clock ms':>9}{'measured':>10}{'off':>8}"]
    with WorkerPool(RANKS) as pool:
        for case in CASES:
            found: Mapping[str, float] = pool.run("sleeping_stages:measured", case, timeout=600)[0]  # type: ignore[assignment]
            clock, took = 1e3 * found["clock"], 1e3 * found["measured"]
            lines.append(f"{case.name:<24}{case.kind:<10}{clock:>9.1f}{took:>10.1f}{took / clock - 1:>8.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--compiled", action="store_true", help="compile the stages of both")
    parser.add_argument("--save", action="store_true", help=f"write to {RESULTS.name}/")
    options = parser.parse_args()
    tables = [beside_torch(options.rounds, compiled=options.compiled), *([] if options.compiled else [beside_the_clock()])]
    text = "\n\n".join((f"{date.today()}, {options.rounds} rounds", *tables)) + "\n"
    print(text)
    if options.save:
        files.write(RESULTS / f"pipeline_step{'_compiled' if options.compiled else ''}.txt", text)


if __name__ == "__main__":
    main()

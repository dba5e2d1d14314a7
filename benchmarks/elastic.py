"""An elastic run whose processes are killed at random moments: what is lost, and whether the losses stay the same.

    python -m benchmarks.elastic [--kills 50] [--seed 0] [--worlds 8,6,4] [--save]

A small training on 8, 6, 4, 8, ... gloo processes of one thread. Each start but the last has one of its ranks killed (two of
three times) or told to leave (SIGTERM), some steps after its first or before it: while it plans, loads, trains or writes. Then
the next number of ranks goes on. Compared with an undisturbed run on one process. `--save` writes results/elastic.txt.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.elastic_agent import Generation, started
from tests.support.elastic_training import logged, train

RESULTS = Path(__file__).parent / "results" / "elastic.txt"
EVERY = 5
CLOSE = 1e-6
PER_KILL = 9  # steps of the training for each kill


class Count:
    """What was seen over all starts."""

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.codes: Counter[str] = Counter()
        self.half = self.orphans = self.removed = 0


def committed(folder: Path) -> list[int]:
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir()) if folder.exists() else ()
    return sorted(int(found[1]) for found in names if found)


def disturb(generation: Generation, folder: Path, drawn: random.Random) -> str:
    """Wait for a random moment and signal a random rank; says what was done."""
    steps = drawn.choice((0, 0, *range(1, 2 * EVERY + 1)))
    until = time.monotonic() + (drawn.uniform(0, 6) if steps == 0 else 120)
    wanted = len(logged(folder)) + steps
    while generation.running and time.monotonic() < until and (steps == 0 or len(logged(folder)) < wanted):
        time.sleep(0.001)
    if steps:
        time.sleep(drawn.uniform(0, 0.05))
    number = drawn.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
    os.kill(generation.number(drawn.randrange(len(generation.ranks))), number)
    return number.name


def alive(generation: Generation) -> int:
    """How many processes of a start there still are, as the kernel sees it."""
    return sum(Path(f"/proc/{process.pid}").exists() for process in generation.ranks)


def one_start(folder: Path, steps: int, world: int, drawn: random.Random | None, count: Count) -> str:
    before, known = logged(folder), committed(folder / "checkpoints")
    with started(world, folder / "out", train, (folder, steps, EVERY)) as generation:
        done = disturb(generation, folder, drawn) if drawn else "none"
        codes = generation.end()
        count.orphans += alive(generation)
    count.codes.update(map(str, codes))
    after = logged(folder)[len(before) :]
    if after and known:
        count.half += after[0]["step"] != known[-1]
        count.lost.append(int(before[-1]["step"]) + 1 - int(after[0]["step"]) if before else 0)
    count.removed += len(list((folder / "checkpoints").glob(".step*")))
    taken = f"{int(after[0]['step']):4} to {int(after[-1]['step']):4}" if after else "no step     "
    return f"{world}  {done:8} {taken}  checkpoints {committed(folder / 'checkpoints')}  exit codes {codes}"


def lines(kills: int, seed: int, worlds: Sequence[int]) -> Iterator[str]:
    drawn, count, steps = random.Random(seed), Count(), kills * PER_KILL
    with tempfile.TemporaryDirectory() as place:
        folder, whole = Path(place, "disturbed"), Path(place, "whole")
        folder.mkdir()
        whole.mkdir()
        with started(1, Path(place, "out"), train, (whole, steps, EVERY)) as alone:
            assert alone.end() == [0], Path(place, "out").read_text()[-2000:]
        expected = [line["loss"] for line in logged(whole)]
        yield f"{kills} kills, {steps} steps, a checkpoint every {EVERY}, seed {seed}"
        yield "ranks, signal, steps taken, what is committed afterwards"
        for number in range(kills):
            yield one_start(folder, steps, worlds[number % len(worlds)], drawn, count)
        yield one_start(folder, steps, worlds[0], None, count)
        found = logged(folder)
        worst = max(abs(line["loss"] - expected[int(line["step"])]) for line in found)
        yield ""
        yield f"steps                 {len({line['step'] for line in found})} of {steps} taken, {len(found) - steps} again"
        yield f"lost by a kill        at most {max(count.lost)} steps (promised: {2 * EVERY} at most)"
        yield f"losses                differ by {worst:.1e} at most from those of the undisturbed run (asked: {CLOSE:g})"
        yield f"half checkpoints      {count.half} taken; {count.removed} were being written or removed, and were dropped"
        yield f"processes left        {count.orphans}"
        yield f"exit codes            {', '.join(f'{code}: {n}' for code, n in sorted(count.codes.items()))}"
        held = max(count.lost) <= 2 * EVERY and worst < CLOSE and not count.half and not count.orphans
        yield "all as promised" if held and len({line["step"] for line in found}) == steps else "NOT AS PROMISED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--worlds", type=lambda text: [int(n) for n in text.split(",")], default=[8, 6, 4], help="ranks of each start"
    )
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    said = []
    for line in lines(asked.kills, asked.seed, asked.worlds):
        print(line, flush=True)
        said.append(line)
    if asked.save:
        RESULTS.write_text("\n".join(said) + "\n")
    return 0 if said[-1] == "all as promised" else 1


if __name__ == "__main__":
    sys.exit(main())

"""Fuzzing: random graphs under random plans against the user's own module; `make fuzz`.

    python -m tests.fuzz --seed 0 --pairs 1000        rounds of drawn graphs, from this seed on, until so many pairs are tried

A round is 20 graphs, drawn by hypothesis from the round's seed. The first failure of a round is shrunk and printed as a script
that repeats it; the next round goes on. Exit code 1 if anything failed: a wrong number, a crash, or no end within the deadline.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import warnings

import torch

from tests.fuzz.rounds import Round

MOST = 10  # failures after which no further rounds are run


def main() -> int:
    """Run rounds; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--pairs", type=int, default=400, help="of graph and plan, at least")
    parser.add_argument("--graphs", type=int, default=20, help="of a round")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin, cpu, seed, failed = time.perf_counter(), time.process_time(), options.seed, 0
    pairs, refused = 0, 0
    while pairs < options.pairs and failed < MOST:
        faulthandler.dump_traceback_later(1800, exit=True)  # in native code, which no alarm interrupts
        one = Round(seed=seed, graphs=options.graphs)
        one.run()
        pairs, refused, seed = pairs + one.pairs, refused + len(one.refused), seed + 1
        print(f"seed {one.seed}: {one.pairs} pairs equal, {len(one.refused)} refused", flush=True)
        for line in sorted(set(one.refused)):
            print(f"    {one.refused.count(line)} x {line[:140]}")
        if one.failure:
            failed += 1
            print(f"FAILED: {one.failure}\n{one.script}\n", flush=True)
    faulthandler.cancel_dump_traceback_later()
    took = f"{time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} CPU s"
    print(f"{pairs} pairs of graph and plan are equal, {refused} refused, {failed} rounds failed; {took}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

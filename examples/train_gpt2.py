"""Train GPT-2 on the source text of Python's standard library, on eight processes and sequentially, and compare the losses.

    python examples/train_gpt2.py                                   starts eight processes of itself
    python examples/train_gpt2.py --strategy megatron               under a scheme that has a name
    torchrun --nproc-per-node 8 examples/train_gpt2.py              the same, started by hand

Exit code 1 if the parallel loss differs from the sequential one by more than 1e-4 in any step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

MESH = (2, 4)
BATCH, LENGTH, STEPS = 16, 64, 30
TOLERANCE = 1e-4
Batch = dict[str, torch.Tensor]


def main() -> int:
    """Start the processes, or be one of them."""
    options = arguments()
    if "RANK" in os.environ:
        return train(options.strategy, options.steps)
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    return subprocess.run([*launch, *sys.argv], env=environment, check=False).returncode


def train(strategy: str, steps: int) -> int:
    """Train on this rank; rank 0 trains the sequential model beside it and prints both losses."""
    import autopar

    torch.manual_seed(0)
    model = gpt2()
    batches = text(torch.Generator().manual_seed(0))
    parallel = autopar.parallelize(model, next(batches), mesh=MESH, strategy=strategy)
    parallel_step = stepper(parallel)
    sequential_step = stepper(model)  # autopar has left the model as it was

    first = torch.distributed.get_rank() == 0
    if first:
        print(parallel.autopar.plan)  # type: ignore[union-attr]
        print(f"\n{'step':>4}  {'sequential':>10}  {'parallel':>10}  difference")
    worst, begin = 0.0, time.perf_counter()
    for step in range(steps):
        batch = next(batches)  # the whole batch, on every rank
        found = parallel_step(batch)
        if first:
            expected = sequential_step(batch)
            worst = max(worst, abs(found - expected))
            print(f"{step:4}  {expected:10.6f}  {found:10.6f}  {abs(found - expected):10.1e}", flush=True)
    equal = worst <= TOLERANCE
    if first:
        took = time.perf_counter() - begin
        print(f"\n{'equal' if equal else 'NOT equal'}: largest difference {worst:.1e}, allowed {TOLERANCE:.0e}; {took:.1f} s")
    torch.distributed.destroy_process_group()
    return 0 if equal else 1


def stepper(model: nn.Module) -> Callable[[Batch], float]:
    """One optimizer step on a batch; nothing here knows whether the model is parallel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def gpt2() -> nn.Module:
    """Four layers over bytes, without dropout: random numbers would differ between the two runs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4,
        n_embd=128,
        n_head=8,
        vocab_size=256,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers warns that it cannot tell this from the name of the class
    return model


def text(generator: torch.Generator) -> Iterator[Batch]:
    """Batches of random pieces of the standard library, byte by byte."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    everything = torch.frombuffer(bytearray(b"\n".join(source.read_bytes() for source in sources)), dtype=torch.uint8).long()
    while True:
        starts = torch.randint(len(everything) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([everything[start : start + LENGTH] for start in starts])
        yield {"input_ids": tokens, "labels": tokens}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train GPT-2 in parallel and sequentially, and compare the losses.")
    parser.add_argument("--strategy", default="auto", help="auto, ddp, fsdp, megatron or replicate (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

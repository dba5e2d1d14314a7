"""Mixtures of experts written as loops: a step of the user's own module beside that of the parallel one, and what is planned.

    python benchmarks/expert_loops.py            on one device, in rounds: the loop in Python, and its plan on one device
    python benchmarks/expert_loops.py --plan     beside it the plan of a language model of 8 such layers on 8 H100s

A loop over experts computes with the tokens that chose each. So does its plan, as products of groups; where experts differ, it
computes with all tokens for each expert.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import autopar

EXPERTS, PICKED, ROUNDS = 8, 2, 15


class Expert(nn.Module):
    """A gated feed-forward layer without biases; `changed` makes it another than the others."""

    def __init__(self, width: int, hidden: int, *, changed: bool) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down, self.act = nn.Linear(hidden, width, bias=False), nn.GELU() if changed else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


class Mixture(nn.Module):
    """Tokens (t, width), each of which goes to two of the experts; experts that nobody chose are left out."""

    def __init__(self, width: int, hidden: int, *, alike: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(width, hidden, changed=not alike and n == 0) for n in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = F.softmax(self.router(x), -1).topk(PICKED, -1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel() == 0:
                continue
            y.index_add_(0, rows, (expert(x[rows]) * weights[rows, place, None]).to(y.dtype))
        return y


class Model(nn.Module):
    """A language model of blocks of attention and a mixture."""

    def __init__(self, width: int, hidden: int, layers: int, *, alike: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32000, width), nn.Linear(width, 32000, bias=False)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 16, batch_first=True) for _ in range(layers))
        self.mixtures = nn.ModuleList(Mixture(width, hidden, alike=alike) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for attention, mixture in zip(self.attention, self.mixtures, strict=True):
            x = x + attention(x, x, x, need_weights=False)[0]
            x = x + mixture(x.flatten(0, 1)).unflatten(0, tokens.shape)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def step(module: nn.Module, x: torch.Tensor) -> float:
    """Seconds of a forward and a backward."""
    start = time.perf_counter()
    module(x).square().mean().backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.randn(2048, 256)
    for alike in (True, False):
        own = Mixture(256, 1024, alike=alike)
        parallel = autopar.parallelize(own, x, mesh=1, device="cpu")
        pairs = [(step(own, x), step(parallel, x)) for _ in range(ROUNDS + 2)][2:]
        ratio = statistics.median(there / here for here, there in pairs)
        named = "experts alike" if alike else "one differs  "
        print(
            f"{named}  loop {statistics.median(one for one, _ in pairs) * 1e3:6.1f} ms, parallel {ratio:.2f} of it", flush=True
        )
        if asked.plan:
            with torch.device("meta"):
                model, tokens = Model(1024, 4096, 8, alike=alike), torch.zeros(32, 2048, dtype=torch.long)
            start = time.process_time()
            plan = autopar.plan(model, tokens, (8,), device="h100")
            seconds = time.process_time() - start
            print(f"{named}  8 layers: {plan.step_time * 1e3:.1f} ms, {plan.peak_memory / 2**30:.1f} GiB, {seconds:.0f} CPU s")


if __name__ == "__main__":
    main()

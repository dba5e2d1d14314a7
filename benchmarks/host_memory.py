"""Plans with weights on the host, for cards of the catalog: `python benchmarks/host_memory.py [--save]`.

18.7 billion parameters, trained on one card of 24 GB with a host of 512 GB, and 13.1 billion in a forward in 10 GB: what a step
is predicted to take, and what lies where. Nothing is run: there is no such card.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import autopar

RESULTS = Path(__file__).parent / "results" / "host_memory.txt"


class Block(nn.Module):
    """A block of GPT-3."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT with its loss, or with logits where there are no labels."""

    def __init__(self, width: int, blocks: int, heads: int, vocabulary: int = 50304, context: int = 1024) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plans() -> Iterator[tuple[str, autopar.Plan, float]]:
    """A title, a plan and the seconds of planning."""
    for batch in (8, 32):
        with torch.device("meta"):
            model, tokens = GPT(6144, 40, 48), torch.zeros(batch, 1024, dtype=torch.long)
        size, start = sum(p.numel() for p in model.parameters()) / 1e9, time.perf_counter()
        plan = autopar.plan(
            model, (tokens, tokens), (1,), device="rtx4090", precision="bf16-mixed", offload="host", host_memory="512GB"
        )
        yield f"train {size:.1f}e9, {batch} x 1024 tokens, rtx4090, host 512 GB", plan, time.perf_counter() - start
    for batch in (1, 16):
        with torch.device("meta"):
            model, tokens = GPT(5120, 40, 40), torch.zeros(batch, 1024, dtype=torch.long)
        size, start = sum(p.numel() for p in model.parameters()) / 1e9, time.perf_counter()
        plan = autopar.plan(
            model.eval(), (tokens,), (1,), device="rtx3080-10gb", precision="bf16", offload="host", host_memory="64GB",
            mode="inference",
        )  # fmt: skip
        yield f"forward {size:.1f}e9, {batch} x 1024 tokens, rtx3080-10gb, host 64 GB", plan, time.perf_counter() - start


def rows() -> Iterator[str]:
    """The table."""
    yield f"{'case':62}{'step s':>9}{'simulated':>11}{'device GB':>11}{'host GB':>9}{'gap':>7}{'planning s':>12}"
    for title, plan, seconds in plans():
        figures = f"{plan.step_time:9.2f}{plan.breakdown.simulated.seconds:11.2f}{plan.peak_memory / 1e9:11.1f}"
        yield f"{title:62}{figures}{plan.host_memory / 1e9:9.1f}{plan.gap:7.1%}{seconds:12.0f}"


def main() -> None:
    """Print the table, and write it with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    lines = []
    for line in rows():
        print(line)
        sys.stdout.flush()
        lines.append(line)
    if parser.parse_args().save:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

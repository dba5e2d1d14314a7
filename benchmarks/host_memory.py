"""Plans with weights on the host and the disk, for cards of the catalog: `python benchmarks/host_memory.py [--save]`.

18.7 billion parameters, trained on one card of 24 GB with a host of 512 GB, and 13.1 billion in a forward in 10 GB, with a host
of 64 GB, or with one that has 8 GB to spare and a disk: what a step is predicted to take, and what lies where. Nothing is run:
there is no such card.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A GPT on a card of the catalog, and what its node's host and disk may store."""

    device: str
    batch: int
    width: int
    heads: int
    options: Mapping[str, object]

    def plan(self) -> tuple[str, autopar.Plan, float]:
        """A title, the plan and the seconds of planning."""
        training = "mode" not in self.options
        with torch.device("meta"):
            model, tokens = GPT(self.width, 40, self.heads), torch.zeros(self.batch, 1024, dtype=torch.long)
        size, start = sum(p.numel() for p in model.parameters()) / 1e9, time.perf_counter()
        sample = (tokens, tokens) if training else (tokens,)
        plan = autopar.plan(model.train(training), sample, (1,), device=self.device, **self.options)  # type: ignore[arg-type]
        stores = ", ".join(f"{at} {self.options[f'{at}_memory']}" for at in ("host", "disk") if f"{at}_memory" in self.options)
        what = "train" if training else "forward"
        return f"{what} {size:.1f}e9, {self.batch} x 1024, {self.device}, {stores}", plan, time.perf_counter() - start


TRAIN = {"precision": "bf16-mixed", "offload": "host", "host_memory": "512GB"}
FORWARD = {"precision": "bf16", "mode": "inference"}
ON_HOST, ON_DISK = {"offload": "host", "host_memory": "64GB"}, {"offload": "disk", "host_memory": "8GB", "disk_memory": "1TB"}
CASES = {
    "host": [
        *(Case(device="rtx4090", batch=batch, width=6144, heads=48, options=TRAIN) for batch in (8, 32)),
        *(Case(device="rtx3080-10gb", batch=batch, width=5120, heads=40, options=FORWARD | ON_HOST) for batch in (1, 16)),
    ],
    "disk": [Case(device="rtx3080-10gb", batch=batch, width=5120, heads=40, options=FORWARD | ON_DISK) for batch in (1, 16)],
}


def rows(cases: Iterable[Case]) -> Iterator[str]:
    """The table."""
    yield f"{'case':62}{'step s':>9}{'simulated':>11}{'device GB':>11}{'host GB':>9}{'disk GB':>9}{'gap':>7}{'planning s':>12}"
    for case in cases:
        title, plan, seconds = case.plan()
        figures = f"{plan.step_time:9.2f}{plan.breakdown.simulated.seconds:11.2f}{plan.peak_memory / 1e9:11.1f}"
        yield f"{title:62}{figures}{plan.host_memory / 1e9:9.1f}{plan.disk_memory / 1e9:9.1f}{plan.gap:7.1%}{seconds:12.0f}"


def main() -> None:
    """Print the table, and write it with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--place", choices=CASES, help="the host's cases, or those of the disk; by default all")
    asked, lines = parser.parse_args(), list[str]()
    for line in rows(case for place, found in CASES.items() if asked.place in (None, place) for case in found):
        print(line)
        sys.stdout.flush()
        lines.append(line)
    if asked.save:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

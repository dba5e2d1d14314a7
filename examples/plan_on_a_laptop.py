"""Plan a model of 6.5 billion parameters for 1000 H100s, on one CPU core without a GPU, in about ten seconds.

    python examples/plan_on_a_laptop.py
    python examples/plan_on_a_laptop.py --layers 4 --save plan.json

The model is built on the meta device: no weight is allocated. The plan is saved, to be run there by
`autopar.parallelize(model, batch, mesh, plan=autopar.Plan.load("plan.json"))`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional

import autopar

MESH = {"node": 125, "gpu": 8}  # the last axis is the innermost: the eight devices of a node
WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 4096, 32, 32000, 2048, 1000


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device, dtype=self.head.weight.dtype)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def main(layers: int, path: str) -> None:
    """Plan, print and save."""
    with torch.device("meta"):
        model = Decoder(layers).to(torch.bfloat16)
        tokens = torch.empty(BATCH, LENGTH, dtype=torch.long)  # the global batch
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.1f} billion parameters")
    plan = autopar.plan(model, (tokens, tokens), MESH, device="h100")
    print(plan)
    if path:
        plan.save(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--save", default="", metavar="PLAN.json")
    options = parser.parse_args()
    main(options.layers, options.save)

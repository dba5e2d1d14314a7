"""Two architectures that no library of the zoo has, in plain torch: AlphaFold's Evoformer, and a decoder like PaLM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GatedAttention(nn.Module):
    """Self-attention over the last but one dim, with a bias on its scores if there is one, its result gated (algorithm 7).

    x is (..., n, width); the bias broadcasts to (..., heads, n, n).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        mixed = (scores if bias is None else scores + bias).softmax(-1) @ v
        return self.out(self.gate(x).sigmoid() * mixed.transpose(-2, -3).flatten(-2))


class Transition(nn.Sequential):
    """Two layers, four times as wide inside (algorithms 9 and 15)."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class OuterProductMean(nn.Module):
    """The mean over sequences of outer products of residues: (batch, s, r, msa) to (batch, r, r, pair) (algorithm 10)."""

    def __init__(self, msa: int, pair: int, inner: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(msa), nn.Linear(inner * inner, pair)
        self.left, self.right = nn.Linear(msa, inner), nn.Linear(msa, inner)

    def forward(self, msa: Tensor) -> Tensor:
        x = self.norm(msa)
        return self.out(torch.einsum("bsic,bsjd->bijcd", self.left(x), self.right(x)).flatten(-2) / msa.shape[1])


class TriangleMultiplication(nn.Module):
    """Each edge ij from the two other edges of its triangles: ik and jk, or incoming ki and kj (algorithms 11 and 12)."""

    def __init__(self, width: int, product: str) -> None:
        super().__init__()
        self.product = product
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.left, self.right, self.left_gate, self.right_gate, self.gate, self.out = (
            nn.Linear(width, width) for _ in range(6)
        )

    def forward(self, pair: Tensor) -> Tensor:
        x = self.norm(pair)
        left, right = self.left_gate(x).sigmoid() * self.left(x), self.right_gate(x).sigmoid() * self.right(x)
        return self.gate(x).sigmoid() * self.out(self.inner_norm(torch.einsum(self.product, left, right)))


class EvoformerBlock(nn.Module):
    """One block of the Evoformer (J. Jumper et al., "Highly accurate protein structure prediction with AlphaFold", 2021,
    supplement, algorithm 6), without dropout. Row attention mixes residues, column attention sequences: what is split well for
    one is split badly for the other, and the same holds for rows and columns of the pair representation.
    """

    def __init__(self, msa: int, pair: int, heads: int, inner: int) -> None:
        super().__init__()
        self.row_bias = nn.Sequential(nn.LayerNorm(pair), nn.Linear(pair, heads, bias=False))
        self.rows, self.columns, self.msa_transition = GatedAttention(msa, heads), GatedAttention(msa, heads), Transition(msa)
        self.outer = OuterProductMean(msa, pair, inner)
        self.outgoing = TriangleMultiplication(pair, "bikc,bjkc->bijc")
        self.incoming = TriangleMultiplication(pair, "bkic,bkjc->bijc")
        self.starting_bias, self.ending_bias = nn.Linear(pair, heads, bias=False), nn.Linear(pair, heads, bias=False)
        self.starting, self.ending = GatedAttention(pair, heads), GatedAttention(pair, heads)
        self.pair_transition = Transition(pair)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = msa + self.rows(msa, self.row_bias(pair).permute(0, 3, 1, 2).unsqueeze(1))
        msa = msa + self.columns(msa.transpose(1, 2)).transpose(1, 2)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer(msa)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair, self.starting_bias(pair).permute(0, 3, 1, 2).unsqueeze(1))
        turned = pair.transpose(1, 2)
        pair = pair + self.ending(turned, self.ending_bias(turned).permute(0, 3, 1, 2).unsqueeze(1)).transpose(1, 2)
        return msa, pair + self.pair_transition(pair)


class Evoformer(nn.Module):
    """A stack of blocks over embedded sequences, with the losses of masked residues and of binned distances."""

    KINDS, BINS = 24, 16

    def __init__(self, layers: int = 2, msa: int = 16, pair: int = 8, heads: int = 4, inner: int = 4) -> None:
        super().__init__()
        self.embedding, self.left, self.right = (nn.Embedding(self.KINDS, width) for width in (msa, pair, pair))
        self.blocks = nn.ModuleList(EvoformerBlock(msa, pair, heads, inner) for _ in range(layers))
        self.residues, self.distances = nn.Linear(msa, self.KINDS), nn.Linear(pair, self.BINS)

    def forward(self, sequences: Tensor, residues: Tensor, distances: Tensor) -> Tensor:
        """The loss of (batch, s, r) aligned sequences, their true residues, and (batch, r, r) bins of distances."""
        msa, first = self.embedding(sequences), sequences[:, 0]
        pair = self.left(first).unsqueeze(2) + self.right(first).unsqueeze(1)
        for block in self.blocks:
            msa, pair = block(msa, pair)
        both = self.distances(pair + pair.transpose(1, 2))
        loss = functional.cross_entropy(self.residues(msa).flatten(0, 2), residues.flatten())
        return loss + functional.cross_entropy(both.flatten(0, 2), distances.flatten())


class PalmBlock(nn.Module):
    """Attention and SwiGLU of one norm side by side, all queries sharing one head of keys and values, no biases.

    A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section 2.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, width // heads
        self.norm = nn.LayerNorm(width, bias=False)
        self.sizes = [width, self.head, self.head, 4 * width, 4 * width]
        self.first = nn.Linear(width, sum(self.sizes), bias=False)  # queries, keys, values, gate and units: one product
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v, gate, up = self.first(self.norm(x)).split(self.sizes, -1)
        q = turned(q.unflatten(-1, (self.heads, self.head)).transpose(1, 2), angles)
        k, v = (part.unsqueeze(1).expand(-1, self.heads, -1, -1) for part in (turned(k, angles), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2)) + self.down(functional.silu(gate) * up)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Queries or keys (..., length, head) turned by the angles of their positions (length, head / 2)."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


class Palm(nn.Module):
    """A decoder whose head is its embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 32, heads: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width, bias=False)
        self.blocks = nn.ModuleList(PalmBlock(width, heads) for _ in range(layers))
        self.head = width // heads

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The logits of (batch, length) words, and the loss of the next one."""
        rates = 10000.0 ** -(torch.arange(0, self.head, 2, device=input_ids.device) / self.head)
        x, angles = self.embedding(input_ids), torch.arange(input_ids.shape[1], device=input_ids.device)[:, None] * rates
        for block in self.blocks:
            x = block(x, angles.to(x.dtype))
        logits = functional.linear(self.norm(x), self.embedding.weight)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}

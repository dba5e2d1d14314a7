"""The decoders of the published runs, as a user would write them: plain modules on `meta`, the loss in forward.

Parameters are stored in one dtype and cast to the other where they are used, as under FSDP's `MixedPrecision(param_dtype)` and
in Megatron: everything computes in half precision, norms and the residual stream too; the loss is taken in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes and the habits of a decoder; `layers` blocks of width `width` on `length` tokens."""

    width: int
    heads: int
    key_heads: int  # heads of keys and values
    hidden: int  # width inside the feed-forward layers
    layers: int
    vocabulary: int
    length: int
    gated: bool = False  # Llama: rotary positions, RMS norm, gated units; else GPT: learned positions, layer norm, GELU
    written_norms: bool = False  # RMS norm operator by operator in float32; else one kernel
    tied: bool = True  # the head is the embedding
    biases: bool = True
    post_norm: bool = False  # BERT's order: a norm behind each sum, and behind the embedding; none at the end
    one_hot: bool = False  # tokens are looked up by a product with one-hot vectors
    flash: bool = True  # scaled_dot_product_attention; else scores, softmax and dropout one after the other
    dropout: float = 0.0
    fused_loss: bool = False  # a kernel for the loss of scores as they are, of which FlashAttention has one
    metrics: int = 0  # further cross-entropies that the harness computes of the same scores
    compute: torch.dtype = torch.bfloat16
    stored: torch.dtype = torch.float32

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        head = self.width // self.heads
        block = 2 * self.width * head * (self.heads + self.key_heads) + (3 if self.gated else 2) * self.width * self.hidden
        block += self.width * (2 if self.gated else 4)
        if self.biases:
            block += head * (self.heads + 2 * self.key_heads) + 2 * self.width + self.hidden
        ends = self.vocabulary * self.width * (1 if self.tied else 2) + self.width * (1 if self.gated else 2)
        return self.layers * block + ends + (0 if self.gated else self.length * self.width)

    def flops(self, sequences: int) -> float:
        """Operations of a training step as model FLOPs utilization counts them: 6 per parameter and token, and 12 per layer,
        width and pair of positions (A. Chowdhery et al., PaLM, 2022, appendix B): attention as if it were not causal."""
        return sequences * self.length * (6.0 * self.parameters + 12.0 * self.layers * self.width * self.length)

    def module(self) -> nn.Module:
        """The model on `meta`."""
        with torch.device("meta"):
            return Model(self).to(self.stored).train()


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype) if self.bias is not None else None)


class Norm(nn.Module):
    """Layer norm, or RMS norm, in the dtype of its input."""

    def __init__(self, of: Decoder) -> None:
        super().__init__()
        self.written = of.written_norms
        self.weight = nn.Parameter(torch.ones(of.width))
        self.bias = None if of.gated else nn.Parameter(torch.zeros(of.width))

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = list(self.weight.shape), self.weight.to(x.dtype)
        if self.written:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * weight
        if self.bias is None:
            return F.rms_norm(x, shape, weight, 1e-5)
        return F.layer_norm(x, shape, weight, self.bias.to(x.dtype))


class Attention(nn.Module):
    """Causal self-attention; one fused projection, head by head as in Megatron, where keys have as many heads as queries and no
    positions of their own."""

    def __init__(self, of: Decoder) -> None:
        super().__init__()
        self.of, self.head = of, of.width // of.heads
        if of.gated:
            self.query = Linear(of.width, of.width, bias=of.biases)
            self.key = Linear(of.width, self.head * of.key_heads, bias=of.biases)
            self.value = Linear(of.width, self.head * of.key_heads, bias=of.biases)
        else:
            self.qkv = Linear(of.width, 3 * of.width, bias=of.biases)
        self.out = Linear(of.width, of.width, bias=of.biases)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        rows, length, width = x.shape
        if turns is None:
            q, k, v = self.qkv(x).view(rows, length, self.of.heads, 3, self.head).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = (
                project(x).view(rows, length, -1, self.head).transpose(1, 2) for project in (self.query, self.key, self.value)
            )
            q, k = rotated(q, turns), rotated(k, turns)
            if (times := self.of.heads // self.of.key_heads) > 1:
                k, v = (part.repeat_interleave(times, 1) for part in (k, v))
        mixed = self._flash(q, k, v) if self.of.flash else self._unfused(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.of.dropout)

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scale and mask belong to the kernel of Megatron's softmax: a plain softmax reads and writes what that one does."""
        shares = (q @ k.transpose(-2, -1)).softmax(-1)
        return dropped(shares, self) @ v


class Block(nn.Module):
    """A transformer block with the norms ahead, or behind."""

    def __init__(self, of: Decoder) -> None:
        super().__init__()
        self.of = of
        self.norm1, self.norm2 = Norm(of), Norm(of)
        self.attention = Attention(of)
        if of.gated:
            self.gate = Linear(of.width, of.hidden, bias=of.biases)
        self.up = Linear(of.width, of.hidden, bias=of.biases)
        self.down = Linear(of.hidden, of.width, bias=of.biases)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        if self.of.post_norm:
            x = self.norm1(x + dropped(self.attention(x, turns), self))
            return self.norm2(x + dropped(self._wide(x), self))
        x = x + dropped(self.attention(self.norm1(x), turns), self)
        return x + dropped(self._wide(self.norm2(x)), self)

    def _wide(self, x: Tensor) -> Tensor:
        """The feed-forward layers."""
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.of.gated else F.gelu(self.up(x)))


def dropped(x: Tensor, by: Attention | Block) -> Tensor:
    """Dropout at the rate of a module's decoder; nothing runs where there is none."""
    return F.dropout(x, by.of.dropout, by.training) if by.of.dropout else x


class Model(nn.Module):
    """The decoder with its loss."""

    def __init__(self, of: Decoder) -> None:
        super().__init__()
        self.of = of
        self.tokens = nn.Embedding(of.vocabulary, of.width)
        self.positions = None if of.gated else nn.Parameter(torch.zeros(of.length, of.width))
        self.blocks = nn.ModuleList(Block(of) for _ in range(of.layers))
        self.norm = Norm(of)
        self.head = None if of.tied else Linear(of.width, of.vocabulary, bias=False)
        if of.gated:
            self.register_buffer("turns", torch.zeros(of.length, of.width // of.heads // 2, 2), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        embedding = self.tokens.weight.to(self.of.compute)
        x, turns = self._looked_up(tokens, embedding), None
        if self.positions is None:
            turns = torch.view_as_complex(self.turns.float())
        else:
            x = x + self.positions.to(x.dtype)
        x = self.norm(x) if self.of.post_norm else x
        for block in self.blocks:
            x = block(x, turns)
        x = x if self.of.post_norm else self.norm(x)
        scores = (F.linear(x, embedding) if self.head is None else self.head(x)).flatten(0, 1)
        more = (F.cross_entropy(scores.detach(), labels.flatten(), reduction="sum") for _ in range(self.of.metrics))
        return F.cross_entropy(scores if self.of.fused_loss else scores.float(), labels.flatten()), *more

    def _looked_up(self, tokens: Tensor, embedding: Tensor) -> Tensor:
        if not self.of.one_hot:
            return F.embedding(tokens, embedding)
        hot = tokens.unsqueeze(-1) == torch.arange(self.of.vocabulary, device=tokens.device)
        return hot.to(embedding.dtype) @ embedding


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Queries or keys turned by their positions: pairs in float32 as complex numbers, as the reference implementation does."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


Recompute = Literal["none", "selective", "blocks", "alternate"]

__all__ = ["Decoder", "Recompute"]

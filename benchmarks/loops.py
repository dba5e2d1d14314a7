"""Models with a loop over time in `forward`, as users write them: capture unrolls it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 128


class SelectiveScan(nn.Module):
    """The selective state space of Mamba (Gu and Dao, 2023), step by step: h = exp(dt A) h + dt B u, y = C h."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.dt, self.bc = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.a = nn.Parameter(torch.rand(width, states))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.enter(x).chunk(2, -1)
        dt, (b, c) = F.softplus(self.dt(u)), self.bc(u).chunk(2, -1)
        kept = torch.exp(dt.unsqueeze(-1) * -self.a)
        added = dt.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        h, found = x.new_zeros(x.shape[0], *self.a.shape), []
        for t in range(x.shape[1]):
            h = kept[:, t] * h + added[:, t]
            found.append((h * c[:, t].unsqueeze(1)).sum(-1))
        result: torch.Tensor = self.leave(torch.stack(found, 1) * F.silu(gate))
        return result


class LinearAttention(nn.Module):
    """The time mixing of RWKV (Peng et al., 2023) step by step, into place: out = r (u k v + state), state = w state + k v."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.rkvg = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.w, self.u = (nn.Parameter(torch.rand(heads, width // heads, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], *self.w.shape[:2])
        r, k, v, gate = (one(self.norm(x)).view(split) for one in self.rkvg)
        state, out = x.new_zeros(x.shape[0], *self.w.shape[:2], self.w.shape[1]), torch.zeros_like(v)
        for t in range(x.shape[1]):
            kv = k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
            out[:, t] = (r[:, t].unsqueeze(-2) @ (self.u * kv + state)).squeeze(-2)
            state = torch.exp(-torch.exp(self.w)) * state + kv
        result: torch.Tensor = self.leave((out * torch.sigmoid(gate)).flatten(2))
        return result


class Cell(nn.Module):
    """`nn.RNNCell`, or the same by hand, over all words, which are cut apart before the loop."""

    def __init__(self, width: int, *, by_hand: bool = False) -> None:
        super().__init__()
        self.cell = None if by_hand else nn.RNNCell(width, width)
        self.x, self.h = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = torch.zeros_like(x[:, 0]), []
        for word in x.unbind(1):
            h = self.cell(word, h) if self.cell is not None else torch.tanh(self.x(word) + self.h(h))
            found.append(h)
        return torch.stack(found, 1)


class Recurrent(nn.Module):
    """An embedding, layers of one kind with residual connections, a head, and the loss of the next word."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(layers)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), next_words.flatten())


def scan(width: int) -> nn.Module:
    """Two layers of a selective scan."""
    return Recurrent(SelectiveScan(width), SelectiveScan(width), width=width)


def rwkv(width: int) -> nn.Module:
    """Two layers of linear attention with a decay."""
    return Recurrent(LinearAttention(width), LinearAttention(width), width=width)


def cell(width: int) -> nn.Module:
    """A recurrent layer of `nn.RNNCell`."""
    return Recurrent(Cell(width), width=width)


def rnn(width: int) -> nn.Module:
    """A recurrent layer written by hand."""
    return Recurrent(Cell(width, by_hand=True), width=width)

"""Mixtures of experts in the ways of code that people start from: whole modules, each with a way of its own to pick tokens.

makeMoE and mistral-inference (GitHub), labml.ai's switch transformer, and others that are often written by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, EXPERTS, PICKED = 6, 4, 2


class Mixture(nn.Module):
    """A router and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)) for _ in range(EXPERTS))


class MakeMoE(Mixture):
    """A mask of tokens in two shapes, and gates of all experts, zero for those that were not chosen."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        top, chosen = scores.topk(PICKED, dim=-1)
        gates = torch.full_like(scores, float("-inf")).scatter(-1, chosen, top).softmax(-1)
        y, tokens, flat_gates = torch.zeros_like(x), x.view(-1, WIDTH), gates.view(-1, EXPERTS)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(dim=-1)
            flat = mask.view(-1)
            if flat.any():
                made = expert(tokens[flat]) * flat_gates[flat, e].unsqueeze(1)
                y[mask] += made.squeeze(1)
        return y.square().mean()


class Mistral(Mixture):
    """Rows and the places of their choices, added at an index."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        weights, chosen = torch.topk(self.router(tokens), PICKED)
        weights, y = F.softmax(weights, dim=1, dtype=torch.float32).to(tokens.dtype), torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == e)
            y[rows] += weights[rows, place, None] * expert(tokens[rows])
        return y.square().mean()


class Switch(Mixture):
    """One expert for each token, and the loss of their balance."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        odds = self.router(tokens).softmax(-1)
        weights, routes = odds.max(-1)
        y = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            rows = (routes == e).nonzero(as_tuple=True)[0]
            if len(rows) > 0:
                y[rows] = self.experts[e](tokens[rows])
        balance = EXPERTS * (F.one_hot(routes, EXPERTS).float().mean(0) * odds.mean(0)).sum()
        return (y * weights.unsqueeze(-1)).square().mean() + 0.01 * balance


class Lists(Mixture):
    """The indices of all experts, then what they compute, then where that goes."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        weights, routes = torch.max(self.router(tokens).softmax(-1), dim=-1)
        rows = [torch.eq(routes, e).nonzero(as_tuple=True)[0] for e in range(EXPERTS)]
        made = [self.experts[e](tokens[rows[e], :]) for e in range(EXPERTS)]
        y = tokens.new_zeros(tokens.shape)
        for e in range(EXPERTS):
            y[rows[e], :] = made[e]
        return (y * weights.view(-1, 1)).square().mean()


class Masks(Mixture):
    """Tokens by a mask, and a column of the router's for each expert."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        odds = self.router(tokens).softmax(-1)
        routes, y = odds.argmax(-1), torch.empty_like(tokens)
        for e, expert in enumerate(self.experts):
            picked = routes == e
            y[picked] = expert(tokens[picked]) * odds[picked][:, e : e + 1]
        return y.square().mean()


class Choices(Mixture):
    """The first choices of all tokens, then their second ones."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(PICKED)
        y = torch.zeros_like(tokens)
        for k in range(PICKED):
            for e in range(EXPERTS):
                mask = chosen[:, k] == e
                if mask.sum() > 0:
                    y[mask] += weights[mask, k : k + 1] * self.experts[e](tokens[mask])
        return y.square().mean()


class Stacked(nn.Module):
    """Weights of all experts in one parameter, multiplied one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8)), nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(PICKED)
        y = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, rows, ((tokens[rows] @ self.up[e]).relu() @ self.down[e]) * weights[rows, place].unsqueeze(1))
        return y.square().mean()


PUBLISHED: list[type[nn.Module]] = [MakeMoE, Mistral, Switch, Lists, Masks, Choices, Stacked]

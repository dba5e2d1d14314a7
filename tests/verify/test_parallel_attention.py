"""Attention over a split sequence or split heads: equal numbers on processes, messages in closed form."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import autopar
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.planning import form
from tests.support.threads import Threads


class Looking(nn.Module):
    """Attention of one head to one long sequence, between linear layers."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (one(x).unsqueeze(1) for one in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(found.squeeze(1)).square().sum()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name, causal", [("query_parallel_attention", True), ("ring_attention", True), ("ring_attention", False)]
)
def test_attention_over_a_split_sequence_gives_equal_numbers(threads: Threads, name: str, causal: bool, ranks: int) -> None:
    """Where memory is plenty the queries alone are split, or by the plain rule; where it is not, keys and values go round."""
    torch.manual_seed(0)
    length, width = 256, 8
    model, x, on = Looking(width, causal=causal), torch.randn(1, length, width), table.mesh((ranks,))
    least = planning.smallest(read_program(model, x), on)
    plan = autopar.plan(model, x, on, budget=None if name == "query_parallel_attention" else least)
    assert form(plan, "attention") == name
    part = 2 * length // ranks * width * 4  # of keys and values
    own = {("all_to_all", "forward", part): ranks - 1, ("all_to_all", "backward", part): 2 * ranks - 1}
    sent = Counter((c.kind, c.where, c.bytes) for c in planning.of(plan, ":scaled_dot_product_attention#0"))
    assert sent == (own if name == "ring_attention" else {})
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


class Grouped(nn.Module):
    """Attention of eight heads, four of which read the same head of keys and values."""

    heads, held, width = 8, 2, 16

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        inner, shared = self.heads * self.width, self.held * self.width
        self.query, self.key, self.value = nn.Linear(8, inner), nn.Linear(8, shared), nn.Linear(8, shared)
        self.out, self.causal = nn.Linear(inner, 8), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.query, self.key, self.value
        query, key, value = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in layers)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.usefixtures("free_copies")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_heads_of_keys_split_the_heads_that_read_them(threads: Threads, causal: bool, ranks: int) -> None:
    torch.manual_seed(0)
    length = 31  # prime: nothing but heads and features can be split
    model, x, on = Grouped(causal=causal), torch.randn(1, length, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    assert form(plan, "attention") == "grouped_query_attention"
    size = 4 * length * Grouped.held * Grouped.width  # of keys, which like values are made in parts, finer than heads
    sent = Counter((c.value, c.kind, c.where, c.bytes) for c in planning.of(plan, "key:linear#0", "value:linear#0"))
    pair = ("all_gather", "forward"), ("reduce_scatter", "backward")
    assert sent == {(f"{name}:linear#0", *how, size): 1 for name in ("key", "value") for how in pair}
    assert not planning.of(plan, "query:linear#0", ":scaled_dot_product_attention#0")
    report = verify(model, x, on, plan, Options(), threads)
    assert report.ok, report


class Masked(Looking):
    """The same to what a mask shows: one mask for all queries of a row, or for each its own, of truth values or addends."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        query, key, value = (one(x).unsqueeze(1) for one in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return self.out(found.squeeze(1)).square().sum()


def shown(queries: int, length: int, *, truth: bool) -> torch.Tensor:
    """A mask of one row that hides most of the keys, all of them of the first query in the last chunk."""
    seen = torch.rand(1, 1, queries, length) < 0.3
    seen[..., 0, length // 2 :] = False
    return seen if truth else torch.zeros(seen.shape).masked_fill(~seen, -9.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "queries, truth, tight",
    [
        (1, True, False),
        (1, True, True),
        (1, False, True),
        (256, True, False),
        (256, True, True),
        (256, False, False),
    ],
)
def test_attention_with_a_mask_over_a_split_sequence_gives_equal_numbers(
    threads: Threads, queries: int, truth: bool, tight: bool
) -> None:
    """Where memory is plenty keys and values are whole; where it is not they go round. The mask is never sent."""
    torch.manual_seed(0)
    length, width, ranks = 256, 8, 4
    model, on = Masked(width, causal=False), table.mesh((ranks,))
    sample = {"x": torch.randn(1, length, width), "mask": shown(queries, length, truth=truth)}
    plan = autopar.plan(model, sample, on, budget=planning.smallest(read_program(model, sample), on) if tight else None)
    assert form(plan, "attention") == ("ring_attention" if tight else "q")
    part = 2 * length // ranks * width * 4  # of keys and values
    own = {("all_to_all", "forward", part): ranks - 1, ("all_to_all", "backward", part): 2 * ranks - 1}
    sent = Counter((c.kind, c.where, c.bytes) for c in planning.of(plan, ":scaled_dot_product_attention#0", "mask"))
    assert sent == (own if tight else {})
    report = verify(model, sample, on, plan, Options(), threads)
    assert report.ok, report


class MultiQuery(nn.Module):
    """Four heads of queries that read one head of keys and values, which attention broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(8, 12), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(x).split((8, 2, 2), -1)
        query, key, value = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().sum()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_attention_that_broadcasts_keys_sends_what_its_plan_lists(threads: Threads, seed: int) -> None:
    model, x, on = MultiQuery(), torch.randn(8, 8, 8), table.mesh((4,))
    report = verify(model, x, on, autopar.testing.random_plan(model, x, on, seed=seed), Options(), threads)
    assert report.ok, report

"""Distributed forms in whole plans: equal numbers on processes, chosen where they are best, messages in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.planner import Options
from autopar.runtime.workers import WorkerPool
from autopar.verification import verify

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 6, 8, 24


class Words(nn.Module):
    """A table of words that is also the head, or has one of its own; a cross-entropy with ignored targets."""

    def __init__(self, vocabulary: int, width: int, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width, padding_idx=1)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.middle(self.table(words))))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def words(*, tied: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with a batch; half of the targets are ignored, all of them in the first row."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH))
    targets = targets.masked_fill(torch.rand(ROWS, LENGTH) < 0.4, -100)
    targets[0] = -100
    return Words(VOCABULARY, WIDTH, tied=tied), {"words": tokens, "targets": targets}


def form(plan: Plan, name: str) -> str:
    """In which form the one op of this name runs on the last axis."""
    (choice,) = (choice for op, choice in plan.choices.items() if name in op)
    return choice.rpartition(", ")[2].partition("/")[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_an_embedding_over_a_split_vocabulary_gives_equal_numbers(pool: WorkerPool, sizes: tuple[int, ...], tied: bool) -> None:
    model, sample = words(tied=tied)
    stored = ", ".join([*["I"] * (len(sizes) - 1), "S(0)"])
    plan = autopar.plan(model, sample, sizes, strategy="megatron", constraints={"table.weight": stored})
    assert form(plan, "embedding") == "vocabulary"
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), pool)
    assert report.ok, report

"""Random numbers in forward become one constant on both sides, a possible draw, and reach everything that depends on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Gamma, MixtureSameFamily, Normal, StudentT
from torch.nn import functional as F

import autopar
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.support import table
from tests.support.threads import Threads

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Draw = Callable[[torch.Tensor], torch.Tensor]
NUMBERS, COUNTS = "random numbers were 0.5 on both sides", "random counts were 1 on both sides"
CLASSES = "random classes were the first that have a weight on both sides"


class Drawing(nn.Module):
    """A layer, and what a function draws from its result."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.layer, self.table = draw, nn.Linear(8, 8), nn.Embedding(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        drawn = self.draw(y)
        return (y * (drawn if drawn.is_floating_point() else self.table(drawn))).sum()


def policy(y: torch.Tensor) -> torch.Tensor:
    """The scores of actions that a policy draws, of which some are not allowed."""
    actions = Categorical(logits=y.masked_fill(torch.arange(8, device=y.device) == 0, -torch.inf))
    return actions.log_prob(actions.sample())[:, None]  # type: ignore[no-untyped-call]


def mixture(y: torch.Tensor) -> torch.Tensor:
    return MixtureSameFamily(Categorical(logits=y), Normal(y, 1.0)).sample()[:, None]


def without(y: torch.Tensor) -> torch.Tensor:
    """Classes that are drawn once each."""
    return F.one_hot(torch.multinomial(y.softmax(-1), 3), 8).sum(1).float()


DRAWS: dict[str, tuple[Draw, str]] = {
    "a policy": (policy, CLASSES),
    "classes once each": (without, CLASSES),
    "classes of one row": (lambda y: torch.multinomial(torch.ones(8, device=y.device), 8, True), CLASSES),
    "poisson": (lambda y: torch.poisson(y.detach().exp()), COUNTS),
    "poisson in bfloat16": (lambda y: torch.poisson(y.detach().exp().bfloat16()).float(), COUNTS),
    "poisson with a gradient": (lambda y: torch.poisson(y.exp()), COUNTS),
    "geometric": (lambda y: torch.empty_like(y).geometric_(0.5), COUNTS),
    "geometric in whole numbers": (lambda y: torch.empty(8, dtype=torch.long, device=y.device).geometric_(0.5), COUNTS),
    "cauchy": (lambda y: torch.empty_like(y).cauchy_(), NUMBERS),
    "gamma": (lambda y: Gamma(y.exp(), 1.0).sample(), NUMBERS),
    "gamma with a gradient": (lambda y: Gamma(y.exp() + 1, y.exp()).rsample(), NUMBERS),
    "student": (lambda y: StudentT(3.0, y).rsample(), NUMBERS),
    "of two tensors": (lambda y: torch.normal(y.detach(), y.detach().exp()), NUMBERS),
    "of two tensors with a gradient": (lambda y: torch.normal(y, y.exp()), NUMBERS),
    "of two tensors that broadcast": (lambda y: torch.normal(y.mean(1, keepdim=True), y.mean(0).exp()), NUMBERS),
    "by probabilities with a gradient": (lambda y: torch.bernoulli(y.sigmoid()), NUMBERS),
    "by probabilities in place": (lambda y: torch.empty_like(y).bernoulli_(y.detach().sigmoid()), NUMBERS),
    "within a function in Python": (lambda y: F.gumbel_softmax(y, hard=True), NUMBERS),
}
INTEGERS: dict[str, Draw] = {
    "steps of a diffusion": lambda y: torch.randint(0, 7, (len(y),), device=y.device),
    "between": lambda y: torch.randint(3, high=7, size=(len(y),), device=y.device),
    "as another": lambda y: torch.randint_like(y.argmax(-1), 2, 7),
    "a subset of samples, as DINOv2 drops paths": lambda y: torch.randperm(len(y), device=y.device),
    "in place": lambda y: torch.zeros(len(y), dtype=torch.long, device=y.device).random_(2, 7),
    "in place below": lambda y: torch.zeros(len(y), dtype=torch.long, device=y.device).random_(7),
}
NOTES = DRAWS | {name: (draw, "random integers were the least of their range on both sides") for name, draw in INTEGERS.items()}


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("seed", [2, 3])
def test_what_is_drawn_is_a_constant_on_both_sides(threads: Threads, name: str, seed: int) -> None:
    """Under random plans, which split what is drawn, and send it."""
    (draw, note), on = NOTES[name], table.mesh((2, 2))
    model = Drawing(draw)
    report = verify(model, X, on, autopar.testing.random_plan(model, X, on, seed=seed), Options(), threads)
    assert report.ok, str(report)
    assert report.notes == (note,)


def test_a_mixture_draws_both_classes_and_numbers(threads: Threads) -> None:
    model, on = Drawing(mixture), table.mesh((4,))
    report = verify(model, X, on, autopar.plan(model, X, on, strategy="fsdp"), Options(), threads)
    assert report.ok, str(report)
    assert report.notes == (NUMBERS, CLASSES)


@pytest.mark.parametrize("name", ["a policy", "poisson with a gradient", "of two tensors", "within a function in Python"])
def test_a_plan_of_micro_batches_knows_what_stands_in_the_place_of_a_draw(threads: Threads, name: str) -> None:
    """Before, `the plan is damaged: there is no entry for ':full_like#0'`."""
    model, on = Drawing(NOTES[name][0]), table.mesh((2,))
    plan = autopar.plan(model, X, on, device="h100", strategy="ddp", microbatches=2)
    report = verify(model, X, on, plan, Options(), threads)
    assert report.ok, str(report)

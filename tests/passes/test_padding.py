"""A padded program computes the original program: values, and the gradients of unpadded parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.errors import LayoutError
from autopar.ir.training_step import TrainingStep
from autopar.parallelize import tensors_of
from autopar.passes.padding import padded, rooms
from autopar.planning.planner import read_program
from autopar.verify.execution import on_one_device, results

WORDS, WIDTH, HIDDEN = 101, 8, 30


class Words(nn.Module):
    """A table of words with a head, and what is made of the scores."""

    def __init__(self, end: Callable[..., torch.Tensor], *, tied: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.end = end
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(torch.tanh(self.table(words)))
        return self.end(scores.flatten(0, 1), words.flatten(), self.table.weight), scores


class Wide(nn.Module):
    """Two layers with a function between them, whose width nothing divides."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.rise, self.gate = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fall = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(self.between(self.rise(x)) * self.gate(x)).square().sum()


class Heads(nn.Module):
    """Attention of six heads of width 5, its projections in one layer or in three; grouped, two heads share keys and values."""

    def __init__(self, *, fused: bool = False, groups: int = 1, causal: bool = True, eps: float | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.widths, self.causal = [30, 30 // groups, 30 // groups], causal
        layers = [sum(self.widths)] if fused else self.widths
        self.into = nn.ModuleList(nn.Linear(WIDTH, width) for width in layers)
        self.out = nn.Linear(30, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [layer(x) for layer in self.into]
        parts = made if len(made) == 3 else made[0].split(self.widths[0], -1)
        query, key, value = (part.unflatten(-1, (-1, 5)).transpose(1, 2) for part in parts)
        if self.causal:
            query, key = query * 0.5 + query.flip(-1), key - key.flip(-1)
        if self.eps is not None:
            query = F.layer_norm(query, (5,), torch.ones(5, dtype=query.dtype), eps=self.eps)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=key.shape != query.shape)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().sum()


def entropy(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, words, ignore_index=7)


def summed(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((scores * 0.5).float().to(scores.dtype), words, reduction="sum")


def chosen(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(scores.log_softmax(-1), words)


def mixed(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (scores.softmax(-1) @ table).square().sum() + scores.logsumexp(-1).sum()


def smooth(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, words, label_smoothing=0.1)


def capped(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.tanh(scores), words)


def joined(alpha: float) -> Callable[..., torch.Tensor]:
    return lambda scores, words, table: F.cross_entropy(torch.add(scores, scores, alpha=alpha), words)


def averaged(scores: torch.Tensor, words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return scores.mean()


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (HIDDEN,))


def cubed(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x) ** 3


def rooted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 1.5


def raised(x: torch.Tensor) -> torch.Tensor:
    return x + F.hardtanh(x, 0.5, 1.5).sum(-1, keepdim=True)


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, 2, HIDDEN // 2).flip(1).reshape(x.shape)


def weighed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(HIDDEN)


def tokens() -> torch.Tensor:
    return torch.randint(WORDS, (4, 6))


def rows() -> torch.Tensor:
    return torch.randn(4, 6, WIDTH)


PADDED = {
    "a tied head": (lambda: Words(entropy), tokens, {"table.weight": (104, 8)}),
    "a head of its own": (lambda: Words(entropy, tied=False), tokens, {"table.weight": (104, 8), "head.weight": (104, 8)}),
    "a head with bias": (lambda: Words(entropy, bias=True), tokens, {"table.weight": (104, 8), "head.bias": (104,)}),
    "scaled and cast scores": (lambda: Words(summed), tokens, {"table.weight": (104, 8)}),
    "a sum of scores": (lambda: Words(joined(0.5)), tokens, {"table.weight": (104, 8)}),
    "logarithms": (lambda: Words(chosen), tokens, {"table.weight": (104, 8)}),
    "a mixture of words": (lambda: Words(mixed), tokens, {"table.weight": (104, 8)}),
    **{
        f"a width with {between.__name__}": (
            lambda between=between: Wide(between),
            rows,
            {"rise.weight": (32, 8), "rise.bias": (32,), "gate.weight": (32, 8), "fall.weight": (8, 32)},
        )
        for between in (F.gelu, F.silu, torch.sigmoid, torch.relu, cubed)
    },
}
ATTENTION = ":scaled_dot_product_attention#0"
SPLIT = {
    "three projections": (lambda: Heads(), (4, 8, 6, 5)),
    "one projection": (lambda: Heads(fused=True), (4, 8, 6, 5)),
    "normalised queries": (lambda: Heads(eps=1e-5), (4, 8, 6, 5)),
    "all see all": (lambda: Heads(causal=False), (4, 8, 6, 5)),
}
WHOLE = {
    "smoothed targets": (lambda: Words(smooth), tokens),
    "scores that are capped": (lambda: Words(capped), tokens),
    "a difference of scores": (lambda: Words(joined(-0.5)), tokens),
    "a power that has none of negative numbers": (lambda: Wide(lambda x: torch.sigmoid(x) ** 1.5), rows),
    "a power without a second derivative at zero": (lambda: Wide(rooted), rows),
    "a mean of the scores": (lambda: Words(averaged), tokens),
    "a norm over the width": (lambda: Wide(normed), rows),
    "a sum of what is not zero in padding": (lambda: Wide(raised), rows),
    "a dim that is cut in two": (lambda: Wide(flat), rows),
    "a constant of that width": (lambda: Wide(weighed), rows),
}


@pytest.mark.parametrize("make, sample, expected", PADDED.values(), ids=PADDED)
def test_what_is_true_of_a_padded_program_is_what_the_program_computes(
    make: Callable[[], nn.Module], sample: Callable[[], torch.Tensor], expected: dict[str, tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    model, given = make().double(), sample()
    given = given.double() if given.is_floating_point() else given
    captured = read_program(model, given)
    room = rooms(captured.program, (2, 4))
    assert room == expected
    step = padded(TrainingStep(program=captured.program), room)
    wide = step.program
    before, after = (
        results(on_one_device(each, captured.signature, tensors_of(model)), each.program, [given])
        for each in (TrainingStep(program=captured.program), step)
    )
    assert before.keys() == after.keys() >= {("gradient", name) for name in expected}
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-12, atol=1e-12)
    assert {name: wide.values[name].shape for name in expected} == expected
    assert {name: step.unpadded[name] for name in expected} == {name: captured.program.values[name].shape for name in expected}
    assert step.hash != captured.program.hash


@pytest.mark.parametrize("make, shape", SPLIT.values(), ids=SPLIT)
def test_heads_are_padded_as_parts_of_dims_and_parameters_stay_what_they_are(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model, given = make().double(), rows().double()
    captured = read_program(model, given)
    assert not rooms(captured.program, (4,))
    assert rooms(captured.program, (4,), parts=True) == {ATTENTION: shape}
    step = padded(TrainingStep(program=captured.program), {ATTENTION: shape})
    wide = step.program
    assert wide.values[ATTENTION].shape == shape
    assert wide.parameters == captured.program.parameters
    before, after = (
        results(on_one_device(each, captured.signature, tensors_of(model)), each.program, [given])
        for each in (TrainingStep(program=captured.program), step)
    )
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-12, atol=1e-12)


def test_heads_are_not_padded_where_zeros_have_no_norm() -> None:
    assert not rooms(read_program(Heads(eps=0.0), rows()).program, (4,), parts=True)


@pytest.mark.parametrize("make, sample", WHOLE.values(), ids=WHOLE)
def test_a_dim_of_which_something_sees_all_is_not_padded(
    make: Callable[[], nn.Module], sample: Callable[[], torch.Tensor]
) -> None:
    program = read_program(make(), sample()).program
    assert not rooms(program, (2, 4))
    name = next(name for name in ("table.weight", "rise.weight") if name in program.values)
    with pytest.raises(LayoutError, match="cannot be padded"):
        padded(TrainingStep(program=program), {name: (1000, WIDTH)})


def test_dims_along_which_matrices_are_multiplied_in_half_precision_are_padded_by_themselves() -> None:
    half, single = (read_program(Words(entropy).to(dtype), tokens()).program for dtype in (torch.bfloat16, torch.float32))
    assert rooms(half, (8,), multiplied=True) == rooms(half, (8,)) == {"table.weight": (104, WIDTH)}
    assert not rooms(single, (8,), multiplied=True)
    assert rooms(single, (8,))


def test_nothing_is_padded_by_much_or_where_the_mesh_divides() -> None:
    program = read_program(Words(entropy), tokens()).program
    assert not rooms(program, (1,))
    assert not rooms(program, (101,))
    assert not rooms(program, (80,))
    assert rooms(program, (80, 10)) == rooms(program, (10,)) == {"table.weight": (110, 10)}  # for one axis where not for both
    assert rooms(program, (3, 4)) == {"table.weight": (104, 8)}
    step = TrainingStep(program=program)
    assert padded(step, {}) is step

"""Distributed forms in whole plans: equal numbers on processes, chosen where they are best, messages in closed form."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.analysis.analysis import analyse
from autopar.explain.phrases import runs
from autopar.formulation.prices import Prices
from autopar.ir.mesh import Mesh
from autopar.plan.assignment_text import resolve
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import collectives_of, read_program
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.planning import NVLINK, mesh

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 6, 8, 24
WIDE, LONG, MANY = 2**11, 2**9, 2**12


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


def large() -> Plan:
    """The plan of a wide vocabulary, whose table is also the head, on four devices."""
    with torch.device("meta"):
        model = Words(2**15, WIDE, tied=True).bfloat16()
        tokens = torch.zeros(ROWS, LONG, dtype=torch.long)
        captured = read_program(model, {"words": tokens, "targets": tokens})
    return planning.plan(captured, mesh((4,), NVLINK))


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
    assert form(plan, "embedding") == "vocab_parallel_embedding"
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), pool)
    assert report.ok, report


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_a_cross_entropy_over_split_classes_gives_equal_numbers(pool: WorkerPool, sizes: tuple[int, ...]) -> None:
    model, sample = words(tied=True)
    on = table.mesh(sizes)
    plan = autopar.plan(model, sample, on, constraints={":reshape#0": ", ".join([*["*"] * (len(sizes) - 1), "S(1)"])})
    assert form(plan, "cross_entropy") == "vocab_parallel_cross_entropy"
    report = verify(model, sample, on, plan, Options(), pool)
    assert report.ok, report


def test_a_wide_vocabulary_is_split_and_no_scores_are_sent() -> None:
    plan, tokens = large(), ROWS * LONG
    assert plan.layouts["table.weight"] == "S(0)"
    said = {op: runs(words, plan.axes) for op, words in plan.breakdown.runs.items()}
    assert said["table:embedding#0"] == "vocabulary split over axis0"
    assert said["head:linear#0"] == "out-features split over axis0"
    assert said[":cross_entropy_loss#0"] == "classes split over axis0 with 2 all-reduces inside"
    sent = Counter((c.kind, c.where, c.bytes) for c in planning.of(plan, "table:embedding#0", "table.weight"))
    assert sent == {("all_reduce", "forward", 2 * tokens * WIDE): 1, ("all_reduce", "backward", 2 * tokens * WIDE): 1}
    sent = Counter((c.kind, c.where, c.bytes) for c in planning.of(plan, ":cross_entropy_loss#0"))
    assert sent == {("all_reduce", "forward", 4 * tokens): 1, ("all_reduce", "forward", 8 * tokens): 1}
    assert not planning.of(plan, "head:linear#0", ":reshape#0")


class Judged(nn.Module):
    """Scores of a linear layer and their cross-entropy, classes weighed and targets smoothed, or probabilities."""

    def __init__(self, width: int, reduction: str, smoothing: float, *, weighed: bool) -> None:
        super().__init__()
        self.scores, self.reduction, self.smoothing = nn.Linear(8, width), reduction, smoothing
        self.register_buffer("weight", torch.rand(width) + 0.1 if weighed else None)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        more = {"reduction": self.reduction, "label_smoothing": self.smoothing}
        return nn.functional.cross_entropy(self.scores(x), target, self.weight, **more).sum()


@pytest.mark.parametrize(
    "reduction, smoothing, weighed, hard, sums",
    [
        ("sum", 0.0, False, True, 2),
        ("mean", 0.1, False, True, 2),
        ("none", 0.1, True, True, 3),
        ("mean", 0.0, True, True, 3),
        ("mean", 0.1, True, False, 3),
    ],
)
def test_a_cross_entropy_with_weights_and_smoothing_is_split_over_its_classes(
    pool: WorkerPool, reduction: str, smoothing: float, weighed: bool, hard: bool, sums: int
) -> None:
    torch.manual_seed(0)
    rows, width, on = 8, 512, table.mesh((4,))
    target = torch.randint(width, (rows,)).masked_fill(torch.rand(rows) < 0.3, -100) if hard else torch.rand(rows, width)
    model, sample = Judged(width, reduction, smoothing, weighed=weighed), {"x": torch.randn(rows, 8), "target": target}
    plan = autopar.plan(model, sample, on)
    assert form(plan, "cross_entropy") == "vocab_parallel_cross_entropy"
    sent = Counter((c.kind, c.where, c.bytes) for c in planning.of(plan, ":cross_entropy_loss#0"))
    assert sent == {("all_reduce", "forward", 4 * rows): 1, ("all_reduce", "forward", 4 * sums * rows): 1}
    report = verify(model, sample, on, plan, Options(), pool)
    assert report.ok, report


class Likely(nn.Module):
    """Logarithms of probabilities, and how unlikely the targets are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(8, width)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.nll_loss(self.scores(x).log_softmax(-1), target, reduction="sum")


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_negative_log_likelihood_of_split_classes_sends_nothing_of_its_own(pool: WorkerPool, ranks: int) -> None:
    torch.manual_seed(0)
    rows, width, on = 8, 512, table.mesh((ranks,))
    sample = {"x": torch.randn(rows, 8), "target": torch.randint(width, (rows,)).masked_fill(torch.rand(rows) < 0.3, -100)}
    plan = autopar.plan(Likely(width), sample, on)
    assert form(plan, "log_softmax") == "log_softmax"
    assert form(plan, "nll_loss") == "vocab_parallel_nll_loss"
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if "nll_loss" in c.value)
    assert sent == {("all_reduce", "forward", 4): 1}  # the loss itself, in addends
    report = verify(Likely(width), sample, on, plan, Options(), pool)
    assert report.ok, report


def many() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model that knows many words, with a batch."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(MANY, (2, ROWS, LENGTH))
    return Words(MANY, WIDTH, tied=True), {"words": tokens, "targets": targets}


def live_bytes(plan: Plan) -> int:
    """The most memory of a step on one rank."""
    model, sample = many()
    parallel = autopar.parallelize(model, sample, (4,), plan=plan, device="cpu")
    with MemoryTracker([*parallel.parameters(), *sample.values()]) as live:
        parallel(**sample).backward()
    return live.peak().bytes


def test_no_rank_ever_has_all_scores(pool: WorkerPool) -> None:
    plan = autopar.plan(*many(), table.mesh((4,)), constraints={"head:linear#0": "S(2)", ":reshape#0": "S(1)"})
    assert form(plan, "cross_entropy") == "vocab_parallel_cross_entropy"
    for peak in pool.run(f"{__name__}:live_bytes", plan, ranks=4):
        assert isinstance(peak, int)
        assert peak < ROWS * LENGTH * MANY * torch.float32.itemsize


class Normal(nn.Module):
    """Two linear layers with a norm or a distribution between them."""

    def __init__(self, width: int, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(8, width), between, nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x))).square().sum()


class Over(nn.Module):
    """A norm over the last dims, which the features make up."""

    def __init__(self, norm: type[nn.LayerNorm] | type[nn.RMSNorm], *dims: int) -> None:
        super().__init__()
        self.dims, self.norm = dims, norm(dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x.unflatten(-1, self.dims)).flatten(1)
        return found


BETWEEN = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
    "softmax": lambda width: nn.Softmax(-1),
    "log_softmax": lambda width: nn.LogSoftmax(-1),
    "batch_norm": nn.BatchNorm1d,
}
# What each sends for so many rows of so many features on so many ranks, elements in the forward and in the backward.
SENT = {
    "layer_norm": lambda rows, width, ranks: ([("all_gather", 2 * rows * ranks)], [("all_reduce", 2 * rows)]),
    "rms_norm": lambda rows, width, ranks: ([("all_reduce", rows)], [("all_reduce", rows)]),
    "softmax": lambda rows, width, ranks: ([("all_reduce", rows)] * 2, [("all_reduce", rows)]),
    "log_softmax": lambda rows, width, ranks: ([("all_reduce", rows)] * 2, [("all_reduce", rows)]),
    "batch_norm": lambda rows, width, ranks: ([("all_gather", 2 * width * ranks)], [("all_reduce", 2 * width)]),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_norm_over_a_split_dim_gives_equal_numbers_and_sends_statistics_only(pool: WorkerPool, name: str, ranks: int) -> None:
    torch.manual_seed(0)
    rows, width = (64, 9) if name == "batch_norm" else (8, 256)  # channels that cannot be split
    model, x, on = Normal(width, BETWEEN[name](width)), torch.randn(rows, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    assert form(plan, name) == ("sync_batch_norm" if name == "batch_norm" else name)
    forward, backward = SENT[name](rows, width, ranks)
    sent = Counter((c.where, c.kind, c.bytes) for c in plan.collectives if c.value == f"between:{name}#0")
    assert sent == Counter(
        (where, kind, 4 * size) for where, found in (("forward", forward), ("backward", backward)) for kind, size in found
    )
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report
    assert ("buffer" in {row.what for row in report.rows}) == (name == "batch_norm")


@pytest.mark.parametrize("name, norm", [("layer_norm", nn.LayerNorm), ("rms_norm", nn.RMSNorm)])
def test_a_norm_over_several_dims_sends_what_one_over_one_does(
    pool: WorkerPool, name: str, norm: type[nn.LayerNorm] | type[nn.RMSNorm]
) -> None:
    torch.manual_seed(0)
    rows, on = 8, table.mesh((4,))
    model, x = Normal(256, Over(norm, 32, 8)), torch.randn(rows, 8)
    plan = autopar.plan(model, x, on)
    assert form(plan, name) == ("sync_batch_norm" if name == "batch_norm" else name)
    forward, backward = SENT[name](rows, 256, 4)
    sent = Counter((c.where, c.kind, c.bytes) for c in plan.collectives if c.value == f"between.norm:{name}#0")
    assert sent == Counter(
        (where, kind, 4 * size) for where, found in (("forward", forward), ("backward", backward)) for kind, size in found
    )
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report


class Planes(nn.Module):
    """A norm of channels over planes, between linear layers over the channels."""

    def __init__(self, channels: int, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, channels), norm, nn.Linear(channels, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x).mT).mT)).square().sum()


# A norm of so many channels and as long a plane, how many means there are, and the form of it that is best.
PLANES = {
    "group_norm": (lambda: nn.GroupNorm(3, 9), 9, 256, 3),
    "group_norm_channels": (lambda: nn.GroupNorm(1, 256), 256, 7, 1),
    "instance_norm": (lambda: nn.InstanceNorm1d(9, affine=True), 9, 256, 9),
    "sync_batch_norm_spatial": (lambda: nn.BatchNorm1d(9), 9, 256, 9),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PLANES)
def test_a_norm_of_split_planes_gives_equal_numbers_and_sends_statistics_only(pool: WorkerPool, name: str, ranks: int) -> None:
    torch.manual_seed(0)
    make, channels, length, means = PLANES[name]
    model, x, on = Planes(channels, make()), torch.randn(1, length, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    assert form(plan, "_norm#") == name
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if c.value.startswith("norm:"))
    assert sent == {("all_gather", "forward", 8 * means * ranks): 1, ("all_reduce", "backward", 8 * means): 1}
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report


class Called(nn.Module):
    """An operator over the last dim."""

    def __init__(self, name: str, *more: object) -> None:
        super().__init__()
        self.name, self.more = name, more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = getattr(torch.ops.aten, self.name)(x, -1, *self.more)
        return found


@pytest.mark.parametrize(
    "name, more, expected",
    [
        ("special_softmax", (), "softmax"),
        ("_softmax", (False,), "softmax"),
        ("_safe_softmax", (), "safe_softmax"),
        ("special_log_softmax", (), "log_softmax"),
        ("_log_softmax", (False,), "log_softmax"),
    ],
)
def test_a_distribution_over_a_split_dim_in_any_spelling_sends_the_same(
    pool: WorkerPool, name: str, more: tuple[object, ...], expected: str
) -> None:
    torch.manual_seed(0)
    model, x, on = Normal(256, Called(name, *more)), torch.randn(8, 8), table.mesh((4,))
    plan = autopar.plan(model, x, on)
    assert form(plan, "softmax") == expected
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if "softmax" in c.value)
    assert sent == {("all_reduce", "forward", 4 * 8): 2, ("all_reduce", "backward", 4 * 8): 1}
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_data_parallelism_shares_the_statistics_of_batch_norm_and_gathers_no_batch(strategy: str) -> None:
    plan = autopar.plan(Normal(32, nn.BatchNorm1d(32)), torch.randn(64, 8), table.mesh((4,)), strategy=strategy)
    assert form(plan, "batch_norm") == "sync_batch_norm"
    assert not planning.of(plan, "up:linear#0")


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


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "name, causal", [("query_parallel_attention", True), ("ring_attention", True), ("ring_attention", False)]
)
def test_attention_over_a_split_sequence_gives_equal_numbers(pool: WorkerPool, name: str, causal: bool, ranks: int) -> None:
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
    assert sent == (own if name == "ring" else {})
    report = verify(model, x, on, plan, Options(), pool)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_heads_of_keys_split_the_heads_that_read_them(pool: WorkerPool, causal: bool, ranks: int) -> None:
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
    report = verify(model, x, on, plan, Options(), pool)
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
    pool: WorkerPool, queries: int, truth: bool, tight: bool
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
    report = verify(model, sample, on, plan, Options(), pool)
    assert report.ok, report


class Told(nn.Module):
    """A recurrent network over a sequence, one row of it, and a linear layer."""

    def __init__(self, made: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.cells, self.down = made(8, width, num_layers=2, batch_first=True), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.cells(x)[0]).square().sum()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("made, gates", [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_the_gates_of_a_recurrent_network_are_split(pool: WorkerPool, made: type[nn.RNNBase], gates: int, ranks: int) -> None:
    """Every step gathers its gates, one after the other; the backward adds up the states' gradients."""
    torch.manual_seed(0)
    length, width, layers = 5, 128, 2
    model, x, on = Told(made, width), torch.randn(1, length, 8), table.mesh((ranks,))
    plan = autopar.plan(model, x, on)
    name = "rnn_tanh" if made is nn.RNN else made.__name__.lower()
    assert form(plan, f":{name}#") == f"gate_parallel_{name}"
    stored = {plan.layouts[f"cells.{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh") for layer in range(layers)}
    assert stored == {"S(0)"}
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if c.value.startswith(f"cells:{name}#"))
    assert sent == {
        ("all_gather", "forward", 4 * length * gates * width): layers,
        ("all_gather", "forward", 4 * gates * width): layers * length,
        ("all_reduce", "backward", 4 * width): layers * (length - 1),
        ("all_reduce", "backward", 4 * length * width): layers,  # of the last one the linear layer's
    }
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report


class Scan(nn.Module):
    """A selective scan, as Mamba has it: step by step, or at once by sums of logarithms; every channel for itself."""

    def __init__(self, channels: int, states: int, *, stepwise: bool) -> None:
        super().__init__()
        self.stepwise = stepwise
        self.inwards, self.step, self.outwards = nn.Linear(8, channels), nn.Linear(8, channels), nn.Linear(channels, 8)
        self.write, self.read = nn.Linear(8, states), nn.Linear(8, states)
        self.decay = nn.Parameter(torch.rand(channels, states))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, value = nn.functional.softplus(self.step(x)).unsqueeze(-1), self.inwards(x).unsqueeze(-1)
        logs = -step * self.decay.exp()  # batch, length, channels, states
        given, read = step * value * self.write(x).unsqueeze(2), self.read(x).unsqueeze(2)
        if self.stepwise:
            state, states = torch.zeros_like(given[:, 0]), []
            for t in range(x.shape[1]):
                state = state * logs[:, t].exp() + given[:, t]
                states.append(state)
            held = torch.stack(states, 1)
        else:
            total = logs.cumsum(1)
            held = total.exp() * (given * (-total).exp()).cumsum(1)
        return self.outwards((held * read).sum(-1)).square().sum()


@pytest.mark.parametrize("batch, split", [(1, "channels"), (8, "batch")])
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_selective_scan_is_split_by_its_factors_alone(pool: WorkerPool, stepwise: bool, batch: int, split: str) -> None:
    """Over channels, or over the batch: nothing is sent inside the scan, which no form of its own knows."""
    torch.manual_seed(0)
    channels = 64 if split == "channels" else 9
    model, x, on = Scan(channels, 3, stepwise=stepwise), torch.randn(batch, 5, 8), table.mesh((4,))
    plan = autopar.plan(model, x, on)
    inside = [op for op in plan.choices if op[1:].partition("#")[0] in ("cumsum", "exp", "mul", "stack", "add")]
    _, *scan = inside  # the first is of the parameter alone
    assert {plan.layouts[op] for op in scan} <= {f"S({dim})" for dim in ((1, 2) if split == "channels" else (0,))}
    assert not planning.of(plan, *inside)
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report


def mixture() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """One layer of attention and of eight experts, two for each token, which choose unevenly; with a batch."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(64, (8, 16))
    return transformers.MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("ranks", [4, 8])
def test_experts_are_split_and_tokens_sent_to_them(pool: WorkerPool, ranks: int) -> None:
    """Two all-to-alls of tokens, there and back; what random choices set astray goes to the neighbours; no weight is sent."""
    (model, sample), on = mixture(), table.mesh((ranks,))
    plan = autopar.plan(model, sample, on)
    place = "model.layers.0.mlp.experts"
    assert [plan.layouts[f"{place}.{name}_proj"] for name in ("gate_up", "down")] == ["S(0)", "S(0)"]
    assert not planning.of(plan, f"{place}.gate_up_proj", f"{place}.down_proj", f"{place}:transpose#0", f"{place}:transpose#1")
    rows, width, inner = 2 * 8 * 16, 16, 32
    astray = math.ceil(math.sqrt(rows / (2 * math.pi)))
    sizes = {
        "index#0": ([rows // ranks * width],) * 2,
        "index#2": ([rows // ranks * width],) * 2,
        "grouped_mm_fallback#0": (own := [astray * width, astray * 2 * inner], [*own, own[0]]),
        "grouped_mm_fallback#1": (own := [astray * inner, astray * width], [*own, own[0]]),
    }
    for name, passes in sizes.items():
        sent = Counter((c.where, c.kind, c.bytes) for c in planning.of(plan, f"{place}:{name}"))
        expected = zip(("forward", "backward"), passes, strict=True)
        assert sent == Counter((where, "all_to_all", 4 * size) for where, found in expected for size in found)
    report = verify(model, sample, on, plan, Options(), pool)
    assert report.ok, report


@pytest.mark.parametrize("name", ["layer_norm", "softmax"])
def test_what_sends_inside_can_be_made_again_and_sends_again(pool: WorkerPool, name: str) -> None:
    torch.manual_seed(0)
    model, x, on = Normal(256, BETWEEN[name](256)), torch.randn(8, 8), table.mesh((2,))
    plan = autopar.plan(model, x, on)
    assert form(plan, name) == name
    plan = replace(plan, recompute={f"between:{name}#0": ("run",)})
    program = read_program(model, x).program
    analysis = analyse(program, on)
    sent = Counter(
        c.where for c in collectives_of(analysis, resolve(plan, program, analysis.fits), Prices(mesh=on)) if name in c.value
    )
    forward, backward = SENT[name](8, 256, 2)
    assert sent == {"forward": len(forward), "backward": len(forward) + len(backward)}
    report = verify(model, x, on, plan, Options(), pool)
    assert report.ok, report


def test_a_constraint_that_leaves_few_routes_under_a_strategy_is_met(pool: WorkerPool) -> None:
    """The relaxation is then a mixture, which rounded has no routes at all."""
    model, on = Words(24, 8, tied=True), table.mesh((2,))
    words, targets = torch.randint(24, (2, 4, 6))
    batch = {"words": words, "targets": targets}
    plan = autopar.plan(model, batch, on, strategy="megatron", constraints={":reshape#0": "S(1)"})
    assert plan.layouts[":reshape#0"] == "S(1)"
    report = verify(model, batch, on, plan, Options(), pool)
    assert report.ok, str(report)

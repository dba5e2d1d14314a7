"""Embeddings and losses over a split vocabulary: equal numbers, chosen where they are best, messages in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.explain.phrases import runs
from autopar.ir.mesh import Mesh
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import read_program
from autopar.runtime.losses import vocab_parallel_cross_entropy, vocab_parallel_nll_loss
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.runtime.parallel_ops import vocab_parallel_embedding
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Axis, Context
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.planning import NVLINK, form, mesh
from tests.support.threads import Threads

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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_an_embedding_over_a_split_vocabulary_gives_equal_numbers(threads: Threads, sizes: tuple[int, ...], tied: bool) -> None:
    model, sample = words(tied=tied)
    stored = ", ".join([*["I"] * (len(sizes) - 1), "S(0)"])
    plan = autopar.plan(model, sample, sizes, strategy="megatron", constraints={"table.weight": stored})
    assert form(plan, "embedding") == "vocab_parallel_embedding"
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), threads)
    assert report.ok, report


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_a_cross_entropy_over_split_classes_gives_equal_numbers(threads: Threads, sizes: tuple[int, ...]) -> None:
    model, sample = words(tied=True)
    on = table.mesh(sizes)
    plan = autopar.plan(model, sample, on, constraints={":reshape#0": ", ".join([*["*"] * (len(sizes) - 1), "S(1)"])})
    assert form(plan, "cross_entropy") == "vocab_parallel_cross_entropy"
    report = verify(model, sample, on, plan, Options(), threads)
    assert report.ok, report


def test_a_wide_vocabulary_is_split_and_no_scores_are_sent() -> None:
    plan, tokens = large(), ROWS * LONG
    assert plan.layouts["table.weight"] == "S(0)"
    said = {op: runs(words, plan.axes) for op, words in plan.breakdown.runs.items()}
    assert said["table:embedding#0"] == "vocabulary split over axis0"
    assert said["head:linear#0"] == "out-features split over axis0"
    assert said[":cross_entropy_loss#0"] == "classes split over axis0 with 2 all-reduces inside"
    sent = planning.of(plan, "table:embedding#0", "table.weight")
    assert {c.bytes for c in sent} == {2 * tokens * WIDE}, "embedded rows, added up in one message or scattered and gathered"
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
    threads: Threads, reduction: str, smoothing: float, weighed: bool, hard: bool, sums: int
) -> None:
    torch.manual_seed(0)
    rows, width, on = 8, 512, table.mesh((4,))
    target = torch.randint(width, (rows,)).masked_fill(torch.rand(rows) < 0.3, -100) if hard else torch.rand(rows, width)
    model, sample = Judged(width, reduction, smoothing, weighed=weighed), {"x": torch.randn(rows, 8), "target": target}
    plan = autopar.plan(model, sample, on)
    assert form(plan, "cross_entropy") == "vocab_parallel_cross_entropy"
    sent = Counter((c.kind, c.where, c.bytes) for c in planning.of(plan, ":cross_entropy_loss#0"))
    assert sent == {("all_reduce", "forward", 4 * rows): 1, ("all_reduce", "forward", 4 * sums * rows): 1}
    report = verify(model, sample, on, plan, Options(), threads)
    assert report.ok, report


class Forbidding(Words):
    """Scores of some words are minus infinity: those that must not be said, of which one part of the vocabulary is full."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH, tied=True)
        self.register_buffer("forbidden", torch.arange(VOCABULARY) < VOCABULARY // 2)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = self.head(torch.tanh(self.middle(self.table(words)))).masked_fill(self.forbidden, -torch.inf)
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
def test_words_that_are_forbidden_give_equal_numbers_where_classes_are_split(threads: Threads, strategy: str) -> None:
    torch.manual_seed(0)
    words, targets = torch.randint(VOCABULARY, (ROWS, LENGTH)), torch.randint(VOCABULARY // 2, VOCABULARY, (ROWS, LENGTH))
    model, sample, on = Forbidding(), {"words": words, "targets": targets}, table.mesh((2,))
    plan = autopar.plan(model, sample, on, strategy=strategy, constraints={":reshape#0": "S(1)"})
    assert form(plan, "cross_entropy") == "vocab_parallel_cross_entropy"
    report = verify(model, sample, on, plan, Options(), threads)
    assert report.ok, report


class Likely(nn.Module):
    """Logarithms of probabilities, and how unlikely the targets are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(8, width)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.nll_loss(self.scores(x).log_softmax(-1), target, reduction="sum")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_negative_log_likelihood_of_split_classes_sends_nothing_of_its_own(threads: Threads, ranks: int) -> None:
    torch.manual_seed(0)
    rows, width, on = 8, 512, table.mesh((ranks,))
    sample = {"x": torch.randn(rows, 8), "target": torch.randint(width, (rows,)).masked_fill(torch.rand(rows) < 0.3, -100)}
    plan = autopar.plan(Likely(width), sample, on)
    assert form(plan, "log_softmax") == "log_softmax"
    assert form(plan, "nll_loss") == "vocab_parallel_nll_loss"
    sent = Counter((c.kind, c.where, c.bytes) for c in plan.collectives if "nll_loss" in c.value)
    assert sent == {("all_reduce", "forward", 4): 1}  # the loss itself, in addends
    report = verify(Likely(width), sample, on, plan, Options(), threads)
    assert report.ok, report


WRONG = {
    "rows": lambda axis, index: vocab_parallel_embedding(axis, torch.randn(VOCABULARY // axis.size, 3), index),
    "log-probabilities": lambda axis, index: vocab_parallel_nll_loss(axis, torch.randn(2, VOCABULARY // axis.size), index),
    "scores": lambda axis, index: vocab_parallel_cross_entropy(axis, torch.randn(2, VOCABULARY // axis.size), index),
}


@pytest.mark.parametrize("wrong", [VOCABULARY, VOCABULARY + 50, -1])
@pytest.mark.parametrize("read", WRONG.values(), ids=WRONG)
def test_an_index_that_no_rank_has_is_an_error_on_every_rank(
    threads: Threads, read: Callable[[Axis, torch.Tensor], torch.Tensor], wrong: int
) -> None:
    def tried(context: Context) -> str:
        try:
            read(context.axes[0], torch.tensor([3, wrong]))
        except (IndexError, RuntimeError) as error:
            return str(error)
        return "nothing is raised"

    assert all("out of" in message for message in threads.threads.run(Mesh.of((2,)), tried))


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


def test_a_constraint_that_leaves_few_routes_under_a_strategy_is_met(threads: Threads) -> None:
    """The relaxation is then a mixture, which rounded has no routes at all."""
    model, on = Words(24, 8, tied=True), table.mesh((2,))
    words, targets = torch.randint(24, (2, 4, 6))
    batch = {"words": words, "targets": targets}
    plan = autopar.plan(model, batch, on, strategy="megatron", constraints={":reshape#0": "S(1)"})
    assert plan.layouts[":reshape#0"] == "S(1)"
    report = verify(model, batch, on, plan, Options(), threads)
    assert report.ok, str(report)

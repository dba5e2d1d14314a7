"""Mixtures of experts: each rank, and each micro-batch, sorts its own tokens; the numbers equal those of a global sort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConstraintError, PlanError
from autopar.ir.training_step import TrainingStep
from autopar.passes.microbatches import microbatches
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import read_plan
from autopar.planning.planner import read_program
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.threads import Threads
from tests.verify.test_parallel_recurrence_and_experts import mixture

EXPERTS, TWO, WIDTH = 4, 2, 8
grouped_mm = torch.ops.autopar.grouped_mm

Routed = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]  # tokens through their experts: x, shares, numbers of experts


def own(plan: Plan) -> set[str]:
    """The ops that run on own rows, without numbers."""
    return {op.rpartition(":")[2].partition("#")[0] for op, form in plan.choices.items() if "own rows" in form}


@pytest.mark.usefixtures("free_copies")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 2)])
def test_each_rank_sorts_its_own_tokens(threads: Threads, sizes: tuple[int, ...]) -> None:
    """As under torch's DDP: nothing is sent but the gradients of weights, and the loss."""
    (model, sample), on = mixture(), table.mesh(sizes)
    plan = autopar.plan(model, sample, on, strategy="ddp")
    assert {"sort", "index", "histc", "cumsum", "grouped_mm_fallback", "index_put"} <= own(plan)
    assert Counter((sent.kind, sent.where) for sent in plan.collectives) == {
        ("all_reduce", "backward"): len(sizes), ("all_reduce", "forward"): 2 * len(sizes)
    }  # fmt: skip
    report = verify(model, sample, on, plan, Options(strategy="ddp"), threads)
    assert report.ok, report


class Experts(nn.Module):
    """Two of four experts for each token, and a loss."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.routed, self.gate = routed, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 3 * WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, 3 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.gate(x).softmax(-1).topk(TWO)
        return self.routed(self, x, shares.flatten(), ids.flatten()).square().sum()

    def products(self, rows: Tensor, ends: Tensor, keys: Tensor) -> Tensor:
        """Through the two matrices of each row's expert."""
        inner = nn.functional.gelu(grouped_mm(rows, self.up, ends) + self.bias[keys])
        return grouped_mm(inner, self.down, ends)


def ends_of(keys: Tensor, experts: int = EXPERTS) -> Tensor:
    return torch.histc(keys.float(), experts, 0, experts - 1).to(torch.int32).cumsum(0, dtype=torch.int32)


def added_at_tokens(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Counted before they are sorted, added up where they came from."""
    ends = ends_of(ids)
    order = ids.argsort(stable=True)
    tokens = order // TWO
    found = self.products(x.index_select(0, tokens), ends, ids[order]) * shares[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, found)


def sorted_twice(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Back by the permutation of the permutation."""
    keys, order = ids.sort()
    found = self.products(x[torch.div(order, TWO, rounding_mode="floor")], ends_of(keys), keys)
    return (found[order.argsort()] * shares.unsqueeze(1)).unflatten(0, (-1, TWO)).sum(1)


def added_up(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Not taken back at all: the sum over rows does not depend on their order."""
    keys, order = ids.sort()
    return (self.products(x[order // TWO], ends_of(keys), keys) * shares[order].unsqueeze(1)).sum(0)


def verified(routed: Routed, ranks: int, threads: Threads) -> Plan:
    """The plan of such experts under data parallelism, which has the numbers of one process."""
    torch.manual_seed(0)
    model, x, on = Experts(routed), torch.randn(16, WIDTH), table.mesh((ranks,))
    plan = autopar.plan(model, x, on, strategy="ddp")
    report = verify(model, x, on, plan, Options(strategy="ddp"), threads)
    assert report.ok, report
    return plan


@pytest.mark.parametrize("routed", [added_at_tokens, sorted_twice, added_up])
def test_however_rows_are_counted_and_taken_back(threads: Threads, routed: Routed) -> None:
    plan = verified(routed, 4, threads)
    assert {"grouped_mm", "gelu", "index"} <= own(plan)
    assert not planning.of(plan, *(name for name in plan.choices if not name.startswith("gate") and "sum" not in name))


def shifted(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Keys from -1 on: those of -1 are not counted, so that ends fall into groups of other keys."""
    return sorted_twice(self, x, shares, ids - 1)


def other_ends(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """The ends of the groups of other keys."""
    keys, order = ids.sort()
    other = (EXPERTS - 1 - ids).sort()[0]
    return self.products(x[order // TWO], ends_of(other), keys)[order.argsort()]


def falling(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Keys sorted the other way than they are counted."""
    keys, order = ids.sort(descending=True)
    return self.products(x[order // TWO], ends_of(keys), keys)[order.argsort()]


def mixed(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Rows in the order of one sort beside those of another."""
    keys, order = ids.sort()
    found = self.products(x[order // TWO], ends_of(keys), keys)
    return found * shares[ids.flip(0).argsort()].unsqueeze(1)


def reversed_rows(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """The first row times what the last one asks for."""
    keys, order = ids.sort()
    return self.products(x[order // TWO].flip(0), ends_of(keys), keys)[order.argsort()]


def places_as_numbers(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Where rows were among those of all ranks, which no rank knows alone."""
    keys, order = ids.sort()
    return self.products(x[order // TWO], ends_of(keys), keys) * order.unsqueeze(1)


def too_few_bins(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Two keys counted as one."""
    keys, order = ids.sort()
    counts = torch.histc(keys.float(), EXPERTS, 0, EXPERTS)
    return self.products(x[order // TWO], counts.to(torch.int32).cumsum(0, dtype=torch.int32), keys)[order.argsort()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("routed", [shifted, other_ends, falling, mixed, reversed_rows, places_as_numbers, too_few_bins])
def test_what_depends_on_the_rows_of_other_ranks_stays_together(threads: Threads, routed: Routed) -> None:
    assert not own(verified(routed, 2, threads)) & {"grouped_mm", "gelu"}


class Chosen(Experts):
    """Whose experts the samples choose themselves, with what else was found of them."""

    def __init__(self, found: str) -> None:
        super().__init__(sorted_twice)
        self.found = found

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        shares, ids = (x[:, :EXPERTS] if self.found == "hoisted" else self.gate(x)).softmax(-1).topk(TWO)
        keys, order = ids.flatten().sort()
        loss = sorted_twice(self, x, shares.flatten(), ids.flatten()).square().sum()
        return {"loss": loss, "found": ends_of(keys) if self.found == "ends" else order}


def test_each_micro_batch_sorts_its_own_tokens(threads: Threads) -> None:
    """In stages, too."""
    (model, sample), on = mixture(), table.mesh((2,))
    options = Options(strategy="ddp", microbatches=2)
    assert verify(model, sample, on, None, options, threads).ok
    assert verify(model, sample, on, None, Options(pipeline="axis0", microbatches=4), threads).ok
    chosen, x = Chosen("hoisted"), torch.randn(16, WIDTH)
    report = verify(chosen, x, on, None, options, threads)
    assert report.ok, report


@pytest.mark.parametrize("found", ["order", "ends"])
def test_what_a_micro_batch_finds_of_its_own_order_is_no_part_of_a_result(found: str) -> None:
    program = read_program(Chosen(found), torch.randn(16, WIDTH)).program
    with pytest.raises(ConstraintError, match="the samples of found are not in the order of the batch"):
        microbatches(program, 2)


@pytest.mark.parametrize("routed", [shifted, other_ends, falling, mixed, reversed_rows, places_as_numbers, too_few_bins])
def test_what_depends_on_the_rows_of_other_micro_batches_is_refused(routed: Routed) -> None:
    program = read_program(Experts(routed), torch.randn(16, WIDTH)).program
    with pytest.raises(ConstraintError, match=r"(mixes|adds up over) the samples of the batch"):
        microbatches(program, 2)


class Several(Experts):
    """Several ways through the same experts, whose operators are the same up to what they read."""

    def __init__(self, *ways: Routed) -> None:
        super().__init__(ways[0])
        self.ways = ways

    def forward(self, x: Tensor) -> Tensor:
        shares, ids = self.gate(x).softmax(-1).topk(TWO)
        found = [way(self, x, shares.flatten(), ids.flatten()).square().sum() for way in self.ways]
        return torch.stack(found).sum()


def taken_back(self: Experts, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    """Rows in their old order, as those of several wrong ways."""
    keys, order = ids.sort()
    return self.products(x[order // TWO], ends_of(keys), keys)[order.argsort()]


@pytest.mark.parametrize("routed", [shifted, other_ends])
def test_what_is_refused_alone_is_refused_beside_equal_operators_that_run(routed: Routed) -> None:
    def made(*ways: Routed) -> TrainingStep:
        return microbatches(read_program(Several(*ways), torch.randn(16, WIDTH)).program, 2)

    assert made(sorted_twice, taken_back, sorted_twice).microbatches == 2
    for ways in ((sorted_twice, taken_back, routed), (routed, taken_back, sorted_twice)):
        with pytest.raises(ConstraintError, match=r"(mixes|adds up over) the samples of the batch"):
            made(*ways)


ROWS = "model.layers.0.mlp.experts:mul#1"
DAMAGE: dict[str, dict[str, dict[str, object]]] = {
    "equal parts": {"choices": {ROWS: "own rows/3, own rows/6"}},
    "is I or S on every axis": {"layouts": {"lm_head.weight": "O(0), I"}},
    "not a conversion": {"routes": {ROWS: ("O(0), O(0) -> O(0), S(0)",)}},
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_plan_with_own_rows_is_read_back_and_refused_where_it_is_damaged(why: str) -> None:
    (model, sample), on = mixture(), table.mesh((2, 2))
    plan = autopar.plan(model, sample, on, strategy="ddp")
    program = read_program(model, sample).program
    assert plan.choices[ROWS] == "own rows/2, own rows/4"
    assert plan.layouts[ROWS] == "O(0), O(0)"
    assert Plan.from_json(plan.to_json()) == plan
    assert read_plan(plan, program, plan.mesh).assignment.ops[ROWS].forms == (("O", 0, 2), ("O", 0, 4))
    for field, entries in DAMAGE[why].items():
        changed = replace(plan, **{field: {**getattr(plan, field), **entries}})
        with pytest.raises(PlanError, match=why):
            read_plan(changed, program, plan.mesh)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_have_own_rows_on_some_axes_and_other_forms_on_others(threads: Threads, seed: int) -> None:
    (model, sample), on = mixture(), table.mesh((2, 2))
    plan = autopar.testing.random_plan(model, sample, on, seed=seed)
    report = verify(model, sample, on, plan, Options(), threads)
    assert report.ok, report


def test_at_another_batch_each_rank_sorts_its_own(threads: Threads) -> None:
    (model, sample), on = mixture(), table.mesh((2,))
    plan = autopar.plan(model, sample, on, strategy="ddp", dynamic={"batch": 0})
    assert "grouped_mm_fallback" in own(plan)
    longer = {name: torch.cat([tokens, tokens.flip(0)]) for name, tokens in sample.items()}
    report = verify(model, longer, on, plan, Options(), threads)
    assert report.ok, report

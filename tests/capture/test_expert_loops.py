"""Mixtures of experts written as loops over experts: captured if a graph without branches computes the same."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.capture import capture, empty_selections
from autopar.errors import CaptureError
from autopar.passes.precision import mixed
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.capture import interpreter
from tests.capture.expert_models import EXPERTS, PICKED, PUBLISHED, WIDTH, MakeMoE, Mistral, Stacked
from tests.support import table
from tests.support.threads import Threads

TOKENS = torch.randn(4, 4, WIDTH, generator=torch.Generator().manual_seed(0))
ALIKE = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(1)).expand(
    4, 4, WIDTH
)  # half of the experts do nothing

Tensor = torch.Tensor
Mix = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """A router, and what is made of tokens (16, 6), with the weights (16, 2) of the experts that each has chosen."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.norm, self.mix = nn.Linear(WIDTH, EXPERTS), nn.LayerNorm(WIDTH), mix
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = F.softmax(self.router(tokens), -1).topk(PICKED, -1)
        return self.mix(self, tokens, weights / weights.sum(-1, keepdim=True), chosen).reshape(x.shape).square().mean()


def mixtral(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As transformers 4.36 had it."""
    y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        k, rows = torch.where(mask[e])
        current = x[None, rows].reshape(-1, WIDTH)
        y.index_add_(0, rows, m.experts[e](current) * w[rows, k, None])
    return y


def hit(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As transformers 4.55 had it: those experts that any token chose."""
    y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        k, rows = torch.where(mask[e].squeeze(0))
        y.index_add_(0, rows, m.experts[int(e)](x[rows]) * w[rows, k, None])
    return y


def deepseek(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """As DeepSeek-V3's own inference code has it."""
    y, counts = torch.zeros_like(x), torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        rows, k = torch.where(chosen == e)
        y[rows] += m.experts[e](x[rows]) * w[rows, k, None]
    return y


def numel(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, k = torch.where(chosen == e)
        if rows.numel() == 0:
            continue
        y = y.index_add(0, rows, F.dropout(m.experts[e](x[rows]), 0.0) * w[rows, k, None])
    return y


def size(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, k = (chosen == e).nonzero(as_tuple=True)
        if rows.shape[0] > 0:
            y[rows] = y[rows] + m.norm(m.experts[e](x[rows])) * w[rows, k].unsqueeze(-1)
    return y


def length(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.nonzero((chosen == e).any(-1)).squeeze(-1)
        if not len(rows):
            continue
        given = (w * (chosen == e)).sum(-1)
        y.index_add_(0, rows, m.experts[e](x.index_select(0, rows)) * given[rows].unsqueeze(-1))
    return y


def any_of_them(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            y[mask] += m.experts[e](x[mask]) * (w * (chosen == e)).sum(-1)[mask].unsqueeze(-1)
    return y


def counts_of_one_hot(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e, count in enumerate(F.one_hot(chosen, EXPERTS).sum((0, 1)).tolist()):
        if not count:
            continue
        rows, k = torch.where(chosen == e)
        y.index_add_(0, rows, m.experts[e](x[rows]) * w[rows, k, None])
    return y


def unique(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in chosen.unique():
        rows, k = torch.where(chosen == e)
        y.index_add_(0, rows, m.experts[int(e)](x[rows]) * w[rows, k, None])
    return y


def one_after_the_other(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Rows of tokens and of the places among their choices, written in place before they go back."""
    y = torch.zeros(len(x), PICKED, WIDTH, device=x.device, dtype=x.dtype)
    for e in range(EXPERTS):
        rows, k = torch.where(chosen == e)
        made = m.experts[e](x[rows])
        made *= w[rows, k, None]
        y[rows, k] = made
    return y.sum(1)


def returned_early(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    mask, y = chosen[:, 0] == 0, m.norm(x)
    if not mask.any():
        return y
    y[mask] = m.experts[0](y[mask]) * w[mask, :1]
    return y


def by_mask(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Weights by the mask itself, whose first dim is the shorter one."""
    y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0).bool()
    for e in range(EXPERTS):
        picked = mask[e]
        _, rows = torch.where(picked)
        y.index_add_(0, rows, m.experts[e](x[rows]) * w.t()[picked].unsqueeze(-1))
    return y


LOOPS = [
    by_mask,
    mixtral,
    hit,
    deepseek,
    numel,
    size,
    length,
    any_of_them,
    counts_of_one_hot,
    unique,
    one_after_the_other,
    returned_early,
]


@pytest.mark.parametrize("mix", LOOPS)
def test_a_loop_over_experts_is_captured(mix: Mix) -> None:
    """Whether tokens chose all experts or some, whichever are in the sample."""
    model = Experts(mix)
    for sample, others in ((TOKENS, ALIKE), (ALIKE, TOKENS)):
        interpreter.check(model, sample, at=(others,))


def check(threads: Threads, model: nn.Module, plan: str | int) -> None:
    """A plan on four devices has the numbers of the model."""
    on = table.mesh((2, 2))
    if isinstance(plan, int):
        made = autopar.testing.random_plan(model, TOKENS, on, seed=plan)
    else:
        made = autopar.plan(model, TOKENS, on, strategy=plan)
    report = verify(model, TOKENS, on, made, Options(), threads)
    assert report.ok, str(report)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "megatron", 0, 1])
@pytest.mark.parametrize("mix", LOOPS)
def test_a_loop_over_experts_has_equal_numbers(threads: Threads, mix: Mix, plan: str | int) -> None:
    check(threads, Experts(mix), plan)


GROUPED = [*(functools.partial(Experts, mix) for mix in LOOPS if mix is not returned_early), *PUBLISHED]


def each_row_once(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """The operations of a product of groups, into which torch does not look: (t, k) times (e, k, n) or (k, n)."""
    return 2 * a[-2] * a[-1] * b[-1]


@pytest.mark.parametrize("made", GROUPED)
def test_an_expert_computes_with_the_tokens_that_chose_it_alone(made: Callable[[], nn.Module]) -> None:
    """A step has the operations of the user's own module, as torch counts them."""
    own, parallel = made(), autopar.parallelize(made(), TOKENS, (1,), device="h100")
    counted = []
    for module in (own, parallel):
        with FlopCounterMode(display=False, custom_mapping={torch.ops.autopar.grouped_mm: each_row_once}) as counter:
            module(TOKENS).backward()
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


@pytest.mark.parametrize("made", PUBLISHED)
def test_a_loop_of_published_code_is_captured(made: type[nn.Module]) -> None:
    for sample, others in ((TOKENS, ALIKE), (ALIKE, TOKENS)):
        interpreter.check(made(), sample.contiguous(), at=(others.contiguous(),))


@pytest.mark.parametrize("made", [MakeMoE, Mistral, Stacked])
def test_one_token_is_no_special_case(made: type[nn.Module]) -> None:
    for x in TOKENS[0, :3].unbind():
        interpreter.check(made(), TOKENS[:1, :1], at=(x[None, None],))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("plan", ["ddp", 0])
@pytest.mark.parametrize("made", PUBLISHED)
def test_a_loop_of_published_code_has_equal_numbers(threads: Threads, made: type[nn.Module], plan: str | int) -> None:
    check(threads, made(), plan)


def differing(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """The last expert does something else."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, k = torch.where(chosen == e)
        made = m.experts[e](x[rows])
        y.index_add_(0, rows, (made.sin() if e == EXPERTS - 1 else made.cos()) * w[rows, k, None])
    return y


def wider(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """One expert is used twice."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, k = torch.where(chosen == e)
        y.index_add_(0, rows, m.experts[e % 3](x[rows]) * w[rows, k, None])
    return y


def fewer(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Nothing is added for the last expert."""
    y = torch.zeros_like(x)
    for e in range(EXPERTS - 1):
        rows, k = torch.where(chosen == e)
        y.index_add_(0, rows, m.experts[e](x[rows]) * w[rows, k, None])
    return y


def of_others(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Half of the loop, then of another choice; what comes between is seen elsewhere."""
    y, others = torch.zeros_like(x), (chosen + 1) % EXPERTS
    for e in range(EXPERTS):
        rows, k = torch.where((chosen if e < 2 else others) == e)
        y = y.index_add(0, rows, m.experts[e](x[rows]) * w[rows, k, None])
        x = x if e != 1 else x + y
    return y


def flattened(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """Places among the choices of all tokens, of which their tokens are computed."""
    y, hot = torch.zeros_like(x), F.one_hot(chosen, EXPERTS)
    for e in range(EXPERTS):
        (places,) = torch.where(hot[..., e].flatten())
        rows = places // PICKED
        y.index_add_(0, rows, m.experts[e](x[rows]) * w.flatten()[places, None])
    return y


@pytest.mark.parametrize("mix", [differing, wider, fewer, of_others, flattened])
def test_a_loop_that_is_no_group_of_products_is_right_too(mix: Mix) -> None:
    interpreter.check(Experts(mix), TOKENS)


def test_a_loop_in_half_precision_takes_torchs_product_of_groups() -> None:
    """Where rows are aligned, as it asks; 8 features are, 6 are not."""
    program = capture(Experts(mixtral), TOKENS, torch.bfloat16).program
    found = {op.target for op in program.ops if "grouped" in op.target}
    assert found == {"autopar.grouped_mm.default"}
    wide = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16, bias=False)) for _ in range(EXPERTS))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts, self.router = wide, nn.Linear(16, EXPERTS)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(PICKED, -1)
            return numel(self, x, weights, chosen)  # type: ignore[arg-type]

    program = capture(Wide(), torch.randn(8, 16), torch.bfloat16).program
    assert [op.target for op in program.ops if "grouped" in op.target] == ["aten._grouped_mm.default"] * 2
    narrow = mixed(capture(Wide(), torch.randn(8, 16)).program)
    assert [op.target for op in narrow.ops if "grouped" in op.target] == ["aten._grouped_mm.default"] * 2


def with_a_penalty(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows, k = torch.where(chosen == e)
        if rows.numel() == 0:
            y = y + 1
            continue
        y = y.index_add(0, rows, m.experts[e](x[rows]) * w[rows, k, None])
    return y


def with_more_in_the_branch(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            y = y * 0.5
            y[mask] += m.experts[e](x[mask])
    return y


def where_there_are_many(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.sum() > 4:
            y[mask] += m.experts[e](x[mask])
    return y


def where_all_are(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), chosen[:, 0] == 0
    if mask.all():
        y[mask] += m.experts[0](x[mask])
    return y


def asked_of_another_mask(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask, other = (chosen == e).any(-1), (chosen == (e + 1) % EXPERTS).any(-1)
        if other.any():
            y[mask] += m.experts[e](x[mask])
    return y


def asked_of_a_part(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask[:12].any():
            y[mask] += m.experts[e](x[mask])
    return y


def another_loss_of_nothing(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen[:, 0] == 0
    more = m.experts[0](x[mask]).mean() if mask.any() else x.sum() * 0
    return x + more


def another_result_of_nothing(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    mask = chosen[:, 0] == 0
    if not mask.any():
        return x * 2
    return x.masked_scatter(mask.unsqueeze(-1), m.experts[0](x[mask]))


def where_only_one_is(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """The same whether both experts have tokens or none has."""
    y, found = torch.zeros_like(x), []
    for e in range(EXPERTS):
        mask = (chosen == e).any(-1)
        if mask.any():
            y[mask] += m.experts[e](x[mask])
            found.append(e)
    return y * 2 if len(found) % EXPERTS else y


def without_end(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    while (chosen > 0).any():
        chosen = chosen - 1
    return x


def normalised_over_tokens(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    rows, _ = torch.where(chosen == 0)
    return torch.zeros_like(x).index_add(0, rows, m.experts[0](x[rows]).softmax(0))


def with_a_capacity(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    rows, _ = torch.where(chosen == 0)
    return torch.zeros_like(x).index_add(0, rows[:3], m.experts[0](x[rows[:3]]))


def written_through_a_view(m: Experts, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), chosen[:, 0] == 0
    rows = x[mask]
    rows.view(-1, WIDTH).mul_(2)
    y[mask] = rows
    return y


BRANCHES = [
    with_a_penalty,
    with_more_in_the_branch,
    where_there_are_many,
    where_all_are,
    asked_of_another_mask,
    asked_of_a_part,
    another_loss_of_nothing,
    another_result_of_nothing,
    where_only_one_is,
]
MIXED = [normalised_over_tokens, with_a_capacity, written_through_a_view]


@pytest.mark.parametrize("mix", BRANCHES)
def test_a_branch_that_does_anything_else_where_nothing_is_selected_is_refused(mix: Mix) -> None:
    with pytest.raises(
        CaptureError, match=r"the control flow of Experts depends on the values of a tensor\n  at .*test_expert"
    ):
        capture(Experts(mix), TOKENS)


@pytest.mark.parametrize("mix", MIXED)
def test_what_is_done_with_all_rows_together_is_refused(mix: Mix) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Experts(mix), TOKENS)


def test_a_loop_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(empty_selections, "MOST_ASKED", 20)
    with pytest.raises(CaptureError, match="a line asks more than 20 times"):
        capture(Experts(without_end), TOKENS)

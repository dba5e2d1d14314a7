"""The law of rules on every distributed form, with its ranks run concurrently as threads; wrong forms are caught."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (an operator)

from autopar.errors import DerivativeError, RuleError
from autopar.formulation.prices import Prices
from autopar.formulation.step_collectives import inside
from autopar.ir.program import Op, Value, filled
from autopar.operators import RULES, OpSharding, fit
from autopar.operators.checking.execution_check import Ranks, Trial, check, distributed_trials
from autopar.operators.checking.sample_call import Example as Called
from autopar.operators.double_precision import DOUBLE, grouped_mm
from autopar.operators.registry import OTHERS
from autopar.runtime.parallel_ops import PARALLEL_OPS
from autopar.runtime.recorder import recorded
from autopar.search_space.candidates import Candidate
from tests.operators.drawing import Example, T, buffer, ex, ints, t
from tests.operators.examples import EXAMPLES
from tests.support import planning
from tests.support.forked import printed_by
from tests.support.threads import Threads

TARGETS = sorted(target for target, rule in RULES.items() if rule.distributed)
ONCE = {"aten.index.Tensor", "aten._grouped_mm.default"}  # beside attention, whose fused kernels have one derivative only
# Calls that know of scores that are minus infinity, and which operand they are.
HIDDEN = [
    ("aten.cross_entropy_loss.default", ex(t(4, 6), ints(4, high=6), None, 2), "x0"),
    ("aten.cross_entropy_loss.default", ex(t(4, 6), ints(4, high=6), buffer(6), 0), "x0"),
    ("aten.nll_loss.default", ex(t(4, 6), ints(4, high=6), None, 2), "x0"),
    ("aten.softmax.int", ex(t(4, 6), -1), "x0"),
    ("aten.log_softmax.int", ex(t(4, 6), -1), "x0"),
    ("aten._safe_softmax.default", ex(t(4, 6), -1), "x0"),
    ("aten.scaled_dot_product_attention.default", ex(*[t(2, 4, 6, 3)] * 3, T((2, 1, 6, 6), grad=False)), "x3"),
]
F = TypeVar("F")
Sent = Counter[tuple[str, str, int]]  # kind, pass and bytes


@pytest.fixture
def ranks(threads: Threads) -> Ranks:
    """Runs the ranks of a form in groups that are kept from test to test."""
    return threads.threads.operator


def test_every_form_of_the_table_can_be_run_and_every_function_is_in_the_table() -> None:
    rules = (*RULES.values(), *OTHERS.values())
    assert {form.name for rule in rules for form in rule.distributed} == set(PARALLEL_OPS)


@pytest.mark.parametrize("target", TARGETS)
def test_the_ranks_of_a_form_together_give_the_whole_and_send_what_it_says(ranks: Ranks, target: str) -> None:
    tried = set()
    for example in EXAMPLES[target]:
        op, values, tensors = example.build(target)
        fitted = fit(op, values)
        assert fitted is not None
        heard: list[Sent] = []
        check(op, values, tensors, ranks=partial(overheard, ranks, heard))
        trials = list(distributed_trials(fitted))
        tried |= {form.name for form in fitted.distributed if trials}
        assert heard == [said for trial in trials for said in [sent(op, fitted, values, trial)] * math.prod(trial.sizes)]
    assert tried == {form.name for form in RULES[target].distributed}


@pytest.mark.parametrize("target, example, scores", HIDDEN, ids=[target for target, *_ in HIDDEN])
def test_minus_infinity_means_the_same_to_the_ranks_of_a_form_as_to_the_whole(
    ranks: Ranks, target: str, example: Example, scores: str
) -> None:
    """Classes or keys that are hidden, of one row all that the first ranks have: 0 times minus infinity would be NaN."""
    op, values, tensors = example.build(target)
    hidden = torch.rand(tensors[scores].shape, generator=torch.Generator().manual_seed(0)) < 0.2
    hidden[..., :1, : hidden.shape[-1] // 2] = True
    tensors[scores].masked_fill_(hidden, -math.inf)
    assert check(op, values, tensors, ranks=ranks) > check(op, values, tensors)


@pytest.mark.parametrize("target", TARGETS)
def test_second_derivatives_of_a_form_are_those_of_the_whole_or_refused(
    ranks: Ranks, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of gradients, those of their product with the operands, which lie as the gradients of the gradients do."""
    grad = torch.autograd.grad

    def second(
        outputs: list[torch.Tensor], operands: list[torch.Tensor], given: list[torch.Tensor], *, allow_unused: bool
    ) -> Sequence[torch.Tensor | None]:
        first = grad(outputs, operands, given, create_graph=True, allow_unused=allow_unused)
        pairs = [(g, x.detach()) for g, x in zip(first, operands, strict=True) if g is not None and g.requires_grad]
        if not pairs:
            return [None] * len(operands)
        return grad([g for g, _ in pairs], operands, [x for _, x in pairs], allow_unused=True)

    built = (example.build(target) for example in EXAMPLES[target])
    op, values, tensors = next(made for made in built if has_forms(*made[:2]))
    monkeypatch.setattr(torch.autograd, "grad", second)
    with pytest.raises(RuleError, match="has no second derivative") if target in ONCE else nullcontext():
        check(op, values, tensors, ranks=ranks)


@pytest.mark.parametrize("form", ["ring_attention", "query_parallel_attention"])
def test_second_derivatives_of_attention_over_a_split_sequence_are_refused(ranks: Ranks, form: str) -> None:
    def run(rank: int, function: Callable[..., object]) -> None:
        heads = [torch.randn(2, 4, length, 3).requires_grad_() for length in (6, 12, 12)]
        out = function(*(heads if form == "query_parallel_attention" else heads[:1] * 3), is_causal=True)
        assert isinstance(out, torch.Tensor)
        with pytest.raises(DerivativeError, match="has no second derivative"):
            torch.autograd.grad(out.sum(), heads[0], create_graph=True)

    ranks(form, 2, run)


def has_forms(op: Op, values: dict[str, Value]) -> bool:
    """Whether a call has distributed forms."""
    fitted = fit(op, values)
    return fitted is not None and any(distributed_trials(fitted))


@pytest.mark.parametrize("ends", [(3, 6, 9, 12), (2, 7, 10, 12), (0, 0, 12, 12), (12, 12, 12, 12), (1, 2, 3, 9)], ids=str)
def test_experts_get_their_rows_however_many_they_are(ranks: Ranks, ends: tuple[int, ...]) -> None:
    given = torch.randn(12, 5).double(), torch.randn(4, 5, 6).double(), torch.tensor(ends, dtype=torch.int32)
    op, values, tensors = (made := Called.of("transformers::grouped_mm_fallback", given)).op, made.values, made.tensors
    fitted = fit(op, values)
    assert fitted is not None
    assert str(fitted) == "t! k, e! k n, e! -> t! n"
    trials = list(distributed_trials(fitted))
    assert len(trials) == 6
    assert check(op, values, tensors, ranks=ranks) == check(op, values, tensors) + len(trials)


@pytest.mark.parametrize("example", EXAMPLES["aten._grouped_mm.default"], ids=str)
def test_grouped_products_in_double_precision_are_torchs_and_obey_its_rule(ranks: Ranks, example: Example) -> None:
    op, values, tensors = example.build("aten._grouped_mm.default")
    args, kwargs = filled(op.args, op.kwargs, lambda ref: tensors[ref.name])
    torch.testing.assert_close(grouped_mm(*args, **kwargs), torch.ops.aten._grouped_mm(*args, **kwargs))
    wide = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    double = replace(op, target=DOUBLE[op.target], results=tuple(replace(r, dtype=torch.float64) for r in op.results))
    held = {name: replace(value, dtype=wide[name].dtype) for name, value in values.items() if name in wide}
    assert fit(double, held) == fit(op, values)
    assert check(double, held, wide, ranks=ranks) == check(op, values, tensors, ranks=ranks) > 0


def overheard(ranks: Ranks, heard: list[Sent], form: str, size: int, run: Callable[[int, Callable[..., object]], F]) -> list[F]:
    """The ranks of a form, and what each of them sends."""

    def one(rank: int, function: Callable[..., object]) -> tuple[F, Sent]:
        with recorded(()) as log:
            found = run(rank, function)
        return found, Counter((message.kind, message.where, message.bytes) for message in log)

    both = ranks(form, size, one)
    heard += [log for _, log in both]
    return [found for found, _ in both]


def sent(op: Op, fitted: OpSharding, values: dict[str, Value], trial: Trial) -> Sent:
    """What every rank of a trial sends, as the form says it."""
    operands, results = trial.layouts(fitted)
    forms = []
    for kind, which, stride in trial.forms:
        own = fitted.chunks(fitted.distributed[which], stride) if kind == "distributed" else {}
        forms.append(("D", which, [*own.values()][-1]) if own else ("S", which, stride))
    candidate = Candidate(forms=tuple(forms), operands=tuple(operands), results=tuple(results))
    on = planning.mesh(trial.sizes, planning.NVLINK)
    said = (one for where in ("forward", "backward") for one in inside(op, fitted, candidate, values, Prices(mesh=on), where))
    return Counter((one.kind, one.where, one.bytes) for one in said)


@pytest.mark.parametrize("every", ["6", pytest.param("1", marks=pytest.mark.thorough)])
def test_forms_that_are_made_wrong_are_caught(every: str, tmp_path: Path) -> None:
    """Of what `sabotage_forms` tries every sixth, in a process of its own: a kernel may trust the sizes that it is given."""
    said = printed_by("tests.operators.sabotage_forms", "--every", every, log=tmp_path / "said")
    *lines, last = said.splitlines()
    assert last == f"all {len(lines)} were caught"
    assert {line.partition(" ")[0] for line in lines} == set(PARALLEL_OPS)

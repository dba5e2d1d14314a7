"""Why and why not: marginal prices that add up, and forced layouts that are satisfied."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import BudgetError, ConstraintError, InputError
from autopar.explain import Explanation, comparison, explain
from autopar.explain.difference import difference
from autopar.explain.why import why_parts
from autopar.explain.whynot import WhyNot, why_not_parts
from autopar.plan.options import Options
from autopar.plan.text import plain
from autopar.planning.planner import connected_mesh, make_plan, plan_program
from autopar.search_space.schemes import strategies_for
from autopar.solver.problem import price
from autopar.solver.routes import tree
from tests.support.models import make

MESH: Mapping[str, int] = {"dp": 2, "tp": 4}
LAYER = "transformer.h.0"


@functools.cache
def explained(**options: object) -> Explanation:
    """A GPT-2 large enough to be split."""
    config = transformers.GPT2Config(n_layer=3, n_embd=768, n_head=12, vocab_size=50304, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).bfloat16()
        tokens = torch.empty(16, 1024, dtype=torch.long)
    model.loss_type = "ForCausalLM"
    return explain(model, {"input_ids": tokens, "labels": tokens}, MESH, device="h100", **options)


NAMES = (
    "lm_head",
    "transformer.wte.weight",
    f"{LAYER}.mlp.c_fc",
    f"{LAYER}.attn",
    f"{LAYER}.mlp.c_fc.weight",
    f"{LAYER}:add#0",
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_no_candidate_beats_the_chosen_one_by_more_than_the_gap(name: str) -> None:
    found = explained()
    for answer in found.why(name):
        (chosen,) = (entry for entry in answer.alternatives if entry.chosen)
        slack = found.plan.gap * found.plan.step_time + 1e-12
        assert chosen.total <= min(entry.total for entry in answer.alternatives) + slack


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_marginal_price_is_the_difference_of_two_whole_prices(name: str) -> None:
    found = explained()
    solved = found.planned.solved
    problem, solution = solved.formulated.problem, solved.solution
    whole = price(problem, solution.picks, solution.arcs)
    for answer in found.why(name):
        choice = solved.formulated.names.index(answer.name)
        (chosen,) = (entry for entry in answer.alternatives if entry.chosen)
        totals = []
        for pick in range(answer.candidates):
            picks = (*solution.picks[:choice], pick, *solution.picks[choice + 1 :])
            arcs = tuple(
                tree(edge, picks) if choice in (edge.producer, *(c.choice for c in edge.consumers)) else used
                for edge, used in zip(problem.edges, solution.arcs, strict=True)
            )
            totals.append(price(problem, picks, arcs) - whole)  # type: ignore[arg-type]
        for entry in answer.alternatives:
            if not entry.chosen:
                more = entry.total - chosen.total
                assert min(abs(total - more) for total in totals) < 1e-12


def test_a_module_means_its_telling_operators_and_a_glob_means_them_all() -> None:
    found = explained()
    assert [answer.name for answer in found.why(f"{LAYER}.mlp.c_fc")] == [f"{LAYER}.mlp.c_fc:addmm#0"]
    assert [answer.name for answer in found.why("transformer.h.2.mlp.c_fc")] == [f"{LAYER}.mlp.c_fc:addmm#0"]
    assert [answer.kind for answer in found.why(f"{LAYER}.attn")] == ["attention"]
    assert [answer.kind for answer in found.why(f"{LAYER}.mlp")] == ["linear", "linear"]
    assert [answer.kind for answer in found.why("*.mlp.c_fc.weight")] == ["stored"]
    assert {answer.name for answer in found.why(f"{LAYER}.mlp.act")} >= {f"{LAYER}.mlp.act:tanh#0"}


def test_what_has_exactly_a_name_comes_before_what_it_matches() -> None:
    """`[x]` in a glob is an x."""
    model = nn.Sequential()
    model.add_module("a[x]", nn.Linear(8, 16))
    model.add_module("ax", nn.Linear(16, 8))
    found = explain(model, torch.zeros(4, 8), 2, device="h100")
    assert [[answer.name for answer in found.why(name)] for name in ("a[x]", "ax")] == [["a[x]:linear#0"], ["ax:linear#0"]]


def test_a_name_that_means_nothing_is_refused_with_what_is_close() -> None:
    with pytest.raises(InputError, match=r"nothing in the model is named 'transformer\.wt\.weight'") as refusal:
        explained().why("transformer.wt.weight")
    assert "transformer.wte.weight" in refusal.value.details["close"]


def test_a_tight_budget_shows_as_peaks_that_do_not_fit() -> None:
    loose = explained()
    tight = explained(budget=int(0.97 * loose.plan.peak_memory))
    limit = int(0.97 * loose.plan.peak_memory)
    entries = [entry for name in NAMES for answer in tight.why(name) for entry in answer.alternatives]
    assert all(entry.peak <= limit for entry in entries if entry.chosen)
    assert any(entry.peak > limit for entry in entries)


def test_a_plan_that_is_faster_with_what_is_forced_is_called_faster() -> None:
    """As beside a plan by a named strategy."""
    found = explained()
    other = WhyNot(forced={"a": "I"}, plan=replace(found.plan, step_time=found.plan.step_time / 2))
    assert re.search(r"ms per step, faster by [\d.]+ ms \(-50.0%\)", plain(why_not_parts(found.plan, other)))


def test_why_not_meets_what_is_forced_and_is_never_faster() -> None:
    found = explained()
    other = found.why_not({"*.mlp.c_fc.weight": "*, S(1)"})
    assert other.plan is not None
    assert {other.plan.layouts[f"transformer.h.{n}.mlp.c_fc.weight"].split(", ")[1] for n in range(3)} == {"S(1)"}
    assert other.plan.step_time >= found.plan.step_time * (1 - found.plan.gap)
    text = plain(why_not_parts(found.plan, other))
    assert "the best plan with *.mlp.c_fc.weight = '*, S(1)' takes " in text
    changed = {name for change in difference(found.plan, other.plan).stored for name in change.names}
    assert {f"transformer.h.{n}.mlp.c_fc.weight" for n in range(3)} <= changed


def test_what_the_plan_does_already_changes_nothing() -> None:
    found = explained()
    other = found.why_not({"*.mlp.c_fc.weight": found.plan.layouts[f"{LAYER}.mlp.c_fc.weight"]})
    assert "nothing changes with *.mlp.c_fc.weight = " in plain(why_not_parts(found.plan, other))


@functools.cache
def normed(**options: object) -> Explanation:
    """Two layers with a norm between them."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4096, 4096), nn.LayerNorm(4096), nn.Linear(4096, 4096)), torch.empty(4096, 4096)
    return explain(model, x, MESH, device="h100", **options)


def test_what_is_impossible_says_why() -> None:
    loose = normed()
    on = loose.planned.solved.formulated.mesh
    sharded = plan_program(loose.planned.captured.program, on, replace(loose.options, strategy="fsdp"))
    found = normed(budget=sharded.peak_memory)
    for forced, kind in (({"1": "S(1), S(1)"}, ConstraintError), ({"*.weight": "I, I"}, BudgetError)):
        other = found.why_not(forced)
        assert isinstance(other.error, kind)
        text = plain(why_not_parts(found.plan, other))
        assert "there is no plan" in text.splitlines()[0]
        assert f"{kind.__name__}: " in text


@pytest.mark.parametrize("forced", [{"nothing": "I, I"}, {"*.c_fc.weight": "*, S(9)"}, {"*.c_fc.weight": "I"}])
def test_what_means_nothing_is_refused(forced: dict[str, str]) -> None:
    with pytest.raises(ConstraintError):
        explained().why_not(forced)


def test_each_strategy_is_planned_as_it_would_be_by_itself() -> None:
    found = explained()
    program, options = found.planned.captured.program, Options(device="h100")
    for entry in found.compared[::3]:
        alone = plan_program(program, connected_mesh(MESH, options), replace(options, strategy=entry.strategy))
        assert entry.plan == alone
        assert alone.step_time >= found.plan.step_time * (1 - found.plan.gap)
    assert [entry.strategy for entry in found.compared] == list(strategies_for(found.planned.solved.formulated.mesh))


def test_a_strategy_that_is_not_possible_says_so_in_words() -> None:
    model, sample = make("gpt2")
    odd = {name: value[:3] for name, value in sample.items()}
    told = {entry.strategy: entry.refusal for entry in explain(model, odd, (2, 4), device="h100").compared}
    assert told["ddp"] == "not possible: strategy 'ddp' cannot split a batch of 3 over 8 devices"
    assert "does not fit: needs " in str(normed(budget=normed().plan.peak_memory))


def test_a_strategy_that_takes_too_many_iterations_is_given_up() -> None:
    found = explained()
    told = {entry.strategy: entry.refusal for entry in comparison.compare(found.planned, found.options, iterations=0)}
    assert told["auto"] == ""
    assert {told[name] for name in ("ddp", "fsdp", "megatron")} == {"not compared: no plan was found in 0 simplex iterations"}


def test_the_code_is_that_of_the_module_that_runs() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), torch.randn(2, 4)
    assert explain(model, x, (1,), device="cpu").code == autopar.parallelize(model, x, (1,), device="cpu").code


def test_many_answers_are_cut_and_the_rest_is_named() -> None:
    found = explained()
    answers = found.why("*.mlp*")
    text = plain(why_parts(found.planned.solved, answers))
    assert f"and {len(answers) - 8} more: " in text


def test_planning_tells_its_phases_as_they_end() -> None:
    model, sample = make("cnn")
    heard: list[str] = []
    planned = make_plan(model, sample, MESH, Options(device="h100"), heard.append)
    assert heard == list(planned.phases) == ["capture", "analyse", "formulate", "solve", "decide", "write"]

"""A saved plan gives the same answers as when it was made, compared with the explanation of the freshly solved plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.cost_models import catalog
from autopar.errors import ConstraintError, MeshError, PlanError
from autopar.explain import Explanation, explain
from autopar.explain.command import main
from autopar.plan.plan import Plan

Sample = Mapping[str, torch.Tensor]


def made(layers: int = 3) -> tuple[nn.Module, Sample]:
    """A GPT-2 that is worth splitting, and its batch, without values."""
    config = transformers.GPT2Config(n_layer=layers, n_embd=768, n_head=12, vocab_size=50304, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).bfloat16()
        tokens = torch.empty(16, 1024, dtype=torch.long)
    model.loss_type = "ForCausalLM"
    return model, {"input_ids": tokens, "labels": tokens}


MODELS = """
import torch
from torch import nn

def layers():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.empty(32, 64)
"""
ASKED: dict[str, dict[str, object]] = {
    "auto": {},
    "fsdp, its gathered weights dropped": {"strategy": "fsdp"},
    "within a budget, recomputed": {"budget": "1500MiB"},
    "blocks recomputed, in micro-batches": {"recompute": "blocks", "microbatches": 2},
    "by constraints": {"constraints": {"*.wte.weight": "S(0), I"}},
    "compiled": {"compiled": True},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_saved_plan_answers_as_the_plan_that_was_just_solved(asked: dict[str, object], tmp_path: Path) -> None:
    solved = explain(*made(), {"dp": 2, "tp": 4}, device="h100", **asked)
    solved.plan.save(tmp_path / "plan.json")
    saved = explain(*made(), plan=Plan.load(tmp_path / "plan.json"))
    assert isinstance(solved, Explanation)
    assert isinstance(saved, Explanation)
    assert saved.planned.resolved.assignment == solved.planned.resolved.assignment
    assert saved.planned.solved.solution.seconds == pytest.approx(solved.planned.solved.solution.seconds, rel=1e-12)
    for name in ("transformer.h.0.mlp.c_fc", "lm_head", "transformer.wte.weight"):
        assert saved.why(name) == solved.why(name)
    assert saved.trace == solved.trace
    assert saved.code == solved.code


def test_a_plan_of_another_model_is_refused() -> None:
    plan = autopar.plan(*made(), (2,), device="h100")
    with pytest.raises(PlanError):
        explain(*made(layers=2), plan=plan)


def test_a_plan_that_no_solution_stands_for_is_refused() -> None:
    """A named strategy whose plan says something else, as an edited file may."""
    plan = autopar.plan(*made(), (8,), device="h100", strategy="fsdp")
    edited = replace(plan, options={**plan.options, "strategy": "replicate"})
    with pytest.raises(PlanError, match="not a solution of the problem that its options pose"):
        explain(*made(), plan=edited)


def test_a_plan_has_its_own_mesh_and_options() -> None:
    plan = autopar.plan(*made(), (2,), device="h100")
    with pytest.raises(ConstraintError, match="its own mesh, strategy"):
        explain(*made(), (2,), plan=plan, strategy="ddp")
    with pytest.raises(MeshError, match="from which a farm comes"):
        explain(*made(), plan=replace(plan, device="a farm"))
    with pytest.raises(PlanError, match="made for h100, not for a farm"):
        explain(*made(), plan=plan, device=replace(catalog.device("h100"), name="a farm"))
    with pytest.raises(PlanError, match="a cost model of your own"):
        explain(*made(), plan=replace(plan, options={**plan.options, "cost_model": "congested"}))
    limited = explain(*made(), plan=replace(plan, options={**plan.options, "time_limit": "600"}))
    assert limited.options.time_limit == 600.0


def test_the_command_line_reads_a_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    target, file = f"{tmp_path / 'models.py'}:layers", str(tmp_path / "plan.json")
    assert main([target, "--mesh", "2,4", "--device", "h100", "--save", file, "--why", "0"]) == 0
    said = capsys.readouterr().out
    assert main([target, "--plan", file, "--why", "0"]) == 0
    assert capsys.readouterr().out == said
    assert main([target, "--plan", file, "--strategy", "ddp"]) == 2
    assert "leave it out, or --plan" in capsys.readouterr().err
    assert main([target, "--plan", file, "--device", "H100", "--why", "0"]) == 0
    assert capsys.readouterr().out == said
    assert main([target, "--plan", file, "--device", "a100-80gb"]) == 1
    assert "the plan was made for h100, not for a100-80gb" in capsys.readouterr().err
    assert main([file, "--why", "0"]) == 2
    assert f"MODEL --plan {file}" in capsys.readouterr().err

"""`python -m autopar.explain` on plans in pipeline stages: the report, questions, the trace, files, baselines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.explain import main
from autopar.pipeline.clock import Clock
from autopar.plan.plan import Plan

TARGET = """
import torch
import transformers

def gpt2():
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.empty(16, 32, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}

class Blocks(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()

def blocks():
    return Blocks(*(Block(64, 256) for _ in range(4))), torch.empty(1024, 64)

class Block(torch.nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))
"""
ASKED = ("--mesh", "pp=2,dp=2", "--device", "h100", "--pipeline", "pp", "--strategy", "fsdp", "--microbatches", "4")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "build_gpt2.py"
    path.write_text(TARGET)
    return f"{path}:gpt2"


def test_a_plan_in_stages_is_explained_saved_traced_and_checked(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, trace, baseline = (tmp_path / name for name in ("plan.json", "step.json", "baseline.json"))
    assert main([target, *ASKED, "--schedule", "1f1b", "--save", str(plan), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert "2 stages over pp, 1f1b, 4 micro-batches" in said
    assert "stage 1, pp=1, from transformer.h.2.ln_1" in said
    assert said.count("total at the peak") == 2
    saved = Plan.load(plan)
    _is_the_clock(json.loads(trace.read_text()), saved)
    assert main([str(plan), "--trace", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_text() == trace.read_text()
    assert said == capsys.readouterr().out
    assert main([target, "--plan", str(plan), "--trace", str(tmp_path / "more.json")]) == 2
    assert "is a plan in pipeline stages: --trace needs no model" in capsys.readouterr().err
    assert main([target, *ASKED, "--schedule", "1f1b", "--check", str(baseline), "--update"]) == 0
    assert main(["--check", str(baseline)]) == 1  # it may be any code, unless it is below the folder
    beside = Path(target.rpartition(":")[0]).with_name("baseline.json")
    assert main([target, *ASKED, "--schedule", "1f1b", "--check", str(beside), "--update"]) == 0
    capsys.readouterr()
    assert main(["--check", str(beside)]) == 0
    assert "on pp=2,dp=2 of h100 as fsdp in 2 stages: step time" in capsys.readouterr().out
    data = json.loads(beside.read_text())
    assert data["pipeline"]["bubble"] == saved.pipeline.timeline.bubble  # type: ignore[union-attr]
    beside.write_text(json.dumps({**data, "step_time": data["step_time"] / 2}))
    assert main(["--check", str(beside)]) == 1
    assert main(["--diff", str(plan), str(plan)]) == 0


def _is_the_clock(trace: dict[str, list[dict[str, object]]], plan: Plan) -> None:
    """Slices are the actions and messages of the clock, and slices of a row do not overlap."""
    pipeline = plan.pipeline
    assert pipeline is not None
    timeline = Clock(pipeline.order).run(pipeline.seconds)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = {(one["pid"], one["name"]): (one["ts"], one["dur"]) for one in slices}
    for rank, timed in enumerate((*a, *b) for a, b in zip(timeline.computed, timeline.sent, strict=True)):
        for one in timed:
            start, took = found.pop((rank, str(one.action)))
            assert start == pytest.approx(one.start * 1e6, abs=1e-3)
            assert took == pytest.approx((one.stop - one.start) * 1e6, abs=2e-3)
    assert {name for _, name in found} == {"once a step"}
    assert max(one["ts"] + one["dur"] for one in slices) == pytest.approx(timeline.seconds * 1e6, abs=1e-2)  # type: ignore[operator]


def test_why_names_the_stage_and_why_not_plans_it_again(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (target, *ASKED, "--schedule", "gpipe", "--stages", "transformer.h.1")
    assert main([*asked, "--why", "transformer.h.3.mlp.c_fc.weight", "--why-not", "transformer.h.3.mlp.c_fc.weight=I"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("stage 1, pp=1, from transformer.h.1.ln_1\n")
    assert "stage 0" not in said
    assert "the best plan with transformer.h.3.mlp.c_fc.weight = 'I' takes" in said
    assert "pipeline" not in said.partition("compared with the plan")[2]
    assert main([*asked, "--why", "nothing.of.this.name"]) == 1
    assert "nothing in the model is named" in capsys.readouterr().err


def test_the_code_of_every_stage_is_shown(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([target, *ASKED, "--schedule", "1f1b", "--code"]) == 0
    said = capsys.readouterr().out
    assert said.count("def forward(self") == 2
    assert said.startswith("# stage 0, pp=0")


def test_less_memory_is_bought_with_time_and_other_prices_are_those_of_other_links(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = target.replace(":gpt2", ":blocks")
    asked = (blocks, "--mesh", "pp=2", "--device", "h100", "--pipeline", "pp", "--microbatches", "4", "--schedule", "1f1b")
    assert main([*asked, "--budget-sweep", "--sensitivity", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan, sweep = Plan.from_json(json.dumps(data["plan"])), data["budget_sweep"]
    assert [step["budget"] for step in sweep] == sorted((step["budget"] for step in sweep), reverse=True)
    assert all(step["peak_memory"] <= step["budget"] for step in sweep)
    times = [step["step_time"] for step in sweep]
    assert times == sorted(times)
    assert times[0] == pytest.approx(plan.step_time)
    assert len(set(times)) > 1
    assert main([*asked, "--budget", f"{sweep[-1]['budget']}B"]) == 0
    assert main([*asked, "--budget", f"{sweep[-1]['budget'] // 2}B"]) == 1
    assert "the smallest budget of such a stage is" in capsys.readouterr().err
    found = {(one["what"], one["speed"]): one["step_time"] for one in data["sensitivity"]}
    pipeline, rates = plan.pipeline, {}
    assert pipeline is not None
    for (what, speed), seconds in found.items():
        links, kernels = (speed, 1.0) if what == "links" else (1.0, speed)
        own = dict.fromkeys(("forward", "backward_input", "backward_weight", "once"), kernels)
        rates = own | dict.fromkeys(("activations", "gradients"), links)
        stages = [replace(one, **{name: getattr(one, name) / rate for name, rate in rates.items()}) for one in pipeline.seconds]
        assert seconds == pytest.approx(
            Clock(pipeline.order).seconds(stages)
        )  # a stage is on one device: only messages are sent

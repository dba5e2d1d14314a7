"""mode="inference": only a forward, with the numbers, memory and sizes of the model in eval() under no_grad."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, CaptureError, ConstraintError, InputError, PlanError
from autopar.plan.plan import Plan
from autopar.runtime.storage import to_local
from autopar.runtime.workers import WorkerPool
from autopar.verify.testing import peak
from tests.support import models, table

NAMES = ("gpt2", "llama", "bert")


def served(name: str) -> tuple[nn.Module, models.Sample]:
    """A model in eval(), and a batch without targets."""
    model, sample = models.make(name)
    return copy.deepcopy(model).eval(), {key: tensor for key, tensor in sample.items() if key != "labels"}


def planned(name: str, sizes: tuple[int, ...] = (2, 2), strategy: str = "auto") -> Plan:
    return autopar.plan(*served(name), table.mesh(sizes), strategy=strategy, mode="inference")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.thorough), "megatron", "fsdp"])
def test_a_plan_has_a_forward_and_nothing_else(strategy: str) -> None:
    model, sample = served("gpt2")
    plan = planned("gpt2", strategy=strategy)
    training = autopar.plan(model, sample, table.mesh((2, 2)), strategy=strategy)
    assert plan.breakdown.backward == plan.breakdown.optimizer == plan.breakdown.recomputed == 0
    assert {entry.where for entry in plan.collectives} <= {"forward"}
    assert set(plan.breakdown.memory) <= {"parameters", "temporary", "inputs", "buffers"}
    assert plan.step_time < training.step_time / 2
    assert plan.peak_memory < training.peak_memory / 2
    frozen = autopar.plan(model.requires_grad_(False), sample, table.mesh((2, 2)), strategy=strategy)
    assert (frozen.step_time, frozen.layouts) == (plan.step_time, plan.layouts), "as one of which nothing is trained"
    assert "per token" in str(plan)
    assert "optimizer" not in str(plan)


def forward(given: tuple[str, Plan]) -> tuple[float, int, bool]:
    """Of one rank: the error of its logits, its peak memory, and whether anything has a gradient."""
    name, plan = given
    model, sample = served(name)
    parallel = autopar.parallelize(model, sample, plan.mesh, plan=plan)
    result = parallel(**sample).logits
    with torch.no_grad():
        expected = model(**sample).logits
    most = peak(parallel, None, sample.values(), lambda: parallel(**sample)).bytes
    trained = result.requires_grad or any(tensor.requires_grad for tensor in parallel.parameters())
    return float((result - expected).abs().max()), most, trained


@pytest.mark.one_in(9)
@pytest.mark.parametrize("strategy", ["auto", "megatron", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_the_logits_within_the_memory_of_the_plan(pool: WorkerPool, name: str, strategy: str) -> None:
    plan = autopar.plan(*served(name), (2,), device="cpu", strategy=strategy, mode="inference")
    ranks = pool.run(f"{__name__}:forward", (name, plan), ranks=2, keep=True)
    errors, peaks, trained = zip(*ranks, strict=True)  # type: ignore[arg-type]
    assert max(errors) < 1e-5
    assert plan.peak_memory == pytest.approx(max(peaks), rel=0.05)
    assert not any(trained)


def cut(sample: models.Sample, length: int) -> models.Sample:
    return {"input_ids": sample["input_ids"][:, :length]}


def lengths(plan: Plan) -> list[tuple[int, float, bool]]:
    """Of one rank: lengths, errors of the logits, and whether the module of that length has the stored weights."""
    model, sample = served("llama")
    parallel = autopar.parallelize(model, sample, plan.mesh, plan=plan)
    found = []
    one = autopar.parallelize(model, cut(sample, 1), plan.mesh, mode="inference", over=parallel)
    for length in (16, 1, 5, 5):
        words = cut(sample, length)
        with torch.no_grad():
            expected = model(**words).logits
        error = float(((one if length == 1 else parallel)(**words).logits - expected).abs().max())
        others = [dict(module.named_parameters()) for module in (one, *parallel.autopar.variants.values())]
        own = dict(parallel.named_parameters())
        shared = all(to_local(own[n]).data_ptr() == to_local(other[n]).data_ptr() for other in others for n in own)
        found.append((len(others), error, shared))
    return found


def test_one_plan_serves_prompts_of_several_lengths_and_one_token_over_the_same_weights(pool: WorkerPool) -> None:
    model, sample = served("llama")
    sizes = {"length": autopar.Dynamic({"input_ids": 1}, least=2, most=16)}
    plan = autopar.plan(model, sample, (2,), device="h100", strategy="megatron", mode="inference", dynamic=sizes)
    for found in pool.run(f"{__name__}:lengths", plan, ranks=2, keep=True):
        built, errors, shared = zip(*found, strict=True)  # type: ignore[call-overload]
        assert built == (1, 1, 2, 2)
        assert max(errors) < 1e-5
        assert all(shared)


def test_verify_compares_outputs_alone() -> None:
    model, sample = served("gpt2")
    report = autopar.verify(model, sample, (1,), device="h100", mode="inference")
    assert report.ok
    assert {row.what for row in report.rows} == {"output", "capture"}
    assert not [row.name for row in report.rows if "gradient" in row.name]


REFUSED = [
    ({"optimizer": "adamw"}, "optimizer='adamw' is for training"),
    ({"microbatches": 2}, "microbatches=2 is for training"),
    ({"strategy": "zero1"}, "strategy='zero1' is for training"),
    ({"strategy": "zero2+2d"}, "strategy='zero2.2d' is for training"),
    ({"recompute": "blocks"}, "recompute='blocks' is for training"),
    ({"pipeline": "auto"}, "pipeline='auto' is for training"),
    ({"precision": "bf16-mixed", "reduce": "bf16"}, "reduce='bf16' is for training"),
    ({"mode": "serving"}, "mode='serving' is not known"),
    ({"config": {"zero": 1}}, "strategy='zero1' is for training"),
]


@pytest.mark.parametrize("options, said", REFUSED)
def test_what_is_of_training_is_refused(options: dict[str, object], said: str) -> None:
    model, sample = served("gpt2")
    mesh = None if "config" in options else (2,)
    more = {"devices": 2} if mesh is None else {}
    with pytest.raises(ConstraintError, match=said):
        autopar.plan(model, sample, mesh, **{"device": "h100", "mode": "inference", **more, **options})


def test_a_model_in_training_and_a_sample_with_a_gradient_are_refused() -> None:
    model, sample = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), torch.randn(2, 4)
    with pytest.raises(CaptureError, match=r"the sample's .* requires a gradient"):
        autopar.plan(model, sample.requires_grad_(), (2,), device="h100", mode="inference")
    model[1].train()
    with pytest.raises(CaptureError, match="1 is in training mode"):
        autopar.plan(model, sample.detach(), (2,), device="h100", mode="inference")


def test_a_module_of_inference_is_not_trained() -> None:
    model, sample = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    parallel = autopar.parallelize(model, sample, (1,), device="h100", mode="inference")
    assert model.weight.requires_grad
    with pytest.raises(InputError, match="takes no step"):
        parallel.step(sample)
    with pytest.raises(InputError, match="planned for inference, and is in training mode"):
        parallel.train()(sample)
    with pytest.raises(InputError, match="weight and 1 more require a gradient"):
        parallel.eval().requires_grad_()(sample)


def test_a_plan_brings_its_mode_with_it() -> None:
    model, sample = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    plan = autopar.plan(model, sample, (1,), device="h100", mode="inference")
    assert not autopar.parallelize(model, sample, plan=Plan.from_json(plan.to_json()))(sample).requires_grad
    training = autopar.plan(model, sample, (1,), device="h100")
    with pytest.raises(PlanError, match="mode='inference' is given"):
        autopar.parallelize(model, sample, plan=training, mode="inference")
    with pytest.raises(PlanError, match="mode='training' is given"):
        autopar.parallelize(model, sample, plan=plan, mode="training")


class Wide(nn.Module):
    """Two programs: of `both` layers, or of one."""

    def __init__(self, both: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.both = nn.Linear(8, 16), nn.Linear(16, 8), both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(hidden.relu()) if self.both else hidden


def test_two_programs_share_what_is_stored() -> None:
    x = torch.randn(4, 8)
    whole = autopar.parallelize(Wide().eval(), x, (1,), device="h100", mode="inference")
    half = autopar.parallelize(Wide(both=False).eval(), x[:2], (1,), device="h100", mode="inference", over=whole)
    assert half.get_parameter("first.weight") is whole.get_parameter("first.weight")
    with torch.no_grad():
        whole.get_parameter("first.weight").zero_()
        assert torch.equal(half(x[:2]), whole.get_parameter("first.bias").expand(2, 16))


def over(_: None) -> list[str]:
    """The errors of second programs that do not fit the first, on two ranks."""
    x, said = torch.randn(4, 8), []
    options = {"device": "h100", "mode": "inference"}
    first = autopar.parallelize(Wide().eval(), x, (2,), constraints={"first.weight": "S(0)"}, **options)
    other = autopar.plan(Wide().eval(), x, (2,), constraints={"first.weight": "S(1)"}, **options)
    for model, more in (
        (nn.Sequential(nn.Linear(8, 16)).eval(), {}),
        (Wide().double().eval(), {}),
        (Wide().eval(), {"plan": other}),
        (Wide().eval(), {"constraints": {"first.weight": "S(1)"}}),
        (Wide().eval(), {"mesh": {"tp": 2}}),
    ):
        try:
            given = x.double() if model.state_dict()[next(iter(model.state_dict()))].dtype == torch.float64 else x
            autopar.parallelize(model, given, **{"mesh": (2,), **options, **more, "over": first})
        except AutoparError as error:
            said.append(f"{type(error).__name__}: {error.what}")
    return said


def test_programs_that_do_not_fit_each_other_are_refused(pool: WorkerPool) -> None:
    for said in pool.run(f"{__name__}:over", ranks=2):
        assert said == [
            "PlanError: 0.weight is torch.float32 of [16, 8], and over= has nothing of that name",
            "PlanError: first.weight is torch.float64 of [16, 8], and over= has torch.float32 of [16, 8]",
            "PlanError: the plan stores first.weight as S(1), and over= has it as S(0)",
            "ConstraintError: first.weight is asked for as S(1), and over= has it as S(0)",
            "PlanError: over= is a module on another mesh",
        ]
    with pytest.raises(PlanError, match="over is a Linear"):
        autopar.parallelize(nn.Linear(2, 2).eval(), torch.randn(2, 2), (1,), over=nn.Linear(2, 2))  # type: ignore[arg-type]

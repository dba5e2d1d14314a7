"""Plans on a GPU compute what the user's own module computes there; needs a GPU: `python -m pytest tests/cuda`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.plan.plan import Plan
from autopar.runtime.offload import listener
from tests.support import models

GPU = torch.device("cuda", 0)
pytestmark = pytest.mark.gpu
STEPS = 3


def on_gpu(name: str, *, dropout: bool = False) -> models.Built:
    """A model of the table and its sample on the GPU; without dropout, so that two modules compute the same."""
    model, sample = models.make(name)
    return model.train(dropout).to(GPU), {key: value.to(GPU) for key, value in sample.items()}


def losses_and_weights(module: nn.Module, sample: models.Sample, steps: int = STEPS) -> tuple[list[float], list[torch.Tensor]]:
    """What some steps of AdamW with clipping make."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(**sample)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [parameter.detach().cpu() for parameter in module.parameters()]


def check_equal(parallel: nn.Module, model: nn.Module, sample: models.Sample, tolerance: float = 1e-4) -> None:
    """Steps of both modules agree, in single precision."""
    (losses, weights), (expected, trained) = (losses_and_weights(module, sample) for module in (parallel, model))
    assert losses == pytest.approx(expected, rel=tolerance)
    for (name, _), mine, theirs in zip(model.named_parameters(), weights, trained, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=10 * tolerance, msg=lambda said, name=name: f"{name}: {said}")


def planned(name: str, **options: Any) -> Plan:
    model, sample = on_gpu(name)
    return autopar.plan(model, sample, (1,), **options)


@pytest.mark.parametrize("name", list(models.MODELS))
def test_steps_are_those_of_the_module(name: str) -> None:
    model, sample = on_gpu(name)
    check_equal(autopar.parallelize(copy.deepcopy(model), sample, (1,)), model, sample)


@pytest.mark.parametrize("name", list(models.MODELS))
def test_compiled_steps_are_those_of_the_module(name: str) -> None:
    model, sample = on_gpu(name)
    parallel = autopar.parallelize(copy.deepcopy(model), sample, (1,))
    parallel.compile()
    check_equal(parallel, model, sample)


@pytest.mark.parametrize("recompute", ["blocks", "selective"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_what_is_recomputed_draws_the_same_dropout(name: str, recompute: str) -> None:
    model, sample = on_gpu(name, dropout=True)
    found = []
    for chosen in ("none", recompute):
        torch.manual_seed(1)
        parallel = autopar.parallelize(copy.deepcopy(model), sample, (1,), recompute=chosen)
        found.append(losses_and_weights(parallel, sample))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert len(set(found[0][0])) == STEPS
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-3)


def test_the_own_generator_is_left_alone() -> None:
    model, sample = on_gpu("gpt2", dropout=True)
    parallel = autopar.parallelize(model, sample, (1,))
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device=GPU)
    torch.cuda.manual_seed(3)
    parallel(**sample)["loss"].backward()
    assert torch.equal(torch.rand(4, device=GPU), expected)


@pytest.mark.parametrize("offload", ["host", "disk"])
@pytest.mark.parametrize("share", [0.8, 0.55])
def test_weights_of_the_host_or_the_disk_train_as_the_module_does(offload: str, share: float) -> None:
    whole = planned("gpt2", offload=False)
    more = {"disk_memory": "10GB", "host_memory": "10GB"} if offload == "disk" else {}
    plan = planned("gpt2", offload=offload, budget=int(share * whole.peak_memory), **more)
    away = {name: layout[-1] for name, layout in plan.layouts.items() if layout[-1] in "HD"}
    assert away
    model, sample = on_gpu("gpt2")
    told: list[str] = []
    token = listener.set(lambda kind, size: told.append(kind))
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), sample, plan=Plan.from_json(plan.to_json()))
        check_equal(parallel, model, sample)
    finally:
        listener.reset(token)
    assert {"H": "fetch", "D": "read"}[next(iter(away.values()))] in told
    assert {parameter.device.type for name, parameter in parallel.named_parameters() if name in away} == {"cpu"}


def test_activations_on_the_host_come_back_as_they_were() -> None:
    whole = planned("gpt2", recompute="none", offload=False)
    plan = planned("gpt2", recompute="none", budget=int(0.85 * whole.peak_memory))
    assert plan.breakdown.offload
    model, sample = on_gpu("gpt2")
    check_equal(autopar.parallelize(copy.deepcopy(model), sample, plan=plan), model, sample)


def test_half_precision_trains_with_a_scaler() -> None:
    model, sample = on_gpu("llama")
    parallel = autopar.parallelize(copy.deepcopy(model), sample, (1,), precision="fp16-mixed")
    scaler = autopar.GradScaler(parallel)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = parallel(**sample)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    expected, _ = losses_and_weights(model, sample)
    assert losses[0] == pytest.approx(expected[0], rel=1e-2)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_bfloat16_is_near_the_module_in_it(precision: str) -> None:
    model, sample = on_gpu("llama")
    parallel = autopar.parallelize(copy.deepcopy(model), sample, (1,), precision=precision)
    losses, _ = losses_and_weights(parallel, sample)
    expected, _ = losses_and_weights(model.to(torch.bfloat16) if precision == "bf16" else model, sample)
    assert losses == pytest.approx(expected, rel=2e-2)


def test_micro_batches_add_up_to_the_batch() -> None:
    model, sample = on_gpu("gpt2")
    whole = autopar.parallelize(copy.deepcopy(model), sample, (1,))
    parts = autopar.parallelize(copy.deepcopy(model), sample, (1,), microbatches=4)
    whole(**sample)["loss"].backward()
    parts.step(**sample)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_a_batch_on_the_cpu_is_copied_to_the_gpu() -> None:
    model, sample = models.make("vit")
    parallel = autopar.parallelize(copy.deepcopy(model.eval()), sample, (1,))
    losses, _ = losses_and_weights(parallel, sample)
    expected, _ = losses_and_weights(model.to(GPU), {key: value.to(GPU) for key, value in sample.items()})
    assert losses == pytest.approx(expected, rel=1e-4)
    parallel.step(**{key: value.pin_memory() for key, value in sample.items()})


def test_a_model_on_the_cpu_moves_to_the_gpu() -> None:
    model, sample = models.make("llama")
    parallel = autopar.parallelize(copy.deepcopy(model), sample, (1,))
    assert {parameter.device for parameter in parallel.parameters()} == {GPU}
    there = {key: value.to(GPU) for key, value in sample.items()}
    check_equal(parallel, model.to(GPU), there)


def test_state_dict_goes_back_into_the_module() -> None:
    model, sample = on_gpu("vit")
    parallel = autopar.parallelize(copy.deepcopy(model), sample, (1,))
    losses_and_weights(parallel, sample)
    model.load_state_dict(parallel.state_dict())
    with torch.no_grad():
        assert float(model(**sample)["loss"]) == pytest.approx(float(parallel(**sample)["loss"]), rel=1e-5)

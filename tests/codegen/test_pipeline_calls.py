"""Pipeline calls with gradients: `parallel(**batch)["loss"].backward()` gives the numbers of the user's own loop."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import InputError
from autopar.runtime.workers import WorkerPool
from tests.codegen.test_grad_scaler import ROUNDING, Deep, batches, expected
from tests.support.pipelines import largest, made

EXACT, SMALL, SINGLE = 1e-9, 1e-7, 1e-6  # AdamW scales up what is rounding alone; the library computes norms of T5 in float32
further = functools.partial(pytest.param, marks=pytest.mark.thorough)
CASES = [
    ({"model": "gpt2", "mesh": {"pp": 2, "dp": 2}, "strategy": "fsdp", "microbatches": 4}, EXACT),
    further(
        {"model": "gpt2", "mesh": {"pp": 2, "tp": 2}, "strategy": "megatron", "schedule": "zb-h1", "microbatches": 2}, EXACT
    ),
    further({"model": "gpt2", "mesh": {"dp": 2, "pp": 2}, "strategy": "ddp", "microbatches": 2, "inputs": "sharded"}, EXACT),
    further({"model": "t5", "mesh": {"pp": 2}, "stages": 4, "microbatches": 2}, SINGLE),
]


def looped(case: dict[str, Any]) -> dict[str, float]:
    """Errors of a loop that accumulates two batches of unequal weight, under hooks; and again, with a stage frozen."""
    case = dict(case)
    model, sample = made(case.pop("model"))
    parallel = autopar.parallelize(model, sample, case.pop("mesh"), **({"device": "h100", "pipeline": "pp"} | case))
    seen = list[nn.Parameter]()
    for parameter in (*parallel.parameters(), *model.parameters()):
        parameter.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    for parameter in parallel.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    given, errors, calls = parallel.shard(sample), dict[str, float](), 0
    for turn in range(2):
        for weight in (0.25, -3.0):
            seen.clear()
            found, known = parallel(**given), model(**sample)
            assert found.get("logits") is None
            errors[f"loss {turn} {weight}"] = largest(found["loss"], known["loss"].detach())
            (found["loss"] * weight).backward()
            (known["loss"] * weight).backward()
            calls = len(seen)
        own = dict(model.named_parameters())
        assert calls == len(set(seen)) == sum(parameter.grad is not None for parameter in parallel.parameters())
        for name, parameter in parallel.named_parameters():
            assert (parameter.grad is None) == (own[name].grad is None), name
            if parameter.grad is not None:
                errors[f"{name} {turn}"] = largest(parameter.grad, own[name].grad)
        parallel.zero_grad()
        model.zero_grad()
        if 0 in parallel.autopar.stages.stages:  # whose rank then trains what is shared, or nothing
            for name, parameter in parallel.named_parameters():
                if name not in parallel.autopar.stages.pipeline.tied:
                    parameter.requires_grad_(False)
                    own[name].requires_grad_(False)
    return errors


@pytest.mark.parametrize("case, tolerance", CASES, ids=str)
def test_a_loop_of_backward_has_the_gradients_of_the_users_module(
    case: dict[str, Any], tolerance: float, pool: WorkerPool
) -> None:
    found: list[dict[str, float]] = pool.run(f"{__name__}:looped", case, ranks=math.prod(case["mesh"].values()), keep=True)  # type: ignore[assignment]
    for errors in found:
        assert len(errors) > 4
        assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


def scaled(microbatches: int) -> list[float]:
    """Losses and norms of a loop in two stages with a loss scale, in which every second loss is halved."""
    options = {"device": "h100", "pipeline": "pp", "stages": 2, "precision": "fp16-mixed"}
    parallel = autopar.parallelize(Deep(), batches()[0], {"pp": 2}, microbatches=microbatches, **options)
    optimizer, scaler = torch.optim.AdamW(parallel.parameters(), lr=0.05), autopar.GradScaler(parallel)
    seen = []
    for x in batches():
        for share in (0.5, 0.5):
            loss = parallel(x)
            scaler.scale(share * loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), float(parallel.clip_grad_norm_(0.1))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("microbatches", [2, further(1)])
def test_a_loss_scale_is_taken_once(microbatches: int, pool: WorkerPool) -> None:
    for seen in pool.run(f"{__name__}:scaled", microbatches, ranks=2, keep=True):
        assert seen == pytest.approx(expected(Deep()), rel=8 * ROUNDING)


class TwoScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return {"loss": x.square().mean(), "mean": x.mean(), "x": x}


def test_one_backward_of_the_loss_alone_is_what_a_call_has() -> None:
    model, x = TwoScalars(), torch.randn(8, 8)
    parallel = autopar.parallelize(model, x, {"pp": 1}, device="h100", pipeline="pp", stages=2, microbatches=2)
    expected = model(x)
    found = parallel(x)
    for name in ("loss", "mean"):
        torch.testing.assert_close(found[name], expected[name])
    assert found["x"] is None
    with pytest.raises(InputError, match="a pipeline differentiates its loss alone"):
        (found["loss"] + found["mean"]).backward()
    (gradient,) = torch.autograd.grad(found["loss"], parallel.get_parameter("layers.0.weight"))
    torch.testing.assert_close(gradient, torch.autograd.grad(expected["loss"], model.layers[0].weight)[0])
    with pytest.raises(RuntimeError, match="the loss of a pipeline has no second backward"):
        found["loss"].backward()
    assert all(parameter.grad is None for parameter in parallel.parameters())


def on_the_last_rank_alone(_: None) -> str:
    """What the call says after a backward of which the first stage has heard nothing."""
    model, sample = made("gpt2")
    parallel = autopar.parallelize(model, sample, {"pp": 2}, device="h100", pipeline="pp", microbatches=2)
    for everywhere in (True, False):
        loss = parallel(**sample)["loss"]
        if everywhere or dist.get_rank() == 1:
            loss.backward()
    with pytest.raises(InputError) as error:
        parallel(**sample)
    return str(error.value).splitlines()[0]


def test_a_backward_on_some_ranks_alone_is_an_error_on_all_of_them(pool: WorkerPool) -> None:
    """A habit from schedules of which the last stage alone has the loss."""
    said = "the calls of the ranks differ in what is called: a call on rank 0; a call after loss.backward() on rank 1"
    assert pool.run(f"{__name__}:on_the_last_rank_alone", None, ranks=2, keep=True) == [said, said]


def averaged(case: dict[str, Any]) -> dict[str, float]:
    """Errors of weights that are averaged over three steps of a compiled module, then of those of a step of their module."""
    case = dict(case)
    model, sample = made(case.pop("model"))
    parallel = autopar.parallelize(model, sample, case.pop("mesh"), **({"device": "h100", "pipeline": "pp"} | case))
    if case["schedule"] == "1f1b":
        parallel.compile(backend="aot_eager")
    modules = [parallel, model]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules]
    for step in range(3):
        for module, optimizer in zip(modules, optimizers, strict=True):
            optimizer.zero_grad()
            module(**sample)["loss"].backward()
            optimizer.step()
        if not step:
            averages = [AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for module in modules]
        for average, module in zip(averages, modules, strict=True):
            average.update_parameters(module)
    errors = compared(modules[0], modules[1], "behind three steps")
    found, known = (average.module for average in averages)
    assert not {*map(id, found.parameters())} & {*map(id, parallel.parameters())}
    with torch.no_grad():
        errors["loss of averages"] = largest(averages[0](**sample)["loss"], averages[1](**sample)["loss"])
    for average in (found, known):
        average.zero_grad()
    errors["loss of a step"] = largest(found.step(**sample), (loss := known(**sample)["loss"]).detach())
    loss.backward()
    return errors | compared(found, known, "of averages") | compared(modules[0], modules[1], "after their step")


def compared(parallel: nn.Module, model: nn.Module, when: str) -> dict[str, float]:
    """Errors of a rank's parameters, and of gradients."""
    own, errors = dict(model.named_parameters()), dict[str, float]()
    for name, parameter in parallel.named_parameters():
        errors[f"{name} {when}"] = largest(parameter, own[name].detach())
        if own[name].grad is not None:
            errors[f"gradient of {name} {when}"] = largest(parameter.grad, own[name].grad)
    return errors


@pytest.mark.parametrize(
    "case",
    [
        {"model": "gpt2", "mesh": {"pp": 2, "dp": 2}, "strategy": "fsdp", "microbatches": 2, "schedule": "1f1b"},
        further({"model": "gpt2", "mesh": {"pp": 2}, "microbatches": 2, "schedule": "zb-v"}),
    ],
    ids=str,
)
def test_a_copy_averages_and_trains_by_itself(case: dict[str, Any], pool: WorkerPool) -> None:
    for errors in pool.run(f"{__name__}:averaged", case, ranks=math.prod(case["mesh"].values()), keep=True):
        assert len(errors) > 30  # type: ignore[arg-type]
        assert {name: error for name, error in errors.items() if not error <= SMALL} == {}  # type: ignore[attr-defined]

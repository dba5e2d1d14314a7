"""Costs of optimizers, against torch's own optimizers where they exist."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.optimizer_instances import counted
from autopar.cost_models.optimizers import OPTIMIZERS, Optimizer, optimizer, step_seconds
from autopar.errors import InputError
from autopar.runtime.memory_tracker import MemoryTracker

TORCH: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("name", TORCH)
def test_the_state_is_what_torch_keeps(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
    made = TORCH[name]([parameter])
    parameter.grad = torch.ones_like(parameter)
    made.step()
    state = made.state[parameter].values()
    kept = [t for t in state if isinstance(t, torch.Tensor) and t.shape == parameter.shape]
    assert len(kept) == OPTIMIZERS[name].states
    assert {t.dtype for t in kept} <= {parameter.dtype}


@pytest.mark.parametrize("cpu", [True, False], ids=["one after the other", "together"])
@pytest.mark.parametrize("name", TORCH)
def test_a_step_takes_what_torch_takes_for_itself(name: str, cpu: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3000, 5000, 2000, 8000)]
    made = TORCH[name](parameters)
    for group in made.param_groups:
        group["foreach"] = not cpu
    for _ in range(2):  # the first step makes the state
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        states = [t for state in made.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        with MemoryTracker([*parameters, *(p.grad for p in parameters if p.grad is not None), *states]) as live:
            before = live.now
            made.step()
    taken = OPTIMIZERS[name].scratch([parameter.nbytes for parameter in parameters], cpu=cpu)
    assert live.peak().bytes - before == pytest.approx(taken, abs=100)  # counts of steps


@pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=lambda entry: entry.name)
def test_a_step_at_least_reads_parameter_gradient_and_state_and_writes_back(entry: Optimizer) -> None:
    assert entry.moved >= 3 + 2 * entry.states
    assert entry.source


def test_half_the_parameters_take_half_the_time() -> None:
    h100 = DEVICES["h100"]
    whole, half = (step_seconds(size, OPTIMIZERS["adamw"], h100) for size in (2e9, 1e9))
    assert whole == pytest.approx(2 * half)
    assert whole == pytest.approx(7 * 2e9 / h100.streaming)


def test_a_step_over_one_parameter_after_the_other_is_on_the_lines_that_were_measured() -> None:
    """Enumerated: below the least size, at the sizes, between them and beyond."""
    cpu = replace(DEVICES["h100"], updates={"adamw": {1000: 5e-5, 5000: 7e-5, 10_000: 9e-4}})
    expected = {0: 0.0, 500: 2.5e-5, 1000: 5e-5, 2000: 5.5e-5, 5000: 7e-5, 10_000: 9e-4, 40_000: 3.6e-3}
    assert {size: step_seconds(size, OPTIMIZERS["adamw"], cpu) for size in expected} == pytest.approx(expected)
    sgd = OPTIMIZERS["sgd"]
    assert step_seconds(2000, sgd, cpu) == step_seconds(2000, sgd, DEVICES["h100"]), "no size of it was measured"


def test_the_optimizers_time_of_a_plan_is_the_sum_over_what_a_device_stores() -> None:
    """Two large weights and two small biases, whole and halved by ZeRO-1; a device steps each by itself."""
    known = {64: 2e-5, 1 << 12: 4e-5, 1 << 20: 9e-4}
    device = replace(DEVICES["h100"], updates={"adamw": known})
    model, x = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256)), torch.zeros(64, 256)
    for strategy, parts in (("ddp", 1), ("zero1", 2)):
        plan = autopar.plan(model, x, 2, device=device, strategy=strategy)
        expected = sum(step_seconds(4 * p.numel() / parts, OPTIMIZERS["adamw"], device) for p in model.parameters())
        assert plan.breakdown.optimizer == pytest.approx(expected)


def test_an_unknown_optimizer_is_refused_with_the_nearest_name_and_all_names() -> None:
    with pytest.raises(InputError) as caught:
        optimizer("adamx")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("no optimizer is called 'adamx'; did you mean 'adam")
    assert all(name in rest[0] for name in OPTIMIZERS)


def test_an_instance_a_class_and_a_function_are_counted_by_a_step() -> None:
    for name, make in TORCH.items():
        assert counted(make([torch.nn.Parameter(torch.zeros(2))])).name == name
        assert counted(make) == optimizer(name)
    large = counted(functools.partial(torch.optim.AdamW, amsgrad=True))
    assert (large.states, large.moved) == (3, 9)
    kept = {kind: counted(kind).states for kind in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.ASGD)}
    assert [*kept.values()] == [1, 0, 1]


def test_a_plan_for_an_instance_is_that_for_its_name() -> None:
    model, sample = torch.nn.Linear(64, 64), torch.zeros(8, 64)
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plans = [autopar.plan(model, sample, (2,), device="h100", optimizer=given) for given in (momentum, "sgd-momentum")]
    assert plans[0].to_json() == plans[1].to_json()
    with pytest.raises(InputError, match="the optimizer Linear cannot be stepped to see what it keeps"):
        autopar.plan(model, sample, (2,), device="h100", optimizer=torch.nn.Linear)

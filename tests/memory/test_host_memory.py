"""Weights in host memory, run on a CPU in place of a device, with separate memory of the same machine as its host."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.cost_models import catalog
from autopar.cost_models.links import LINKS
from autopar.errors import BudgetError, PlanError
from autopar.explain.energy import energy_of
from autopar.explain.report import memory
from autopar.ir.conversion import COPIES
from autopar.ir.device import Device
from autopar.plan.plan import Plan
from autopar.plan.text import plain
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.verify.testing import peak

GIB = 2**30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(96, width), nn.Linear(width, 96)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def device(processes: int = 1, **others: object) -> Device:
    """A CPU that stands for a device with a host of its own."""
    cpu = catalog.device("cpu", processes=processes)
    return replace(cpu, host=LINKS["pcie4"], host_memory=GIB, host_bandwidth=2e10, **others)  # type: ignore[arg-type]


def made(blocks: int = 3) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(96, (4, 9))
    return Model(blocks=blocks), (tokens[:, :-1], tokens[:, 1:])


def planned(share: float, **options: object) -> Plan:
    """A plan within a share of the memory that the model takes with everything on the device."""
    model, batch = made()
    whole = autopar.plan(model, batch, (1,), device=device(), offload=False)
    return autopar.plan(
        model,
        batch,
        (1,),
        device=device(),
        offload="host",
        budget=int(share * whole.peak_memory),
        **options,  # type: ignore[arg-type]
    )


def hosted(plan: Plan) -> set[str]:
    return {name for name, layout in plan.layouts.items() if layout.endswith(", H")}


def equal_steps(parallel: nn.Module, sequential: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.optim.Optimizer:
    """Three steps of AdamW have losses and parameters equal to the bit; returns the optimizer of the first module."""
    modules = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)) for m in (parallel, sequential)]
    for _ in range(3):
        losses = []
        for module, optimizer in modules:
            optimizer.zero_grad()
            losses.append(module(*batch))
            losses[-1].backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
        assert losses[0].detach() == losses[1].detach()
    for mine, theirs in zip(parallel.parameters(), sequential.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    return modules[0][1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("share", [0.6, 0.25])
def test_a_step_is_that_of_the_whole_model_and_its_memory_by_place_what_the_plan_says(share: float) -> None:
    plan, (model, batch) = planned(share), made()
    away = hosted(plan)
    assert away
    assert "on the host" in plain(memory(plan))
    over_bus = sum(message.bytes for message in plan.collectives if message.kind in COPIES)
    energy = energy_of(replace(plan, device="rtx3090"))
    assert energy.moved["pcie4"][0] == over_bus > 0
    parallel = autopar.parallelize(model, batch, plan=Plan.from_json(plan.to_json()))
    sequential = copy.deepcopy(model)
    optimizer = equal_steps(parallel, sequential, batch)

    stored = {name: parameter for name, parameter in parallel.named_parameters() if name in away}
    state = [tensor for parameter in stored.values() for tensor in optimizer.state[parameter].values() if tensor.ndim]
    gradients = [parameter.grad for parameter in stored.values() if parameter.grad is not None]
    there = sum(tensor.nbytes for tensor in (*stored.values(), *gradients, *state))
    assert there == pytest.approx(plan.host_memory, rel=0.05)

    def step() -> None:
        parallel(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert peak(parallel, optimizer, batch, step).bytes == pytest.approx(plan.peak_memory, rel=0.05)


def test_inference_fetches_weights_block_by_block() -> None:
    model, batch = made(blocks=6)
    model = model.eval()
    whole = autopar.plan(model, batch, (1,), device=device(), mode="inference")
    budget = int(0.5 * whole.peak_memory)
    plan = autopar.plan(model, batch, (1,), device=device(), mode="inference", offload="host", budget=budget)
    parallel = autopar.parallelize(model, batch, plan=plan)
    stored = {name: p for name, p in parallel.named_parameters() if name in hosted(plan)}
    here = [p for name, p in parallel.named_parameters() if name not in stored]
    with torch.no_grad(), MemoryTracker([*here, *batch], elsewhere=stored.values()) as tracker:
        found = parallel(*batch)
    assert found == model(*batch)
    assert tracker.peak().bytes == pytest.approx(plan.peak_memory, rel=0.05)
    assert sum(p.nbytes for p in stored.values()) == plan.host_memory
    assert plan.peak_memory <= budget < sum(p.nbytes for p in model.parameters())


class Products(nn.Module):
    """Three products of different sizes: every one may lie on the host or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 96), nn.Linear(96, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(functional.relu(self.second(functional.relu(self.first(x))))).square().mean()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("share", [0.7, 0.45])
def test_places_are_the_best_of_all(share: float) -> None:
    """The integer program finds what trying every placement of the weights finds."""
    model, batch = Products(), torch.randn(16, 32)
    whole = autopar.plan(model, batch, (1,), device=device(), offload=False)
    budget = int(share * whole.peak_memory)
    best = autopar.plan(model, batch, (1,), device=device(), offload="host", budget=budget)
    names, prices = [name for name, _ in model.named_parameters() if name.endswith("weight")], []
    for places in itertools.product("IH", repeat=len(names)):
        constraints = dict(zip(names, (f"I, {place}" for place in places), strict=True))
        try:
            plan = autopar.plan(model, batch, (1,), device=device(), offload="host", budget=budget, constraints=constraints)
        except autopar.AutoparError:
            continue
        prices.append(plan.step_time)
    assert len(prices) < 2 ** len(names)
    assert best.step_time == pytest.approx(min(prices), rel=1e-9)


ZERO = {
    "zero-offload": "zero2",
    "zero-infinity": "fsdp",
}  # what fixed placement of all weights, gradients and state on the host is


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", ZERO)
def test_auto_is_never_slower_than_a_fixed_placement(placement: str) -> None:
    with torch.device("meta"):
        model, tokens = Model(width=256, blocks=2), torch.zeros(16, 64, dtype=torch.long)
    fixed = {name: "*, H" for name, _ in model.named_parameters()}

    def plan(**options: object) -> Plan:
        return autopar.plan(
            model,
            (tokens, tokens),
            (2,),
            device="rtx3090",
            offload="host",
            host_memory="64GB",
            **options,  # type: ignore[arg-type]
        )

    named = plan(strategy=ZERO[placement], constraints=fixed)
    assert hosted(named) == fixed.keys()
    assert all(bool(named.recompute.get(name)) == (placement == "zero-infinity") for name in fixed if "up.weight" in name)
    auto = plan(budget=named.peak_memory)
    assert auto.step_time <= named.step_time * (1 + 1e-9)


def test_ranks_that_fetch_and_gather_give_the_numbers_of_the_whole_model_and_send_what_the_plan_says() -> None:
    model, batch = made()
    plan = autopar.plan(
        model, batch, (2,), device=device(2), offload="host", strategy="fsdp", constraints={"*weight": "*, H"}, microbatches=2
    )
    assert plan.routes["blocks.0.up.weight"] == ("S(0), H -> S(0), I", "S(0), I -> R, I")
    report = autopar.verify(model, batch, (2,), plan=plan)
    assert report.ok, str(report)  # also that the copies which the ranks made are those of the plan


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"offload": "moon"}, "offload='moon' is not known"),
    ({"host_memory": "1GB"}, "host_memory='1GB' says how much the host may store, and offload=True"),
    ({"offload": "host", "device": catalog.device("cpu")}, "has no link to one"),
    ({"offload": "host", "device": "rtx3090"}, "offload='host' needs to know the memory of the host of rtx3090"),
    ({"offload": "host", "host_memory": "much"}, "'much' is not an amount of the host's memory"),
    ({"offload": "host", "mesh": {"memory": 1}}, "a mesh axis is called 'memory'"),
    ({"offload": "host", "pipeline": "axis0"}, "offload='host' beside a pipeline is not known"),
    ({"offload": "host", "constraints": {"first:linear#0": "I, H"}}, "has first:linear#0 in state H"),
    ({"constraints": {"first.weight": "H"}}, "has first.weight in state H"),
    ({"offload": "host", "budget": 60_000, "host_memory": 1000}, "no plan fits"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_no_host_can_do_is_refused(options: dict[str, object], message: str) -> None:
    asked = {"mesh": (1,), "device": device(), **options}
    with pytest.raises(autopar.AutoparError, match=message.replace("(", r"\(")) as found:
        autopar.plan(Products(), torch.randn(16, 32), **asked)  # type: ignore[arg-type]
    assert found.value.details.get("fix")


def test_auto_stores_no_weights_on_a_host_that_is_not_known() -> None:
    model, batch = Products(), torch.randn(16, 32)
    plans = [autopar.plan(model, batch, (1,), device="rtx3090", offload=offload) for offload in (True, "auto")]
    assert [plan.axes for plan in plans] == [("axis0",), ("axis0",)]
    assert autopar.plan(model, batch, (1,), device="h100", offload="auto").axes == ("axis0", "memory")


def test_frozen_weights_are_fetched_again_for_the_backward() -> None:
    """A small trained part on a large frozen one, of which the device never has more than two blocks."""
    model, batch = made(blocks=6)
    model.requires_grad_(False)
    model.embed.requires_grad_(True)
    size = sum(parameter.nbytes for parameter in model.parameters())
    plan = autopar.plan(model, batch, (1,), device=device(), offload="host", budget=int(0.55 * size))
    assert not set(plan.breakdown.host) & {"gradients", "optimizer state"} or "embed.weight" in hosted(plan)
    parallel = autopar.parallelize(model, batch, plan=plan)
    found, expected = parallel(*batch), model(*batch)
    found.backward()
    expected.backward()
    torch.testing.assert_close(parallel.embed.weight.grad, model.embed.weight.grad, rtol=0, atol=0)
    optimizer = torch.optim.AdamW([parallel.embed.weight], fused=True)

    def step() -> None:
        parallel(*batch).backward()
        optimizer.step()

    assert peak(parallel, optimizer, batch, step).bytes == pytest.approx(plan.peak_memory, rel=0.05)


def test_evaluation_of_a_model_that_was_planned_for_training_uses_the_weights_where_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 8))
    batch = torch.randn(4, 16)
    plan = autopar.plan(model, batch, (1,), device=device(), offload="host", constraints={"*weight": "*, H"})
    parallel = autopar.parallelize(model, batch, plan=plan)
    torch.testing.assert_close(parallel.eval()(batch), model.eval()(batch), rtol=0, atol=0)


def test_a_machine_with_less_memory_than_the_plan_needs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Products(), torch.randn(16, 32)
    plan = autopar.plan(model, batch, (1,), device=device(), offload="host", constraints={"*weight": "*, H"})
    monkeypatch.setattr("autopar.planning.memories.system_memory", lambda: 4096)
    with pytest.raises(BudgetError, match=r"of this host.s memory, which has 4\.00 KiB"):
        autopar.parallelize(model, batch, plan=plan)


def test_a_plan_file_that_has_something_on_the_host_where_nothing_can_be_is_damaged() -> None:
    plan = autopar.plan(Products(), torch.randn(16, 32), (1,), device=device(), offload="host")
    for name, layout in (("first.weight", "H, I"), ("first:linear#0", "I, H")):
        wrong = replace(plan, layouts={**plan.layouts, name: layout})
        with pytest.raises(PlanError, match="damaged"):
            autopar.parallelize(Products(), torch.randn(16, 32), plan=Plan.from_json(wrong.to_json()))


def test_a_model_on_meta_is_initialised_where_the_plan_stores_it() -> None:
    with torch.device("meta"):
        model, batch = Products(), torch.randn(16, 32)
    plan = autopar.plan(model, batch, (1,), device=device(), offload="host", constraints={"*weight": "*, H"})
    parallel = autopar.parallelize(model, batch, plan=plan)
    autopar.initialize(parallel, model)
    parallel(torch.randn(16, 32)).backward()
    assert all(parameter.grad is not None for parameter in parallel.parameters())

"""Weights on the disk, run on a CPU in place of a device, with a local folder as its disk."""

from __future__ import annotations

import gc
import itertools
import os
import resource
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import BudgetError, DiskError, InputError, RankError
from autopar.explain.report import memory
from autopar.ir.device import Device, Disk
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.text import plain
from autopar.runtime.disk import on_disk
from autopar.runtime.memory_tracker import MemoryTracker
from autopar.runtime.single_steps import local
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.verify.testing import peak
from autopar.verify.verification import verify
from tests.memory.test_host_memory import Model, Products, device, equal_steps, made
from tests.support.elastic_training import logged, train
from tests.support.threads import Threads

DISK = Disk(memory=0, read=3e9, write=2e9, latency=1e-5, source="of this test")
ALL = {"*weight": "*, D"}


def with_disk(processes: int = 1) -> Device:
    """A CPU that stands for a device with a host and a disk of its own."""
    return replace(device(processes), disk=DISK)


def planned(share: float, **options: object) -> Plan:
    """A plan within a share of the memory that the model takes with everything on the device."""
    model, batch = made()
    whole = autopar.plan(model, batch, (1,), device=with_disk(), offload=False)
    asked = {"offload": "disk", "disk_memory": "1GB", "budget": int(share * whole.peak_memory), **options}
    return autopar.plan(model, batch, (1,), device=with_disk(), **asked)  # type: ignore[arg-type]


def small(**options: object) -> tuple[nn.Module, torch.Tensor, nn.Module]:
    """A model with a batch, and its parallel module with all weights on the disk."""
    torch.manual_seed(0)
    model, batch = Products(), torch.randn(16, 32)
    asked = {"device": with_disk(), "offload": "disk", "disk_memory": "1GB", "constraints": ALL, **options}
    return model, batch, autopar.parallelize(model, batch, (1,), **asked)


def placed(plan: Plan) -> set[str]:
    return {layout[-1] for layout in plan.layouts.values()} & {"H", "D"}


def test_a_host_beside_a_disk_may_store_nothing() -> None:
    plan = planned(0.4, host_memory=0)
    assert placed(plan) == {"D"}
    (model, batch), device = made(), with_disk()
    with pytest.raises(BudgetError, match="0 is not an amount of the host's memory") as caught:
        autopar.plan(model, batch, (1,), device=device, offload="host", host_memory=0)
    assert "bytes per node" in caught.value.details["fix"]


def test_a_step_is_that_of_the_whole_model_and_its_memory_by_place_what_the_plan_says(tmp_path: Path) -> None:
    plan = planned(0.4, host_memory=300_000)
    assert placed(plan) == {"H", "D"}
    assert "memory on the disk per device" in plain(memory(plan))
    model, batch = made()
    parallel = autopar.parallelize(model, batch, plan=Plan.from_json(plan.to_json()), disk=tmp_path)
    optimizer = equal_steps(parallel, model, batch)

    counted = dict.fromkeys("HD", 0)
    for name, parameter in parallel.named_parameters():
        assert parameter.grad is not None
        own = [parameter, parameter.grad, *(kept for kept in optimizer.state[parameter].values() if kept.ndim)]
        assert {on_disk(tensor) for tensor in own} == {plan.layouts[name].endswith("D")}
        if plan.layouts[name][-1] in counted:
            counted[plan.layouts[name][-1]] += sum(tensor.nbytes for tensor in own)
    assert (counted["H"], counted["D"]) == pytest.approx((plan.host_memory, plan.disk_memory), rel=0.05)
    assert os.listdir(tmp_path) == []  # the files have no names, so that none is left, however the process ends
    assert str(tmp_path) in Path("/proc/self/maps").read_text()

    def step() -> None:
        parallel(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert peak(parallel, optimizer, batch, step).bytes == pytest.approx(plan.peak_memory, rel=0.05)


def test_files_are_gone_with_the_module(tmp_path: Path) -> None:
    _, batch, parallel = small(disk=tmp_path)
    parallel(batch).backward()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del parallel
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_inference_reads_weights_block_by_block() -> None:
    """A forward whose weights are larger than device and host together."""
    model, batch = made(blocks=6)
    model, size = model.eval(), sum(p.nbytes for p in model.parameters())
    options = {"offload": "disk", "host_memory": size // 4, "disk_memory": "1GB", "budget": size // 2}
    plan = autopar.plan(model, batch, (1,), device=with_disk(), mode="inference", **options)  # type: ignore[arg-type]
    parallel = autopar.parallelize(model, batch, plan=plan)
    away = {name: p for name, p in parallel.named_parameters() if plan.layouts[name][-1] in "HD"}
    here = [p for name, p in parallel.named_parameters() if name not in away]
    with torch.no_grad(), MemoryTracker([*here, *batch], elsewhere=away.values()) as tracker:
        found = parallel(*batch)
    assert found == model(*batch)
    assert tracker.peak().bytes == pytest.approx(plan.peak_memory, rel=0.05)
    assert sum(p.nbytes for p in away.values() if on_disk(p)) == plan.disk_memory > 0
    assert sum(p.nbytes for p in away.values() if not on_disk(p)) == plan.host_memory <= size // 4


def test_places_are_the_best_of_all() -> None:
    """The integer program finds what trying every placement of the weights finds, within the limits of device and host."""
    model, batch = Products(), torch.randn(16, 32)
    whole = autopar.plan(model, batch, (1,), device=with_disk(), offload=False)
    names = [name for name, _ in model.named_parameters() if name.endswith("weight")]
    asked = {"offload": "disk", "budget": int(0.6 * whole.peak_memory), "host_memory": 60_000, "disk_memory": "1GB"}

    def plan(**options: object) -> Plan:
        return autopar.plan(model, batch, (1,), device=with_disk(), **asked, **options)  # type: ignore[arg-type]

    best, prices = plan(), []
    for places in itertools.product("IHD", repeat=len(names)):
        try:
            prices.append(plan(constraints=dict(zip(names, (f"I, {p}" for p in places), strict=True))).step_time)
        except autopar.AutoparError:
            continue
    assert 1 < len(prices) < 3 ** len(names)
    assert best.step_time == pytest.approx(min(prices), rel=1e-9)
    assert "D" in placed(best)


def test_auto_is_never_slower_than_zero_infinity() -> None:
    """ZeRO-Infinity has all parameters, gradients and state on the disk, by shards."""
    with torch.device("meta"):
        model, tokens = Model(width=256, blocks=2), torch.zeros(16, 64, dtype=torch.long)
    options = {"device": "rtx3090", "offload": "disk", "host_memory": 4_000_000, "disk_memory": "1TB"}
    fixed = {name: "*, D" for name, _ in model.named_parameters()}
    named = autopar.plan(model, (tokens, tokens), (2,), strategy="fsdp", constraints=fixed, **options)  # type: ignore[arg-type]
    assert placed(named) == {"D"}
    auto = autopar.plan(model, (tokens, tokens), (2,), budget=named.peak_memory, **options)  # type: ignore[arg-type]
    assert auto.step_time <= named.step_time * (1 + 1e-9)


def test_ranks_that_read_and_gather_give_the_numbers_of_the_whole_model(threads: Threads) -> None:
    model, batch = made()
    options = {"offload": "disk", "disk_memory": "1GB", "strategy": "fsdp", "constraints": ALL, "microbatches": 2}
    plan = autopar.plan(model, batch, (2,), device=with_disk(2), **options)  # type: ignore[arg-type]
    assert plan.routes["blocks.0.up.weight"] == ("S(0), D -> S(0), I", "S(0), I -> R, I")
    report = verify(model, batch, (2,), plan, Options(), threads)
    assert report.ok, str(report)


@pytest.mark.parametrize("names", [["*weight"], ["0.weight"], ["2.weight"]])
def test_chunks_that_differ_are_padded(threads: Threads, names: list[str]) -> None:
    model, batch = nn.Sequential(nn.Linear(10, 9), nn.ReLU(), nn.Linear(9, 7)), torch.randn(4, 10)
    constraints = dict.fromkeys(names, "S(0), D")
    options = {"offload": "disk", "disk_memory": "1GB", "constraints": constraints}
    plan = autopar.plan(model, batch, (2,), device=with_disk(2), **options)  # type: ignore[arg-type]
    report = verify(model, batch, (2,), plan, Options(), threads)
    assert report.ok, str(report)


def test_an_elastic_run_goes_on_with_weights_on_the_disk(tmp_path: Path) -> None:
    options = {"device": with_disk(), "offload": "disk", "disk_memory": "1GB", "strategy": "auto", "constraints": ALL}
    for folder, more in ((tmp_path / "disk", options), (tmp_path / "device", {})):
        folder.mkdir()
        train(folder, 2, 2, **more)
        state = train(folder, 4, 2, **more)
        assert on_disk(state.model.get_parameter("body.0.weight")) == bool(more)
    assert logged(tmp_path / "disk") == logged(tmp_path / "device")


def test_a_damaged_file_is_an_error_and_what_is_written_on_purpose_is_not() -> None:
    model, batch, parallel = small()
    parallel.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    for parameter in model.parameters():
        parameter.data *= 2
    assert parallel(batch) == model(batch)
    parallel.second.weight.data[3, 5] += 1e-6  # past torch's counter of writes, as a damaged disk would
    with pytest.raises(DiskError, match="on the disk is damaged"):
        parallel(batch)
    parallel.load_state_dict(model.state_dict())
    assert parallel(batch) == model(batch)


def split_steps(width: int) -> list[str]:
    """Steps by torch's optimizer of split rows on the disk, with gradients that add up and writes to the weights; then the
    errors of a damaged file.
    """
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(8, width), nn.Sigmoid(), nn.Linear(width, 8)).double(), torch.randn(4, 8).double()
    options = {"offload": "disk", "host_memory": "1GB", "disk_memory": "1GB", "constraints": {"0.weight": "S(0), D"}}
    parallel = autopar.parallelize(deepcopy(plain), x, (2,), device=with_disk(), **options)  # type: ignore[arg-type]
    for module in (parallel, plain):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        for part in range(4):
            module(x).square().mean().backward()
            if part % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                with torch.no_grad():
                    module.get_parameter("0.weight").mul_(0.9)
    torch.testing.assert_close(full_tensor(parallel.get_parameter("0.weight")), plain.get_parameter("0.weight"))
    parallel(x)
    local(parallel.get_parameter("0.weight")).data[0, 0] += 1e-6
    try:
        parallel(x)
    except (DiskError, RankError) as error:
        return [type(error).__name__]
    return []


@pytest.mark.parametrize("width", [8, 7], ids=["even", "padded"])
def test_what_is_written_through_a_dtensor_is_no_damage(width: int, pool: WorkerPool) -> None:
    found = pool.run(f"{__name__}:split_steps", width, ranks=2)
    assert "DiskError" in {name for names in found for name in names}


def test_what_is_loaded_into_a_model_on_meta_lies_where_the_plan_stores_it() -> None:
    model, batch, planned = small()
    with torch.device("meta"):
        hollow = Products()
    parallel = autopar.parallelize(hollow, batch, plan=planned.autopar.plan)
    parallel.load_state_dict(model.state_dict(), assign=True)
    assert [on_disk(parameter) for parameter in parallel.parameters()] == [on_disk(one) for one in planned.parameters()]
    assert parallel(batch) == model(batch)


def test_a_disk_that_fills_up_is_an_error_after_which_the_step_can_be_taken_again() -> None:
    model, batch, parallel = small()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    loss = parallel(batch)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # no larger file can be written
    try:
        with pytest.raises(DiskError, match="more cannot be written to the disk"):
            loss.backward()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    parallel.zero_grad()
    parallel(batch).backward()
    model(batch).backward()
    torch.testing.assert_close(parallel.first.weight.grad, model.first.weight.grad, rtol=0, atol=0)


def test_folders_that_cannot_hold_the_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="nowhere for weights on the disk does not exist"):
        small(disk=tmp_path / "nowhere")
    with pytest.raises(DiskError, match="no file can be created in /proc"):
        small(disk="/proc")
    model, batch, _ = small()
    plan = autopar.plan(model, batch, (1,), device=with_disk(), offload="disk", disk_memory="1GB", constraints=ALL)
    large = replace(plan, breakdown=replace(plan.breakdown, disk={"parameters": 2**60}))
    with pytest.raises(BudgetError, match=r"1073741824\.00 GiB on this disk, which has"):
        autopar.parallelize(model, batch, plan=large)


def test_an_optimizer_that_needs_whole_models_is_refused() -> None:
    _, batch, parallel = small()
    parallel(batch).backward()
    with pytest.raises(InputError, match="Adafactor is not known to compute each element by itself"):
        torch.optim.Adafactor(parallel.parameters()).step()
    with pytest.raises(InputError, match="takes no closure"):
        torch.optim.LBFGS(parallel.parameters()).step(lambda: 0.0)


def test_parameters_in_groups_are_stepped_with_their_own_rates_and_keep_their_gradients() -> None:
    model, batch, parallel = small()
    optimizers = []
    for module in (model, parallel):
        groups = [{"params": module.first.parameters(), "lr": 0.1}, {"params": [*module.second.parameters()], "momentum": 0.9}]
        optimizers.append(torch.optim.SGD(groups, lr=0.01))
        for _ in range(2):
            optimizers[-1].zero_grad()
            module(batch).backward()
            optimizers[-1].step()
    for mine, theirs in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)
    assert [len(group["params"]) for group in optimizers[1].param_groups] == [2, 2]


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"offload": "host", "disk_memory": "1TB"}, "disk_memory='1TB' says how much the disk may store, and offload='host'"),
    ({"offload": "disk"}, "needs to know how much the disk of cpu"),
    ({"offload": "disk", "disk_memory": "1TB", "device": device()}, "needs to know the rates of the disk of cpu"),
    ({"offload": "disk", "disk_memory": "much"}, "'much' is not an amount of the disk"),
    ({"offload": "disk", "disk_memory": "1TB", "pipeline": "axis0"}, "offload='disk' beside a pipeline is not known"),
    ({"offload": "host", "constraints": {"first.weight": "I, D"}}, "has first.weight in state D"),
    ({"offload": "disk", "disk_memory": 1000, "host_memory": 1000, "budget": 60_000}, "no plan fits"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_no_disk_can_do_is_refused(options: dict[str, object], message: str) -> None:
    asked = {"mesh": (1,), "device": with_disk(), **options}
    with pytest.raises(autopar.AutoparError, match=message.replace("(", r"\(")) as found:
        autopar.plan(Products(), torch.randn(16, 32), **asked)  # type: ignore[arg-type]
    assert found.value.details.get("fix")


def test_auto_stores_weights_on_the_disk_where_its_size_is_said() -> None:
    model, batch = Products(), torch.randn(16, 32)
    plans = [
        autopar.plan(model, batch, (1,), device="rtx3090", offload="auto", **more) for more in ({}, {"disk_memory": "1TB"})
    ]  # type: ignore[arg-type]
    assert [plan.axes for plan in plans] == [("axis0",), ("axis0", "memory")]


def test_a_model_on_meta_is_initialised_where_the_plan_stores_it() -> None:
    with torch.device("meta"):
        model, batch = Products(), torch.randn(16, 32)
    options = {"offload": "disk", "disk_memory": "1GB", "constraints": ALL}
    parallel = autopar.parallelize(model, batch, (1,), device=with_disk(), **options)
    autopar.initialize(parallel, model)
    parallel(torch.randn(16, 32)).backward()
    assert on_disk(parallel.first.weight)
    assert on_disk(parallel.first.weight.grad)

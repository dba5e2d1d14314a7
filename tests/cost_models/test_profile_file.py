"""Measured profiles: written, read, and used instead of the data sheets."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar import profile
from autopar.analysis.analysis import analyse
from autopar.cost_models import catalog
from autopar.cost_models.collectives import seconds
from autopar.cost_models.compute import pricer
from autopar.cost_models.kernel_profile import Kernel
from autopar.cost_models.links import connect
from autopar.cost_models.profile_file import load, measured_link, save
from autopar.errors import DiskError, MeshError
from autopar.ir.device import Device, Disk, Link
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Ref, Value
from autopar.ir.training_step import TrainingStep
from autopar.plan.assignment_text import resolve
from autopar.planning.planner import read_program
from autopar.profile import Noise, main, timed_call
from autopar.runtime import benchmark, memory_rates
from autopar.runtime.benchmark import Times, repeated
from tests.cost_models.cost_ops import op, x
from tests.support import table
from tests.support.planning import form
from tests.verify.test_parallel_recurrence_and_experts import mixture

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LINE = (1e-4, 8e-9)
LINK = measured_link(2, dict.fromkeys(KINDS, LINE), "made up")
DEVICE = Device(
    name="cpu, 2 processes measured",
    flops={"float32": 1e10},
    memory=1 << 30,
    bandwidth=1e10,
    launch=1e-6,
    inner="gloo",
    outer="gloo",
    per_node=2,
    source="made up",
    rates={"aten.linear.default": (2e9, 1e9), "optimizer.sgd": (1e9, 0.0)},
    updates={"adamw": {64: 2e-5, 65536: 1e-4}},
    links={2: LINK},
)


def linear() -> tuple[Op, dict[str, Value]]:
    def value(name: str, *shape: int) -> Value:
        return Value(name=name, shape=shape, dtype=torch.float32, requires_grad=True)

    operands = {v.name: v for v in (value("x", 64, 32), value("w", 16, 32))}
    op = Op(name=":linear#0", target="aten.linear.default", args=(Ref("x"), Ref("w")), results=(value("y", 64, 16),))
    return op, operands


DISK = Disk(memory=0, read=7e9, write=5e9, latency=4e-5, source="made up")
BUS = Link(name="measured, host", latency=9e-6, bandwidth=5e10, source="made up")
HOST = replace(DEVICE, host=BUS, host_memory=1 << 40, host_bandwidth=6e11, host_source="made up", disk=DISK)


@pytest.mark.parametrize("device", [DEVICE, replace(DEVICE, disk=DISK), HOST], ids=["device", "disk", "host"])
def test_what_is_written_is_read_back(device: Device, tmp_path: Path) -> None:
    save(device, tmp_path / "machine.json")
    assert load(tmp_path / "machine.json") == device
    assert catalog.device(str(tmp_path / "machine.json")) == device


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "x", "source": "y", "device": 3, "links": {}, "rates": {}}'])
def test_a_file_that_is_not_a_profile_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(MeshError, match="is not a machine profile"):
        load(tmp_path / "machine.json")
    with pytest.raises(MeshError, match="is not a machine profile"):
        load(tmp_path / "missing.json")


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_line_counts_instead_of_latency_and_bandwidth(kind: str) -> None:
    assert seconds(kind, 0.0, 2, LINK) == 1e-4
    assert seconds(kind, 1e6, 2, LINK) == pytest.approx(1e-4 + 8e-3)
    assert seconds(kind, 1e6, 1, LINK) == 0.0, "nothing is sent on an axis of one"
    sizes = np.linspace(0.0, 1e6, 500)
    found = seconds(kind, sizes, 2, LINK)
    assert (np.diff(found) > 0).all(), "more bytes take more"
    assert found[7] == seconds(kind, float(sizes[7]), 2, LINK)


def test_a_measured_operator_is_priced_by_its_work_and_rate() -> None:
    op, values = linear()
    price, shapes = pricer(op, values, DEVICE), ([(64, 32), (16, 32)], [(64, 16)])
    flops = 2 * 64 * 32 * 16
    assert price.forward_seconds(*shapes) == pytest.approx(flops / 2e9)
    assert price.backward_seconds(*shapes) == pytest.approx(2 * flops / 1e9), "two products in the backward"


def test_each_axis_gets_the_link_of_its_size() -> None:
    assert connect(Mesh.of((2, 1)), DEVICE).links[0] == LINK
    with pytest.raises(MeshError, match="knows no groups of 4 devices"):
        connect(Mesh.of((2, 4)), DEVICE)


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, x):
        return self.body(x).square().sum() / 3

def build():
    return Net(), torch.empty(512, 256)
"""


def test_a_machine_is_measured_and_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "BYTES", (1 << 10, 1 << 14, 1 << 18))
    monkeypatch.setattr(profile, "UPDATED", (1 << 8, 1 << 16))
    (tmp_path / "small.py").write_text(MODEL)
    file = tmp_path / "machine.json"
    assert main([f"{tmp_path}/small.py:build", "--processes", "2", "--save", str(file)]) == 0
    data = json.loads(file.read_text())
    said = re.search(r"repeats differ by \d+% \(quartiles (\d+)% .. (\d+)%\)", data["source"])
    assert said
    printed = capsys.readouterr()
    assert said[0] in printed.out
    assert int(said[1]) <= int(said[2])
    assert ("measure again" in printed.err) == (int(said[2]) > 20) or int(said[2]) == 20, printed.err
    assert {"aten.linear.default", "aten.gelu.default"} <= data["rates"].keys()
    assert all(rate > 0 for rates in data["rates"].values() for rate in rates)
    assert data["updates"].keys() == set(profile.OPTIMIZERS)
    assert {int(size) for size in data["updates"]["adamw"]} == set(profile.UPDATED)
    assert "aten.div.Tensor" not in data["rates"], "a call on a scalar says nothing of larger ones"
    assert 1e-7 < data["device"]["launch"] < 1e-3
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plan = autopar.plan(model, torch.empty(8, 16), (2,), device=str(file))
    assert plan.device == "cpu, 2 processes measured"
    assert plan.step_time > 0


def test_a_disk_and_a_host_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("WRITTEN", 1 << 20), ("CHUNK", 1 << 18), ("STEPPED", 1 << 10), ("COPIED", (1 << 10, 1 << 12))):
        monkeypatch.setattr(memory_rates, name, size)
    disk = memory_rates.disk_times(str(tmp_path))
    assert min(disk.read, disk.write, disk.latency) > 0
    assert not list(tmp_path.iterdir())
    host = memory_rates.host_times(torch.device("cpu"), [], repeated)
    assert host.copies.keys() == {1 << 10, 1 << 12}
    assert min(*host.copies.values(), host.stepped) > 0
    with pytest.raises(DiskError, match="to measure the disk cannot be written"):
        memory_rates.disk_times(str(tmp_path / "none"))


def test_a_cpu_beside_a_measured_disk_stores_weights_there(tmp_path: Path) -> None:
    save(replace(DEVICE, disk=DISK), tmp_path / "machine.json")
    model, batch = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.randn(4, 64)
    options = {"device": str(tmp_path / "machine.json"), "offload": "disk", "disk_memory": "1GB", "mode": "inference"}
    parallel = autopar.parallelize(model.eval(), batch, (1,), constraints={"*weight": "*, D"}, **options)
    assert parallel.autopar.plan.disk_memory == 4 * 4 * 64 * 64
    assert parallel.autopar.plan.host_memory == 0
    assert torch.equal(parallel(batch), model(batch))


def test_noise_is_that_of_all_measurements_of_all_processes() -> None:
    found = [Times(calls=(), collectives={}, optimizers={}, noise=noise) for noise in ((0.0, 0.1, 0.2), (0.3, 0.4))]
    assert str(Noise.of(found)) == "repeats differ by 20% (quartiles 10% .. 30%)"


def test_a_target_that_cannot_be_built_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{tmp_path}/none.py:build", "--save", str(tmp_path / "x.json")]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("first, second, ends", [
    ((12, 32), (4, 32, 16), (3, 6, 9, 12)), ((4, 16, 32), (32, 24), (6, 12, 18, 24)), ((16, 24), (24, 32), (6, 12, 18, 24)),
])  # fmt: skip
def test_products_of_groups_are_timed_with_groups_of_equal_length_and_not_with_empty_ones(
    first: tuple[int, ...], second: tuple[int, ...], ends: tuple[int, ...]
) -> None:
    half = torch.bfloat16
    made = op("aten._grouped_mm.default", x(*first, dtype=half), x(*second, dtype=half), x(4, dtype=torch.int32))
    call = timed_call(Kernel(op=made.op, given=made.operands, price=made.pricer(catalog.device("h100"))))
    assert [elements for *_, elements in call.operands] == [(), (), ends]


def test_what_runs_in_a_distributed_form_is_measured_whole() -> None:
    """Experts: the products of a rank have its own experts, which do not fit the lengths of all groups."""
    (model, sample), mesh = mixture(), table.mesh((4,))
    asked = {"model.layers.0.mlp.experts:grouped_mm_fallback#*": "S(0)"}
    program, plan = read_program(model, sample).program, autopar.plan(model, sample, mesh, constraints=asked)
    analysis = analyse(TrainingStep(program=program), mesh)
    chosen = resolve(plan, analysis.step, analysis.fits)
    (made, *_) = [op for op in program.ops if "grouped_mm" in op.target]
    assert form(plan, "grouped_mm_fallback#0") == "expert_parallel_grouped_mm"
    found, values = profile._local(made, analysis.fits[made.name], program, chosen, mesh)
    assert found == made
    assert Kernel.of(found, values, DEVICE).work(0).flops > 0


@pytest.mark.parametrize("cold, copies", [(1, 1), (3 * 4 * (8 * 16 + 4 * 16), 3), (1 << 30, 4)])
def test_an_operator_is_timed_with_operands_that_caches_lack(cold: int, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in turn, so many that they are more bytes than the caches have, if these are no more than allowed."""
    read = list[tuple[int, ...]]()

    def linear(*given: torch.Tensor) -> torch.Tensor:
        read.append(tuple(one.data_ptr() for one in given))
        return torch.nn.functional.linear(*given)

    monkeypatch.setattr(benchmark, "COLD", cold)
    monkeypatch.setattr(benchmark, "COPIES", 4)
    monkeypatch.setattr(benchmark, "ENOUGH", 1e-4)
    monkeypatch.setattr(benchmark, "overload", lambda target: linear)
    operands = tuple((shape, torch.float32, True, ()) for shape in ((8, 16), (4, 16)))
    call = benchmark.TimedCall(target="aten.linear.default", args=(Ref("x"), Ref("w")), kwargs=(), operands=operands)
    there, back = benchmark._call(call, torch.device("cpu"), benchmark.repeated, [])
    assert there > 0
    assert back >= 0
    assert len(set(read)) == copies
    assert all(before != after for before, after in itertools.pairwise(read[:10])) == (copies > 1)


def test_a_backward_without_a_rate_is_priced_by_its_kernels() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(64, 64)
    half = replace(DEVICE, rates={"aten.linear.default": (2e9, 0.0)})
    slow, none = (autopar.plan(model, x, (2,), device=replace(half, rates=rates)) for rates in (half.rates, {}))
    assert slow.step_time > none.step_time

"""A GPU's profile without a GPU: the kernels that it times, and the device that follows from injected timings."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.collectives import seconds
from autopar.cost_models.compute import pricer
from autopar.cost_models.kernel_profile import Kernel
from autopar.cost_models.kernel_rates import reached
from autopar.cost_models.optimizers import optimizer
from autopar.cost_models.profile_file import load, save
from autopar.errors import MeshError
from autopar.ir.device import Device, Disk, Link
from autopar.profile import gpu_device, gpu_kernels, main
from autopar.runtime import benchmark
from autopar.runtime.benchmark import KINDS, Job, Times
from autopar.runtime.custom_ops import Operators
from autopar.runtime.memory_rates import COPIED, DiskTimes, HostTimes
from tests.support import planning

BASE = DEVICES["h100"].at_peak()
TRUE = reached(BASE)
BYTES = (1 << 16, 1 << 20, 1 << 26)
WIRE = Link(name="wire", latency=2e-6, bandwidth=3e11, source="made up")
JOB = Job(
    operators=Operators.of([]), calls=(), groups=(2, 4), bytes=BYTES, optimizers=("adamw",), parameters=(((1000, 1000),),)
)

HOST = HostTimes(copies={size: 1e-5 + size / 2e10 for size in COPIED}, stepped=1e9)
DISK = DiskTimes(read=7e9, write=5e9, latency=4e-5)


def kernels() -> list[Kernel]:
    captured = planning.gpt2(32, 1024, 1024, depth=1, vocabulary=4096)
    return gpu_kernels([captured.program], 4, BASE)


def times(kernels: Sequence[Kernel], device: Device) -> Times:
    """What these kernels, messages and an optimizer take on a device."""
    calls = []
    for kernel in kernels:
        price = pricer(kernel.op, dict(zip(kernel.op.operands, kernel.given, strict=True)), device)
        shapes = kernel.operands, kernel.results
        calls.append((price.forward_seconds(*shapes), price.backward_seconds(*shapes)))
    sent = {(n, kind, size): seconds(kind, float(size), n, WIRE) for n in JOB.groups for kind in KINDS for size in BYTES}
    return Times(calls=tuple(calls), collectives=sent, optimizers={"adamw": (1e-4,)}, beside=(10e-3, 4e-3, 11.8e-3), host=HOST)


def test_the_kernels_are_the_program_s_at_the_shapes_of_data_parallelism_and_probes() -> None:
    found = kernels()
    products = {kernel.products(0)[0].sizes for kernel in found if kernel.products(0) and not kernel.price.attention}
    local = 32 * 1024 // 4
    assert {(of.m, of.n, of.k) for of in products if of} >= {
        (local, 3072, 1024),
        (local, 4096, 1024),
        (local, 1024, 4096),
        (local, 3072, 256),
    }
    assert {kernel.kind for kernel in found} >= {"attention", "norm"}
    assert {kernel.operands[0][2] for kernel in found if kernel.price.attention} == {512, 1024, 2048, 4096, 8192}
    assert len({(kernel.op.target, kernel.op.args, kernel.given) for kernel in found}) > 10


def test_a_device_is_recovered_from_the_times_of_a_program() -> None:
    found = kernels()
    device = gpu_device(found, JOB, [times(found, TRUE)] * 4, BASE, 132)
    assert device.product is not None
    assert device.attention is not None
    assert TRUE.product is not None
    assert TRUE.attention is not None
    assert (device.product.fraction, device.product.wave) == pytest.approx((TRUE.product.fraction, TRUE.product.wave), rel=0.01)
    assert device.attention.forward == pytest.approx({64: TRUE.attention.forward[64]}, rel=0.01)
    assert device.attention.start == pytest.approx(TRUE.attention.start, rel=0.01)
    assert device.share("norm") == pytest.approx(TRUE.share("norm"), rel=0.01)
    assert device.interference == pytest.approx(0.45)
    assert set(device.links) == {2, 4}
    for n, link in device.links.items():
        assert seconds("all_gather", 1e8, n, link) == pytest.approx(seconds("all_gather", 1e8, n, WIRE), rel=0.01)
    assert device.host is not None
    assert (device.host.latency, device.host.bandwidth) == (pytest.approx(1e-5), pytest.approx(2e10))
    assert (device.host_bandwidth, device.host_memory) == (4e9 * optimizer("adamw").moved, BASE.host_memory)
    assert device.disk == BASE.disk, "it was not measured"


def test_coefficients_are_written_and_read_back(tmp_path: Path) -> None:
    found = kernels()
    base = DEVICES["h100"]
    device = gpu_device(found, JOB, [times(found, TRUE)] * 2, base, 132, DISK)
    save(device, tmp_path / "machine.json")
    again = load(tmp_path / "machine.json")
    assert base.product is not None
    assert base.product.unaligned < 1
    assert again.product is not None
    assert device.product is not None
    assert dataclasses.replace(again.product, source="") == dataclasses.replace(device.product, source="")
    assert (again.product.unaligned, again.addresses) == (base.product.unaligned, base.addresses)
    assert again.attention is not None
    assert device.attention is not None
    assert dataclasses.replace(again.attention, source="") == dataclasses.replace(device.attention, source="")
    assert (again.host, again.host_memory, again.host_bandwidth) == (device.host, device.host_memory, device.host_bandwidth)
    assert again.disk == device.disk == Disk(memory=0, **dataclasses.asdict(DISK), source=device.source)
    assert (again.achieved, again.interference, again.links) == (device.achieved, device.interference, device.links)


CHANGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "fraction": (("product", "fraction"), "a product's fraction of the peak is"),
    "attention": (("attention", "backward", "64"), "attention's rate at head dim 64 is"),
    "share": (("achieved", "norm"), "share of bandwidth of norm is"),
    "rate": (("rates", "optimizer.adamw"), "rate of optimizer.adamw is"),
    "update": (("updates", "adamw", "4096"), "time of adamw for 4096 bytes is"),
    "line": (("links", "2", "all_gather"), "a measured all_gather's time of no bytes is"),
}


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(("path", "message"), CHANGES.values(), ids=CHANGES)
def test_numbers_that_no_machine_has_are_refused(path: tuple[str, ...], message: str, bad: float, tmp_path: Path) -> None:
    wire = dataclasses.replace(WIRE, lines=dict.fromkeys(KINDS, (1e-5, 1e-10)))
    file = tmp_path / "machine.json"
    save(
        dataclasses.replace(TRUE, rates={"optimizer.adamw": (1e12, 0.0)}, updates={"adamw": {4096: 1e-5}}, links={2: wire}),
        file,
    )
    data = json.loads(file.read_text())
    *folders, name = path
    held = data
    for folder in folders:
        held = held[folder]
    held[name] = [bad, 1.0] if isinstance(held[name], list) else bad
    file.write_text(json.dumps(data))
    with pytest.raises(MeshError, match=message if math.isfinite(bad) else "is not a finite number"):
        load(file)


def test_a_machine_without_gpus_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "from torch import empty, nn\n\ndef build():\n    return nn.Linear(8, 8), empty(4, 8)\n"
    (tmp_path / "small.py").write_text(model)
    code = main([f"{tmp_path}/small.py:build", "--processes", "4096", "--cuda", "--save", str(tmp_path / "x.json")])
    assert code == 1
    assert "a profile of 4096 GPUs on a machine that has" in capsys.readouterr().err


class Clock:
    """Stands for the module `time`, and for a device that runs calls when they are issued; reading it takes 10 microseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def event(self, *, enable_timing: bool) -> Event:
        """What stands for a CUDA event."""
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = self.clock.now

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


def test_calls_on_a_gpu_are_timed_between_events_behind_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, noise, runs = Clock(), list[float](), list[float]()
    monkeypatch.setattr(benchmark, "time", clock)
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(benchmark, "STALL", 8)

    def run() -> None:
        clock.now += 2e-3
        runs.append(clock.now)

    timed = benchmark.issued_ahead(torch.device("cpu"))
    assert timed(run, noise) == pytest.approx(2e-3)
    assert len(runs) == 2 + benchmark.ROUNDS * round(benchmark.ENOUGH / 2e-3)
    assert noise == [pytest.approx(0.0)]

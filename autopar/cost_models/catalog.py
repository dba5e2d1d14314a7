"""The device catalog: peak rates of each accelerator from its data sheet, and the fractions that kernels reach.

Peaks count a multiply and an add as two operations, without structured sparsity, as torch uses the device by default:

    float32   on the ordinary cores: torch leaves TF32 off for matrix products
    float64   on the tensor cores where they have it (A100, H100, H200, B200), else on the ordinary cores
    float16, bfloat16   tensor cores with float32 accumulation
    int8      tensor cores; dp4a on V100

A device that lacks bfloat16 (V100, T4, RTX 2060) computes it at the float32 rate. Memory is what the data sheet names, in units
of 2^30 bytes; the driver keeps about 1% of it, which the default budget of 90% leaves room for.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import re
import sys
from pathlib import Path

import torch

from autopar.cost_models.kernel_rates import reached
from autopar.cost_models.links import LINKS
from autopar.cost_models.profile_file import load
from autopar.errors import MeshError
from autopar.ir.device import Bytes, Device, Disk, Seconds

GIB = 2**30
TERA = 1e12
GIGA = 1e9

# The time of a short kernel with its launch, launches overlapping: 3.8 microseconds on a V100 (A. Gray, "Getting Started with
# CUDA Graphs", NVIDIA, 2019). The host sets it, not the device, so it serves for all of them.
LAUNCH: Seconds = 3.8e-6
# Seconds that computing loses per second of a message sent beside it: fit on the table of MPT under FSDP, A100 and H100 on 1 to
# 16 nodes (mosaicml/llm-foundry, scripts/train/benchmarking), given the rates of kernels and links.
INTERFERENCE = 0.45
LAUNCH_SOURCE = "launch: NVIDIA, Getting Started with CUDA Graphs, 2019"

# The bus to the host that devices with these links have: data sheets of V100, A100, H100, DGX B200; else the link is the bus.
HOSTS = {"nvlink2": "pcie3", "nvlink3": "pcie4", "nvlink4": "pcie5", "nvlink5": "pcie5", "pcie3": "pcie3", "pcie4": "pcie4"}

# The host of a node: memory in GiB, 0 where nodes differ, and bandwidth in 10^9 bytes/s, channels times their rate by JEDEC
# JESD79-4 and JESD79-5.
HOST_MEMORY: dict[str, tuple[float, float, str]] = {
    "v100-32gb": (512, 136.5, "DGX-1 data sheet, 2018: 512 GB; two Xeon E5-2698 v4, four channels of DDR4-2133 each"),
    "a100-40gb": (1024, 409.6, "DGX A100 320GB data sheet, 2020: 1 TB; two EPYC 7742, eight channels of DDR4-3200 each"),
    "a100-80gb": (2048, 409.6, "DGX A100 640GB data sheet, 2021: 2 TB; two EPYC 7742, eight channels of DDR4-3200 each"),
    "h100": (2048, 614.4, "DGX H100 data sheet, 2023: 2 TB; two Xeon 8480C, eight channels of DDR5-4800 each"),
    "h200": (2048, 614.4, "DGX H200 data sheet, 2024: 2 TB; two Xeon 8480C, eight channels of DDR5-4800 each"),
    "b200": (2048, 716.8, "DGX B200 data sheet, 2024: 2 TB; two Xeon 8570, eight channels of DDR5-5600 each"),
    "l4": (768, 409.6, "g6.48xlarge of AWS: 768 GiB; two EPYC 7R13, eight channels of DDR4-3200 each"),
    "l40s": (1536, 409.6, "g6e.48xlarge of AWS: 1536 GiB; two EPYC 7R13, eight channels of DDR4-3200 each"),
    "t4": (192, 140.8, "g4dn.12xlarge of AWS: 192 GiB; one Xeon 8259CL, six channels of DDR4-2933"),
}
ANY_HOST = (0.0, 204.8, "taken for a server of one socket with eight channels of DDR4-3200, JEDEC JESD79-4; its memory is open")

# The disk of a node: how much of it is free for this, the user says.
ANY_DISK = Disk(
    memory=0, read=7.0e9, write=5.1e9, latency=45e-6,
    source="taken for one NVMe drive: Samsung 980 PRO 2 TB data sheet, 2020: 7000 and 5100 MB/s, 22,000 reads/s one by one",
)  # fmt: skip

DTYPES = ("float64", "float32", "bfloat16", "float16", "int8")


def _gpu(
    *, peaks: tuple[float, ...], memory: float, bandwidth: float, inner: str, outer: str, per_node: int, source: str
) -> Device:
    """A catalog entry: peaks in 10^12 operations/s in the order of DTYPES, memory in GiB, bandwidth in 10^9 bytes/s."""
    return Device(
        name="",
        flops={dtype: peak * TERA for dtype, peak in zip(DTYPES, peaks, strict=True)},
        memory=int(memory * GIB),
        bandwidth=bandwidth * GIGA,
        launch=LAUNCH,
        inner=inner,
        outer=outer,
        host=LINKS[HOSTS[inner]],
        per_node=per_node,
        interference=INTERFERENCE,
        source=f"{source}; {LAUNCH_SOURCE}",
    )


ENTRIES = {
    "v100-32gb": _gpu(
        peaks=(7.8, 15.7, 15.7, 125, 62.8), memory=32, bandwidth=900, inner="nvlink2", outer="ib-edr", per_node=8,
        source="V100 SXM2 data sheet, 2018; int8: dp4a is four times float32, CUDA C Programming Guide; node: DGX-1",
    ),
    "a100-40gb": _gpu(
        peaks=(19.5, 19.5, 312, 312, 624), memory=40, bandwidth=1555, inner="nvlink3", outer="ib-hdr", per_node=8,
        source="A100 SXM4 40GB data sheet, 2020; node: DGX A100",
    ),
    "a100-80gb": _gpu(
        peaks=(19.5, 19.5, 312, 312, 624), memory=80, bandwidth=2039, inner="nvlink3", outer="ib-hdr", per_node=8,
        source="A100 SXM4 80GB data sheet, 2021; node: DGX A100",
    ),
    "h100": _gpu(
        peaks=(67, 67, 989.4, 989.4, 1978.9), memory=80, bandwidth=3350, inner="nvlink4", outer="ib-ndr", per_node=8,
        source="H100 SXM5 data sheet, 2023, half of its figures with sparsity; node: DGX H100",
    ),
    "h200": _gpu(
        peaks=(67, 67, 989.4, 989.4, 1978.9), memory=141, bandwidth=4800, inner="nvlink4", outer="ib-ndr", per_node=8,
        source="H200 SXM data sheet, 2024, half of its figures with sparsity; node: DGX H200",
    ),
    "b200": _gpu(
        peaks=(40, 80, 2250, 2250, 4500), memory=180, bandwidth=8000, inner="nvlink5", outer="ib-ndr", per_node=8,
        source="HGX B200 in NVIDIA's Blackwell architecture technical brief, 2024, half of its figures with sparsity; memory "
        "and node: DGX B200 data sheet, 2024",
    ),
    "l4": _gpu(
        peaks=(0.47, 30.3, 121, 121, 242), memory=24 * 15 / 16, bandwidth=300, inner="pcie4", outer="ethernet-25g", per_node=8,
        source="L4 data sheet, 2023, half of its figures with sparsity; float64: 1/64 of float32, Ada whitepaper, 2022; "
        "memory: 24 GiB less a sixteenth for inline ECC, as the driver reports it",
    ),
    "l40s": _gpu(
        peaks=(1.43, 91.6, 362.05, 362.05, 733), memory=48 * 15 / 16, bandwidth=864, inner="pcie4", outer="ethernet-25g",
        per_node=8,
        source="L40S data sheet, 2023, half of its figures with sparsity; float64: 1/64 of float32, Ada whitepaper, 2022; "
        "memory: 48 GiB less a sixteenth for inline ECC, as the driver reports it",
    ),
    "t4": _gpu(
        peaks=(0.254, 8.1, 8.1, 65, 130), memory=16 * 15 / 16, bandwidth=320, inner="pcie3", outer="ethernet-25g", per_node=4,
        source="T4 data sheet, 2019; float64: 1/32 of float32, Turing whitepaper, 2018; memory: 16 GiB less a sixteenth for "
        "inline ECC, as the driver reports it; node: g4dn.12xlarge of AWS",
    ),
    "rtx4090": _gpu(
        peaks=(1.29, 82.6, 165.2, 165.2, 660.6), memory=24, bandwidth=1008, inner="pcie4", outer="ethernet-25g", per_node=4,
        source="NVIDIA Ada GPU architecture whitepaper, 2022",
    ),
    "rtx3090": _gpu(
        peaks=(0.556, 35.6, 71.2, 71.2, 284), memory=24, bandwidth=936, inner="pcie4", outer="ethernet-25g", per_node=4,
        source="NVIDIA Ampere GA102 whitepaper v2, 2021, without NVLink bridge",
    ),
    "rtx3080-10gb": _gpu(
        peaks=(0.465, 29.8, 59.5, 59.5, 238), memory=10, bandwidth=760, inner="pcie4", outer="ethernet-25g", per_node=4,
        source="NVIDIA Ampere GA102 whitepaper v2, 2021",
    ),
    "rtx2060-6gb": _gpu(
        peaks=(0.2, 6.45, 6.45, 25.8, 103), memory=6, bandwidth=336, inner="pcie3", outer="ethernet-25g", per_node=4,
        source="NVIDIA Turing whitepaper, 2018: rates per SM, 30 SMs at 1.68 GHz, half rate for float32 accumulation",
    ),
}  # fmt: skip


def _with_host(entry: Device, name: str) -> Device:
    """A catalog entry with its name and its node's host."""
    memory, bandwidth, source = HOST_MEMORY.get(name, ANY_HOST)
    return dataclasses.replace(
        entry, name=name, host_memory=int(memory * GIB), host_bandwidth=bandwidth * GIGA, host_source=source,
        disk=ANY_DISK if entry.host else None,
    )  # fmt: skip


DEVICES: dict[str, Device] = {name: reached(_with_host(entry, name)) for name, entry in ENTRIES.items()}

# Words in a device's name that say it is not the board in the catalog: other clocks, cores or links.
VARIANTS = frozenset({"pcie", "nvl", "ti", "super", "laptop", "mobile", "max"})


def device(name: str | Device | None = None, processes: int = 1) -> Device:
    """The device to plan for: a catalog entry by name, "cpu", a `Device`, or None for this machine's.

    A name ending in .json is a file written by `python -m autopar.profile`.

    `processes` is the number of processes that share this machine's CPU, its cores and memory. An accelerator serves one
    process. Raises MeshError for a name that is not in the catalog.

    >>> device("h100").memory // 2**30
    80
    """
    if isinstance(name, Device):
        return name
    if name is None:
        return _accelerator() if torch.cuda.is_available() else cpu(processes)
    if str(name).endswith(".json"):
        return load(name)
    key = str(name).lower()
    if key == "cpu":
        return cpu(processes)
    if key not in DEVICES:
        close = [known for known in DEVICES if key and known.startswith(key)] or difflib.get_close_matches(
            key, DEVICES, n=1, cutoff=0.5
        )
        raise MeshError(
            f"no device is called {name!r}" + (f"; did you mean {' or '.join(map(repr, close))}?" if close else ""),
            devices=", ".join((*DEVICES, "cpu")),
            fix="give one of these names, a profile.json of python -m autopar.profile, or an autopar.Device of your own",
        )
    return DEVICES[key]


def _accelerator() -> Device:
    """This machine's CUDA device: the catalog's rates, with the memory that the device reports."""
    memory = int(torch.cuda.get_device_properties(0).total_memory)
    return recognise(torch.cuda.get_device_name(0), memory)


def recognise(name: str, memory: Bytes) -> Device:
    """The catalog entry for a driver's device name, with the memory that the device reports.

    Raises MeshError for a device that is not in the catalog.

    >>> recognise("NVIDIA A100-SXM4-40GB", 42405855232).name
    'a100-40gb'
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    known = {*words, *(left + right for left, right in itertools.pairwise(words))}
    for key, entry in DEVICES.items():
        # The board's own memory tells apart versions of one name; drivers keep up to a tenth of it.
        same_memory = 0.9 * entry.memory <= memory <= 1.1 * entry.memory
        if key.split("-")[0] in known and same_memory and not VARIANTS & set(words):
            return dataclasses.replace(entry, memory=memory)
    raise MeshError(
        f"this machine's device {name!r} is not in the catalog",
        memory=f"{memory / GIB:.1f} GiB",
        devices=", ".join(DEVICES),
        fix='name the nearest one, device="...", or give an autopar.Device with your own numbers',
    )


# Operations per core and clock at float32: two units of 16 or 8 lanes, a multiply and an add each (Agner Fog, "Instruction
# tables", 2024). What torch reports for other machines is taken as one unit of 4 lanes.
LANES = {"AVX512": 64, "AVX2": 32}
CORE_BANDWIDTH = 35e9  # bytes/s that one core reads and writes: copy of 64 MiB on an AMD EPYC core, measured with torch 2.13
SOCKET_BANDWIDTH = 204.8e9  # bytes/s: eight channels of DDR4-3200, JEDEC JESD79-4
CPU_LAUNCH: Seconds = 1e-6  # adding two tensors of four elements, measured with torch 2.13


def cpu(processes: int = 1) -> Device:
    """One process's share of this machine's CPU: cores, clock and memory as the system reports them.

    Nothing is timed, so the same machine always gets the same plan.
    """
    cores = _cores()
    clock, said = _clock()
    capability = torch.backends.cpu.get_cpu_capability()
    single = cores * clock * LANES.get(capability, 8) / processes
    flags = _cpuinfo("flags")
    return Device(
        name="cpu",
        flops={
            "float64": single / 2,
            "float32": single,
            "bfloat16": single * (2 if "avx512_bf16" in flags else 1),
            "float16": single,
            "int8": single * (4 if "vnni" in flags else 1),
        },
        memory=system_memory() // processes,
        bandwidth=min(cores * CORE_BANDWIDTH, SOCKET_BANDWIDTH) / processes,
        launch=CPU_LAUNCH * max(1.0, processes / cores),
        inner="gloo",
        outer="ethernet-25g",
        per_node=processes,
        source=f"this machine: {cores} cores at {clock / 1e9:.1f} GHz ({said}), {capability}, shared by {processes} processes",
    )


def _cores() -> int:
    """The cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _clock() -> tuple[float, str]:
    """Cycles per second, and the source of the number."""
    scaling = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if scaling.exists():
        return float(scaling.read_text()) * 1e3, "cpufreq"
    megahertz = _cpuinfo("cpu MHz")
    if megahertz:
        return round(float(megahertz) / 100) * 1e8, "/proc/cpuinfo"
    return 2e9, "assumed: the system does not say"


def _cpuinfo(key: str) -> str:
    """The first processor's entry in /proc/cpuinfo, empty where there is none."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def system_memory() -> Bytes:
    """The machine's memory, or the container's limit where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return memory if text == "max" else min(memory, int(text))

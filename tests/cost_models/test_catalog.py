"""Laws of the device catalog."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from typing import Any

import pytest

from autopar.cost_models.board_power import BOARD_POWER
from autopar.cost_models.catalog import DEVICES, DTYPES, GIB, LAUNCH_SOURCE, cpu, device, recognise
from autopar.cost_models.links import LINKS
from autopar.errors import MeshError
from autopar.ir.device import Device, Link

NAMES = (
    *("v100-32gb", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "l4", "l40s", "t4"),
    *("rtx4090", "rtx3090", "rtx3080-10gb", "rtx2060-6gb"),
)

# What the drivers of these boards call them, and the memory that they report.
DRIVERS = {
    "Tesla V100-SXM2-32GB": (31.7, "v100-32gb"),
    "NVIDIA A100-SXM4-40GB": (39.4, "a100-40gb"),
    "NVIDIA A100-SXM4-80GB": (79.1, "a100-80gb"),
    "NVIDIA H100 80GB HBM3": (79.1, "h100"),
    "NVIDIA H200": (139.8, "h200"),
    "NVIDIA B200": (179.1, "b200"),
    "NVIDIA L4": (22.0, "l4"),
    "NVIDIA L40S": (44.4, "l40s"),
    "Tesla T4": (14.6, "t4"),
    "NVIDIA GeForce RTX 4090": (23.6, "rtx4090"),
    "NVIDIA GeForce RTX 3090": (23.7, "rtx3090"),
    "NVIDIA GeForce RTX 3080": (9.8, "rtx3080-10gb"),
    "NVIDIA GeForce RTX 2060": (5.8, "rtx2060-6gb"),
}


def test_every_board_of_the_catalog_has_its_power_in_watts() -> None:
    assert BOARD_POWER.keys() == DEVICES.keys()
    assert all(50 <= watts <= 1500 for watts in BOARD_POWER.values())


def test_the_catalog_has_the_promised_devices() -> None:
    assert tuple(DEVICES) == NAMES


@pytest.mark.parametrize("entry", [*DEVICES.values(), cpu(2)], ids=lambda entry: entry.name)
def test_every_device_is_complete_and_in_plausible_units(entry: Device) -> None:
    assert set(entry.flops) == set(DTYPES)
    assert all(1e8 < peak < 1e16 for peak in entry.flops.values())
    assert 1e8 < entry.memory < 1e13
    assert 1e8 < entry.bandwidth < 1e14
    assert 1e-7 < entry.launch < 1e-3
    assert entry.per_node >= 1
    assert {entry.inner, entry.outer} <= set(LINKS)


@pytest.mark.parametrize("entry", DEVICES.values(), ids=lambda entry: entry.name)
def test_every_entry_cites_its_sources_with_a_year(entry: Device) -> None:
    sheet, launch = entry.source.removesuffix(LAUNCH_SOURCE), LAUNCH_SOURCE
    assert any(str(year) in sheet for year in range(2017, 2027))
    assert "2019" in launch


@pytest.mark.parametrize("entry", DEVICES.values(), ids=lambda entry: entry.name)
def test_narrower_floating_point_numbers_are_never_slower(entry: Device) -> None:
    rates = [entry.flops[dtype] for dtype in ("float64", "float32", "bfloat16", "float16")]
    assert rates == sorted(rates)


@pytest.mark.parametrize(("name", "expected"), DRIVERS.items())
def test_a_driver_s_name_and_memory_find_the_entry(name: str, expected: tuple[float, str]) -> None:
    memory = int(expected[0] * GIB)
    found = recognise(name, memory)
    assert (found.name, found.memory) == (expected[1], memory)


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA H100 PCIe", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GB200"])
def test_a_board_that_is_not_in_the_catalog_is_refused_by_name(name: str) -> None:
    with pytest.raises(MeshError, match=f"this machine's device '{name}' is not in the catalog"):
        recognise(name, 24 * GIB)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"flops": {}}, "device h100's flops have no rate of float32"),
    ({"flops": {"bfloat16": 1e15}}, "device h100's flops have no rate of float32"),
    ({"flops": 1e15}, "device h100's flops is 1000000000000000.0, not a mapping from a text to a number"),
    ({"memory": "80GB"}, "device h100's memory is '80GB', not a number"),
    ({"per_node": True}, "device h100's per_node is True, not a number"),
    ({"name": 3}, "device 3's name is 3, not a text"),
    ({"host": 3}, "device h100's host is 3, not an autopar Link or None"),
    ({"achieved": {"stream": (1.0,)}}, "device h100's achieved is {'stream': (1.0,)}, not a mapping from a text to a tuple of"),
    ({"compiled": "yes"}, "device h100's compiled is 'yes', not True or False"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG)
def test_a_device_of_other_types_than_its_fields_have_is_refused_where_it_is_made(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(MeshError, match=f"^{re.escape(said)}"):
        replace(DEVICES["h100"], **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"latency": -1.0}, "link wire's latency is -1.0, not a nonnegative finite number"),
        ({"bandwidth": 0}, "link wire's bandwidth is 0, not a positive finite number"),
        ({"bandwidth": math.nan}, "link wire's bandwidth is nan, not a positive finite number"),
        ({"lines": {"all_gather": (1e-6, -1e-9)}}, "link wire's time of all_gather is -1e-09, not a nonnegative finite number"),
        ({"lines": {"all_gather": 1e-6}}, "link wire's lines is {'all_gather': 1e-06}, not a mapping"),
        ({"bus": "nvlink4"}, "link wire's bus is 'nvlink4', not an autopar Bus or None"),
    ],
)
def test_a_link_that_there_is_not_is_refused(fields: dict[str, Any], said: str) -> None:
    """Of a negative latency a search had no end."""
    with pytest.raises(MeshError, match=f"^{re.escape(said)}"):
        Link(**({"name": "wire", "latency": 1e-6, "bandwidth": 1e9, "source": "made up"} | fields))


def test_an_unknown_name_is_refused_with_the_nearest_one_and_all_names() -> None:
    with pytest.raises(MeshError) as caught:
        device("a100-80g")
    first, *rest = str(caught.value).splitlines()
    assert first == "no device is called 'a100-80g'; did you mean 'a100-80gb'?"
    assert all(name in rest[0] for name in NAMES)
    with pytest.raises(MeshError, match=r"no device is called 'a100'; did you mean 'a100-40gb' or 'a100-80gb'\?"):
        device("a100")


def test_names_are_found_in_any_case_and_a_device_is_taken_as_it_is() -> None:
    assert device("H100") is DEVICES["h100"]
    assert device(DEVICES["l4"]) is DEVICES["l4"]


def test_processes_share_the_cpu_s_rates_and_memory() -> None:
    one, four = cpu(1), cpu(4)
    assert four.memory == one.memory // 4
    assert four.flops["float32"] * 4 == pytest.approx(one.flops["float32"])
    assert four.bandwidth * 4 == pytest.approx(one.bandwidth)
    assert one.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_same_machine_always_gets_the_same_device() -> None:
    assert cpu(2) == cpu(2)

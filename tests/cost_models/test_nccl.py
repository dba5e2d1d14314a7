"""The NCCL model: closed forms, orderings that must hold, and published measurements."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.collectives import BASE, LOSS, TREE, RankGroup, nccl, seconds
from autopar.cost_models.links import LINKS, NETWORK_HOP, NVLINK_HOP, connect
from autopar.ir.conversion import COLLECTIVES
from autopar.ir.device import Link
from autopar.ir.mesh import Mesh

MIB, GIB = 2**20, 2**30
A100, H100 = DEVICES["a100-80gb"], DEVICES["h100"]
SWITCHED = ("nvlink3", "nvlink4")  # one rate for groups of any size

kinds, inside, outside = st.sampled_from(COLLECTIVES), st.sampled_from(SWITCHED), st.sampled_from(["ib-hdr", "ib-ndr"])
sizes, nodes, local = st.integers(0, 2**36).map(float), st.integers(1, 128), st.integers(1, 8)


def lines(group: RankGroup, inner: str = "nvlink4", outer: str = "ib-ndr") -> dict[str, tuple[float, float]]:
    return nccl(group, LINKS[inner], LINKS[outer])


def price(kind: str, size: float, group: RankGroup, inner: str = "nvlink4", outer: str = "ib-ndr") -> float:
    empty, per_byte = lines(group, inner, outer)[kind]
    return empty + size * per_byte


def gathered(sizes: tuple[int, ...], device: str, size: float) -> float:
    """Seconds of gathering a weight of so many bytes over all axes of a mesh, the outermost first."""
    mesh, total = connect(Mesh.of(sizes), DEVICES[device]), 0.0
    for axis, ranks in enumerate(sizes):
        rest = mesh.size // Mesh.of(sizes[: axis + 1]).size
        total += seconds("all_gather", size / rest, ranks, mesh.links[axis])
    return total


# --- closed forms --------------------------------------------------------------------------------------------------------


def test_a_ring_in_a_node_takes_a_step_less_than_it_has_ranks() -> None:
    empty, per_byte = lines(RankGroup(ranks=8, nodes=1, local=8), "nvlink3")["all_gather"]
    assert empty == pytest.approx(BASE + 7 * NVLINK_HOP)
    assert 1 / per_byte == pytest.approx(8 / 7 * 235e9)


def test_a_ring_enters_each_node_once_through_all_of_its_cards() -> None:
    """Sixteen A100 on two nodes: NVLink reaches 235 GB/s, eight cards of 25 GB/s less 5% reach 190."""
    empty, per_byte = lines(RankGroup(ranks=16, nodes=2, local=8), "nvlink3", "ib-hdr")["reduce_scatter"]
    assert empty == pytest.approx(BASE + 14 * NVLINK_HOP + NETWORK_HOP)
    assert 1 / per_byte == pytest.approx(16 / 15 * 190e9)


def test_one_rank_per_node_has_one_card() -> None:
    empty, per_byte = lines(RankGroup(ranks=4, nodes=4, local=1))["all_gather"]
    assert empty == pytest.approx(BASE + 3 * NETWORK_HOP)
    assert 1 / per_byte == pytest.approx(4 / 3 * 50e9 * (1 - 2 * LOSS))


def test_an_all_reduce_in_a_node_goes_around_twice_or_is_added_up_by_the_switch() -> None:
    group = RankGroup(ranks=8, nodes=1, local=8)
    assert lines(group, "nvlink3")["all_reduce"] == pytest.approx((BASE + 14 * NVLINK_HOP, 2 * 7 / 8 / 235e9))
    assert lines(group, "nvlink4")["all_reduce"] == pytest.approx((BASE + 2 * NVLINK_HOP, 2 * 7 / 8 / 480e9))


def test_an_all_reduce_over_nodes_is_a_double_tree() -> None:
    group = RankGroup(ranks=128, nodes=16, local=8)
    empty, per_byte = lines(group, "nvlink3", "ib-hdr")["all_reduce"]
    assert empty == pytest.approx(BASE + 2 * (7 * NVLINK_HOP + 4 * NETWORK_HOP))
    assert 1 / per_byte == pytest.approx(128 / 127 / 2 * min(TREE * 235e9, 8 * 25e9 * 0.8))


def test_an_all_to_all_sends_what_leaves_the_node_through_the_card_of_each_rank() -> None:
    group = RankGroup(ranks=16, nodes=2, local=8)
    assert lines(group)["all_to_all"][1] == pytest.approx(8 / 16 / (50e9 * 0.95))
    inside = RankGroup(ranks=4, nodes=1, local=4)
    assert lines(inside, "nvlink2", "ib-edr")["all_to_all"][1] == pytest.approx(3 / 4 / 48e9)


# --- laws ----------------------------------------------------------------------------------------------------------------


@given(kinds, sizes, nodes, local, inside, outside)
def test_more_nodes_never_cost_less_for_the_same_buffer(kind: str, size: float, m: int, r: int, inner: str, outer: str) -> None:
    fewer, more = (RankGroup(ranks=count * r, nodes=count, local=r) for count in (m, m + 1))
    if fewer.ranks > 1:
        assert price(kind, size, fewer, inner, outer) <= price(kind, size, more, inner, outer) * (1 + 1e-9)


@given(kinds, sizes, st.integers(2, 7), inside)
def test_more_ranks_of_a_node_never_cost_less_for_the_same_buffer(kind: str, size: float, r: int, inner: str) -> None:
    fewer, more = (RankGroup(ranks=count, nodes=1, local=count) for count in (r, r + 1))
    assert price(kind, size, fewer, inner) <= price(kind, size, more, inner) * (1 + 1e-9)


@given(sizes, nodes, local, inside, outside)
def test_an_all_reduce_is_never_slower_than_its_two_halves_by_more_than_the_tree_s_rate(
    size: float, m: int, r: int, inner: str, outer: str
) -> None:
    group = RankGroup(ranks=max(2, m * r), nodes=m, local=r if m * r > 1 else 2)
    halves = sum(price(kind, size, group, inner, outer) for kind in ("reduce_scatter", "all_gather"))
    assert price("all_reduce", size, group, inner, outer) <= halves / TREE


@pytest.mark.parametrize("device", ["a100-40gb", "a100-80gb", "h100", "h200"])
@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_a_flat_axis_over_nodes_is_priced_no_higher_than_its_two_axes(device: str, nodes: int) -> None:
    """A ring of 128 takes 0.2 ms longer to start than two of 16 and 8, which 128 MiB of weights make up for."""
    for size in (128 * MIB, GIB):
        assert gathered((8 * nodes,), device, size) <= gathered((nodes, 8), device, size)


@pytest.mark.parametrize("device", ["a100-40gb", "v100-32gb", "h100", "h200", "l4"])
@pytest.mark.parametrize("sizes", [(2, 8), (2, 4), (4, 2, 8), (2, 2)])
def test_axes_as_one_have_the_lines_of_the_flat_axis(device: str, sizes: tuple[int, ...]) -> None:
    """Those that are published: of 2, 4, 8, 16 and more devices in one group."""
    mesh, flat = connect(Mesh.of(sizes), DEVICES[device]), connect(Mesh.of(math.prod(sizes)), DEVICES[device])
    assert dict(mesh.flattened)[tuple(range(len(sizes)))] == flat.links[0]


def test_axes_whose_name_as_one_another_axis_has_are_not_flattened() -> None:
    mesh = connect(Mesh.of({"a": 2, "b": 2, "a_b": 2}), H100)
    assert [axes for axes, _ in mesh.flattened] == [(0, 1, 2), (1, 2)]


def test_a_measured_device_has_axes_as_one_where_groups_of_so_many_were_measured() -> None:
    two, four = (Link(name=f"of {size}", latency=1e-6, bandwidth=1e9, source="made up") for size in (2, 4))
    measured = dataclasses.replace(H100, links={2: two, 4: four})
    assert connect(Mesh.of((2, 2)), measured).flattened == (((0, 1), four),)
    assert connect(Mesh.of((2, 4)), measured).flattened == ()


def test_gathering_the_outer_axis_last_sends_eight_times_as_much_over_the_network() -> None:
    mesh, size = connect(Mesh.of((2, 8)), H100), float(GIB)
    first, last = (seconds("all_gather", part, 2, mesh.links[0]) for part in (size / 8, size))
    assert last / first == pytest.approx(8, rel=0.05)


def test_groups_of_two_in_a_cube_mesh_reach_a_third_of_what_eight_reach() -> None:
    mesh = connect(Mesh.of((4, 2)), DEVICES["v100-32gb"])
    assert [round(link.bandwidth / 1e9) for link in mesh.links] == [76, 41]
    assert connect(Mesh.of((8,)), DEVICES["v100-32gb"]).links[0].bandwidth == pytest.approx(130e9)


# --- measurements --------------------------------------------------------------------------------------------------------

CARD = {"ib-hdr 4x": dataclasses.replace(LINKS["ib-hdr"], bandwidth=12.5e9)}  # four cards for eight devices

# kind, inner, outer, nodes, ranks, bytes of the larger buffer, measured microseconds
Row = tuple[str, str, str, int, int, float, float]
ROWS: dict[str, list[Row]] = {
    "8 A100, NVLink (stas00/ml-engineering, network/README.md)": [
        ("all_reduce", "nvlink3", "ib-hdr", 1, 8, size, us)
        for size, us in [(32 * MIB, 424), (64 * MIB, 684.6), (256 * MIB, 2420.6), (GIB, 8203.9), (16 * GIB, 127997)]
    ],
    "8 H100, NVLink (NVIDIA/nccl issue 1047)": [
        ("reduce_scatter", "nvlink4", "ib-ndr", 1, 8, size, us)
        for size, us in [(128 * MIB, 377.2), (256 * MIB, 709.7), (512 * MIB, 1377.8), (GIB, 2689.3), (8 * GIB, 20754)]
    ],
    "8 H100, NVLink SHARP (awsome-distributed-training, aws-batch)": [
        ("all_reduce", "nvlink4", "ib-ndr", 1, 8, size, us)
        for size, us in [(32 * MIB, 198.6), (64 * MIB, 326.6), (256 * MIB, 1121.4), (GIB, 4253), (16 * GIB, 62239)]
    ],
    "H100, 8 x NDR, bus bandwidth of large messages (NVIDIA/nccl issue 1229)": [
        ("reduce_scatter", "nvlink4", "ib-ndr", m, 8 * m, 100 * GIB, 100 * GIB * (1 - 1 / (8 * m)) / rate / 1e3)
        for m, rate in [(4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260)]
    ],
    "16 H100, 8 x 400 Gb/s (awsome-distributed-training)": [
        ("all_reduce", "nvlink4", "ib-ndr", 2, 16, size, us)
        for size, us in [(GIB, 4607.6), (4 * GIB, 17286), (16 * GIB, 66132)]
    ],
    "24 A100, 4 x HDR (NVIDIA/nccl-tests issue 119)": [
        ("all_reduce", "nvlink3", "ib-hdr 4x", 3, 24, 128 * MIB, 2 * 23 / 24 * 128 * MIB / 96e3)
    ],
    "V100, cube mesh (microsoft/SuperScaler, branch Aceso, prim_gpt_13B)": [
        (kind, "nvlink2", "ib-edr", 1, n, size * MIB, ms * 1e3)
        for kind, n, size, ms in [
            ("all_reduce", 2, 160, 4.240), ("all_reduce", 4, 160, 3.310), ("all_reduce", 8, 160, 2.339),
            ("all_reduce", 2, 40, 1.141), ("all_reduce", 4, 40, 0.870), ("all_reduce", 8, 40, 0.635),
            ("all_to_all", 2, 160, 2.529), ("all_to_all", 4, 160, 2.653), ("all_to_all", 8, 160, 3.329),
        ]
    ],
}  # fmt: skip


def error(row: Row) -> float:
    kind, inner, outer, m, n, size, measured = row
    empty, per_byte = nccl(RankGroup(ranks=n, nodes=m, local=n // m), LINKS[inner], (LINKS | CARD)[outer])[kind]
    return (empty + size * per_byte) / (measured * 1e-6) - 1


@pytest.mark.parametrize("source", ROWS)
def test_published_measurements_are_met_from_32_mib_on(source: str) -> None:
    errors = [error(row) for row in ROWS[source]]
    assert statistics.median(map(abs, errors)) < 0.15, source
    assert max(map(abs, errors)) < 0.3, source


def test_l4_on_several_nodes_share_the_cards_as_was_measured() -> None:
    """Mist's fits for groups of 1, 2, 4, 8 L4 on 2 and on 4 nodes, GiB/s: a card of half a GiB/s each, up to the bus."""
    card: Link = dataclasses.replace(LINKS["ethernet-25g"], bandwidth=0.4895 * GIB / (1 - LOSS))
    measured = {2: (0.4895, 0.9791, 1.7183, 3.3215), 4: (0.4609, 0.9195, 1.6759, 2.9659)}
    for m, rates in measured.items():
        for r, rate in zip((1, 2, 4, 8), rates, strict=True):
            n = m * r
            per_byte = nccl(RankGroup(ranks=n, nodes=m, local=r), LINKS["pcie4"], card)["all_gather"][1]
            assert (n - 1) / n / per_byte / GIB == pytest.approx(rate, rel=0.3), (m, r)

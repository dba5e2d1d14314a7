"""Laws of links and of laying a mesh over nodes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from autopar.cost_models.catalog import DEVICES, cpu
from autopar.cost_models.links import LINKS, connect, groups, merged
from autopar.errors import MeshError
from autopar.ir.device import Device, Link
from autopar.ir.layout import numbered_axes
from autopar.ir.mesh import Mesh

H100 = DEVICES["h100"]


def node(size: int, inner: str = "nvlink4", outer: str = "ib-ndr") -> Device:
    return dataclasses.replace(H100, per_node=size, inner=inner, outer=outer)


def names(sizes: tuple[int, ...], device: Device) -> list[str]:
    return [link.name for link in connect(Mesh.of(sizes), device).links]


@pytest.mark.parametrize("link", LINKS.values(), ids=lambda link: link.name)
def test_every_link_is_in_plausible_units_and_cites_a_source(link: Link) -> None:
    assert 1e-7 < link.latency < 1e-2
    assert 1e8 < link.bandwidth < 1e12
    assert len(link.source) > 10


def test_newer_generations_are_faster() -> None:
    for family in (["nvlink2", "nvlink3", "nvlink4", "nvlink5"], ["pcie3", "pcie4", "pcie5"], ["ib-edr", "ib-hdr", "ib-ndr"]):
        rates = [LINKS[name].bandwidth for name in family]
        assert rates == sorted(set(rates))


@pytest.mark.parametrize(
    ("sizes", "per_node", "expected"),
    [
        ((2, 4), 8, ["nvlink4", "nvlink4"]),  # all in one node
        ((2, 4), 4, ["ib-ndr", "nvlink4"]),  # the inner axis fills a node
        ((8, 16, 8), 8, ["ib-ndr", "ib-ndr", "nvlink4"]),
        ((2, 2, 2), 4, ["ib-ndr", "nvlink4", "nvlink4"]),
        ((2, 8), 4, ["ib-ndr", "nvlink4+ib-ndr"]),  # the inner axis is partly inside
        ((16,), 8, ["nvlink4+ib-ndr"]),
        ((3,), 8, ["nvlink4"]),  # a mesh smaller than the node
        ((4, 3), 8, ["ib-ndr", "ib-ndr"]),  # groups of three straddle nodes of eight
        ((1, 8), 8, ["nvlink4", "nvlink4"]),
    ],
)
def test_the_last_axis_is_innermost(sizes: tuple[int, ...], per_node: int, expected: list[str]) -> None:
    assert names(sizes, node(per_node)) == expected


@pytest.mark.parametrize(
    ("sizes", "per_node", "expected"),
    [
        ((2, 4), 8, [(1, 2), (1, 4), (1, 8)]),
        ((2, 8), 8, [(2, 1), (1, 8), (2, 8)]),
        ((16,), 8, [(2, 8)]),
        ((4, 4), 8, [(2, 2), (1, 4), (2, 8)]),  # four groups leave a node of eight at the same time: two cards each
        ((2, 2, 4), 4, [(2, 1), (2, 1), (1, 4), (4, 1), (4, 4), (2, 4)]),
        ((4, 3), 8, [(3, 1), (2, 1), (2, 4)]),  # groups of three straddle nodes of eight
        ((12,), 8, [(2, 4)]),
        ((1, 16), 8, [(1, 1), (2, 8), (2, 8)]),
    ],
)
def test_groups_stand_on_so_many_nodes_with_so_many_ranks_on_each(
    sizes: tuple[int, ...], per_node: int, expected: list[tuple[int, int]]
) -> None:
    mesh = Mesh.of(sizes)
    axes = numbered_axes(len(sizes))
    found = list(groups(mesh, per_node, axes))
    assert [(group.nodes, group.local) for group in found] == expected
    for places, group in zip(axes, found, strict=True):
        counted = [Counter(rank // per_node for rank in ranks).values() for ranks in _ranks(mesh, places)]
        assert group.nodes >= max(map(len, counted))
        assert group.local == min(min(count) for count in counted) or group.nodes == 1


def _ranks(mesh: Mesh, axes: Sequence[int]) -> list[list[int]]:
    """The ranks of every group over some axes, counted one by one."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        where = mesh.coordinates(rank)
        found[tuple(at for axis, at in enumerate(where) if axis not in axes)].append(rank)
    return list(found.values())


def test_links_that_nccl_does_not_drive_keep_their_own_latency_and_bandwidth() -> None:
    device = node(4, inner="gloo", outer="ethernet-25g")
    assert connect(Mesh.of((2, 4)), device).links == (LINKS["ethernet-25g"], LINKS["gloo"])
    assert connect(Mesh.of((2, 8)), device).links == (LINKS["ethernet-25g"], LINKS["gloo"]), "partly inside: the slower one"


def test_processes_of_one_machine_talk_over_loopback() -> None:
    assert names((2, 4), cpu(8)) == ["gloo", "gloo"]


def test_connecting_keeps_the_mesh_and_sets_the_device() -> None:
    mesh = connect(Mesh.of({"data": 2, "model": 4}), H100)
    assert (mesh.axes, mesh.sizes, mesh.device) == (("data", "model"), (2, 4), H100)


def test_links_that_the_mesh_brings_along_are_kept() -> None:
    own = Link(name="own", latency=1e-6, bandwidth=1e9, source="test")
    mesh = dataclasses.replace(Mesh.of((2, 4)), links=(own, own))
    assert connect(mesh, H100).links == (own, own)


def test_a_device_with_an_unknown_link_is_refused() -> None:
    with pytest.raises(MeshError, match="device h100 names the link 'wire', which is not in the catalog"):
        connect(Mesh.of((2,)), node(8, inner="wire"))


@pytest.mark.parametrize(
    ("sizes", "per_node", "expected"),
    [
        ((2,) * 6, 8, (8, 8)),
        ((2,) * 4, 8, (2, 8)),
        ((2, 2, 4, 4), 8, (4, 4, 4)),  # the third is partly inside a node
        ((2, 2, 2, 2), 16, (16,)),
        ((4, 3, 2, 2), 8, (4, 3, 4)),  # twelve devices to a group of the second: nodes of eight are filled unevenly
        ((2, 8), 8, (2, 8)),
    ],
)
def test_adjacent_axes_of_one_kind_become_one(sizes: tuple[int, ...], per_node: int, expected: tuple[int, ...]) -> None:
    found = merged(Mesh.of(sizes), node(per_node))
    assert found.sizes == expected
    assert found.merges(Mesh.of(sizes))
    assert found.size == Mesh.of(sizes).size


def test_axes_of_equal_links_become_one_and_keep_their_link() -> None:
    fast, slow = LINKS["nvlink4"], LINKS["ib-ndr"]
    mesh = dataclasses.replace(Mesh.of({"a": 2, "b": 2, "c": 2, "d": 4}), links=(slow, slow, fast, fast))
    found = merged(mesh, node(2))
    assert (found.axes, found.sizes, found.links) == (("a_b", "c_d"), (4, 8), (slow, fast))


def test_axes_stay_where_a_profile_knows_no_groups_of_all_their_devices() -> None:
    device = dataclasses.replace(H100, links=dict.fromkeys((2, 4), LINKS["nvlink4"]))
    assert merged(Mesh.of((2, 2)), device).sizes == (4,)
    assert merged(Mesh.of((2, 4)), device).sizes == (2, 4)


@pytest.mark.parametrize(
    "axes, sizes", [(("a_b",), (8,)), (("a_b", "c"), (4, 4)), (("a", "c_b"), (2, 4)), (("a", "b"), (2, 2))]
)
def test_a_mesh_of_other_axes_merges_nothing(axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    assert not Mesh(axes=axes, sizes=sizes).merges(Mesh.of({"a": 2, "b": 2, "c": 2}))


def test_axes_that_would_share_a_name_are_not_flattened() -> None:
    found = connect(Mesh(axes=("x_y", "x", "y_x"), sizes=(2, 2, 2)), H100)
    assert [axes for axes, _ in found.flattened] == [(0, 1, 2)]
    others = connect(Mesh(axes=("a", "a_b", "b"), sizes=(2, 2, 2)), H100)
    assert [axes for axes, _ in others.flattened] == [(0, 1), (0, 1, 2), (1, 2)]

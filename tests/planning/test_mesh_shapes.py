"""The search for a mesh shape, against planning every mesh of as many devices as a user would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, BudgetError, ConstraintError, MeshError
from autopar.explain.command import main
from autopar.explain.explanation import Explanation, explain
from autopar.ir.device import Device
from autopar.ir.mesh import Mesh
from autopar.planning.mesh_shapes import shapes
from tests.planning.test_pipeline_search import network
from tests.support import models
from tests.support.pipelines import SLOW
from tests.support.planning import Layers


def device(outer: str, per_node: int, **more: Any) -> Device:
    """A made-up device, in nodes that are connected so."""
    return replace(SLOW, per_node=per_node, outer=outer, **more)


def factorisations(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """All sizes of meshes of so many devices, of so many axes at most, in any order."""
    yield (devices,)
    for first in range(2, devices):
        if axes > 1 and devices % first == 0:
            yield from ((first, *rest) for rest in factorisations(devices // first, axes - 1))


@pytest.mark.parametrize("devices, per_node", [(1, 8), (4, 8), (8, 8), (8, 4), (12, 8), (7, 4), (16, 1), (64, 8), (6, 4)])
def test_a_shape_has_all_devices_and_inner_axes_within_nodes(devices: int, per_node: int) -> None:
    found = list(shapes(devices, per_node))
    assert len(set(found)) == len(found)
    assert (devices,) in found
    for sizes in found:
        assert math.prod(sizes) == devices
        inside = math.prod(sizes[1:])
        assert len(sizes) == 1 or devices <= per_node or per_node == 1 or per_node % inside == 0
    assert set(shapes(devices, per_node, axes=2)) == {sizes for sizes in found if len(sizes) < 3}


CASES: dict[str, tuple[tuple[nn.Module, Any], int, dict[str, Any]]] = {
    "layers in two nodes": ((Layers((512, 2048, 512)), torch.empty(64, 512)), 8, {"device": device("ethernet-25g", 4)}),
    "layers in one node": ((Layers((512, 2048, 512)), torch.empty(64, 512)), 8, {"device": device("ib-ndr", 8)}),
    "by megatron": (
        (Layers((512, 2048, 512)), torch.empty(64, 512)),
        8,
        {"device": device("ib-hdr", 4), "strategy": "megatron"},
    ),
    "gpt2 by fsdp": (models.make("gpt2"), 4, {"device": device("ethernet-25g", 2), "strategy": "fsdp"}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_no_shape_of_the_mesh_is_faster(name: str) -> None:
    (model, sample), devices, options = CASES[name]
    found = autopar.plan(model, sample, mesh="auto", devices=devices, **options)
    known: dict[tuple[int, ...], float] = {}
    for sizes in factorisations(devices, 3):
        try:
            known[sizes] = autopar.plan(model, sample, mesh=sizes, **options).step_time
        except (BudgetError, ConstraintError):
            continue
    assert found.step_time <= min(known.values()) * (1 + 1e-9)
    assert found.step_time == pytest.approx(known[found.sizes], rel=1e-12)
    assert f"{found.sizes} {1e3 * found.step_time:.3f} ms" in found.searched


def test_the_shapes_differ() -> None:
    """Or else nothing would be searched: data over slow links and products within nodes, each way."""
    model, sample = Layers((512, 2048, 512)), torch.empty(64, 512)
    asked: dict[str, Any] = {"strategy": "megatron", "device": device("ib-hdr", 4)}
    known = {sizes: autopar.plan(model, sample, mesh=sizes, **asked).step_time for sizes in ((8,), (2, 4), (4, 2))}
    assert max(known.values()) > 1.05 * min(known.values())
    searched = autopar.plan(model, sample, mesh="auto", devices=8, **asked).searched
    for sizes in known:
        assert f"{sizes} slower" in searched or f"{sizes} {1e3 * known[sizes]:.3f} ms" in searched
    assert " slower" in searched


def test_stages_are_searched_over_every_shape() -> None:
    model, sample = network(), torch.empty(8, 16, 128)
    options: dict[str, Any] = {"device": device("ethernet-25g", 2), "pipeline": "auto", "microbatches": 4}
    found = autopar.plan(model, sample, mesh="auto", devices=4, **options)
    each = [autopar.plan(model, sample, mesh=sizes, **options).step_time for sizes in ((4,), (2, 2))]
    assert found.step_time == pytest.approx(min(each), rel=1e-9)
    assert "2 shapes of the mesh" in found.searched
    assert Mesh.of(dict(zip(found.axes, found.sizes, strict=True))).joined.sizes in ((4,), (2, 2))


REFUSED: list[tuple[dict[str, Any], type[AutoparError], str, str]] = [
    ({"mesh": "auto"}, MeshError, "does not say how many devices", "devices=8"),
    ({"mesh": "auto", "devices": 0}, MeshError, "devices=0 is not a number", "from 1 on"),
    ({"mesh": "auto", "devices": "4"}, MeshError, "devices='4' is not a number", "from 1 on"),
    ({"mesh": "best", "devices": 4}, ConstraintError, "both say how the devices are used", "leave mesh= out"),
    ({"mesh": "auto", "devices": 4, "pipeline": "pp"}, MeshError, "has no axis 'pp'", "pipeline='auto'"),
    ({"mesh": "auto", "devices": 4, "constraints": {"*": "I"}}, ConstraintError, "how many axes there are", "no constraints"),
    ({"mesh": "auto", "config": {"devices": 4, "parallel": {"tensor": 2}}}, ConstraintError, "tensor is given", "or the key"),
    ({"config": {"mesh": "auto", "parallel": {"pipeline": 2}}, "devices": 4}, ConstraintError, "pipeline is 2", "'auto'"),
    ({"config": {"mesh": "2,4"}, "devices": 8}, ConstraintError, "mesh is '2,4'", "'auto'"),
    ({"mesh": "auto", "devices": 2, "budget": "1KiB"}, BudgetError, "no plan fits into 1.00 KiB", "budget"),
]


@pytest.mark.parametrize("asked, kind, what, fix", REFUSED)
def test_what_leaves_no_shape_is_refused_with_what_would(
    asked: dict[str, Any], kind: type[Exception], what: str, fix: str
) -> None:
    with pytest.raises(kind) as caught:
        autopar.plan(Layers((64, 64)), torch.empty(8, 64), **{"device": "h100", **asked})
    assert isinstance(caught.value, AutoparError)
    assert what in caught.value.what
    assert fix in str(caught.value.details["fix"])


def test_a_declaration_and_explain_say_the_same() -> None:
    model, sample = Layers((256, 1024, 256)), torch.empty(64, 256)
    found = autopar.plan(model, sample, mesh="auto", devices=4, device="h100", strategy="zero1")
    declared = autopar.plan(model, sample, config={"mesh": "auto", "devices": 4, "device": "h100", "zero": 1})
    assert declared == found
    explained = explain(model, sample, "auto", devices=4, device="h100", strategy="zero1")
    assert isinstance(explained, Explanation)
    assert explained.plan == found


BUILD = """
import torch
from tests.support.planning import Layers

def build():
    return Layers((256, 1024, 256)), torch.empty(64, 256)
"""


def test_the_command_line_explains_one_number_and_tabulates_several(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(BUILD)
    target = f"{tmp_path / 'own.py'}:build"
    assert main([target, "--mesh", "auto", "--devices", "16", "--device", "h100"]) == 0
    said = capsys.readouterr().out
    assert "the fastest of 6 shapes of the mesh: (2, 8)" in " ".join(said.split())
    assert main([target, "--mesh", "auto", "--devices", "2,4", "--device", "h100", "--within", "1s"]) == 0
    _, *rows, _, last = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["2", "4"]
    assert "2 devices are the fewest" in last
    assert main([target, "--mesh", "auto", "--device", "h100"]) == 2
    assert "does not say how many devices" in capsys.readouterr().err

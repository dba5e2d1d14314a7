"""A declaration names an existing mesh, strategy and options; anything else is refused with what would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, ConstraintError, MeshError
from autopar.plan.declaration import read_declaration
from autopar.plan.declaration_file import load_declaration

TRANSLATED: list[tuple[dict[str, Any], int, dict[str, int], dict[str, object]]] = [
    ({}, 8, {"outer": 2, "inner": 4}, {}),
    ({"parallel": {"data": 8}}, 8, {"data": 8}, {"strategy": "data"}),
    ({"zero": 3}, 8, {"data": 8}, {"strategy": "fsdp"}),
    ({"zero": 0}, 8, {"data": 8}, {"strategy": "ddp"}),
    ({"parallel": {"tensor": 4}}, 8, {"data": 2, "tensor": 4}, {"strategy": "any"}),
    ({"parallel": {"data": 2}}, 8, {"data": 2, "tensor": 4}, {"strategy": "any"}),
    ({"parallel": {"tensor": {"mode": "1d", "size": 4}}, "zero": 1}, 8, {"data": 2, "tensor": 4}, {"strategy": "zero1+1d"}),
    ({"parallel": {"tensor": {"mode": "2d", "size": 4}}}, 8, {"data": 2, "row": 2, "column": 2}, {"strategy": "2d"}),
    ({"parallel": {"tensor": {"mode": "3d"}}}, 8, {"batch": 2, "row": 2, "column": 2}, {"strategy": "3d"}),
    (
        {"parallel": {"tensor": {"mode": "2.5d", "size": 8, "depth": 2}, "data": 2}, "zero": 0},
        16,
        {"data": 2, "depth": 2, "row": 2, "column": 2},
        {"strategy": "ddp+2.5d"},
    ),
    (
        {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "zero": 1, "gradient_accumulation": 4},
        16,
        {"pipeline": 2, "data": 2, "row": 2, "column": 2},
        {"strategy": "zero1+2d", "pipeline": "pipeline", "microbatches": 4},
    ),
    (
        {"parallel": {"pipeline": {"size": 2, "schedule": "1f1b"}}, "offload": False, "precision": "bf16-mixed"},
        4,
        {"pipeline": 2, "device": 2},
        {"pipeline": "pipeline", "schedule": "1f1b", "offload": False, "precision": "bf16-mixed"},
    ),
    ({"parallel": {"pipeline": "auto", "data": 4}}, 4, {"data": 4}, {"strategy": "data", "pipeline": "auto"}),
]


@pytest.mark.parametrize("config, world, sizes, options", TRANSLATED)
def test_a_declaration_is_a_mesh_and_options(
    config: dict[str, Any], world: int, sizes: dict[str, int], options: dict[str, object]
) -> None:
    found = read_declaration(config, world)
    assert found.mesh is not None
    assert dict(zip(found.mesh.axes, found.mesh.sizes, strict=True)) == sizes
    assert found.options == options


BOMB = "precision:\n- &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
REFUSED: list[tuple[dict[str, Any], int, type[AutoparError], str, str]] = [
    ({"paralel": {}}, 8, ConstraintError, "no key 'paralel'", "did you mean 'parallel'?"),
    ({"parallel": {"tensr": 2}}, 8, ConstraintError, "parallel has no key 'tensr'", "did you mean 'tensor'?"),
    ({"parallel": {"tensor": {"sise": 2}}}, 8, ConstraintError, "no key 'sise'", "did you mean 'size'?"),
    (
        {"parallel": {"tensor": {"size": 2, "mode": "sequences"}}},
        8,
        ConstraintError,
        "mode is 'sequences'",
        "did you mean 'sequence'?",
    ),
    ({"parallel": 8}, 8, ConstraintError, "parallel is 8, not a table", "leave it out"),
    ({"parallel": {"data": True}}, 8, ConstraintError, "parallel.data is True", "a number"),
    ({"parallel": {"data": 0}}, 8, ConstraintError, "parallel.data is 0", "from 1 on"),
    ({"parallel": {"tensor": {"size": "4"}}}, 8, ConstraintError, "size is '4'", "a number"),
    ({"zero": 4}, 8, ConstraintError, "zero is 4", "0, 1, 2, 3"),
    ({"zero": True}, 8, ConstraintError, "zero is True", "0, 1, 2, 3"),
    ({"offload": "moon"}, 8, ConstraintError, "offload is 'moon'", "True, False, 'host', 'disk' or 'auto'"),
    ({"gradient_accumulation": "some"}, 8, ConstraintError, "gradient_accumulation is 'some'", "'auto'"),
    ({"parallel": {"tensor": {"size": 8, "mode": "2d"}}}, 16, MeshError, "8 in mode '2d' is not a square", "1, 4, 16"),
    ({"parallel": {"tensor": {"size": 4, "mode": "3d"}}}, 16, MeshError, "4 in mode '3d' is not a cube", "1, 8"),
    (
        {"parallel": {"tensor": {"size": 4, "mode": "2.5d", "depth": 2}}},
        16,
        MeshError,
        "depth x a square with a depth of 2",
        "2, 8",
    ),
    ({"parallel": {"tensor": {"size": 8, "mode": "2.5d"}}}, 16, ConstraintError, "has no depth", '"depth": 2'),
    ({"parallel": {"tensor": {"size": 4, "mode": "2d", "depth": 1}}}, 8, ConstraintError, "depth is only for mode", "leave"),
    ({"parallel": {"tensor": 3}}, 8, MeshError, "tensor of 3 does not divide 8 devices", "1, 2, 4, 8"),
    ({"parallel": {"pipeline": 3}}, 8, MeshError, "pipeline of 3 ranks does not divide 8", "1, 2, 4, 8"),
    ({"parallel": {"data": 3}}, 8, MeshError, "data of 3 does not divide 8", "1, 2, 4, 8"),
    ({"parallel": {"data": 2, "tensor": 2}}, 8, MeshError, "data of 2 and tensor of 2 are 4 devices", "data=4"),
    ({"parallel": {"pipeline": 1, "tensor": 8, "data": 2}}, 8, MeshError, "are 16 devices", "data=1"),
    ({"parallel": {"pipeline": {"stages": 2}}}, 8, ConstraintError, "pipeline has no size", "auto"),
    ({"parallel": {"pipeline": "auto", "tensor": 8}}, 8, MeshError, "cuts the axis of data", "smaller"),
]


@pytest.mark.parametrize("config, world, kind, what, hint", REFUSED)
def test_what_does_not_fit_is_refused_with_what_would(
    config: dict[str, Any], world: int, kind: type[AutoparError], what: str, hint: str
) -> None:
    with pytest.raises(kind) as caught:
        read_declaration(config, world)
    assert what in caught.value.what
    assert hint in str(caught.value)


def test_a_file_says_what_the_mapping_says(tmp_path: Path) -> None:
    config = {"parallel": {"tensor": {"size": 4, "mode": "2d"}}, "zero": 1}
    (tmp_path / "a.json").write_text(json.dumps(config))
    (tmp_path / "a.toml").write_text('zero = 1\n[parallel.tensor]\nsize = 4\nmode = "2d"\n')
    (tmp_path / "a.yaml").write_text("zero: 1\nparallel:\n  tensor: {size: 4, mode: 2d}\n")
    pytest.importorskip("yaml")
    for name in ("a.json", "a.toml", "a.yaml"):
        assert load_declaration(tmp_path / name) == load_declaration(str(tmp_path / name)) == config


@pytest.mark.parametrize(
    "name, text, what",
    [
        ("a.py", "config = {}", "is a Python file: reading it would run it"),
        ("a.ini", "", "is no .toml, .json, .yaml"),
        ("a.toml", "zero = ", "is not valid TOML"),
        ("a.json", "[1]", "holds a list"),
        ("a.json", "{", "is not valid JSON"),
        ("none.toml", None, "cannot be read"),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.json", '{"devices": 2, "devices": 4}', "two entries"),
        ("a.json", '{"time_limit": NaN}', "not a finite number"),
        ("a.json", '{"budget": 1' + "0" * 400 + "}", "too large a number"),
        ("a.toml", "a = " + "[" * 50_000, "nested too deeply"),
        ("a.toml", "a" + ".a" * 50_000 + " = 1", "dots"),
        ("a.yaml", "[" * 5_000, "nested too deeply"),
        ("a.yaml", "static: &a [*a]", "more than 100000 entries"),
        ("a.yaml", BOMB, "more than 100000 entries"),
        ("a.yaml", "!!python/object/apply:os.system ['exit']", "could not determine a constructor"),
        ("a.json", " " * 2**20 + "{}", "more than 1048576 bytes"),
    ],
)
def test_a_file_that_holds_no_declaration_is_refused(tmp_path: Path, name: str, text: str | None, what: str) -> None:
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConstraintError, match=what):
        load_declaration(tmp_path / name)


@pytest.mark.parametrize("number", [2**31, 10**18, 10**400])
def test_more_devices_than_there_are_are_refused_at_once(number: int) -> None:
    asked = ({"config": {"devices": number}}, {"mesh": (number,)}, {"mesh": (2,) * 31}, {"mesh": "auto", "devices": number})
    for one in asked:
        with pytest.raises(MeshError, match="a mesh has at most 2147483647 devices"):
            autopar.plan(model(), torch.zeros(8, 64), device="h100", **one)  # type: ignore[arg-type]


def test_the_largest_world_is_divided_at_once() -> None:
    most = 2**31 - 1  # a prime
    found = read_declaration({}, most).mesh
    assert found is not None
    assert found.sizes == (most,)
    with pytest.raises(MeshError, match="does not divide"):
        read_declaration({"parallel": {"tensor": {"size": 7, "mode": "3d"}}}, most)


@pytest.mark.parametrize("options", [{"budget": 10**400}, {"time_limit": 10**400}, {"assume": {"model.py:1": 10**5000}}])
def test_numbers_that_no_float_holds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(AutoparError, match=r"memory budget|number of seconds|is no line with"):
        autopar.plan(model(), torch.zeros(8, 64), (2,), device="h100", **options)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def test_a_plan_by_declaration_is_the_plan_by_its_mesh_and_strategy() -> None:
    x = torch.ones(32, 64)
    found = autopar.plan(model(), x, config={"parallel": {"tensor": {"size": 4, "mode": "1d"}}, "device": "h100"}, devices=8)
    assert found.mesh.axes == ("data", "tensor")
    assert found == autopar.plan(model(), x, {"data": 2, "tensor": 4}, strategy="1d", device="h100")


@pytest.mark.parametrize(
    "mesh, options, what",
    [
        (None, {}, "neither a mesh nor a declaration"),
        ((8,), {"config": {"zero": 1}}, "both say how the devices are used"),
        (None, {"config": {"zero": 1}, "strategy": "ddp", "devices": 4}, "both say strategy"),
        (None, {"config": {"devices": 2}, "devices": 4}, "both given"),
        (None, {"config": 3}, "config is a int"),
        (None, {"devices": 0}, "devices=0 is not a number"),
    ],
)
def test_a_declaration_that_others_contradict_is_refused(mesh: object, options: dict[str, Any], what: str) -> None:
    with pytest.raises(AutoparError, match=what):
        autopar.plan(model(), torch.ones(32, 64), mesh, device="h100", **options)
    with pytest.raises(AutoparError, match=what):
        autopar.parallelize(model(), torch.ones(32, 64), mesh, device="h100", **options)

"""Translates one declaration of how a model is parallel into a mesh, a strategy and options.

    {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "zero": 1}, 16 devices

    ->  mesh (pipeline=2, data=2, row=2, column=2), strategy "zero1+2d", pipeline "pipeline"

Whatever is left out is searched, or follows from the rest, as the size of data does.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import ConstraintError, MeshError
from autopar.ir.mesh import AutoMesh, Mesh
from autopar.plan.options import AUTO, DISK, HOST
from autopar.search_space.schemes import MODES, mode_axes

KEYS: Mapping[str, tuple[type, ...]] = {
    "mesh": (str,), "parallel": (Mapping,), "zero": (int, str), "offload": (bool, str), "precision": (str,), "reduce": (str,),
    "gradient_accumulation": (int, str), "mode": (str,), "devices": (int,), "device": (str,), "budget": (int, str),
    "optimizer": (str,), "constraints": (Mapping,), "outputs": (str,), "strict": (bool,), "recompute": (str,),
    "dynamic": (Mapping,), "static": (list, tuple), "assume": (Mapping,), "time_limit": (int, float), "host_memory": (int, str),
    "disk_memory": (int, str), "disk": (str,), "compiled": (bool,),
}  # fmt: skip
PARALLEL: Mapping[str, tuple[type, ...]] = {"data": (int, str), "pipeline": (int, str, Mapping), "tensor": (int, str, Mapping)}
PIPELINE: Mapping[str, tuple[type, ...]] = {"size": (int, str), "stages": (int, str, list, tuple), "schedule": (str,)}
TENSOR: Mapping[str, tuple[type, ...]] = {"size": (int,), "mode": (str,), "depth": (int,)}
PASSED = tuple(key for key in KEYS if key not in ("mesh", "parallel", "zero", "offload", "gradient_accumulation", "devices"))
WORDS = {int: "a number", float: "a number", str: "text", bool: "true or false", Mapping: "a table", list: "a list"}
ZERO: Mapping[int | str, object] = {AUTO: "", 0: "ddp", 1: "zero1", 2: "zero2", 3: "fsdp"}
OFFLOAD: Mapping[int | str, object] = {AUTO: AUTO, HOST: HOST, DISK: DISK, True: True, False: False}
AXIS = "pipeline"  # the name of the axis of stages
NOUNS = {"2d": "a square", "2.5d": "depth x a square", "3d": "a cube"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A declaration as arguments of `autopar.plan`: the mesh, unless only options were declared, and options by name."""

    mesh: Mesh | AutoMesh | None
    options: Mapping[str, object]


def read_declaration(config: Mapping[str, object], world: int, *, own_mesh: bool = False) -> Declaration:
    """Read a declaration for a number of devices; with `own_mesh` the caller has a mesh, and only options may be declared.

    Raises ConstraintError for unknown keys, wrong types and contradictions, and MeshError for sizes that do not fit each other
    or the number of devices.
    """
    _check("the declaration", config, KEYS)
    zero = _choice("zero", config.get("zero", AUTO), ZERO, "0, 1, 2, 3 or 'auto'")
    options: dict[str, object] = {name: config[name] for name in PASSED if name in config}
    if "offload" in config:
        options["offload"] = _choice("offload", config["offload"], OFFLOAD, "True, False, 'host', 'disk' or 'auto'")
    if "gradient_accumulation" in config:
        options["microbatches"] = _count("gradient_accumulation", config["gradient_accumulation"])
    if own_mesh:
        if said := sorted({"mesh", "parallel", "zero", "devices"} & config.keys()):
            what = f"mesh= and the declaration's {said[0]!r} both say how the devices are used"
            raise ConstraintError(what, fix="leave mesh= out, or the key")
        return Declaration(mesh=None, options=options)
    parallel = _table("parallel", config.get("parallel", {}))
    _check("parallel", parallel, PARALLEL)
    if "mesh" in config:
        named = {"strategy": zero} if zero else {}
        return Declaration(mesh=_open_mesh(config["mesh"], parallel, world), options=options | _stages_of(parallel) | named)
    pipeline, staged = _pipeline(parallel.get("pipeline", 1), world)
    data = _count("parallel.data", parallel.get("data", AUTO))
    sizes, strategy = _axes(
        parallel, data, zero if isinstance(zero, str) else "", "zero" in config and config["zero"] != AUTO, world, pipeline
    )
    axes = {AXIS: pipeline} | sizes if pipeline > 1 else sizes
    if "pipeline" in staged and staged["pipeline"] == AUTO and next(iter(axes)) not in ("data", "outer", "device"):
        what = "pipeline='auto' cuts the axis of data, and tensor takes all devices"
        raise MeshError(what, fix="pipeline= a number, or a smaller size of tensor")
    return Declaration(mesh=Mesh.of(axes), options=options | staged | ({"strategy": strategy} if strategy != AUTO else {}))


def _open_mesh(said: object, parallel: Mapping[str, object], world: int) -> AutoMesh:
    """The mesh whose shape is searched. Raises ConstraintError for any word but "auto", and if sizes are given as well."""
    if said != AUTO:
        what = f"mesh is {said!r} in the declaration"
        raise ConstraintError(what, fix=f'{AUTO!r}, which searches its shape; sizes are those of parallel: {{"tensor": 4}}')
    if sizes := [key for key in ("data", "tensor") if parallel.get(key, AUTO) != AUTO]:
        what = f"mesh={AUTO!r} searches the sizes of all axes, and parallel.{sizes[0]} is given"
        raise ConstraintError(what, fix=f"leave mesh={AUTO!r} out, or the key")
    return AutoMesh(world)


def _stages_of(parallel: Mapping[str, object]) -> dict[str, object]:
    """The pipeline options for a mesh whose shape is searched."""
    said = parallel.get("pipeline", 1)
    table = said if isinstance(said, Mapping) else {"size": said}
    if table.get("size") not in (1, AUTO):
        what = f"mesh={AUTO!r} searches the sizes of all axes, and that of parallel.pipeline is {table.get('size')!r}"
        raise ConstraintError(what, fix=f"pipeline={AUTO!r}, or leave mesh={AUTO!r} out")
    return _pipeline(said, 1)[1]


def _pipeline(said: object, world: int) -> tuple[int, dict[str, object]]:
    """The size of the pipeline's axis, 1 if there is none or its size is searched, and the options of its stages."""
    table = said if isinstance(said, Mapping) else {"size": said}
    _check("parallel.pipeline", table, PIPELINE)
    if "size" not in table:
        raise ConstraintError("parallel.pipeline has no size", fix='pipeline={"size": 2}, or "auto"')
    size, more = _count("parallel.pipeline", table["size"]), {name: table[name] for name in table if name != "size"}
    if size == AUTO:
        return 1, {"pipeline": AUTO, **more}
    assert isinstance(size, int), "a count is a number or 'auto'"
    if world % size:
        raise _unfit(f"a pipeline of {size} ranks", world, _divisors(world))
    if size == 1 and more:
        raise ConstraintError("a pipeline of one rank has neither stages nor a schedule", fix="a size of 2 or more")
    return size, {"pipeline": AXIS, **more} if size > 1 else {}


def _axes(
    parallel: Mapping[str, object], data: int | str, zero: str, sharding: bool, world: int, pipeline: int
) -> tuple[dict[str, int], str]:
    """The data and tensor axes on the devices that the pipeline leaves, and the strategy over them."""
    rest, table = world // pipeline, parallel.get("tensor", {})
    if not isinstance(table, Mapping):
        table = {} if table == AUTO else {"size": table}
    _check("parallel.tensor", table, TENSOR)
    if isinstance(data, int) and rest % data:
        raise _unfit(f"data of {data}", rest, _divisors(rest))
    mode, depth = str(table.get("mode", "any")), table.get("depth")
    if mode not in MODES:
        raise ConstraintError(
            f"parallel.tensor.mode is {mode!r}", close=_close(mode, MODES), fix=f"one of {', '.join([*MODES][1:])}"
        )
    if depth is not None and mode != "2.5d":
        raise ConstraintError(f"parallel.tensor.depth is only for mode '2.5d', not {mode!r}", fix="leave depth out")
    if not table and data == AUTO and not sharding:
        return _searched(rest), AUTO
    left = rest if table else 1
    if isinstance(data, int):
        left = rest // data
    size = _count("parallel.tensor.size", table.get("size", left))
    assert isinstance(size, int), "text is not a size of tensor"
    if rest % size:
        raise _unfit(f"tensor of {size}", rest, _fitting(rest, mode, depth))
    if isinstance(data, int) and data * size != rest:
        what = f"data of {data} and tensor of {size} are {data * size} devices, and the pipeline leaves {rest} of {world}"
        raise MeshError(
            what, fix=f"data={rest // size}, or leave it out: it is inferred" + (f"; or tensor of {left}" if left else "")
        )
    own = _mode_sizes(mode, size, depth, rest)
    data = rest // size
    if size == 1:
        return {"data": data}, zero or "data"
    strategy = f"{zero}+{mode}" if zero else mode
    return ({"data": data} if data > 1 else {}) | own, strategy


def _mode_sizes(mode: str, size: int, depth: object, rest: int) -> dict[str, int]:
    """The sizes of a tensor mode's axes. Raises MeshError for a size that the mode does not support."""
    names = mode_axes(mode)
    if mode == "2.5d" and depth is None:
        raise ConstraintError(
            "parallel.tensor of mode '2.5d' has no depth", fix='tensor={"size": 8, "mode": "2.5d", "depth": 2}'
        )
    if mode in NOUNS and size not in _fitting(size, mode, depth):
        what = f"tensor of {size} in mode {mode!r} is not {NOUNS[mode]}" + (f" with a depth of {depth}" if depth else "")
        fits = _fitting(rest, mode, depth)
        raise MeshError(what, fits=", ".join(map(str, fits)), fix="a size that fits, another mode, or mode '1d' for any size")
    if mode in NOUNS and size == 1:
        return {}
    if mode == "2.5d":
        assert isinstance(depth, int), "it fits"
        side = math.isqrt(size // depth)
        return dict(zip(names, (depth, side, side), strict=True))
    return dict.fromkeys(names, round(size ** (1 / len(names))))


def _fitting(devices: int, mode: str, depth: object) -> list[int]:
    """The tensor sizes that divide so many devices and that a mode supports."""

    def has(size: int) -> bool:
        match mode:
            case "2d":
                return math.isqrt(size) ** 2 == size
            case "2.5d" if isinstance(depth, int) and depth > 0:
                return size % depth == 0 and math.isqrt(size // depth) ** 2 == size // depth
            case "3d":
                return round(math.cbrt(size)) ** 3 == size
        return mode != "2.5d"

    return [size for size in _divisors(devices) if has(size)]


def _searched(devices: int) -> dict[str, int]:
    """Two axes, as even as possible, for an unrestricted search: the outer is no longer than the inner."""
    outer = max(size for size in _divisors(devices) if size * size <= devices)
    return {"outer": outer, "inner": devices // outer} if outer > 1 else {"device": devices}


def _divisors(number: int) -> list[int]:
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*low, *(number // size for size in low)})


def _unfit(what: str, devices: int, fits: Iterable[int]) -> MeshError:
    number = f"{devices} device{'s' if devices > 1 else ''}"
    return MeshError(f"{what} does not divide {number}", fits=", ".join(map(str, fits)), fix="a size that fits, or devices=")


def _check(where: str, table: Mapping[str, object], keys: Mapping[str, tuple[type, ...]]) -> None:
    """Raise ConstraintError for an unknown key, or a value of the wrong type."""
    for key, value in table.items():
        if key not in keys:
            raise ConstraintError(f"{where} has no key {key!r}", close=_close(str(key), keys), fix=f"one of {', '.join(keys)}")
        types = keys[key]
        number_like = isinstance(value, bool) and bool not in types and key != "zero"
        if number_like or not isinstance(value, types):
            wanted = " or ".join(dict.fromkeys(WORDS.get(one, "a list") for one in types))
            name = key if where == "the declaration" else f"{where}.{key}"
            raise ConstraintError(f"{name} is {value!r}, not {wanted}", fix=f"{wanted}, or leave it out")


def _close(key: str, known: Iterable[str]) -> str | None:
    """A suggestion: the closest known key."""
    found = difflib.get_close_matches(key, list(known), n=1)
    return f"did you mean {found[0]!r}?" if found else None


def _table(where: str, value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping), f"{where} was checked"
    return value


def _count(where: str, value: object) -> int | str:
    """A number of at least one, or "auto"."""
    if value == AUTO and isinstance(value, str):
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConstraintError(f"{where} is {value!r}", fix="a number from 1 on, or 'auto'")
    return value


def _choice(where: str, value: object, known: Mapping[int | str, object], fix: str) -> object:
    if (value is True and where == "zero") or not isinstance(value, int | str) or value not in known:
        raise ConstraintError(f"{where} is {value!r}", fix=fix)
    return known[value]


__all__ = ["Declaration", "read_declaration"]

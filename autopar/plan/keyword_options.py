"""Checks the arguments of the public functions (keywords, mesh, declaration) before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path

from autopar.cost_models.cost_model import CATALOG, CostModel
from autopar.errors import ConstraintError, MeshError, PlanError
from autopar.ir.mesh import AutoMesh
from autopar.plan.declaration import read_declaration
from autopar.plan.declaration_file import load_declaration
from autopar.plan.options import AUTO, DISK, HOST, MODES, TRAINING, Options
from autopar.plan.plan import Plan
from autopar.runtime.process_environment import started, world_size
from autopar.search_space import schemes


def declared(
    mesh: object, config: Mapping[str, object] | str | Path | None, devices: int | None, options: dict[str, object]
) -> tuple[object, dict[str, object]]:
    """The mesh to plan for and the options, merged with a declaration.

    Raises ConstraintError for options that both give, and MeshError if neither says how many devices there are.
    """
    found, asked = declared_mesh(mesh, config, devices, options)
    if isinstance(mesh, str) and found == AutoMesh(1) and devices is None and not started():
        raise MeshError(f"mesh={AUTO!r} does not say how many devices there are", fix="devices=8, or start the processes")
    return found, asked


def declared_mesh(
    mesh: object, config: Mapping[str, object] | str | Path | None, devices: int | None, options: dict[str, object]
) -> tuple[object, dict[str, object]]:
    """The mesh and the options, merged with a declaration. Raises ConstraintError for options that both give."""
    if isinstance(mesh, str) and mesh == AUTO:
        config, mesh = {"mesh": AUTO, **load_declaration({} if config is None else config)}, None
    if config is None and devices is None:
        if mesh is None:
            fix = 'mesh=(2, 4), config={"parallel": {"data": 8}}, or devices=8 to search it all'
            raise MeshError("neither a mesh nor a declaration says which devices there are", fix=fix)
        return mesh, options
    table = load_declaration({} if config is None else config)
    if devices is not None and "devices" in table:
        raise ConstraintError("devices= and the declaration's 'devices' are both given", fix="leave one of them out")
    if devices is not None:
        table = {**table, "devices": devices}
    found = read_declaration(table, world_size(table.get("devices")), own_mesh=mesh is not None)
    for name in found.options:
        field = Options.__dataclass_fields__[name]
        plain = field.default if field.default is not MISSING else None
        if options.get(name) not in (None, plain):
            raise ConstraintError(f"{name}= and the declaration both say {name}", fix="leave one of them out")
    return (mesh if found.mesh is None else found.mesh), {**options, **found.options}


# Options of training, each with the value that says nothing.
OF_TRAINING = {"optimizer": None, "microbatches": 1, "pipeline": None, "recompute": AUTO, "reduce": None}
OF_GRADIENTS = 'strategy="fsdp" shards weights; zero1 and zero2 shard the optimizer\'s state and gradients'
OFFLOADS = (True, False, HOST, DISK, AUTO)
OF_STAGES = ("stages", "schedule")
FLAGS = ("strict", "compiled")
UNSAID = ("constraints", "dynamic", "microbatches", "assume", "optimizer", *OF_STAGES)  # options whose None says nothing


def options_of(options: Mapping[str, object]) -> dict[str, object]:
    """Convert keywords to `Options`; raises TypeError for an unknown one, as Python does for a wrong keyword."""
    known = set(Options.__dataclass_fields__)
    if wrong := set(options) - known:
        raise TypeError(f"unexpected keyword argument {sorted(wrong)[0]!r}; the options are {', '.join(sorted(known))}")
    found = {name: value for name, value in options.items() if value is not None or name not in UNSAID}
    if isinstance(found.get("schedule"), Path):
        found["schedule"] = str(found["schedule"])
    _check_mode(found)
    for name in FLAGS:
        if not isinstance(found.get(name, False), bool):
            raise ConstraintError(f"{name}={found[name]!r} is neither True nor False", fix="one of the two")
    if not isinstance(found.get("cost_model", CATALOG), CostModel):
        what = f"cost_model={found['cost_model']!r} has not all prices of a cost model"
        raise ConstraintError(what, fix="an instance of a subclass of autopar.cost_models.cost_model.CatalogCostModel")
    if (offload := found.get("offload", True)) not in OFFLOADS:
        raise ConstraintError(f"offload={offload!r} is not known", fix=", ".join(map(repr, OFFLOADS)))
    asked = next((name for name in OF_STAGES if found.get(name) not in (None, AUTO)), None)
    if asked and found.get("pipeline") is None:
        what = f"{asked}={found[asked]!r} is of pipeline stages, and no pipeline= says whose ranks have them"
        raise ConstraintError(what, fix=f'pipeline= the name of a mesh axis, or "auto"; or no {asked}=')
    return {"microbatches": AUTO} | found if found.get("pipeline") is not None else found


def check_is_plan(plan: object) -> None:
    """Raise PlanError for anything but a plan or None."""
    if not isinstance(plan, Plan | None):
        fix = "autopar.plan(...), or autopar.Plan.load(path) for a saved one"
        raise PlanError(f"plan is a {type(plan).__name__}", fix=fix)


def asked_options(options: Mapping[str, object], plan: Plan | None) -> Options:
    """The given options, perhaps together with a plan. Raises PlanError for one that the plan was not made with."""
    given = options_of(options)
    asked = Options(**given)  # type: ignore[arg-type]
    if plan is not None:
        asked.check_plan(plan, given)
    return asked


def _check_mode(options: Mapping[str, object]) -> None:
    """Raise ConstraintError for an unknown mode, and for training options in inference."""
    mode = options.get("mode", TRAINING)
    if mode not in MODES:
        raise ConstraintError(f"mode={mode!r} is not known", fix=" or ".join(map(repr, MODES)))
    if mode == TRAINING:
        return
    wrong = [name for name, plain in OF_TRAINING.items() if options.get(name, plain) not in (None, plain)]
    strategy = options.get("strategy")
    wrong += ["strategy"] if str(strategy).partition("+")[0] in schemes.OF_TRAINING else []
    if wrong:
        raise ConstraintError(
            f"{wrong[0]}={options[wrong[0]]!r} is for training, but mode={mode!r} computes no gradients",
            fix=OF_GRADIENTS if wrong[0] == "strategy" else f"leave {wrong[0]}= out",
        )


__all__ = ["asked_options", "check_is_plan", "declared", "declared_mesh", "options_of"]

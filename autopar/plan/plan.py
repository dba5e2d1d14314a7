"""Plans: assignments as plain data, with their costs. A plan is text only: it is validated, never executed.

choices   op -> one form per axis: "I", "R", "P 0" (the rule's first linear group), "n/512" (factor n, stride 512),
          "vocabulary/512" (a distributed form, stride of its last factor)
layouts   value or parameter -> its layout as produced or stored; "output:loss" -> that output. A parameter in state H on the
          axis "memory", which a plan has last if weights need not lie on the device, lies on the host, in state D on the disk
routes    value -> its conversions, "I, S(0) -> R, S(0)"
recompute what the backward recomputes instead of keeping it: op -> "run"; value -> these of its conversions, or
          "host: I, S(0)": offloaded to host memory in this layout
once      whether weights are gathered at the top, once for all micro-batches
padded    value or parameter -> its true shape, and the one in which the program has it: "101 x 8 -> 104 x 8"
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from autopar import files
from autopar.errors import PlanError
from autopar.ir.device import Bytes, Seconds, cpu_named
from autopar.ir.dynamic_dims import Size
from autopar.ir.mesh import Mesh
from autopar.plan.breakdown import CostBreakdown
from autopar.plan.budget import RESERVED
from autopar.plan.check import check
from autopar.plan.pipeline import Pipeline
from autopar.plan.tables import tables
from autopar.plan.text import plain

VERSION = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step: `bytes` is its larger buffer on one rank, `where` the forward or the backward pass.

    `more` names the weights that travel in the same message. By the simulator the device waits for `exposed` of its `seconds`;
    the rest overlaps with computation.
    """

    value: str
    more: tuple[str, ...] = ()
    axis: str
    kind: str
    bytes: Bytes
    where: str
    seconds: Seconds
    exposed: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a program runs on a mesh, with its costs and the number of micro-batches per step.

    `step_time` is in seconds, `peak_memory` in bytes per device; `status` is "optimal" or "feasible", `gap` the relative
    distance of `step_time` from the proven bound.

    With a `pipeline` each of its `stages` has a plan of its own, for its program and the mesh without the pipeline's axis.
    These hold the entries of ops and values; the breakdown here is that of the slowest stage.
    """

    hash: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[str, ...]
    device: str
    options: Mapping[str, str]
    microbatches: int
    status: str
    gap: float
    step_time: Seconds
    peak_memory: Bytes
    choices: Mapping[str, str]
    layouts: Mapping[str, str]
    routes: Mapping[str, tuple[str, ...]]
    recompute: Mapping[str, tuple[str, ...]]
    padded: Mapping[str, str]
    collectives: tuple[Collective, ...]
    breakdown: CostBreakdown
    once: bool = False
    dynamic: tuple[Size, ...] = ()  # the sizes that may be others in a call; `step_time` and the like are for the sample's
    searched: str = ""  # in words, what of pipelines was compared before this plan was chosen, what ended or decided the search
    pipeline: Pipeline | None = None
    stages: tuple[Plan, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh, without its links."""
        return Mesh(axes=self.axes, sizes=self.sizes)

    @property
    def inference(self) -> bool:
        """Whether it is a plan for inference: a forward without gradients."""
        return self.options.get("mode") == "inference"

    @property
    def placed(self) -> dict[str, str]:
        """The layouts of inputs, parameters, buffers and outputs."""
        ops = self.choices
        return {name: x for name, x in self.layouts.items() if name not in ops and name.rpartition(".")[0] not in ops}

    @property
    def host_memory(self) -> Bytes:
        """Bytes in the host's memory for one device: stored weights and offloaded activations."""
        return sum(self.breakdown.host.values())

    @property
    def disk_memory(self) -> Bytes:
        """Bytes on the disk for one device."""
        return sum(self.breakdown.disk.values())

    @property
    def peak_reserved(self) -> Bytes:
        """About what torch's caching allocator reserves for `peak_memory` (`plan.budget.RESERVED`); equal to it on a CPU."""
        return self.peak_memory if cpu_named(self.device) else round(RESERVED * self.peak_memory)

    def to_json(self) -> str:
        """The plan as a JSON text."""
        return json.dumps({"version": VERSION, **_written(asdict(self))}, indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, atomically: whatever fails, the file is complete, the old or the new one.

        Raises PlanError if `path` is not a path, and OSError where a plain write would.
        """
        files.write(_path(path), self.to_json() + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a saved plan. Raises PlanError if the file is not a plan, or is damaged."""
        try:
            text = files.read(_path(path))
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read the plan {path}", error=error) from error
        return Plan.from_json(text, str(path))

    @staticmethod
    def from_json(line: str, name: str = "the plan") -> Plan:
        """Read a plan from a JSON text. Raises PlanError if it is not a plan."""
        fix = "make the plan again with autopar.plan(...).save(path)"
        try:
            if not isinstance(line, str):
                raise ValueError(f"it is a {type(line).__name__}, not a text")
            data = files.parse(line)
            if not isinstance(data, dict) or "version" not in data:
                raise ValueError("it is not a plan: it has no version")
            if (version := data.pop("version")) != VERSION:
                raise PlanError(f"{name} has version {version!r:.20}, this autopar reads {VERSION}", fix=fix)
            made = files.typed(Plan, _read(data))
            check(made)
        except ValueError as error:
            raise PlanError(f"{name} is damaged", error=error, fix=fix) from error
        return made

    def __str__(self) -> str:
        return plain(self.tables())

    def _repr_html_(self) -> str:
        """The printed plan for notebooks, in lines that do not wrap."""
        return f'<pre style="white-space: pre; overflow-x: auto">{html.escape(str(self))}</pre>'

    def tables(self) -> Iterator[str | Table]:
        """The printed sections: totals with sources, layouts of stored and returned tensors, and where the step time goes."""
        return tables(self)


def _path(path: object) -> str | Path:
    """A path that was given, of which a number would be an open file. Raises PlanError for what is none."""
    if not isinstance(path, str | os.PathLike):
        raise PlanError(f"{path!r} is not the path of a plan", fix='a text or a pathlib.Path: "plan.json"')
    return path if isinstance(path, str) else Path(path)


def _written(data: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan and its stages, as in its JSON."""
    data["mesh"] = {"axes": data.pop("axes"), "sizes": data.pop("sizes"), "links": data.pop("links")}
    for entry in data["collectives"]:
        entry["pass"] = entry.pop("where")
    data["stages"] = [_written(stage) for stage in data["stages"]]
    return data


def _read(data: dict[str, Any]) -> dict[str, Any]:
    """Convert a plan's JSON to the fields of the plan and its stages; anything else is left as it is."""
    if isinstance(mesh := data.pop("mesh", None), dict) and mesh.keys() == {"axes", "sizes", "links"}:
        data |= mesh
    if isinstance(sent := data.get("collectives"), list):
        for entry in sent:
            if isinstance(entry, dict) and "pass" in entry:
                entry["where"] = entry.pop("pass")
    if isinstance(stages := data.get("stages"), list):
        data["stages"] = [_read(stage) if isinstance(stage, dict) else stage for stage in stages]
    return data

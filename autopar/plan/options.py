"""What the user may ask of a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from autopar.capture import Assumptions
from autopar.cost_models import optimizers
from autopar.cost_models.cost_model import CATALOG, CostModel
from autopar.cost_models.optimizer_instances import counted
from autopar.cost_models.optimizers import NONE, Optimizer
from autopar.errors import PlanError
from autopar.ir.device import Bytes, Device
from autopar.ir.dynamic_dims import DimSizes, Dynamic
from autopar.plan.budget import byte_count
from autopar.plan.plan import Plan
from autopar.search_space.strategies import OTHER_NAMES

HOST, DISK = "host", "disk"  # where weights may be stored
AUTO = "auto"  # as many micro-batches as are best, as much recomputed as is best
PLENTY: Bytes = 1 << 60  # a budget that never binds
FREE = ("compiled", "cost_model", "time_limit")  # what a module may be built with under any plan
TRAINING, INFERENCE = MODES = "training", "inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The user's options for a plan; `budget` is bytes per device, a string such as "80GB", or None for 90% of the device.

    `mode` is "training" or "inference", which computes no gradients; `microbatches` is their number in a step, or "auto";
    `pipeline` is the mesh axis of the `stages`, which run by a `schedule`; `recompute` is a name of
    `analysis.recompute_policy`; `offload` says what may go to the host and the disk (`planning.memories`), which may store
    `host_memory` and `disk_memory` bytes per node, the disk in the folder `disk`; `cost_model` prices the step, by default from
    the catalog; `time_limit` is in seconds, by default none; `static` names inputs that are constants, `assume` answers
    conditions in forward; `compiled` prices kernels as torch.compile generates them.
    """

    device: str | Device | None = None
    budget: Bytes | str | None = None
    mode: str = TRAINING
    strategy: str = "auto"
    optimizer: str | Optimizer | torch.optim.Optimizer | Callable[..., object] = "adamw"
    constraints: Mapping[str, str] = field(default_factory=dict)
    outputs: str | None = None
    precision: str | None = None
    reduce: str | None = None
    strict: bool = False
    microbatches: int | str = 1
    offload: bool | str = True
    host_memory: Bytes | str | None = None
    disk_memory: Bytes | str | None = None
    disk: str | Path = ""
    recompute: str = "auto"
    dynamic: Mapping[str, DimSizes | Dynamic] = field(default_factory=dict)
    static: Sequence[str] = ()
    assume: Mapping[str, bool | int] = field(default_factory=dict)
    pipeline: str | None = None
    stages: int | str | Sequence[str] = AUTO
    schedule: str = AUTO
    cost_model: CostModel = CATALOG
    time_limit: float | None = None
    compiled: bool = False

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions that capture may make."""
        return Assumptions(static=self.static, assume=self.assume, inference=self.mode == INFERENCE)

    @property
    def stepped(self) -> Optimizer:
        """The optimizer that steps; in inference one without state. Raises InputError for an unknown name."""
        if self.mode == INFERENCE:
            return NONE
        if isinstance(self.optimizer, torch.optim.Optimizer) or callable(self.optimizer):
            return counted(self.optimizer)
        return optimizers.optimizer(self.optimizer)

    def text(self) -> dict[str, str]:
        """The options as a plan stores them; defaults are empty."""
        return {
            "strategy": self.strategy,
            "optimizer": "" if self.mode == INFERENCE else self.stepped.name,
            "budget": "" if self.budget is None else str(self.budget),
            "outputs": self.outputs or "",
            "precision": self.precision or "",
            "reduce": self.reduce or "",
            "constraints": "; ".join(f"{name}: {layout}" for name, layout in self.constraints.items()),
            "microbatches": "" if self.microbatches == 1 else str(self.microbatches),
            **({} if self.mode == TRAINING else {"mode": self.mode}),
            **({} if self.offload is True else {"offload": self.offload or "no"}),
            **({} if self.host_memory is None else {"host_memory": str(self.host_memory)}),
            **({} if self.disk_memory is None else {"disk_memory": str(self.disk_memory)}),
            **({} if self.recompute == AUTO else {"recompute": str(self.recompute)}),
            **({"pipeline": self.pipeline} if self.pipeline else {}),
            **({} if self.stages == AUTO else {"stages": _stages(self.stages)}),
            **({} if self.schedule == AUTO else {"schedule": self.schedule}),
            **({"static": ", ".join(self.static)} if self.static else {}),
            **({"assume": "; ".join(f"{line}: {answer}" for line, answer in self.assume.items())} if self.assume else {}),
            **({"compiled": "yes"} if self.compiled else {}),
            **({} if self.time_limit is None else {"time_limit": f"{self.time_limit:g}"}),
            **({"cost_model": self.cost_model.name} if self.cost_model.name != CATALOG.name else {}),
        }

    @staticmethod
    def read(texts: Mapping[str, str], **others: object) -> Options:
        """Parse the options that `text` wrote; missing and empty ones keep their defaults."""
        found: dict[str, object] = {name: text for name, text in texts.items() if text and name != "constraints"}
        pairs = [entry.rpartition(": ") for entry in texts.get("constraints", "").split("; ") if entry]
        if (runs := texts.get("microbatches", "")).isdecimal():
            found["microbatches"] = int(runs)
        if texts.get("offload", "") == "no":
            found["offload"] = False
        if limit := texts.get("time_limit", ""):
            found["time_limit"] = float(limit)
        if texts.get("compiled"):
            found["compiled"] = True
        if stages := texts.get("stages", ""):
            found["stages"] = int(stages) if stages.isdecimal() else stages.split(", ")
        if static := texts.get("static", ""):
            found["static"] = static.split(", ")
        if assume := texts.get("assume", ""):
            answers = (entry.rpartition(": ") for entry in assume.split("; "))
            found["assume"] = {
                line: answer == "True" if answer in ("True", "False") else int(answer) for line, _, answer in answers
            }
        return Options(constraints={name: layout for name, _, layout in pairs}, **found, **others)  # type: ignore[arg-type]

    def check_plan(self, plan: Plan, said: Collection[str]) -> None:
        """Raise PlanError for an option among those `said` that the plan was not made with; "auto" matches anything.

        Spelling does not matter: budgets of "80GB" and "80 GB" are the same.
        """
        asked = {**self.text(), "mode": self.mode, "microbatches": str(self.microbatches)}
        found = {"mode": TRAINING, **plan.options, "microbatches": str(plan.microbatches)}
        if plan.pipeline:
            found |= {"pipeline": plan.pipeline.axis, "schedule": plan.pipeline.schedule, "stages": str(len(plan.stages))}
        for name in (name for name in asked if name in said and name not in FREE):
            made_with = (found.get(name) or "", plan.options.get(name) or "")
            if asked[name] not in ("", AUTO) and not any(_same(name, asked[name], text) for text in made_with):
                raise PlanError(
                    f"{name}={asked[name]!r} is given, but the plan was made with another",
                    plan=f"{name}={found[name]!r}" if found.get(name) else f"without {name}=",
                    fix=f"leave {name}= out, or plan again with it",
                )

    def under(self, plan: Plan | None) -> Options:
        """The options with the mode, precision and assumptions of an existing plan.

        Others would not fit it.
        """
        found = plan.options if plan else {}
        kept = Options.read({name: found.get(name, "") for name in ("static", "assume")})
        return replace(
            self,
            mode=found.get("mode") or self.mode,
            precision=self.precision or found.get("precision") or None,
            reduce=self.reduce or found.get("reduce") or None,
            offload=found.get("offload", self.offload) if plan and plan.mesh.has_memories else self.offload,
            host_memory=found.get("host_memory") or self.host_memory,
            disk_memory=found.get("disk_memory") or self.disk_memory,
            compiled=self.compiled or bool(found.get("compiled")),
            static=self.static or kept.static,
            assume=self.assume or kept.assume,
        )


def _bytes(what: str) -> Callable[[str], object]:
    return lambda text: byte_count(text, what, least=0) if text else None


def _entries(text: str) -> frozenset[tuple[str, str]]:
    """The entries of a mapping regardless of order, with blanks removed."""
    parted = (entry.rpartition(": ") for entry in text.split("; "))
    return frozenset((name, said.replace(" ", "")) for name, _, said in parted)


MEANINGS: Mapping[str, Callable[[str], object]] = {  # what is compared of options that can be spelled in several ways
    "budget": _bytes("a memory budget"),
    "host_memory": _bytes("an amount of the host's memory"),
    "disk_memory": _bytes("an amount of the disk"),
    "strategy": lambda text: OTHER_NAMES.get(text, text),
    "reduce": lambda text: text or "fp32",
    "constraints": _entries,
    "assume": _entries,
    "static": lambda text: frozenset(text.split(", ")),
    "schedule": os.path.abspath,  # a file's
}


def _same(name: str, asked: str, made_with: str) -> bool:
    """Whether two texts of an option mean the same. Raises BudgetError for an invalid number of bytes."""
    meaning = MEANINGS.get(name, str)
    return asked == made_with or meaning(asked) == meaning(made_with)


def _stages(stages: int | str | Sequence[str]) -> str:
    return str(stages) if isinstance(stages, (int, str)) else ", ".join(map(str, stages))

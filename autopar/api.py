"""The public functions."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from autopar.ir.dynamic_dims import DimSizes, Dynamic
from autopar.ir.mesh import Bytes, Device
from autopar.operators.checking.discover import discover_rule
from autopar.operators.checking.register import check_rule, register_rule
from autopar.parallelize import build
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import make_plan
from autopar.runtime.initialize import initialize
from autopar.verify.verification import Report
from autopar.verify.verification import verify as _verify


def plan(
    model: nn.Module,
    sample_input: object,
    mesh: object,
    *,
    device: str | Device | None = None,
    budget: Bytes | str | None = None,
    strategy: str = "auto",
    optimizer: str = "adamw",
    constraints: Mapping[str, str] | None = None,
    outputs: str | None = None,
    precision: str | None = None,
    reduce: str | None = None,
    strict: bool = False,
    microbatches: int | str = 1,
    offload: bool = True,
    dynamic: Mapping[str, DimSizes | Dynamic] | None = None,
) -> Plan:
    """Plan how a model trains on a mesh; needs neither processes nor weights (the model may be on `meta`).

    `sample_input` is the global batch: a tensor, a tuple of arguments, or a mapping of keywords. `mesh` is a tuple of sizes, a
    dict name -> size, an `autopar.Mesh` or a `DeviceMesh`. `device` names a catalog entry ("h100"), by default this machine's
    accelerator, else its CPU; `budget` is bytes per device (or "80GB"), by default 90% of the device. `strategy` is "auto",
    "ddp", "zero1", "zero2", "fsdp" (ZeRO-3), "megatron" or "replicate"; `constraints` maps names (globs) to layouts; `outputs`
    is "whole" or "sharded" for tensors that are not scalars; with `strict`, an operator without a rule is an error. `precision`
    is by default the model's own, "fp32" and "bf16" plan for `model.to(dtype)`, "bf16-mixed" computes and gathers in bfloat16
    over float32 shards: there gradients are added up in float32 unless `reduce` is "bf16". `microbatches` is the number of
    parts of the batch that a step takes one after the other (`parallel.step`), so as to hold fewer activations; "auto" plans
    it too. `dynamic` names sizes that may be others than in the sample, for which the plan is made: `{"batch": 0}`, that dim of
    every input which is as long there as the first; `{"sequence": {"input_ids": 1}}`; `autopar.Dynamic(dims, least, most)`.
    Without `offload` the host's memory holds nothing for the backward, where the device's is short.

    Raises an `autopar.AutoparError` that says what is wrong: CaptureError, ConstraintError, BudgetError, MeshError, InputError,
    RuleError.

    >>> import autopar, torch
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> autopar.plan(model, torch.randn(32, 64), mesh=(2, 4), device="a100-80gb").status
    'optimal'
    """
    options = Options(
        device=device, budget=budget, strategy=strategy, optimizer=optimizer, constraints=constraints or {}, outputs=outputs,
        precision=precision, reduce=reduce, strict=strict, microbatches=microbatches, offload=offload, dynamic=dynamic or {},
    )  # fmt: skip
    return make_plan(model, sample_input, mesh, options).plan


def parallelize(
    model: nn.Module, sample_input: object, mesh: object, *, plan: Plan | None = None, **options: object
) -> fx.GraphModule:
    """This rank's part of the model, as an `fx.GraphModule` that is called, trained and saved like the original.

    Run it under torchrun with as many processes as the mesh has devices (a mesh of one device needs none); rank 0 plans, and
    its weights are the ones that count. `options` are those of `plan`, which may also be made before and given. The user's
    model is left as it is. A model on `meta` gives a module on `meta`: load a checkpoint into it, or call `autopar.initialize`.

    Raises PlanError if the plan was made for another model or mesh, MeshError if the mesh is not as large as the world, and
    what `plan` raises.
    """
    return build(model, sample_input, mesh, plan, Options(**options_of(options)))  # type: ignore[arg-type]


def verify(model: nn.Module, sample_input: object, mesh: object, *, plan: Plan | None = None, **options: object) -> Report:
    """Run the model sequentially and in parallel in float64 and compare outputs, loss and every gradient.

    Starts its own gloo processes on this machine, one per device of the mesh. Dropout is 0 on both sides. A second comparison
    holds the captured program against the user's module in its own dtype. `report.ok` says whether all agree.
    """
    return _verify(model, sample_input, mesh, plan, Options(**options_of(options)))  # type: ignore[arg-type]


def options_of(options: Mapping[str, object]) -> dict[str, object]:
    """Keyword options as `Options` has them; raises TypeError for one that does not exist, as a wrong keyword does."""
    known = set(Options.__dataclass_fields__)
    if wrong := set(options) - known:
        raise TypeError(f"unexpected keyword argument {sorted(wrong)[0]!r}; the options are {', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None or name not in ("constraints", "dynamic")}


__all__ = ["check_rule", "discover_rule", "initialize", "parallelize", "plan", "register_rule", "verify"]

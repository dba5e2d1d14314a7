"""The public functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import fx, nn

from autopar.capture.signature import refuse_model
from autopar.codegen import ParallelModule
from autopar.codegen.graph_module import warn_of_hidden
from autopar.codegen.shared_parameters import remember, warn_of_shared_parameters
from autopar.codegen.state_dict_hooks import warn_of_state_dict_hooks
from autopar.cost_models.cost_model import CATALOG, CostModel
from autopar.cost_models.optimizers import Optimizer
from autopar.errors import ConstraintError, InputError, PlanError
from autopar.ir.device import Bytes, Device
from autopar.ir.dynamic_dims import DimSizes, Dynamic
from autopar.ir.layout import I
from autopar.ir.mesh import AutoMesh
from autopar.operators.checking.discover import discover_rule
from autopar.operators.checking.register import check_rule, register_rule
from autopar.parallelize import build
from autopar.pipelining import build_pipeline, planned_by_rank_0
from autopar.plan.keyword_options import asked_options, check_is_plan, declared, declared_mesh, options_of
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.pipeline_search import make_pipeline_plan
from autopar.planning.planner import make_plan
from autopar.runtime.initialize import initialize
from autopar.runtime.launch import launch
from autopar.runtime.progress import phases, progress
from autopar.runtime.steps_in_backward import StepsInBackward
from autopar.verify.report import Report
from autopar.verify.verification import verify as _verify


def plan(
    model: nn.Module,
    sample_input: object,
    mesh: object = None,
    *,
    config: Mapping[str, object] | str | Path | None = None,
    devices: int | None = None,
    device: str | Device | None = None,
    budget: Bytes | str | None = None,
    mode: str = "training",
    strategy: str = "auto",
    optimizer: str | Optimizer | torch.optim.Optimizer | Callable[..., object] | None = None,
    constraints: Mapping[str, str] | None = None,
    outputs: str | None = None,
    precision: str | None = None,
    reduce: str | None = None,
    strict: bool = False,
    microbatches: int | str | None = None,
    offload: bool | str = True,
    host_memory: int | str | None = None,
    disk_memory: int | str | None = None,
    recompute: str = "auto",
    dynamic: Mapping[str, DimSizes | Dynamic] | None = None,
    static: Sequence[str] = (),
    assume: Mapping[str, bool | int] | None = None,
    cost_model: CostModel = CATALOG,
    pipeline: str | None = None,
    stages: int | str | Sequence[str] = "auto",
    schedule: str = "auto",
    time_limit: float | None = None,
    compiled: bool = False,
) -> Plan:
    """Plan how a model trains on a mesh; needs neither processes nor weights (the model may be on `meta`).

    Args:
        model: the module to plan; it is left unchanged.
        sample_input: the global batch: a tensor, a tuple of arguments, or a mapping of keywords.
        mesh: a tuple of sizes, a dict name -> size, an `autopar.Mesh` or a `DeviceMesh`; the last axis is the innermost.
            Optional with `config` or `devices`. "auto" searches for the shape of `devices` with the fastest step, given the
            device's nodes.
        config: one declaration of all this: a mapping, or the path of a TOML, JSON or YAML file; see the page "One
            declaration". Whatever it leaves out is searched.
        devices: the number of devices for a declaration or mesh="auto"; by default the number of running processes.
        device: a catalog entry ("h100"), a profile.json, or an `autopar.Device`; by default this machine's accelerator, else
            its CPU.
        budget: bytes per device, or a string such as "80GB"; by default 90% of the device's memory.
        mode: "training": a step of forward, backward and optimizer; or "inference": a forward without gradients, of a model in
            `eval()`.
        strategy: "auto", or the name of one: "ddp", "zero1", "zero2", "fsdp" (ZeRO-3), "hsdp", "megatron", "fsdp+tp",
            "hsdp+tp", "replicate"; or a tensor mode, "2d" or "zero1+2d" (docs, "One declaration").
        optimizer: the optimizer whose state and step are priced: a name in `autopar.cost_models.optimizers`, by default
            "adamw"; or an instance, a class, or a function from parameters to an optimizer, of which a small copy takes one
            step.
        constraints: layouts for parameters, inputs, modules or ops, by name or glob: `{"*.weight": "I, S(0)"}`; `*` in a layout
            leaves that axis free.
        outputs: "whole" or "sharded", for results that are not scalars; by default sharded if there is a scalar loss, else
            whole.
        precision: "fp32", "bf16" or "fp16" plan for `model.to(dtype)`; "bf16-mixed" or "fp16-mixed" computes and gathers in
            that dtype over float32 shards (fp16 with an `autopar.GradScaler`). By default the model's own.
        reduce: the dtype in which gradients are reduced under mixed precision: "bf16", "fp16"; by default float32.
        strict: make an operator without a sharding rule an error; otherwise it is planned whole, with a warning.
        microbatches: the number of equal parts of the batch that a step runs one after the other (`parallel.step`), which
            lowers activation memory; "auto" plans their number too. By default 1, or "auto" with a pipeline.
        offload: True allows offloading saved activations to host memory; "host" also stores parameters, gradients and the
            optimizer's state there, weight by weight, where that is best within the budget; "disk" does so on the host or the
            disk; "auto" does so wherever their memory is known.
        host_memory: bytes that one node's host may store for its devices, or a string such as "512GB"; by default 90% of the
            catalog's.
        disk_memory: bytes that one node's disk may store for its devices, or a string such as "2TB".
        recompute: which activations the backward recomputes: "auto", whatever is best within the budget; "none"; "blocks",
            everything in each repeated block except its inputs, like `torch.utils.checkpoint` around it; "selective",
            everything in a block except products with weights and fused attention.
        dynamic: sizes that may differ from the sample's: `{"batch": 0}` for that dim of every input in which it is as long as
            in the first, `{"sequence": {"input_ids": 1}}`, or `autopar.Dynamic(dims, least, most)`.
        static: names of integer inputs that are sizes, counts or flags (the name of a container covers everything in it): the
            plan treats their sample values as constants, and a call with other values is an error.
        assume: answers to conditions in forward, by file and line as in error messages: `{"model.py:12": False}`. Every call
            still computes the condition, or the integer; if it differs, the call is an error.
        cost_model: prices of ops, conversions and collectives (`autopar.cost_models.cost_model.CostModel`); by default those
            of the catalog, or of a measured profile.
        pipeline: the mesh axis whose ranks run one or more stages of the model each; every stage is planned on the other axes.
            `parallel.step` runs it, with `microbatches`. "auto" splits the outermost axis into stages if that is faster.
        stages: the number of stages, a multiple of the axis; or the module paths at which all but the first begin; "auto": the
            fastest of one to four per rank.
        schedule: "gpipe", "1f1b", "zb-h1" (defers weight gradients), "1f1b+2" or "zb-h1+2" (runs that many forwards ahead), for
            several stages per rank "interleaved" or "zb-v", or a file in torch's notation, "table.csv"; "auto": the fastest of
            the named ones.
        time_limit: seconds after which the search stops and returns the best plan found, never worse than the best named
            strategy; by default none, so that no clock decides which plan is chosen. Ctrl-C stops it too, with
            KeyboardInterrupt if no plan has been found.
        compiled: price the step as `torch.compile` runs it (`parallel.compile()`), which fuses memory-bound operators into few
            kernels; by default each operator is one kernel. Operators measured in a profile keep their measured cost.

    Returns:
        The fastest plan that fits the budget, or the best found, with the proven gap.

    Raises:
        CaptureError: the model cannot be captured, or becomes another program at other dynamic sizes.
        ConstraintError: an option has an invalid value, or the constraints leave no way to run the model.
        BudgetError: no plan fits; the error names the smallest budget that works.
        MeshError: the mesh or device is unknown.
        InputError: autopar cannot use the optimizer or the sample.
        RuleError: an operator has no sharding rule (`strict`), or can only run on one device.
        TimeLimitError: no plan was found in `time_limit`.

    >>> import autopar, torch
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> autopar.plan(model, torch.randn(32, 64), mesh=(2, 4), device="a100-80gb").status
    'optimal'
    """
    asked: dict[str, object] = {
        "device": device, "budget": budget, "mode": mode, "strategy": strategy, "optimizer": optimizer,
        "constraints": constraints, "outputs": outputs, "precision": precision, "reduce": reduce, "strict": strict,
        "microbatches": microbatches, "offload": offload, "host_memory": host_memory, "recompute": recompute,
        "disk_memory": disk_memory,
        "dynamic": dynamic, "static": static, "assume": assume, "cost_model": cost_model, "pipeline": pipeline,
        "stages": stages, "schedule": schedule, "time_limit": time_limit, "compiled": compiled,
    }  # fmt: skip
    mesh, asked = declared(mesh, config, devices, asked)
    options = Options(**options_of(asked))  # type: ignore[arg-type]
    with progress("planning: capturing the model") as tell:
        if options.pipeline is not None:
            return make_pipeline_plan(model, sample_input, mesh, options)
        return make_plan(model, sample_input, mesh, options, phases(tell)).plan


def parallelize(
    model: nn.Module,
    sample_input: object,
    mesh: object = None,
    *,
    config: Mapping[str, object] | str | Path | None = None,
    devices: int | None = None,
    plan: Plan | None = None,
    plans: str | Path | None = None,
    inputs: str = "whole",
    over: fx.GraphModule | None = None,
    **options: object,
) -> fx.GraphModule:
    """Build this rank's part of the model: an `fx.GraphModule` that is called, trained and saved like the original.

    Run it under torchrun with one process per device of the mesh; a mesh of one device does not need torchrun. Rank 0 plans,
    and its weights are used on all ranks. A model on `meta` gives a module on `meta`: load a checkpoint into it, or call
    `autopar.initialize`.

    Args:
        model: the module to run in parallel; it is left unchanged.
        sample_input: the global batch, the same on every rank: a tensor, a tuple of arguments, or a mapping of keywords.
        mesh: as for `plan`; its size, also with "auto", is the world size.
        config: as for `plan`: `autopar.parallelize(model, batch, config={"parallel": {"tensor": 4}, "zero": 1})`.
        devices: as for `plan`.
        plan: an existing plan for this model, sample and mesh; by default rank 0 makes one.
        plans: a folder in which rank 0 looks for a plan for this program, mesh and options, and saves the one that it makes.
        inputs: what each rank passes to a call: the "whole" batch, or with "sharded" its own part of each input in the plan's
            layout, as cut by `parallel.shard(batch)` or loaded by `parallel.sampler(dataset)`; or a DTensor.
        over: another result of `parallelize` for the same model, such as prefill when this is decode: this module is planned in
            its layouts and shares its parameters and buffers, without copies.
        **options: those of `plan`.

    Returns:
        The parallel module. Its parameters are `DTensor`s under their own names, so that optimizers, gradient clipping and
        `torch.distributed.checkpoint` work; `step` runs micro-batches.

    Raises:
        PlanError: the plan was made for another model, sample or mesh, or with other options than the ones given; or the ranks
            captured different programs.
        MeshError: the size of the mesh is not the world size.
        AutoparError: what `plan` raises.

    >>> import autopar, torch
    >>> parallel = autopar.parallelize(nn.Linear(8, 4), torch.randn(2, 8), mesh=(1,))
    >>> parallel(torch.randn(2, 8)).shape
    torch.Size([2, 4])
    """
    check_is_plan(plan)
    refuse_model(model)
    if plan is not None and mesh is None and config is None:
        mesh = dict(zip(plan.axes, plan.sizes, strict=True))
    mesh, options = declared_mesh(mesh, config, devices, options)
    asked = asked_options(options, plan)
    if not isinstance(plans, str | Path | None):
        raise PlanError(f"plans={plans!r} is not a folder", fix='its path: plans="plans"')
    if plan is None and (plans is not None or isinstance(mesh, AutoMesh)):
        plan = planned_by_rank_0(model, sample_input, mesh, asked, None if plans is None else Path(plans))
    if isinstance(mesh, AutoMesh):
        assert plan is not None, "rank 0 has made one"
        mesh = dict(zip(plan.axes, plan.sizes, strict=True))
    if inputs not in ("whole", "sharded"):
        raise ConstraintError(f"inputs={inputs!r} is not known", fix='"whole" or "sharded"')
    warn_of_state_dict_hooks(model)
    if over is None:
        warn_of_shared_parameters(model)
    if asked.pipeline is not None or (plan and plan.pipeline):
        if over is not None:
            raise ConstraintError("a pipeline has no second program", fix="leave over= out, or pipeline=")
        parallel: fx.GraphModule = build_pipeline(model, sample_input, mesh, plan, asked, sharded_inputs=inputs == "sharded")
    else:
        if over is not None and not isinstance(over, ParallelModule):
            raise PlanError(f"over is a {type(over).__name__}", fix="what autopar.parallelize returned")
        parallel = build(model, sample_input, mesh, plan, asked, sharded_inputs=inputs == "sharded", over=over)
    warn_of_hidden(parallel)
    remember(model, parallel)
    return parallel


def step_in_backward(optimizer: torch.optim.Optimizer, parallel: fx.GraphModule) -> torch.optim.Optimizer:
    """Step weights stored on the host or the disk during the backward, while the device computes; returns the optimizer.

    A thread steps each weight as soon as its gradient is ready; `optimizer.step()` waits for it, and steps what the device
    stores. The numbers equal those of a step after the backward. Nothing may change gradients in between (no clipping, no
    scaler), and the module is called once per step. The plan is priced as if the steps came after the backward.

    Args:
        optimizer: an optimizer of torch.optim that computes element by element, over the module's parameters.
        parallel: what `autopar.parallelize` returned for a plan with `offload="host"` or `"disk"`.

    Raises:
        InputError: the optimizer is of another class, or the module stores nothing on the host or the disk. Raised in the
            backward or in the optimizer's step if one of the rules above is broken.
    """
    state = parallel.autopar if isinstance(parallel, ParallelModule) else None
    stored = parallel.named_parameters() if state else ()
    away = {name: p for name, p in stored if state and state.place(name) != I and p.requires_grad}
    if state is None or not away:
        what = "step_in_backward is for a module that has trained weights on the host or the disk"
        raise InputError(what, fix='autopar.parallelize(..., offload="host"), or leave it out')
    more, scaled = lambda: state.accumulator.more, lambda: state.scaler is not None
    state.stepped = StepsInBackward(optimizer, away.values(), more, scaled)
    return optimizer


def verify(model: nn.Module, sample_input: object, mesh: object, *, plan: Plan | None = None, **options: object) -> Report:
    """Run the model sequentially and in parallel in float64 and compare outputs, loss and every gradient.

    Starts its own gloo processes on this machine, one per device of the mesh. Dropout is 0 on both sides. A second comparison
    checks the captured program against the user's module in its own dtype.

    Args:
        model: the module to verify, with weights (not on `meta`).
        sample_input: the global batch, as for `plan`.
        mesh: as for `plan`.
        plan: the plan to verify; by default one is made.
        **options: those of `plan`.

    Returns:
        A report that prints as a table: `ok` says whether all tensors agree, `rows` has the error of each.

    Raises:
        InputError: the model is on `meta`, or is no module.
        PlanError: the plan was made for another model, sample or mesh, or with other options than the ones given.
        AutoparError: what `plan` raises.

    >>> import autopar, torch
    >>> autopar.verify(nn.Linear(8, 4), torch.randn(2, 8), mesh=(1,)).ok
    True
    """
    check_is_plan(plan)
    refuse_model(model)
    with progress("comparing the sequential and the parallel model"):
        return _verify(model, sample_input, mesh, plan, asked_options(options, plan))


__all__ = ["check_rule", "discover_rule", "initialize", "launch", "parallelize", "plan", "register_rule", "verify"]

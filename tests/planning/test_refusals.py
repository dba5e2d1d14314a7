"""Every bad input is refused by an error that says what is wrong, with the values, and how to fix it."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar import AutoparError, Plan
from autopar.errors import BudgetError, CaptureError, ConstraintError, InputError, MeshError, PlanError, RuleError
from autopar.plan.options import Options
from autopar.plan.plan import VERSION
from autopar.runtime.workers import WorkerPool

X = torch.ones(32, 64)
DEVICE: dict[str, Any] = {"device": "h100"}


BY_TORCH, BEFORE = "{} is parallel already, by torch.distributed", "give the model before fully_shard or parallelize_module"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def plan(mesh: object = (2, 4), sample: object = X, **options: Any) -> Plan:
    return autopar.plan(model(), sample, mesh, **(DEVICE | options))


def single(**options: Any) -> nn.Module:
    return autopar.parallelize(model(), X, (1,), **(DEVICE | options))


def check(call: Callable[[], object], kind: type[AutoparError], first: str, fix: str) -> AutoparError:
    """The error of a call: its kind, its first line, and a part of its fix."""
    with pytest.raises(kind) as refusal:
        call()
    assert str(refusal.value).splitlines()[0] == refusal.value.what == first
    assert fix in refusal.value.details.get("fix", "")
    return refusal.value


@pytest.mark.parametrize(
    "mesh, first, fix",
    [
        ((2, 0), "a mesh needs axes of at least one device each, not (2, 0)", "mesh=(2, 4)"),
        ((2, -1), "a mesh needs axes of at least one device each, not (2, -1)", "mesh=(2, 4)"),
        ((2.0,), "a mesh needs axes of at least one device each, not (2.0,)", "mesh=(2, 4)"),
        ((), "a mesh needs axes of at least one device each, not ()", "mesh=(2, 4)"),
        ({"memory": 1}, "a mesh axis is called 'memory', which is that of the device's memories", "another name"),
        ("2,4", "cannot make a mesh of '2,4'", "a tuple of sizes"),
        (None, "neither a mesh nor a declaration says which devices there are", "mesh=(2, 4)"),
    ],
)
def test_a_mesh_that_is_none_is_refused(mesh: object, first: str, fix: str) -> None:
    check(lambda: plan(mesh), MeshError, first, fix)


class Given(nn.Module):
    """Returns what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Multiplied(nn.Module):
    """Products along a dim, which cannot be padded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumprod(0)


@pytest.mark.parametrize(
    "made, mesh, axis", [(Multiplied, (7,), "axis0"), (Multiplied, {"dp": 2, "tp": 7}, "tp"), (Given, (7,), "axis0")]
)
def test_a_model_of_which_nothing_can_be_split_over_an_axis_is_planned_whole_there(
    made: Callable[[], nn.Module], mesh: object, axis: str
) -> None:
    with pytest.warns(UserWarning, match=f"over the 7 devices of mesh axis {axis!r}: planned whole there") as said:
        found = autopar.plan(made(), X, mesh, **DEVICE)
    assert {layout.rpartition(", ")[2] for layout in (*found.layouts.values(), *found.choices.values())} == {"I"}
    assert sum(f"mesh axis {axis!r}" in str(warning.message) for warning in said) == 1


def test_a_model_without_operators_runs() -> None:
    x = torch.randn(4, 8)
    parallel = autopar.parallelize(Given(), x, (1,), device="h100")
    assert torch.equal(parallel(x), x)


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    first = "the mesh (axis0=2, axis1=4) has 8 devices, but 1 process runs"
    check(lambda: autopar.parallelize(model(), X, (2, 4)), MeshError, first, "torchrun --nproc-per-node 8")


STAGES = "is of pipeline stages, and no pipeline= says whose ranks have them"


@pytest.mark.parametrize(
    "options, kind, first, fix",
    [
        ({"strategy": "fast"}, ConstraintError, "no strategy is called 'fast'", "auto, ddp, zero1, zero2, fsdp, "),
        ({"strategy": ["ddp"]}, ConstraintError, "no strategy is called ['ddp']", "auto, ddp, zero1, zero2, fsdp, "),
        ({"strategy": None}, ConstraintError, "no strategy is called None", "auto, ddp, zero1, zero2, fsdp, "),
        ({"device": "tpu"}, MeshError, "no device is called 'tpu'", "autopar.Device"),
        ({"device": 3}, MeshError, "no device is called 3", "autopar.Device"),
        ({"stages": 2}, ConstraintError, f"stages=2 {STAGES}", "no stages="),
        ({"schedule": "1f1b"}, ConstraintError, f"schedule='1f1b' {STAGES}", "no schedule="),
        ({"static": 3}, InputError, "static=3 is no list of names", "static=['lengths']"),
        ({"optimizer": "magic"}, InputError, "no optimizer is called 'magic'", "one of these names"),
        ({"outputs": "all"}, ConstraintError, "outputs='all' is unknown", '"whole" or "sharded"'),
        ({"budget": "lots"}, BudgetError, "'lots' is not a memory budget", '"24GiB"'),
        ({"budget": "0GB"}, BudgetError, "'0GB' is not a memory budget", '"24GiB"'),
        ({"budget": -1}, BudgetError, "-1 is not a memory budget", '"24GiB"'),
        ({"budget": True}, BudgetError, "True is not a memory budget", '"24GiB"'),
    ],
)
def test_an_option_that_does_not_exist_is_refused(
    options: dict[str, object], kind: type[AutoparError], first: str, fix: str
) -> None:
    check(lambda: plan(**options), kind, first, fix)


def test_an_unknown_keyword_is_a_type_error_as_everywhere_in_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'stratgy'; the options are assume, budget, "):
        single(stratgy="auto")
    with pytest.raises(TypeError, match="unexpected keyword argument 'stratgy'"):
        autopar.verify(model(), X, (1,), stratgy="auto")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron"])
def test_a_batch_that_a_strategy_cannot_split_is_refused(strategy: str) -> None:
    first = f"strategy {strategy!r} cannot split a batch of 9 over 4 devices"
    check(lambda: plan((4, 1), X[:9], strategy=strategy), ConstraintError, first, "a multiple of 4, or strategy='auto'")


MET = "the constraint '0.weight' cannot be met: "
CONSTRAINTS: list[tuple[object, str, str]] = [
    ({"7.weight": "I, I"}, "the constraint '7.weight' names nothing in the model", '"module.path:op#n"'),
    ({"0.weight": "I, I", "*.weight": "S(0), I"}, "two constraints contradict each other on 0.weight", "drop one"),
    ({"0.weight": "I"}, f"{MET}'I' is not a layout of 0.weight on a mesh of 2 axes", "one entry per axis"),
    ({"0.weight": "I, Q"}, f"{MET}'I, Q' is not a layout of 0.weight on a mesh of 2 axes", "one entry per axis"),
    ({"0.weight": "I, S(0/0)"}, f"{MET}'I, S(0/0)' is not a layout of 0.weight on a mesh of 2 axes", "one entry per axis"),
    ({"0.weight": "I, S(2)"}, f"{MET}'I, S(2)' splits dim 2, but 0.weight has 2 dims", "a dim that it has"),
    ({"0.weight": "I, S(1/64)"}, f"{MET}cannot split dim 1 of 0.weight over mesh axis 1 as 'I, S(1/64)' says", "leave the dim"),
    ({"0.weight": "I, P"}, "the constraint '0.weight' stores 0.weight in state P", "stored tensors are I or S"),
    ({"1": "P, *"}, "1:relu#0 cannot be produced as 'P, *'", "one of the layouts above, or *"),
    ({"0.weight": ("I", "I")}, "the constraint '0.weight' is ('I', 'I'), which is not text", '"I, S(1)"'),
    ({0: "I, I"}, "constraints names 0, which is not text", '{"*.weight": "I, S(0)"}'),
    (["0.weight"], "constraints is a list", '{"*.weight": "I, S(0)"}'),
]


@pytest.mark.parametrize("constraints, first, fix", CONSTRAINTS)
def test_a_constraint_that_names_nothing_contradicts_another_or_cannot_be_met_is_refused(
    constraints: object, first: str, fix: str
) -> None:
    check(lambda: plan(constraints=constraints), ConstraintError, first, fix)


def test_a_constraint_with_a_typing_error_is_shown_what_is_close() -> None:
    first = "the constraint '0.weigh' names nothing in the model"
    error = check(lambda: plan(constraints={"0.weigh": "I, I"}), ConstraintError, first, "a parameter")
    assert error.details["close"] == "0.weight"


def test_constraints_that_a_strategy_cannot_obey_are_refused() -> None:
    first = "the strategy 'ddp' and the constraints leave no way to run the model"
    error = check(lambda: plan(strategy="ddp", constraints={"0": "I, I"}), ConstraintError, first, "strategy='auto'")
    assert error.details["constraints"] == "0: I, I"
    assert error.details["operator"] == "0:linear#0"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_an_infeasible_budget_names_the_smallest_that_works_and_what_fills_it(strategy: str) -> None:
    first = r"no plan fits into 9\.77 KiB per device; the smallest budget that works is "
    with pytest.raises(BudgetError, match=first) as refusal:
        plan(budget="10KB", strategy=strategy)
    details = refusal.value.details
    assert "KiB stored 0.weight" in details["filled"]
    assert "a smaller batch" in details["fix"]
    smallest = int(details["smallest"].removeprefix("budget="))
    assert plan(budget=smallest, strategy=strategy).peak_memory <= smallest
    with pytest.raises(BudgetError):
        plan(budget=int(smallest * 0.99), strategy=strategy)


@pytest.mark.parametrize(
    "call, first, fix",
    [
        (lambda m: m(X[:16]), "argument input has another shape than planned: dim 0 is 16, planned 32", "drop_last=True"),
        (lambda m: m(X[0]), "argument input has another shape than planned: 1 dims, planned 2", "plan again"),
        (lambda m: m(X.double()), "argument input has another dtype than planned", "convert it"),
        (lambda m: m(X.to("meta")), "argument input is on meta, but the model runs on cpu", "input.to('cpu')"),
        (lambda m: m(), "argument input is missing", "as it was planned"),
        (lambda m: m(3.0), "argument input is not a tensor", "give a tensor"),
        (lambda m: m([X]), "argument input is not a tensor but a container of tensors", "the tensor itself"),
        (lambda m: m(X, X), "2 positional arguments, but forward takes 1", ""),
        (lambda m: m(X, mask=X), "argument mask is not in the plan", "plan with a sample that has it"),
    ],
)
def test_a_call_other_than_the_planned_one_is_refused(call: Callable[[nn.Module], object], first: str, fix: str) -> None:
    check(lambda: call(single()), InputError, first, fix)


def test_a_call_under_autocast_is_refused() -> None:
    first = "a parallel module was called under torch.autocast, which its plan does not include"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(lambda: single()(X), InputError, first, 'precision="bf16-mixed"')


def test_models_and_samples_that_are_none_are_refused() -> None:
    none: Any = lambda x: x  # noqa: E731
    check(lambda: autopar.plan(none, X, (2,)), InputError, "the model is a function", "torch.nn.Module")
    check(lambda: autopar.parallelize(none, X, (1,)), InputError, "the model is a function", "torch.nn.Module")
    check(
        lambda: autopar.GradScaler(none), InputError, "a function was not made by autopar.parallelize", "torch.amp.GradScaler"
    )
    check(lambda: plan(sample="x"), InputError, "the sample contains no tensor: it is 'x'", "the global batch")
    check(lambda: plan(sample=[1.0]), InputError, "the sample contains no tensor: it is [1.0]", "the global batch")
    check(lambda: plan(sample=[object()]), InputError, "argument input is a object", "pass tensors")
    first = "the sample does not fit Sequential.forward: missing a required argument: 'input'"
    check(lambda: plan(sample={"y": X}), InputError, first, "")


def test_a_sample_of_another_width_is_refused_without_noise(capfd: pytest.CaptureFixture[str]) -> None:
    first = "Sequential cannot be captured: a and b must have same reduction dim, but got [3, 5] X [64, 256]."
    check(lambda: plan(sample=torch.ones(3, 5)), CaptureError, first, "without autopar")
    assert capfd.readouterr().err == ""


def test_numbers_that_are_not_there_cannot_be_verified() -> None:
    meta = model().to("meta")
    first = "0.weight is on the meta device and has no data to compare"
    check(lambda: autopar.verify(meta, X, (1,)), InputError, first, "with weights")
    first = "argument input is on meta, but the model runs on cpu"
    check(lambda: autopar.verify(model(), X.to("meta"), (1,), **DEVICE), InputError, first, "input.to('cpu')")


class Doubled(nn.Module):
    """A linear layer and an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = torch.ops.refusals.doubled(self.layer(x))
        return doubled


@pytest.fixture(scope="module", autouse=True)
def _operator() -> Any:
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("refusals", "DEF"))
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        yield


def test_an_operator_without_rule_is_a_warning_and_in_strict_mode_an_error() -> None:
    first = "no sharding rule for refusals.doubled.default"
    error = check(
        lambda: autopar.plan(Doubled(), X, (2,), strict=True, **DEVICE), RuleError, first, 'register_rule("refusals::doubled"'
    )
    assert f"{__file__}:" in error.details["at"]
    with pytest.warns(UserWarning, match=f"{first}: planned whole on every device"):
        autopar.plan(Doubled(), X, (2,), **DEVICE)


DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.pop("layouts"), 'it has no entry "layouts"'),
    (lambda d: d.update(step_time="soon"), 'step_time is "soon", not a number'),
    (lambda d: d["layouts"].update({"0.weight": "Z"}), "'Z' is not a layout of 0.weight"),
    (lambda d: d["layouts"].update({"0.weight": "P"}), "what is stored, given or returned is I or S on every axis"),
    (lambda d: d["layouts"].pop("0.weight"), "there is no entry for '0.weight'"),
    (lambda d: d["choices"].pop("0:linear#0"), "there is no entry for '0:linear#0'"),
    (lambda d: d["choices"].update({"0:linear#0": "q/3"}), "'q/3' is not a choice: I, R, P and a number, or one of "),
    (lambda d: d["choices"].update({"0:linear#0": "I, I"}), "choices['0:linear#0'] has 2 entries, the mesh 1 axes"),
    (lambda d: d["routes"].update({"0.weight": ["I -> I"]}), "'I -> I' is not a conversion on one axis"),
]


@pytest.mark.parametrize("damage, said", DAMAGE)
def test_a_damaged_plan_is_refused(damage: Callable[[dict[str, Any]], object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    data = json.loads(plan((1,)).to_json())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"^the plan is damaged|plan\.json is damaged") as refusal:
        single(plan=Plan.load(path))
    assert said in refusal.value.details["error"]
    assert "make the plan again" in refusal.value.details["fix"]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"a": 1}', "not a plan"])
def test_a_file_that_is_not_a_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    check(lambda: Plan.load(path), PlanError, f"{path} is damaged", "make the plan again")


def test_a_plan_that_is_missing_of_another_version_or_no_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    check(lambda: Plan.load(path), PlanError, f"cannot read the plan {path}", "")
    data = json.loads(plan((1,)).to_json()) | {"version": 99}
    path.write_text(json.dumps(data))
    check(lambda: Plan.load(path), PlanError, f"{path} has version 99, this autopar reads {VERSION}", "make the plan again")
    path.write_bytes(b"\xff\xfe\x00")
    check(lambda: Plan.load(path), PlanError, f"cannot read the plan {path}", "")
    wrong: Any = "plan.json"
    check(lambda: single(plan=wrong), PlanError, "plan is a str", "autopar.Plan.load(path)")
    check(lambda: autopar.verify(model(), X, (1,), plan=wrong, **DEVICE), PlanError, "plan is a str", "autopar.Plan.load(path)")


@pytest.mark.parametrize("path", [None, 3, ["plan.json"], b"plan.json"])
def test_a_plan_is_saved_to_and_loaded_from_paths(path: Any) -> None:
    """A number is the file that has it: that of another one, and of the terminal."""
    for call in (lambda: Plan.load(path), lambda: plan((1,)).save(path)):
        check(call, PlanError, f"{path!r} is not the path of a plan", "pathlib.Path")
    with pytest.raises(PlanError) as refusal:
        Plan.from_json(path)
    assert refusal.value.details["error"] == f"it is a {type(path).__name__}, not a text"


WRONG: Any = None  # of another type than is asked for


@pytest.mark.parametrize(
    "call, kind, first, fix",
    [
        (lambda: autopar.verify(WRONG, X, (1,)), InputError, "the model is a NoneType", "torch.nn.Module"),
        (lambda: autopar.step_in_backward(WRONG, WRONG), InputError, "step_in_backward is for a module that has", "offload"),
        (lambda: single(plans=3), PlanError, "plans=3 is not a folder", "its path"),
        (lambda: plan(dynamic={3: 0}), ConstraintError, "dynamic names 3, which is not text", '{"batch": 0}'),
        (
            lambda: plan(dynamic={"b": autopar.Dynamic(0, WRONG)}),
            ConstraintError,
            "'b' is 32 in the sample, and may be",
            "bounds",
        ),
        (lambda: plan(autopar.Mesh(axes=WRONG, sizes=(2,))), MeshError, "a mesh's axes is None, not a tuple of a text", ""),
        (lambda: plan(autopar.Mesh(axes=("a",), sizes=[2])), MeshError, "a mesh's sizes is [2], not a tuple of a number", ""),
        (
            lambda: autopar.register_rule("aten::relu", WRONG),
            RuleError,
            "the rule None is not text",
            "a pattern",
        ),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(
    call: Callable[[], object], kind: type[AutoparError], first: str, fix: str
) -> None:
    with pytest.raises(kind) as refusal:
        call()
    assert refusal.value.what.startswith(first)
    assert fix in refusal.value.details.get("fix", "")


def test_a_state_dict_that_is_none_is_refused_as_by_every_module() -> None:
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        single().load_state_dict(WRONG)


def test_a_plan_for_another_model_batch_or_mesh_is_refused() -> None:
    made = plan((1,))
    first, fix = "the plan was made for another model or sample", "plan again with this model, sample shapes and mode"
    check(lambda: autopar.parallelize(nn.Linear(64, 3), X, (1,), plan=made), PlanError, first, fix)
    check(lambda: autopar.parallelize(model(), X[:16], (1,), plan=made), PlanError, first, fix)
    check(lambda: autopar.verify(model(), X[:16], (1,), plan=made), PlanError, first, fix)
    mesh = "the plan was made for another mesh"
    check(lambda: single(plan=plan((2, 4))), PlanError, mesh, "plan again for this mesh")
    check(lambda: single(plan=plan({"other": 1})), PlanError, mesh, "plan again for this mesh")
    check(lambda: autopar.verify(model(), X, (2,), plan=plan((2, 4))), PlanError, mesh, "plan again for this mesh")


def test_what_cannot_be_planned_captured_or_pickled_says_so() -> None:
    first = "the gradient of weight is sparse, which cannot be sent between devices"
    rows = torch.zeros(32, dtype=torch.long)
    check(lambda: autopar.plan(nn.Embedding(64, 8, sparse=True), rows, (2,), **DEVICE), RuleError, first, "sparse=False")
    autopar.parallelize(nn.Embedding(64, 8, sparse=True), rows, (1,), **DEVICE)
    lazy = "0.weight has no shape yet: its module is lazy"
    check(lambda: autopar.plan(nn.Sequential(nn.LazyLinear(8)), X, (2,), **DEVICE), CaptureError, lazy, "call the model once")
    norm = nn.Sequential(nn.BatchNorm1d(64, momentum=None))
    counted = "0 has momentum=None: what it averages depends on the number of calls before"
    check(lambda: autopar.plan(norm, X, (2,), **DEVICE), CaptureError, counted, "give it a momentum")
    autopar.plan(norm.eval(), X, (2,), **DEVICE)
    wrong: Any = 3
    check(lambda: plan(optimizer=wrong), InputError, "no optimizer is called 3", "give one of these names")
    whole = "a parallel module cannot be pickled: it holds this rank's part and the groups of running processes"
    parallel = single()
    for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        check(lambda save=save: save(parallel), InputError, whole, "state_dict")  # type: ignore[misc]


def test_a_plan_that_stores_addends_is_refused_before_any_process_starts() -> None:
    made = plan((2,))
    for name in ("0.weight", "input", "output:0"):
        bad = replace(made, layouts={**made.layouts, name: "P"})
        refusal = check(
            lambda bad=bad: autopar.verify(model(), X, (2,), plan=bad), PlanError, "the plan is damaged", "make the plan again"
        )  # type: ignore[misc]
        assert "is I or S on every axis" in refusal.details["error"]


def test_parameters_that_share_memory_are_refused_unless_they_are_one_or_lie_side_by_side() -> None:
    shared = nn.ParameterDict({"a": nn.Parameter(torch.ones(64, 64))})
    linear = nn.Linear(64, 64)
    linear.register_module("held", shared)
    shared["b"] = nn.Parameter(shared["a"].data[:8])
    first = "held.a and held.b are parameters that share memory without being the same"
    check(lambda: autopar.plan(linear, X, (2,), **DEVICE), CaptureError, first, "take the view of it in forward")
    whole = torch.ones(2, 64)
    shared["a"], shared["b"], shared["c"] = nn.Parameter(whole[0]), nn.Parameter(whole[1]), linear.bias
    autopar.plan(linear, X, (2,), **DEVICE)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron"])
def test_a_strategy_that_splits_the_batch_is_refused_a_number(strategy: str) -> None:
    first = f"strategy {strategy!r} splits the batch, but input has no dim"
    check(lambda: autopar.plan(nn.ReLU(), torch.ones(()), (2, 2), strategy=strategy), ConstraintError, first, "strategy='auto'")


def made_before(_: object) -> list[tuple[str, str]]:
    """What is said of models that were made parallel before, and the way out; in a process that has a group."""
    mesh = init_device_mesh("cpu", (1,))
    said = []
    for made in (
        single(),
        fully_shard(model(), mesh=mesh),
        parallelize_module(model(), mesh, {"0": ColwiseParallel()}),
        DistributedDataParallel(model()),
        torch.jit.trace(model(), X),
    ):
        with pytest.raises(CaptureError) as refusal:
            autopar.plan(made, X, (2,), **DEVICE)
        said.append((refusal.value.what, str(refusal.value.details["fix"])))
    return said


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_model_that_was_made_parallel_before_is_refused(pool: WorkerPool) -> None:
    (said,) = pool.run(f"{__name__}:made_before", ranks=1)
    assert said == [
        ("the model is what autopar.parallelize returned", "give the model that it was made of"),
        (BY_TORCH.format("the model"), BEFORE),
        (BY_TORCH.format("0.weight"), BEFORE),
        ("the model is wrapped in DistributedDataParallel", "give its .module"),
        ("the model is TorchScript", "give the module before torch.jit.script or trace"),
    ]


@pytest.mark.parametrize(
    "options, what, fix",
    [
        ({"cost_model": 3}, "cost_model=3 has not all prices of a cost model", "CatalogCostModel"),
        ({"compiled": "yes"}, "compiled='yes' is neither True nor False", "one of the two"),
        ({"strict": 1}, "strict=1 is neither True nor False", "one of the two"),
    ],
)
def test_an_option_of_another_type_is_refused(options: dict[str, Any], what: str, fix: str) -> None:
    check(lambda: plan(**options), ConstraintError, what, fix)


def test_sizes_of_a_mesh_may_be_numpys() -> None:
    assert plan(np.int64(2)).sizes == plan((np.int32(2),)).sizes == plan({"dp": np.int64(2)}).sizes == (2,)


@pytest.mark.parametrize(
    "norms, said",
    [
        (("x",), "max_norm='x' is no norm"),
        ((None,), "max_norm=None is no norm"),
        ((float("nan"),), "max_norm=nan is no norm"),
        ((-1.0,), "max_norm=-1.0 is no norm"),
        ((1.0, "x"), "norm_type='x' is no norm"),
    ],
)
def test_gradients_are_clipped_by_a_number_and_stay_as_they_are_without_one(norms: tuple[Any, ...], said: str) -> None:
    """A norm that was not a number made them all NaN, and a negative one turned them round."""
    parallel = single()
    parallel(X).sum().backward()
    before = [parameter.grad.clone() for parameter in parallel.parameters()]
    check(lambda: parallel.clip_grad_norm_(*norms), InputError, said, "a number")
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(before, parallel.parameters(), strict=True))
    parallel.clip_grad_norm_(torch.tensor(1.0), "inf", parameters=parallel.get_parameter("0.weight"))
    assert float(parallel.get_parameter("0.weight").grad.abs().max()) == pytest.approx(1.0)


def test_a_sampler_takes_a_data_set_with_a_length_and_integers() -> None:
    parallel = single()
    for given, kind in ((3, "int"), (iter(range(64)), "range_iterator"), (None, "NoneType")):
        said = f"the data set has no length: it is a {kind}"
        check(lambda given=given: parallel.sampler(given), InputError, said, "parallel.shard(batch)")  # type: ignore[misc]
    check(lambda: parallel.sampler(range(64), seed="x"), InputError, "seed='x' is not an integer", "")
    sampler = parallel.sampler(range(64), shuffle=True)
    check(lambda: sampler.set_epoch(1.5), InputError, "epoch=1.5 is not an integer", "")
    check(lambda: sampler.start(0, "x"), InputError, "step='x' is not an integer", "")
    sampler.set_epoch(np.int64(1))
    assert len([*sampler]) == 2


SUBMODULE = "a submodule of a parallel module cannot be called: only the whole was planned"


def test_a_submodule_of_a_parallel_module_cannot_be_called() -> None:
    check(lambda: single().get_submodule("0")(X), InputError, SUBMODULE, "by itself")


@pytest.mark.parametrize(
    "option, value, of_plan",
    [
        ("microbatches", 4, "microbatches='1'"),
        ("strategy", "fsdp", "strategy='auto'"),
        ("pipeline", "axis0", "without pipeline="),
        ("budget", "10GB", "without budget="),
        ("optimizer", "sgd", "optimizer='adamw'"),
        ("recompute", "blocks", "without recompute="),
        ("constraints", {"0.weight": "I"}, "without constraints="),
    ],
)
def test_an_option_beside_a_plan_that_was_made_with_another_is_refused(option: str, value: object, of_plan: str) -> None:
    """Before, these were left out in silence."""
    made = plan((1,))
    for call in (
        lambda: single(plan=made, **{option: value}),
        lambda: autopar.verify(model(), X, (1,), plan=made, **{option: value}),
    ):
        with pytest.raises(PlanError, match=f"^{option}=.* is given, but the plan was made with another") as refusal:
            call()
        assert refusal.value.details["plan"] == of_plan


def test_options_beside_a_plan_that_was_made_with_them_and_auto_are_taken() -> None:
    made = plan((1,), strategy="ddp", optimizer="sgd", budget="10GB")
    for options in ({"strategy": "ddp", "optimizer": "sgd", "budget": "10GB"}, {"microbatches": 1, "strategy": "auto"}):
        assert single(plan=made, **options)(X).shape == X.shape


SPELLED: list[tuple[str, Any, Any, Any]] = [  # an option, another spelling of it, and what is another option
    ("budget", "80GB", "80 GB", "80GiB"),
    ("budget", "80GB", 80_000_000_000, "80.5GB"),
    ("budget", 24 * 2**30, "24.0GiB", "24GB"),
    ("host_memory", "1TB", "1000 GB", "1TiB"),
    ("disk_memory", "1TB", 1e12, "2TB"),
    ("strategy", "fsdp", "zero3", "zero2"),
    ("optimizer", "adamw", torch.optim.AdamW, torch.optim.SGD),
    ("reduce", None, "fp32", "bf16"),
    (
        "constraints",
        {"0.weight": "I, S(0)", "0.bias": "I, *"},
        {"0.bias": "I,*", "0.weight": "I,  S(0)"},
        {"0.weight": "I, S(0)"},
    ),
    ("stages", ["h.1", "h.2"], ("h.1", "h.2"), ("h.2", "h.1")),
    ("schedule", "orders/table.csv", "./orders/../orders/table.csv", "table.csv"),
    ("static", ["a", "b"], ("b", "a"), ["a"]),
    ("assume", {"m.py:1": True, "m.py:2": 3}, {"m.py:2": 3, "m.py:1": True}, {"m.py:1": True, "m.py:2": 4}),
]


@pytest.mark.parametrize("option, made_with, same, other", SPELLED)
def test_an_option_beside_a_plan_is_compared_by_what_it_means(option: str, made_with: Any, same: Any, other: Any) -> None:
    """Before, `budget="80 GB"` was refused beside a plan that was made with "80GB"."""
    made = plan((1,))
    made = replace(made, options={**made.options, **Options(**{option: made_with}).text()})
    Options(**{option: same}).check_plan(made, [option])
    with pytest.raises(PlanError, match=f"^{option}=.* is given, but the plan was made with another"):
        Options(**{option: other}).check_plan(made, [option])


def test_a_budget_beside_a_plan_that_is_none_is_refused_as_without_a_plan() -> None:
    what, fix = "'80 gigs' is not a memory budget", "bytes per device"
    for made in (None, plan((1,), budget="80GB")):
        check(lambda made=made: single(plan=made, budget="80 gigs"), BudgetError, what, fix)


CASTS: dict[str, tuple[Callable[[nn.Module], object], str, str]] = {
    "half": (lambda m: m.half(), "torch.float16", 'precision="fp16" or "fp16-mixed"'),
    "to": (lambda m: m.to(torch.bfloat16), "torch.bfloat16", 'precision="bf16" or "bf16-mixed"'),
    "double": (lambda m: m.double(), "torch.float64", "cast the model before"),
    "a part": (lambda m: m.get_submodule("0").half(), "torch.float16", 'precision="fp16"'),
    "from outside": (lambda m: nn.Sequential(m).half(), "torch.float16", 'precision="fp16"'),
}


@pytest.mark.parametrize("cast, to, fix", CASTS.values(), ids=CASTS)
def test_a_parallel_module_cannot_be_cast_and_stays_as_it_is(cast: Callable[[nn.Module], object], to: str, fix: str) -> None:
    parallel = single()
    first = f"a parallel module cannot be cast: its plan computes with weights and buffers of torch.float32, not {to}"
    check(lambda: cast(parallel), InputError, first, fix)
    assert {parameter.dtype for parameter in parallel.parameters()} == {torch.float32}


def test_moves_that_cast_nothing_are_as_those_of_any_module() -> None:
    parallel, expected = single(), model()(X)
    parallel.load_state_dict(model().state_dict())
    average = AveragedModel(parallel)
    for made in (parallel, average, average.module):
        made.to("cpu").float().to(memory_format=torch.channels_last).to("cpu", torch.float32).eval().requires_grad_()
        torch.testing.assert_close(made(X), expected)

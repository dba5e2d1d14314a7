"""Models with custom operators: captured, planned, run in parallel and verified."""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.analysis.saved_tensors import saved
from autopar.cost_models import catalog
from autopar.cost_models.compute import pricer
from autopar.errors import CaptureError, InputError, PlanError, RuleError
from autopar.operators.registry import REGISTERED
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from autopar.runtime.custom_ops import Operators
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.support import own, table
from tests.support.forked import ended, run_script

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def further(*plans: str | int) -> list[object]:
    """Cases for `make thorough`."""
    return [pytest.param(plan, marks=pytest.mark.thorough) for plan in plans]


pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def _rules(registry: None) -> None:
    autopar.register_rule(own.scaled_linear, "... k, n k, +n -> ... n", linear="x bias, weight bias")
    autopar.register_rule(own.gated, "... (k! c) -> ... c")


@pytest.mark.usefixtures("_rules")
@pytest.mark.parametrize("plan", ["auto", 0, *further("ddp", "fsdp", "megatron", 1, 2, 3)])
def test_a_model_of_own_operators_has_equal_numbers(pool: WorkerPool, plan: str | int) -> None:
    report = table.report(own.Gated(), X, table.mesh((2, 2)), plan, pool)
    assert report.ok, str(report)


@pytest.mark.usefixtures("_rules")
def test_an_own_operator_is_split_by_its_rule_and_called_in_the_emitted_code() -> None:
    columns = {"weight": "S(0)", ":scaled_linear#0": "S(1)"}
    plan = autopar.plan(own.Gated(64), torch.randn(8, 8), table.mesh((4,)), constraints=columns)
    assert plan.choices[":scaled_linear#0"] == "n/32"
    found = autopar.explain.explain(own.Gated(64), torch.randn(8, 8), table.mesh((4,)))
    assert "torch.ops.own.scaled_linear.default(" in found.code
    assert "torch.ops.own.gated.default(" in found.code


def test_an_operator_without_rule_runs_whole_and_the_warning_says_what_to_register(pool: WorkerPool) -> None:
    model, on = own.Gated(), table.mesh((4,))
    with pytest.warns(UserWarning, match="own.scaled_linear.default, own.gated.default: planned whole") as told:
        plan = autopar.plan(model, X, on)
    said = str(told[0].message)
    assert 'autopar.register_rule("own::scaled_linear", "...")' in said
    assert 'autopar.discover_rule("own::scaled_linear", arguments)' in said
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        report = verify(model, X, on, plan, Options(), pool)
    assert report.ok, str(report)
    with pytest.raises(RuleError, match=r"no sharding rule for own.scaled_linear.default, own.gated.default\n"):
        autopar.plan(model, X, on, strict=True)


@pytest.mark.usefixtures("_rules")
def test_a_plan_is_refused_where_the_rule_that_it_uses_is_not_registered() -> None:
    model, on = own.Gated(), table.mesh((4,))
    plan = autopar.plan(model, X, on, strategy="megatron")
    REGISTERED.clear()
    with pytest.raises(PlanError, match=r"^the plan is damaged") as refusal:
        autopar.verify(model, X, on, plan=plan)
    assert "is not a choice of an operator without a sharding rule: register its rule first" in refusal.value.details["error"]


class Centred(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer, self.dim = nn.Linear(8, 8), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return own.centred(self.layer(x).detach(), self.dim)  # type: ignore[no-any-return]


def test_a_call_for_which_no_rule_was_registered_says_for_which_it_was() -> None:
    autopar.register_rule(own.centred, "a b! -> a b!", linear="x", when={"dim": 1})
    autopar.plan(Centred(1), X, (2,), device="h100", strict=True)
    with pytest.raises(RuleError, match=r"no sharding rule for own.centred.default") as refusal:
        autopar.plan(Centred(0), X, (2,), device="h100", strict=True)
    assert refusal.value.details["fix"] == "its rule was registered for calls with dim=1"


class Does(nn.Module):
    def __init__(self, op: object) -> None:
        super().__init__()
        self.layer, self.op = nn.Linear(8, 8), op

    def forward(self, x: torch.Tensor) -> object:
        y = self.layer(x)
        found = self.op(y)  # type: ignore[operator]
        return y if found is None else found


def test_an_operator_that_cannot_be_captured_says_what_it_lacks() -> None:
    with pytest.raises(CaptureError, match=r"^own::doubled has no fake implementation") as refusal:
        autopar.plan(Does(lambda y: own.doubled(y)), X, (2,), device="h100")
    assert "register_fake" in refusal.value.details["fix"]
    with pytest.raises(CaptureError, match=r"^own.filled.default writes into an argument") as refusal:
        autopar.plan(Does(lambda y: own.filled(y)), X, (2,), device="h100")
    assert "mutates_args=()" in refusal.value.details["fix"]


def test_an_own_operator_may_be_called_like_one_of_torch(pool: WorkerPool) -> None:
    model = Does(lambda y: own.add(y.detach(), torch.zeros(8, 8, device=y.device)) + y)
    autopar.register_rule(own.add, "..., ... -> ...", linear="x, y", example=(torch.randn(4, 6), torch.randn(4, 6)))
    report = verify(model, X, table.mesh((4,)), None, Options(), pool)
    assert report.ok, str(report)


def test_what_autograd_saves_of_it_is_seen_and_its_operations_are_counted_by_its_formula() -> None:
    program = read_program(own.Gated(64), torch.randn(32, 8)).program
    op = program.op[":scaled_linear#0"]
    assert saved(op, program.values).operands == (0, 1)
    price = pricer(op, program.values, catalog.device("h100", processes=1))
    shapes = [program.values[name].shape for name in op.operands], [r.shape for r in op.results]
    assert price.forward(*shapes).flops == 2 * 32 * 8 * 128
    assert price.gradient(*shapes).flops == 2 * 2 * 32 * 8 * 128
    assert price.forward([(32, 4), (128, 4), (128,)], shapes[1]).flops == 2 * 32 * 4 * 128


SCRIPT = """
    import torch
    import autopar

    @torch.library.custom_op("script::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @tripled.register_fake
    def _(x):
        return torch.empty_like(x)

    tripled.register_autograd(lambda ctx, g: g * 3)
    autopar.register_rule(tripled, "... -> ...", linear="x")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
        def forward(self, x):
            return tripled(self.layer(x)).square().sum()

    def main():
        print("ok" if autopar.verify(Model(), torch.randn(8, 8), (2,), strategy="ddp", device="h100").ok else "differs")

    if GUARD:
        main()
"""


def run(script: Path, text: str) -> tuple[int, str]:
    """The exit code of a script and what it prints."""
    script.write_text(textwrap.dedent(text))
    log = script.with_suffix(".log")
    return ended(run_script, script, log), log.read_text()


def test_a_guarded_script_may_define_operators_and_verify_them(tmp_path: Path) -> None:
    assert run(tmp_path / "script.py", SCRIPT.replace("GUARD", '__name__ == "__main__"')) == (0, "ok\n")


def test_a_script_that_verifies_own_operators_without_a_main_guard_is_told_to_add_one(tmp_path: Path) -> None:
    code, said = run(tmp_path / "script.py", SCRIPT.replace("GUARD", "True"))
    assert code == 1
    assert "a worker process cannot start workers" in said
    assert 'if __name__ == "__main__":' in said


def test_an_operator_that_no_other_process_can_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Operators.of(["own.gated.default", "aten.relu.default"]).modules == {"own.gated.default": "tests.support.own"}
    monkeypatch.setattr(own.gated._init_fn, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(InputError, match=r"^own::gated is defined in a notebook or interactively"):
        Operators.of(["own.gated.default"])
    with pytest.raises(InputError, match=r"^a worker process has no operator own::gone"):
        Operators(modules={"own.gone.default": ""}).unpack()


def test_the_rules_of_a_script_come_along() -> None:
    autopar.register_rule(own.gated, "... (k! c) -> ... c")
    packed = Operators.of(["own.gated.default"])
    REGISTERED.clear()
    packed.unpack()
    assert re.fullmatch(r"\.\.\. \(k! c\) -> \.\.\. c", str(REGISTERED["own.gated.default"]))

"""An `autograd.Function` with its own gradient is an operator: planned by a discovered rule, run and verified."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import InputError
from autopar.operators.autograd_functions import DEFINED, NAMESPACE
from autopar.operators.registry import FOUND, rule_of
from autopar.planning.planner import read_program
from autopar.runtime.custom_ops import Operators, SentFunction
from autopar.runtime.workers import WorkerPool
from tests.support import functions, table
from tests.support.forked import ended, run_script

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.usefixtures("registry")

RULES = {
    functions.Rounded: "... -> ...",
    functions.Reversed: "... -> ...",
    functions.Clamped: "... -> ...",
    functions.Spike: "... -> ...",
    functions.Exponential: "... -> ...",
    functions.Normalised: "... _ -> ... _",
    functions.Quantized: "... _, _ _ -> ... _, ...",
}


@pytest.mark.parametrize("plan", ["auto", "megatron", *range(6)])
def test_a_model_with_own_gradients_has_equal_numbers(pool: WorkerPool, plan: str | int) -> None:
    report = table.report(functions.Model(), X, table.mesh((2, 2)), plan, pool)
    assert report.ok, str(report)


def test_rules_are_found_and_numbers_make_operators_of_their_own() -> None:
    program = read_program(functions.Model(), X).program
    made = [DEFINED[op.target.split(".")[1]] for op in program.ops if op.target.split(".")[0] == NAMESPACE]
    assert {one.call.function: FOUND[one.target].text for one in made} == RULES
    whole = {one.call.function for one in made if FOUND[one.target].whole_gradient}
    assert whole == {functions.Clamped, functions.Normalised}
    turned = [one for one in made if one.call.function is functions.Reversed]
    assert [one.call.arguments[1] for one in turned] == [0.5, 2.0]
    assert [FOUND[one.target].linear for one in turned] == [(("x0",),)] * 2


def test_a_function_that_is_captured_again_is_the_operator_that_it_was() -> None:
    first, second = (capture(functions.Model(), X).program for _ in range(2))
    assert [op.target for op in first.ops] == [op.target for op in second.ops]


def test_steps_are_the_modules_bit_by_bit() -> None:
    model = functions.Model()
    parallel = autopar.parallelize(model, X, (1,))
    model(X).backward()
    parallel(X).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, parallel.get_parameter(name).grad), name


@pytest.mark.filterwarnings("ignore")
def test_compiled_they_are_the_same() -> None:
    model = functions.Model()
    parallel = autopar.parallelize(model, X, (1,))
    parallel.compile(backend="aot_eager")
    model(X).backward()
    parallel(X).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parallel.get_parameter(name).grad, parameter.grad)


def test_a_rule_that_is_registered_stays() -> None:
    (target,) = {op.target for op in read_program(Only(functions.Rounded), X).program.ops if "Rounded" in op.target}
    autopar.register_rule(target.removesuffix(".default").replace(".", "::"), "a! ... -> a! ...", replace=True)
    read_program(Only(functions.Rounded), X)
    rule = rule_of(target)
    assert rule
    assert rule.text == "a! ... -> a! ..."


class Only(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.layer(x)).sum()  # type: ignore[no-any-return,no-untyped-call]


def test_workers_cannot_import_a_function_of_a_function() -> None:
    class Inner(functions.Rounded):
        pass

    with pytest.raises(InputError, match=r"Inner is defined inside of a function") as refusal:
        Operators.of(op.target for op in read_program(Only(Inner), X).program.ops)
    assert "top of its module" in refusal.value.details["fix"]


def test_a_function_that_workers_do_not_find_is_named() -> None:
    (operator,) = (DEFINED[op.target.split(".")[1]] for op in read_program(Only(functions.Rounded), X).program.ops[1:2])
    with pytest.raises(InputError, match="a worker process has no Rounded") as refusal:
        SentFunction.of(operator).define({})
    assert "outside of `if __name__`" in refusal.value.details["fix"]


SCRIPT = """
    import torch
    from torch import nn

    import autopar

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return Turned.apply(self.layer(x)).square().sum()

    if __name__ == "__main__":
        print(autopar.verify(Model(), torch.randn(8, 8), (2,)))
"""


def test_a_function_of_the_script_itself_is_verified(tmp_path: Path) -> None:
    script = tmp_path / "turned.py"
    script.write_text(textwrap.dedent(SCRIPT))
    log = tmp_path / "log"
    assert ended(run_script, script, log) == 0
    assert "\nequal: max error" in log.read_text()

"""Answers that the user gives to data-dependent conditions: assumed while tracing, and checked in every call."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import Assumptions, assumptions, capture
from autopar.errors import AutoparError, CaptureError, ConstraintError, InputError, RankError
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Body = Callable[[torch.Tensor], torch.Tensor]


class Does(nn.Module):
    """A linear layer, and then what a test says."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x))


def large(y: torch.Tensor) -> torch.Tensor:
    if y.abs().max() > 100:  # ask
        return y.clamp(-100, 100)
    return y.sin()


def otherwise(y: torch.Tensor) -> torch.Tensor:
    return y.sin() if (y > 100).any() else y.cos()  # ask


def either(y: torch.Tensor) -> torch.Tensor:
    if (y < 1e9).all() and not (y > -1e3).all():  # ask
        return y.sin()
    return y.cos()


def flag(y: torch.Tensor) -> torch.Tensor:
    found = (y > 100).any().item()  # ask
    return y.sin() if found else y.cos()


def looped(y: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        if (y > 100).any():  # ask
            break
        y = y.sin()
    return y


def repeated(y: torch.Tensor) -> torch.Tensor:
    while y.abs().max() > 100:  # ask
        y = y / 2
    return y


CONDITIONS = [large, otherwise, either, flag, looped, repeated]


def asking(body: Body) -> str:
    """The line of a body that asks, as "file:line"."""
    lines, first = inspect.getsourcelines(body)
    return f"test_assumptions.py:{first + next(place for place, line in enumerate(lines) if '# ask' in line)}"


def assumed(body: Body, answer: bool | int = False) -> Assumptions:
    return Assumptions(assume={asking(body): answer})


@pytest.mark.parametrize("body", CONDITIONS)
def test_a_condition_is_taken_for_granted(body: Body) -> None:
    with pytest.raises(CaptureError, match="assume="):
        capture(Does(body), X)
    captured = capture(Does(body), X, assumptions=assumed(body))
    found = interpreter.outputs(captured.program, Does(body), [X])
    torch.testing.assert_close(found[0], Does(body)(X))
    captured.signature.returned.check(found)


@pytest.mark.parametrize("body", CONDITIONS)
def test_a_call_in_which_it_does_not_hold_is_refused(body: Body) -> None:
    parallel = autopar.parallelize(Does(body), X, (1,), assume=assumed(body).assume)
    torch.testing.assert_close(parallel(X), Does(body)(X))
    with pytest.raises(
        InputError, match=rf"{asking(body)} is assumed to be False in every call, and is True in this one\n  at .*"
    ):
        parallel(X * 1e4)
    torch.testing.assert_close(parallel(X), Does(body)(X))


def test_a_loop_that_never_ends_as_assumed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assumptions, "MOST_ASKED", 20)
    with pytest.raises(CaptureError, match="asks more than 20 times, and is assumed to be True each time"):
        capture(Does(repeated), X, assumptions=assumed(repeated, True))


def count(y: torch.Tensor) -> torch.Tensor:
    return y[:, : int((y > -100).sum(1).amax())] * y.isfinite().sum().item()  # ask


def longest(y: torch.Tensor) -> torch.Tensor:
    return y[:, : int((y > -100).sum(1).amax()) - 2]  # ask


def test_a_number_is_taken_for_granted_and_compared() -> None:
    parallel = autopar.parallelize(Does(longest), X, (1,), assume={asking(longest): 6})
    assert parallel(X).shape == (4, 4)
    with pytest.raises(InputError, match="is assumed to be 6 in every call, and is 0 in this one"):
        parallel(X * torch.nan)
    with pytest.raises(CaptureError, match=r"asks for a number, and is assumed to be True"):
        capture(Does(longest), X, assumptions=assumed(longest, True))


def test_every_answer_of_a_line_is_compared() -> None:
    with pytest.raises(InputError, match="is assumed to be 6 in every call, and is 24 in this one"):
        autopar.parallelize(Does(count), X, (1,), assume={asking(count): 6})(X)


def test_a_plan_keeps_what_is_assumed_and_outputs_are_the_users(pool: WorkerPool) -> None:
    plan = autopar.plan(Does(large), X, (2,), assume=assumed(large).assume)
    kept = autopar.Plan.from_json(plan.to_json())
    assert kept.options["assume"] == f"{asking(large)}: False"
    report = verify(Does(large), X, (2,), kept, Options(), pool)
    assert report.ok
    assert autopar.parallelize(Does(large), X, (1,), assume=assumed(large).assume)(X).shape == X.shape


def test_the_line_may_be_given_as_the_refusal_has_it() -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(Does(large), X)
    line = refusal.value.details["at"].partition(" in ")[0]
    assert capture(Does(large), X, assumptions=Assumptions(assume={line: False})).signature.returned.assumed[0].answer is False


@pytest.mark.parametrize("assume", [{"model.py": True}, {"model.py:3": "yes"}, {"model.py:3": 0.5}])
def test_what_is_no_assumption_is_refused(assume: dict[str, object]) -> None:
    with pytest.raises(ConstraintError, match="is no line with True, False or an integer"):
        autopar.plan(Does(large), X, (2,), assume=assume)


def test_assumptions_that_are_no_dict_are_refused() -> None:
    with pytest.raises(ConstraintError, match="assume is a str"):
        autopar.plan(Does(large), X, (2,), assume="model.py:3")  # type: ignore[arg-type]


def test_a_line_that_asks_for_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match=r"assume names model.py:3, but forward asks for no value there"):
        capture(Does(torch.sin), X, assumptions=Assumptions(assume={"model.py:3": True}))


def test_another_file_with_the_same_end_is_another() -> None:
    other = Assumptions(assume={asking(large).removeprefix("test_"): False})
    with pytest.raises(AutoparError, match="depends on the values"):
        capture(Does(large), X, assumptions=other)


class Gated(nn.Module):
    """Blocks, in each of which a branch depends on a weight: in stages the first is asked in another one than has the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gate() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Gate(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        return x + y if self.bias.abs().max() < 100 else x  # ask


def test_stages_compare_what_was_assumed_in_any_of_them() -> None:
    """Two stages on one rank, which needs no processes."""
    model = Gated().double()
    loss = model(X.double())
    loss.backward()
    source, first = inspect.getsourcelines(Gate)
    line = first + next(at for at, text in enumerate(source) if text.endswith("# ask\n"))
    asked = {"assume": {f"{__name__.rpartition('.')[2]}.py:{line}": True}}
    options = {"device": "h100", "pipeline": "pp", "stages": 2, "microbatches": 2, **asked}
    parallel = autopar.parallelize(model, X.double(), {"pp": 1}, **options)
    torch.testing.assert_close(parallel.step(X.double()), loss.detach())
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
    with torch.no_grad():
        torch.testing.assert_close(parallel(X.double()), loss.detach())
        parallel.get_parameter("blocks.0.bias")[0] = 1000.0
    told = rf"failed at 1F0 on rank 0\n  reason  InputError: .*{line} is assumed to be True in every call"
    with pytest.raises(RankError, match=told):
        parallel.step(X.double())


def test_micro_batches_refuse_a_condition_on_all_samples() -> None:
    class Loss(Does):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean()

    with pytest.raises(ConstraintError, match="mixes the samples of the batch"):
        autopar.plan(Loss(large), X, (2,), microbatches=2, assume=assumed(large).assume)

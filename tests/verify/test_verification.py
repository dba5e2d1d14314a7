"""Verification notices what capture would lose, and leaves the model as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture import Captured
from autopar.ir.program import Parameter, Program
from autopar.planning.planner import read_program
from autopar.verify import verification
from autopar.verify.execution import error
from autopar.verify.report import Report, ReportRow


class Running(nn.Module):
    """A layer, and the mean of what it has seen in a buffer that every call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.last(torch.tanh(self.first(x - self.mean))).sum()


def without_gradient(program: Program) -> Program:
    def changed(parameter: Parameter) -> Parameter:
        lost = parameter.names[0] == "first.weight"
        return replace(parameter, value=replace(parameter.value, requires_grad=False)) if lost else parameter

    return replace(program, parameters=tuple(map(changed, program.parameters)))


def another_operator(program: Program) -> Program:
    return replace(program, ops=tuple(replace(op, target=op.target.replace("aten.tanh.", "aten.sin.")) for op in program.ops))


def unwritten(program: Program) -> Program:
    return replace(program, ops=tuple(op for op in program.ops if not op.target.startswith("aten.copy_")))


@pytest.mark.parametrize(
    "wrong, name",
    [(another_operator, "0"), (without_gradient, "gradients, the worst first.weight"), (unwritten, "buffer mean")],
)
def test_what_capture_loses_is_seen_beside_the_module(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Program], Program], name: str
) -> None:
    def read(*asked: Any, **options: Any) -> Captured:
        captured = read_program(*asked, **options)
        return replace(captured, program=wrong(captured.program))

    monkeypatch.setattr(verification, "read_program", read)
    report = autopar.verify(Running(), torch.randn(4, 8), (1,))
    assert not report.ok
    assert name in [row.name for row in report.rows if not row.ok]
    assert {row.what for row in report.rows if not row.ok} == {"capture"}


def test_the_model_stays_as_it_was() -> None:
    model, x = Running(), torch.randn(4, 8)
    buffer, before = model.mean, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = autopar.verify(model, x, (1,))
    assert report.ok, report
    assert [row.name for row in report.rows if row.what == "capture"][1:2] == ["buffer mean"]
    assert model.mean is buffer
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Cached(nn.Module):
    """A layer that returns what it would keep of its input, and whose result may depend on whether it does."""

    def __init__(self, apart: float) -> None:
        super().__init__()
        self.layer, self.apart = nn.Linear(8, 4), apart

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> dict[str, torch.Tensor]:
        loss = self.layer(x).sum()
        return {"past": x, "loss": loss + self.apart} if use_cache else {"loss": loss}


def differing(report: Report) -> list[str]:
    return [row.name for row in report.rows if not row.ok]


def test_the_module_runs_as_the_sample_calls_it_with_its_cache() -> None:
    x = torch.randn(4, 8)
    same, other = autopar.verify(Cached(0.0), x, (1,)), autopar.verify(Cached(0.1), x, (1,))
    said = autopar.verify(Cached(0.1), {"x": x, "use_cache": False}, (1,))
    assert (differing(same), differing(other), differing(said)) == ([], ["loss"], [])
    assert "use_cache=False" in other.notes[0]
    assert not said.notes


@pytest.mark.filterwarnings("ignore")
class CastOnCpu(nn.Module):
    """On a CPU torch leaves the norm in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.norm(x @ x.t())


def test_an_output_of_another_dtype_than_the_modules_is_not_equal() -> None:
    report = autopar.verify(CastOnCpu(), torch.randn(8, 8), (1,))
    assert [(row.what, row.name) for row in report.rows if not row.ok] == [("capture", "0")]
    assert autopar.verify(CastOnCpu(), torch.randn(8, 8), (1,), precision="bf16-mixed").ok


def test_compiled_functions_of_the_module_run_eagerly() -> None:
    kept = torch.compile(lambda x: x * (torch.rand_like(x) > 0.3), backend="aot_eager")

    class Thinned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kept(self.layer(x)).sum()  # type: ignore[no-any-return]

    report = autopar.verify(Thinned(), torch.randn(4, 8), (1,))
    assert report.ok, report


class Checkpointed(nn.Module):
    """Two layers, each under a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.last):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().sum()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_with_checkpoints_is_verified_and_gradients_stay_as_they_were(reentrant: bool) -> None:
    model, x = Checkpointed(reentrant=reentrant), torch.randn(16, 8, requires_grad=True)
    model.last.weight.grad = torch.ones(4, 8)
    report = autopar.verify(model, x, (1,), device="h100")
    assert report.ok, str(report)
    assert (model.first.weight.grad, x.grad) == (None, None)
    assert torch.equal(model.last.weight.grad, torch.ones(4, 8))


@pytest.mark.parametrize(
    "found, expected, right", [([1.0, -math.inf], [1.0, -math.inf], True), ([1.0, math.inf], [1.0, 2.0], False)]
)
def test_equal_infinities_are_no_error(found: list[float], expected: list[float], right: bool) -> None:
    assert (error(torch.tensor(found), torch.tensor(expected)) == 0) is right


class Remembers(nn.Module):
    """Registers in its first call what the others use, in the place of None or anew."""

    def __init__(self, *, place: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        if place:
            self.register_buffer("line", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "line", None) is None:
            self.register_buffer("line", torch.arange(8.0, device=x.device), persistent=False)
        return self.lin(x) * self.line


def test_the_last_line_of_a_report_says_nan_where_a_row_does() -> None:
    rows = [ReportRow(what="gradient", name="w", error=error, tolerance=1e-9) for error in (1e-12, math.nan, 1e-3)]
    plan = autopar.plan(nn.Linear(4, 4), torch.ones(2, 4), (1,), device="h100")
    report = Report(plan=plan, rows=tuple(rows))
    assert math.isnan(report.max_error)
    assert str(report).endswith("NOT equal: max error nan over 3 tensors")


@pytest.mark.parametrize("place", [True, False])
def test_a_buffer_that_forward_registers_is_no_error(place: bool) -> None:
    assert autopar.verify(Remembers(place=place), torch.randn(4, 8), mesh=2).ok

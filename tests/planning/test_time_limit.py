"""`time_limit`: the plan when its search is cut short; and Ctrl-C during planning."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import autopar
from autopar.errors import AutoparError, BudgetError, ConstraintError
from autopar.explain.command import main
from autopar.ir.training_step import TrainingStep
from autopar.plan.options import Options
from autopar.planning.optimize import NAMED, Optimized, analysed, solution_time, solved
from autopar.planning.planner import connected_mesh
from autopar.solver.deadline import Deadline
from autopar.solver.highs import TimeLimitError
from autopar.solver.settings import DEFAULTS
from tests.solver.test_deadline import AfterLooks
from tests.support.planning import Layers, layers

WIDTHS = (64, 256, 128, 512, 64)


def found(deadline: Deadline, **options: str) -> Optimized:
    """Layers of four widths on (2, 4) by this deadline."""
    asked = Options(device="h100", **options)  # type: ignore[arg-type]
    mesh = connected_mesh((2, 4), asked)
    analysis = analysed(TrainingStep(program=layers(32, *WIDTHS).program), mesh, asked)
    return solved(analysis, mesh, asked, settings=replace(DEFAULTS, deadline=deadline))


@dataclass(frozen=True)
class NamedOnly(Deadline):
    """A deadline that has come for the search of all layouts, and not for the named strategies."""

    def earlier(self, share: float) -> Deadline:
        return AfterLooks() if share else self


def test_where_the_search_of_all_layouts_does_not_end_the_plan_is_the_best_named_strategy() -> None:
    strategies = {name: found(Deadline(), strategy=name) for name in NAMED}
    seconds = {name: solution_time(one.memory_model, one.solution) for name, one in strategies.items()}
    cut, whole = found(NamedOnly()), found(Deadline())
    assert cut.strategy in NAMED
    assert cut.stopped
    assert not whole.stopped
    assert solution_time(cut.memory_model, cut.solution) == pytest.approx(min(seconds.values()), rel=1e-9)
    assert cut.solution.bound <= solution_time(whole.memory_model, whole.solution) * (1 + 1e-9)
    assert cut.solution.status == "feasible"


def test_a_search_that_ends_sooner_is_between_the_best_named_strategy_and_the_best_with_a_bound_that_holds() -> None:
    whole, strategies = found(Deadline()), [found(Deadline(), strategy=name) for name in NAMED]
    best, named = (
        solution_time(whole.memory_model, whole.solution),
        [solution_time(s.memory_model, s.solution) for s in strategies],
    )
    for looks in (0, 1, 2, 3, 5, 8, 1000):
        one = found(AfterLooks(looks=looks))
        assert best * (1 - 1e-9) <= solution_time(one.memory_model, one.solution) <= min(named) * (1 + 1e-9)
        assert one.solution.bound <= best * (1 + 1e-9)


def test_a_limit_that_is_long_enough_changes_nothing_and_one_that_is_too_short_says_what_to_do(tmp_path: Path) -> None:
    model, sample = Layers(WIDTHS), torch.zeros(32, 64)
    free, limited = (autopar.plan(model, sample, (2, 4), device="h100", time_limit=limit) for limit in (None, 600))
    assert limited.options["time_limit"] == "600"
    assert "time_limit" not in free.options
    assert replace(limited, options=free.options) == free
    assert str(limited) == str(free)
    limited.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == limited
    with pytest.raises(TimeLimitError, match=r"no plan was found in the time_limit of 1e-09 s\n  fix +a longer time_limit="):
        autopar.plan(model, sample, (2, 4), device="h100", time_limit=1e-9, strategy="fsdp")


@functools.cache
def best_named(budget: str | None) -> float:
    """The step time of the fastest named strategy that fits."""
    fits = []
    for name in NAMED:
        with suppress(BudgetError):
            named = autopar.plan(Layers(WIDTHS), torch.zeros(32, 64), (2, 4), device="h100", strategy=name, budget=budget)
            fits.append(named.step_time)
    return min(fits)


@pytest.mark.parametrize("options", [{}, {"microbatches": "auto"}, {"pipeline": "auto"}, {"budget": "1MB"}], ids=str)
def test_where_nothing_is_known_at_the_limit_the_plan_is_the_best_named_strategy_that_fits(options: dict[str, str]) -> None:
    plan = autopar.plan(Layers(WIDTHS), torch.zeros(32, 64), (2, 4), device="h100", time_limit=1e-9, **options)  # type: ignore[arg-type]
    assert plan.step_time == pytest.approx(best_named(options.get("budget")), rel=1e-9)
    assert 0 < plan.gap <= 1
    assert "until the time_limit of 1e-09 s" in plan.searched


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "60"], ids=str)
def test_a_time_limit_is_a_number_of_seconds(wrong: float) -> None:
    with pytest.raises(ConstraintError, match=r"time_limit=.* is not a number of seconds"):
        autopar.plan(nn.Linear(8, 8), torch.zeros(8, 8), (2,), device="h100", time_limit=wrong)


def test_the_command_has_a_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "made.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(64, 64), torch.zeros(32, 64)\n")
    asked = [f"{file}:build", "--mesh", "2", "--device", "h100", "--strategy", "fsdp", "--time-limit"]
    assert main([*asked, "1e-9"]) == 1
    assert "TimeLimitError: no plan was found in the time_limit of 1e-09 s" in capsys.readouterr().err
    assert main([*asked, "600"]) == 0


def state_of_torch() -> list[object]:
    """What planning might leave otherwise than it was."""
    tensors = [hash(torch.get_rng_state().numpy().tobytes()), hash(str(np.random.get_state())), hash(random.getstate())]
    modes = [list(_get_current_function_mode_stack()), list(_get_current_dispatch_mode_stack())]
    grad = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")]
    default = [torch.get_default_dtype(), torch.get_default_device(), signal.getsignal(signal.SIGINT)]
    return [*tensors, *modes, *grad, *default, dict(vars(torch.Tensor))]


class Interrupted(nn.Module):
    """Layers in whose forward someone presses Ctrl-C."""

    def __init__(self, press: Callable[[], None]) -> None:
        super().__init__()
        self.layers, self.dropout, self.press = Layers(WIDTHS), nn.Dropout(0.1), press

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layers(self.dropout(x))
        self.press()
        result: torch.Tensor = loss
        return result


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("place", ["capture", "analyse", "formulate", "solve"])
def test_ctrl_c_ends_planning_and_torch_is_as_it_was(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    model, sample = Interrupted(press if place == "capture" else lambda: None), torch.zeros(32, 64)
    if place == "analyse":
        monkeypatch.setattr("autopar.planning.optimize.analyse", lambda *_, **__: press())
    elif place == "formulate":
        monkeypatch.setattr("autopar.planning.optimize.formulate", lambda *_, **__: press())
    elif place == "solve":
        monkeypatch.setattr("highspy.Highs.run", lambda _: press())
    before, modes = state_of_torch(), [module.training for module in model.modules()]
    with pytest.raises(KeyboardInterrupt):
        autopar.plan(model, sample, (2, 4), device="h100")
    assert state_of_torch() == before
    assert [module.training for module in model.modules()] == modes
    monkeypatch.undo()
    model.press = lambda: None
    assert autopar.plan(model, sample, (2, 4), device="h100").status == "optimal"


def pressed_when_known(monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Have Ctrl-C pressed as soon as the search knows a solution."""
    note, pressed = Deadline.note_solution, list[int]()

    def noted(deadline: Deadline) -> None:
        note(deadline)
        if not pressed:
            pressed.append(1)
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Deadline, "note_solution", noted)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "options", [{}, {"microbatches": "auto"}, {"pipeline": "auto"}], ids=["plain", "microbatches", "stages"]
)
def test_ctrl_c_gives_the_best_plan_that_is_known_and_pressed_twice_none(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample, handler = Layers(WIDTHS), torch.zeros(32, 64), signal.getsignal(signal.SIGINT)
    whole = autopar.plan(model, sample, (2, 4), device="h100", **options)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        pressed_when_known(patched)
        cut = autopar.plan(model, sample, (2, 4), device="h100", **options)  # type: ignore[arg-type]
    assert cut.step_time >= whole.step_time * (1 - 1e-9)
    assert (1 - cut.gap) * cut.step_time <= whole.step_time * (1 + 1e-9)
    assert "Ctrl-C" not in whole.searched
    assert ("until Ctrl-C" in cut.searched) == bool(options), "what is known first of the plain one is its optimum"
    pressed_when_known(monkeypatch, times=2)
    with pytest.raises(KeyboardInterrupt):
        autopar.plan(model, sample, (2, 4), device="h100", **options)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_one_where_what_was_known_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    pressed_when_known(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        autopar.plan(Layers(WIDTHS), torch.zeros(32, 64), (2, 4), device="h100", budget=1000)


def test_the_error_is_one_of_autopars() -> None:
    assert issubclass(TimeLimitError, AutoparError)

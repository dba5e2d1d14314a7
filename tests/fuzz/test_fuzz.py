"""A fixed sample of fuzzing, and proof that it detects faults; `make fuzz` draws more."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from autopar.runtime.threaded_ranks import ThreadedRanks
from tests.fuzz import rounds
from tests.fuzz.graphs import Graph
from tests.fuzz.rounds import Round, script
from tests.fuzz.sabotage import found
from tests.fuzz.trial import Outcome, Setting, WrongNumber, check

pytestmark = pytest.mark.filterwarnings("ignore")  # of what is drawn: axes of no use, operators without a rule


@pytest.mark.parametrize("seed", [3, 1001])
def test_random_graphs_under_random_plans_compute_what_their_modules_do(seed: int) -> None:
    one = Round(seed=seed, graphs=3)
    one.run()
    assert not one.failure, f"{one.failure}\n{one.script}"
    assert one.pairs > 3


@pytest.mark.parametrize("name", ["a log-softmax may be split along its dim", "an all-reduce that sends nothing"])
def test_what_is_made_wrong_is_found(name: str) -> None:
    assert found(name)


class Forgetful(nn.Module):
    """Captured in one way, run in another."""

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        return x0 * 2 if x0.is_meta else x0 * 3


def test_a_captured_program_that_is_not_the_module_is_a_wrong_number() -> None:
    with ThreadedRanks() as world, pytest.raises(WrongNumber, match="the captured program is wrong by"):
        check(Forgetful, lambda batch: {"x0": torch.ones(batch, 4)}, Setting(), world)


def test_a_failure_is_a_script_that_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    graph = Graph(members=(), inputs=(("x0", "torch.randn(batch, 4)"),), lines=("v1 = x0.tanh()",), returned="v1.mean()")
    exec(compile(script(graph, Setting(plans=(0, 1))), "<script>", "exec"), {})
    assert "Outcome(equal=2, refused=[])" in capsys.readouterr().out


def test_what_fails_once_only_is_said_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def once(*_: object) -> Outcome:
        if not next(calls):
            raise TimeoutError("no end within 300 s")
        return Outcome(1, [])

    monkeypatch.setattr(rounds, "check", once)
    one = Round(seed=0, graphs=2)
    one.run()
    assert one.failure.endswith("TimeoutError: no end within 300 s (not when it was repeated)")

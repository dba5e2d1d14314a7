"""Differences between training and evaluation follow the module's mode, for every operator that has them.

If the modes differ only in flags that the emitted code switches, one graph serves both; otherwise evaluation has its own plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.errors import InputError
from autopar.plan.options import Options
from autopar.planning.planner import connected_mesh


class Flagged(nn.Module):
    """Recurrent dropout, alpha dropout, and norms with and without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.5)
        self.kept = nn.InstanceNorm1d(8, track_running_stats=True)
        self.own = nn.BatchNorm1d(8, track_running_stats=False)
        self.drop = nn.AlphaDropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.kept(self.rnn(x)[0].transpose(1, 2)).transpose(1, 2)
        return self.drop(self.own(kept.flatten(0, 1))).square().mean()  # type: ignore[no-any-return]


def test_every_flag_of_training_follows_the_module() -> None:
    torch.manual_seed(0)
    model, x = Flagged(), torch.randn(4, 6, 8)
    parallel = autopar.parallelize(copy.deepcopy(model), (x,), connected_mesh((1,), Options(device="cpu")), device="cpu")
    assert not torch.equal(parallel(x), parallel(x)), "training draws"
    parallel.eval()
    model.load_state_dict(parallel.state_dict())
    torch.testing.assert_close(parallel(x), model.eval()(x))
    torch.testing.assert_close(parallel(x), parallel(x), rtol=0, atol=0)


class Auxiliary(nn.Module):
    """Has another form in evaluation than in training, as torchvision's Inception v3 returns auxiliary logits."""

    def __init__(self, form: Callable[[bool, torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.form = nn.Linear(8, 8), form

    def forward(self, x: torch.Tensor) -> object:
        y = self.layer(x)
        return self.form(self.training, y, functional.mse_loss(y, x))


FORMS: dict[str, Callable[[bool, torch.Tensor, torch.Tensor], object]] = {
    "order": lambda training, y, loss: (loss, y) if training else (y, loss),
    "names": lambda training, y, loss: {"loss": loss, "y": y * 2} if training else {"y": y, "sum": y.sum()},
    "fewer": lambda training, y, loss: (y, loss) if training else y,
    "more": lambda training, y, loss: y if training else (y, y.argmax(-1)),
    "constants": lambda training, y, loss: {"loss": loss, "mode": 1 if training else 2},
}


@pytest.mark.parametrize("name", FORMS)
def test_the_results_of_an_evaluation_have_the_form_of_evaluation(name: str) -> None:
    torch.manual_seed(0)
    model, x = Auxiliary(FORMS[name]), torch.randn(4, 8)
    parallel = autopar.parallelize(model, x, (1,), device="cpu", outputs="whole")
    for mode in (False, True, False):
        with torch.no_grad():
            torch.testing.assert_close(parallel.train(mode)(x), model.train(mode)(x))


def test_a_step_in_evaluation_mode_differentiates_the_loss_of_evaluation() -> None:
    model, x = Auxiliary(lambda training, y, loss: (loss, y) if training else (y, 3 * loss)), torch.randn(4, 8)
    parallel = autopar.parallelize(model, x, (1,), device="cpu", outputs="whole")
    expected = model.eval()(x)[1]
    torch.testing.assert_close(parallel.eval().step(x), expected.detach())
    expected.backward()
    torch.testing.assert_close(parallel.get_parameter("layer.weight").grad, model.layer.weight.grad)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


def test_buffers_that_are_replaced_count_in_both_modes() -> None:
    model, x = normed(), torch.randn(4, 8)
    parallel = autopar.parallelize(copy.deepcopy(model), x, (1,), device="cpu")
    torch.testing.assert_close(parallel.eval()(x), model.eval()(x))
    for module in (model, parallel):
        module.get_submodule("1").running_mean = torch.ones(8)
    torch.testing.assert_close(parallel(x), model(x))
    parallel.load_state_dict({"1.running_var": torch.full((8,), 4.0)}, strict=False, assign=True)
    model.load_state_dict({"1.running_var": torch.full((8,), 4.0)}, strict=False)
    torch.testing.assert_close(parallel(x), model(x))
    torch.testing.assert_close(parallel.train()(x), model.train()(x))
    torch.testing.assert_close(parallel.get_buffer("1.running_mean"), model.get_buffer("1.running_mean"))


def test_the_mode_of_a_submodule_alone_is_refused() -> None:
    model, x = normed(), torch.randn(4, 8)
    parallel = autopar.parallelize(copy.deepcopy(model), x, (1,), device="cpu")
    parallel.get_submodule("1").eval()
    with pytest.raises(InputError, match="1 alone was put into evaluation mode"):
        parallel(x)
    parallel.eval().get_submodule("1").train()
    with pytest.raises(InputError, match="1 alone was put into training mode"):
        parallel(x)
    model[1].eval()
    frozen = autopar.parallelize(copy.deepcopy(model), x, (1,), device="cpu")
    torch.testing.assert_close(frozen(x), model(x))
    frozen.get_submodule("1").eval()
    torch.testing.assert_close(frozen(x), model(x))


class Counted(nn.Module):
    """Returns how many samples there were."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"loss": self.layer(x).square().mean(), "samples": x.shape[0]}


def test_numbers_that_forward_returns_are_those_of_the_call() -> None:
    model = Counted()
    parallel = autopar.parallelize(model, torch.randn(8, 8), (1,), device="cpu", dynamic={"batch": 0})
    for samples in (8, 4, 16, 8):
        x = torch.randn(samples, 8)
        torch.testing.assert_close(parallel(x), model(x))

"""State that Python code keeps between calls is not silently frozen into a program."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, InputError

X = torch.ones(4, 6)


class Does(nn.Module):
    def __init__(self, body: Callable[[Does, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.inner, self.body = nn.Linear(6, 6), nn.Identity(), body
        self.calls, self.longest, self.table = 0, 0, [1.0]
        self.masks: dict[str, torch.Tensor] = {}
        self.state, self.own = SimpleNamespace(step=0, before=None), random.Random(0)
        self.mean, self.before, self.slots = torch.zeros(6), None, [None]
        self.register_buffer("empty", None, persistent=False)
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.body(self, x))


def drawn(self: Does, x: torch.Tensor) -> torch.Tensor:
    number = random.random()
    return x * number


def drawn_by_numpy(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.rand(4, 6))


def seeded(self: Does, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return x + torch.rand_like(x)


def drawn_of_its_own(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * self.own.random()


def counted(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x


def counted_in_an_object(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.state.step += 1
    return x


def grown(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.table.append(2.0)
    return x


def first_call(self: Does, x: torch.Tensor) -> torch.Tensor:
    x = x if self.inner.training else 2 * x
    self.longest, scale = 1, 1 - self.longest
    return x * scale


def caching(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.longest = max(self.longest, x.shape[0])
    return x


def keeping_tensors(self: Does, x: torch.Tensor) -> torch.Tensor:
    if "mask" not in self.masks:
        self.masks["mask"] = torch.ones(6, device=x.device)
    return x * self.masks["mask"]


def averaging(self: Does, x: torch.Tensor) -> torch.Tensor:
    found = x - self.mean
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return found


def averaging_in_a_copy(self: Does, x: torch.Tensor) -> torch.Tensor:
    mean = self.mean.clone()
    mean[:] = 0.9 * mean + 0.1 * x.detach().mean(0)
    found, self.mean = x - self.mean, mean
    return found


def before(self: Does, x: torch.Tensor) -> torch.Tensor:
    found = x if self.before is None else x + self.before
    self.before = x.detach()
    return found


def before_in_a_list(self: Does, x: torch.Tensor) -> torch.Tensor:
    found = x if self.slots[0] is None else x + self.slots[0]
    self.slots[0] = x.detach()
    return found


def before_in_an_object(self: Does, x: torch.Tensor) -> torch.Tensor:
    found = x if self.state.before is None else x + self.state.before
    self.state.before = x.detach()
    return found


def before_in_a_dict(self: Does, x: torch.Tensor) -> torch.Tensor:
    found = x + self.masks.get("before", 0.0)
    self.masks["before"] = x.detach()
    return found


def moved(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.mean = self.mean.to(x.device)
    return x - self.mean


def cast(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.mean = self.mean.to(torch.bfloat16).contiguous()
    return x - self.mean


def noted(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.before = x.mean(0)
    self.mean, self.state.before = self.before, x
    return x - self.mean


def kept_in_an_attribute(self: Does, x: torch.Tensor) -> torch.Tensor:
    if self.before is None or len(self.before) < x.shape[1]:
        self.before = torch.arange(6, device=x.device)
    return x * self.before


def of_the_first_batch(self: Does, x: torch.Tensor) -> torch.Tensor:
    if self.before is None:
        self.before = x.detach().mean(0)
    return x - self.before


def of_the_first_weight(self: Does, x: torch.Tensor) -> torch.Tensor:
    if "scale" not in self.masks:
        self.masks["scale"] = self.lin.weight.detach().norm()
    return x / self.masks["scale"]


def drawn_once(self: Does, x: torch.Tensor) -> torch.Tensor:
    if self.slots[0] is None:
        self.slots[0] = torch.rand(6, device=x.device)
    return x * self.slots[0]


def registered_of_the_first_batch(self: Does, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "late"):
        self.register_buffer("late", x.detach().mean(0))
    return x - self.late


def set_of_the_first_batch(self: Does, x: torch.Tensor) -> torch.Tensor:
    if self.empty is None:
        self.empty = x.detach().mean(0)
    return x - self.empty


def cached_of_a_buffer(self: Does, x: torch.Tensor) -> torch.Tensor:
    if self.before is None:
        angles = torch.outer(torch.arange(x.shape[0], device=x.device).type_as(x), self.frequencies)
        self.before = angles.cos().to(x.dtype).expand_as(x)
    return x * self.before


def registered_once(self: Does, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "late"):
        self.register_buffer("late", torch.arange(6.0, device=x.device))
    self.empty = x.new_ones(6) if self.empty is None else self.empty
    return x * self.late + self.empty


@pytest.mark.parametrize(
    "body, what",
    [(drawn, "draws from random"), (drawn_by_numpy, "draws from numpy.random"), (seeded, "calls torch.manual_seed")],
)
def test_generators_that_a_graph_does_not_have_are_refused(
    body: Callable[[Does, torch.Tensor], torch.Tensor], what: str
) -> None:
    torch.manual_seed(0)
    model, before = Does(body), torch.get_rng_state()
    with pytest.raises(CaptureError, match=f"forward {what}") as refusal:
        capture(model, X)
    line = body.__code__.co_firstlineno
    at = str(refusal.value.details["at"]).removesuffix(", or before")
    assert at in {f"{__file__}:{line + n} in {body.__name__}" for n in (1, 2)}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "body, name",
    [
        (drawn_of_its_own, "own"),
        (counted, "calls"),
        (counted_in_an_object, "state"),
        (grown, "table"),
        (first_call, "longest"),
    ],
)
def test_attributes_that_forward_changes_are_refused(body: Callable[[Does, torch.Tensor], torch.Tensor], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"forward changes 0\.{name}, "):
        capture(nn.Sequential(Does(body)), X)


@pytest.mark.parametrize(
    "body, name",
    [
        (averaging, "mean"),
        (averaging_in_a_copy, "mean"),
        (before, "before"),
        (before_in_a_list, "slots[0]"),
        (before_in_a_dict, "masks['before']"),
        (before_in_an_object, "state.before"),
    ],
)
def test_a_tensor_of_the_call_before_is_refused(body: Callable[[Does, torch.Tensor], torch.Tensor], name: str) -> None:
    """Every call would have that of the first one."""
    with pytest.raises(CaptureError, match=rf"forward reads 0\.{re.escape(name)} and sets it"):
        capture(nn.Sequential(Does(body)), X)


DRAWS: dict[str, Callable[[], object]] = {
    "random.random": lambda: random.random(),
    "random.uniform": lambda: random.uniform(0, 1),
    "random.uniform elsewhere": lambda: random.uniform(0.25, 0.75),
    "numpy.random.rand": lambda: np.random.rand(),
    "numpy.random.uniform": lambda: np.random.uniform(0, 1),
    "numpy.random.random": lambda: np.random.random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_rate_of_which_no_draw_decides_is_captured(draw: Callable[[], Any]) -> None:
    """Dropping layers at rates of 0 and 1, as libraries write it; the generators of a user go on as they would."""

    def body(self: Does, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if draw() < 0.0 else x * 3
        x = x if draw() < 1.0 else x * 5
        return x.sin() if draw() >= 0 and not draw() > 1.0 and draw() <= 1 else x

    states = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    program = capture(Does(body), X).program
    assert [op.target for op in program.ops] == ["aten.mul.Tensor", "aten.sin.default", "aten.linear.default"]
    assert states == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "use",
    [
        lambda number, x: x if number < 0.5 else x * 2,
        lambda number, x: x if number > 0.25 else x * 2,
        lambda number, x: x * number,
        lambda number, x: x * float(number),
        lambda number, x: x * (1 - number),
        lambda number, x: torch.full_like(x, number),
        lambda number, x: x[: int(4 * number)],
        lambda number, x: x if number else x * 2,
        lambda number, x: x if number == 0 else x * 2,
    ],
)
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_number_that_is_used_is_refused(draw: Callable[[], Any], use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"forward draws from (numpy\.)?random: .*\n  at .*test_python_state.py"):
        capture(Does(lambda self, x: use(draw(), x)), X)


@pytest.mark.parametrize(
    "body, names",
    [
        (caching, {"longest"}),
        (keeping_tensors, set()),
        (kept_in_an_attribute, set()),
        (moved, set()),
        (cast, set()),
        (noted, set()),
        (cached_of_a_buffer, set()),
        (registered_once, set()),
    ],
)
def test_an_attribute_that_is_computed_once_is_no_harm(
    body: Callable[[Does, torch.Tensor], torch.Tensor], names: set[str]
) -> None:
    assert capture(Does(body), X).kept == names


@pytest.mark.parametrize(
    "body, name",
    [
        (of_the_first_batch, "before"),
        (of_the_first_weight, "masks['scale']"),
        (drawn_once, "slots[0]"),
        (registered_of_the_first_batch, "late"),
        (set_of_the_first_batch, "empty"),
    ],
)
def test_what_the_first_call_computes_for_all_others_is_refused(
    body: Callable[[Does, torch.Tensor], torch.Tensor], name: str
) -> None:
    """A graph would compute it in every step: data-dependent initialisation, as that of activation normalisation."""
    with pytest.raises(CaptureError, match=f"forward keeps {re.escape(name)} as its first call computed it"):
        capture(Does(body), X)


def asking(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.is_grad_enabled() else x


def test_a_forward_that_asks_whether_gradients_are_computed_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"also under no_grad, at .*test_python_state\.py:\d+ in asking"):
        capture(Does(asking), X)
    capture(nn.MultiheadAttention(6, 2), (X, X, X))


class Activated(nn.Module):
    """A layer without parameters behind one with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(6, 6), nn.GELU()
        self.prefix = nn.Parameter(torch.ones(6))
        self.layer.prefix = "a setting of the user"  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.act(self.layer(x)) + self.prefix).sum()  # type: ignore[no-any-return]


class Warm(nn.Module):
    """A layer whose result depends on an attribute, and that remembers the longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.0)
        self.temperature, self.longest = 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, x.shape[0])
        return self.drop(self.layer(x)).sum() / self.temperature


class Annealed(nn.Module):
    """With a factor behind a property, and a function as attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self._beta = nn.Linear(6, 6), torch.relu, 1.0

    @property
    def beta(self) -> float:
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x)) * self.beta


@pytest.mark.parametrize("name, value, said", [("beta", 0.5, "_beta"), ("act", torch.tanh, "act")])
def test_what_is_behind_a_property_and_functions_are_settings_too(name: str, value: object, said: str) -> None:
    model = Annealed()
    parallel = autopar.parallelize(model, X, mesh=1)
    parallel(X)
    setattr(model, name, value)
    with pytest.raises(InputError, match=f"{said} was set after the model was captured"):
        parallel(X)


class Weighted(nn.Module):
    """With the weights of several losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.weights, self.named, self.pair = [1.0, 0.5], {"mean": 1.0, "power": 0.5}, (1, 2)
        self.seen: list[float] = []
        self.logged = [2.5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        mean, power = y.mean(), y.square().mean()
        return self.weights[0] * mean + self.named["power"] * power * self.pair[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.weights.__setitem__(0, 0.1),
        lambda model: model.named.update(power=0.1),
        lambda model: setattr(model, "pair", (1, 3)),
        lambda model: setattr(model, "weights", [0.1]),
    ],
)
def test_numbers_in_lists_and_dicts_that_are_set_after_capture_are_refused(change: Callable[[Any], None]) -> None:
    model = Weighted()
    parallel = autopar.parallelize(model, X, mesh=1)
    model.seen.append(parallel(X).item())
    model.named["others"] = 1.0
    model.logged.clear()
    parallel(X)
    change(model)
    with pytest.raises(InputError, match=r"(weights|named|pair) was set after the model was captured"):
        parallel(X)


def test_an_attribute_that_is_set_after_capture_is_refused_at_the_next_call() -> None:
    model = Warm()
    parallel = autopar.parallelize(model, X, mesh=1)
    model(X)
    assert torch.equal(parallel(X), model(X))
    for owner, name in ((model, "temperature"), (model.drop, "p"), (parallel, "temperature")):
        before = getattr(owner, name, 1.0)
        setattr(owner, name, 0.5)
        with pytest.raises(InputError, match=f"{name} was set after the model was captured"):
            parallel(X)
        setattr(owner, name, before)
    parallel(X)
    layer, model.layer = model.layer, nn.Sequential(model.layer)
    with pytest.raises(InputError, match="layer was replaced after the model was captured"):
        parallel(X)
    model.layer = layer
    parallel(X)
    del model, layer
    parallel(X)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda parallel: setattr(parallel, "act", nn.ReLU()), "act was replaced after the model was captured"),
        (lambda parallel: parallel.add_module("act", nn.ReLU()), "act was replaced after the model was captured"),
        (lambda parallel: setattr(parallel, "layer", nn.Identity()), "layer was replaced after the model was captured"),
        (lambda parallel: setattr(parallel.layer, "bias", None), "bias cannot be removed"),
        (lambda parallel: setattr(parallel, "layer", None), "layer cannot be removed"),
        (lambda parallel: setattr(parallel.layer, "forward", torch.relu), "forward of a submodule was set"),
    ],
)
def test_layers_of_the_parallel_module_that_are_replaced_or_removed_are_refused(
    change: Callable[[Any], None], said: str
) -> None:
    parallel = autopar.parallelize(Activated(), X, mesh=1)
    parallel.mine, parallel.act = nn.Identity(), nn.GELU()
    parallel(X)

    def changed() -> None:
        change(parallel)
        parallel(X)

    with pytest.raises(InputError, match=said):
        changed()

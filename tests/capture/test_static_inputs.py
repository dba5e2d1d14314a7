"""Inputs that are sizes: their values are constants of the graph, and a call with other values is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.capture import Assumptions, capture
from autopar.errors import CaptureError, InputError
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
STATIC = Assumptions(static=["n"])


class Sized(nn.Module):
    """A linear layer, and then what a test does with an integer."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x), n)


BODIES: dict[str, Body] = {
    "item": lambda y, n: y[:, : n.item()],
    "a slice": lambda y, n: y[:, :n],
    "an index": lambda y, n: y[:, n],
    "int": lambda y, n: y[:, : int(n)],
    "range": lambda y, n: torch.stack([y[:, i] for i in range(n)]),
    "tolist": lambda y, n: y[:, : n.tolist()],
    "a branch": lambda y, n: y.sin() if n > 2 else y,
    "a formula": lambda y, n: y[:, : max(n, 2) // 2 + 1],
    "a factory": lambda y, n: torch.cat([y, torch.zeros(4, n, device=y.device)], 1) @ torch.ones(6 + n, 2, device=y.device),
    "a shape": lambda y, n: y.reshape(4, n, 2).repeat(n, 1, 1),
    "an argument of an operator": lambda y, n: y.topk(n, 1)[0].roll(n, 0),
    "padding": lambda y, n: functional.pad(y, (n, 1)),
    "interpolation": lambda y, n: functional.interpolate(y[None], size=n + 2),
    "a tensor": lambda y, n: y * n,
    "lengths": lambda y, n: torch.cat([part.sum(1) for part in y.split(torch.stack([n, 6 - n]).tolist(), 1)]),
    "repeats": lambda y, n: torch.repeat_interleave(y, torch.stack([n, n, n * 2, n - 3]), dim=0),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_a_static_input_decides_is_known(body: Body) -> None:
    captured = interpreter.check(Sized(body), X, torch.tensor(3), assumptions=STATIC)
    assert [value.name for value in captured.program.inputs] == ["x"]


@pytest.mark.parametrize("n", [torch.tensor([3]), torch.tensor([[3]], dtype=torch.int16)])
def test_one_element_is_a_number(n: torch.Tensor) -> None:
    interpreter.check(Sized(BODIES["item"]), X, n, assumptions=STATIC)
    interpreter.check(Sized(BODIES["a branch"]), X, n, assumptions=STATIC)


class Lengths(nn.Module):
    """Packed texts: their lengths are a list in a container beside the batch, which comes by name."""

    def forward(self, x: torch.Tensor, *, of: dict[str, torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
        parts = x.split(of["lengths"].tolist(), 1)
        return torch.stack([part.mean(1) for part in parts]) * scale


def lengths(*numbers: int) -> dict[str, object]:
    return {"scale": torch.tensor(2.0), "of": {"lengths": torch.tensor(numbers)}, "x": X}


def test_a_container_is_static_whole_and_names_come_in_any_order() -> None:
    captured = capture(Lengths(), lengths(1, 2, 3), assumptions=Assumptions(static=["of"]))
    given = captured.signature.bind((), lengths(1, 2, 3))
    (found,) = interpreter.outputs(captured.program, Lengths(), given)
    torch.testing.assert_close(found, Lengths()(**lengths(1, 2, 3)))
    with pytest.raises(InputError, match=r"argument of.lengths is static, and has another value.*\n.*2, 2, 2\n.*1, 2, 3"):
        captured.signature.bind((), lengths(2, 2, 2))


def test_a_call_with_another_value_is_refused() -> None:
    parallel = autopar.parallelize(Sized(BODIES["item"]), (X, torch.tensor(3)), (1,), static=["n"])
    assert parallel(X, torch.tensor(3)).shape == (4, 3)
    for wrong, said in ((torch.tensor(4), "another value"), (torch.tensor([3]), "another shape"), (3, "not a tensor")):
        with pytest.raises(InputError, match=said):
            parallel(X, wrong)


def test_other_modes_and_sizes_are_captured_with_the_same_values() -> None:
    class Dropped(Sized):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return super().forward(functional.dropout(x, 0.5, self.training) if self.training else x.sin(), n)

    model = Dropped(BODIES["item"])
    parallel = autopar.parallelize(model, (X, torch.tensor(3)), (1,), static=["n"], dynamic={"batch": 0})
    x = X.repeat(2, 1)
    torch.testing.assert_close(parallel.eval()(x, torch.tensor(3)), model.eval()(x, torch.tensor(3)))


def test_a_plan_keeps_what_is_static(pool: WorkerPool) -> None:
    model, sample = Sized(BODIES["item"]), (X, torch.tensor(3))
    plan = autopar.plan(model, sample, (2,), static=["n"])
    kept = autopar.Plan.from_json(plan.to_json())
    assert kept.options["static"] == "n"
    assert verify(model, sample, (2,), kept, Options(), pool).ok


@pytest.mark.parametrize(
    "static, sample, what",
    [
        (["m"], (X, torch.tensor(3)), r"static names 'm', which is no argument of the sample\n  takes  x, n"),
        (["x"], (X, torch.tensor(3)), "argument x cannot be static: it is not made of 1024 integers"),
        (["n"], (X, torch.zeros(1025, dtype=torch.int)), "argument n cannot be static"),
        (["n"], (X, torch.tensor(3, device="meta")), "argument n is static, but on the meta device"),
        ("n", (X, torch.tensor(3)), r"static='n' is a text\n  fix  static=\['n'\]"),
    ],
)
def test_what_cannot_be_static_is_refused(static: list[str], sample: tuple[object, ...], what: str) -> None:
    with pytest.raises(InputError, match=what):
        capture(Sized(BODIES["item"]), sample, assumptions=Assumptions(static=static))


def test_a_python_number_is_static_as_it_is() -> None:
    captured = capture(Sized(lambda y, n: y[:, :n]), (X, 3), assumptions=STATIC)
    with pytest.raises(InputError, match="argument n is not the planned one"):
        captured.signature.bind((X, 4), {})


def test_without_it_the_refusal_says_so() -> None:
    with pytest.raises(CaptureError, match="static="):
        capture(Sized(BODIES["a branch"]), (X, torch.tensor(3)))

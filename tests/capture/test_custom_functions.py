"""An `autograd.Function` is traced if autograd would derive the same gradient from its forward; otherwise it is an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Function

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from tests.capture import interpreter
from tests.support.functions import Rounded, rounded

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Does(nn.Module):
    """A linear layer whose result and weight a function takes."""

    def __init__(self, function: Callable[..., torch.Tensor], width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), self.layer.weight).square().sum()


class Product(Function):
    """Keeps its operands only, and multiplies again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).relu()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        passed = gradient * (x @ weight > 0)
        return passed @ weight.t(), x.t() @ passed


class Swish(Function):
    """With a context of its own step."""

    @staticmethod
    def forward(x: torch.Tensor, slope: float) -> torch.Tensor:
        return x * torch.sigmoid(slope * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, ctx.slope = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        part = torch.sigmoid(ctx.slope * x)
        return gradient * part * (1 + ctx.slope * x * (1 - part)), None


class Gelu(Function):
    """Its derivative is written with constants of ten digits, and has terms that cancel (BLOOM's)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        bent = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - bent * bent) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + bent)
        return slope * gradient


class Clamped(Function):
    """Whose gradient is autograd's where it is small."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-10, 10)


class Observed(Function):
    """Whose gradient is autograd's, and whose backward keeps statistics of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.seen = seen
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.add_(gradient.abs().sum(0))
        return gradient, None


class Chosen(Function):
    """Whose gradient is autograd's where a mask of integers is zero (YOSO's attention)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return x.sin() * mask

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class Detached(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


class Pair(Function):
    """Two results, of which one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> Any:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return factor * x, signs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> Any:
        return gradient.sign(), None


class Single(Function):
    """A tuple of one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return (x.floor(),)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.rand_like(x)).round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Told(Function):
    """Returns more than tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: float) -> Any:
        return x.round(), number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        return gradient, None


class Given(Function):
    """Is given what is neither a tensor nor a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: object) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


@pytest.mark.parametrize(
    "function",
    [
        Product.apply,
        lambda x, _: Swish.apply(x, 1.5),
        lambda x, _: Swish.apply(x.relu(), 2.0),
    ],
)
def test_a_function_whose_gradient_is_autograds_is_captured(function: Callable[..., torch.Tensor]) -> None:
    interpreter.check(Does(function), X)


def test_a_gradient_with_rounded_constants_is_autograds() -> None:
    interpreter.check(Does(lambda x, _: Gelu.apply(x), 128), torch.linspace(-4, 4, 128 * 64).reshape(64, 128))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, _: Rounded.apply(x),
        lambda x, _: rounded(Clamped.apply(x)),
        lambda x, _: Chosen.apply(x, torch.ones(4, 6, dtype=torch.int64, device=x.device)),
        lambda x, _: Pair.apply(x, 2.0)[0] + Pair.apply(x, 3.0)[1],
        lambda x, _: Single.apply(x)[0],
    ],
)
def test_a_function_with_another_gradient_is_an_operator(function: Callable[..., torch.Tensor]) -> None:
    program = interpreter.check(Does(function), X).program
    assert any(op.target.startswith("autopar_function.") for op in program.ops)


def test_what_a_function_marks_has_no_gradient() -> None:
    (value,) = capture(Does(lambda x, _: Pair.apply(x, 2.0)[1]), X).program.outputs
    program = capture(Does(lambda x, _: Pair.apply(x, 2.0)[1]), X).program
    assert not program.values[value.value].requires_grad


def test_one_gradient_for_all_of_none_stays_none() -> None:
    model = Does(lambda x, weight: Detached.apply(x) @ weight)
    parallel = autopar.parallelize(model, X, (1,))
    parallel(X).backward()
    model(X).backward()
    assert parallel.layer.bias.grad is None
    assert model.layer.bias.grad is None
    assert torch.equal(parallel.layer.weight.grad, model.layer.weight.grad)


@pytest.mark.parametrize(("function", "args"), [(Noisy, ()), (InPlace, ()), (Told, (1.0,)), (Given, (object(),))])
def test_a_function_that_no_operator_can_call_is_refused(function: type[Function], args: tuple[object, ...]) -> None:
    with pytest.raises(CaptureError, match=f"the backward of {function.__name__} would be lost") as refusal:
        capture(Does(lambda x, _: function.apply(x, *args)), X)
    assert __file__ in refusal.value.details["at"]
    assert "custom_op" in refusal.value.details["fix"]


@pytest.mark.parametrize("size", [4, 2048])
def test_a_function_whose_backward_writes_a_buffer_is_refused(size: int) -> None:
    model = Does(lambda x, _: Observed.apply(x, model.seen))
    model.register_buffer("seen", torch.zeros(model.layer.out_features))
    with pytest.raises(CaptureError, match="the backward of Observed would be lost"):
        capture(model, torch.ones(size, model.layer.in_features))


def test_a_function_of_large_operands_is_compared_on_small_ones() -> None:
    captured = capture(Does(Product.apply, 2048), torch.empty(2048, 2048, device="meta"))
    assert "aten.relu.default" in [op.target for op in captured.program.ops]


def test_other_threads_and_later_calls_apply_functions_themselves() -> None:
    before = Function.__mro__[1].apply
    capture(Does(lambda x, _: Rounded.apply(x)), X)
    assert Function.__mro__[1].apply == before
    assert "apply" not in vars(Function.__mro__[1])

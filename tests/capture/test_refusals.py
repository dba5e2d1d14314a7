"""Every model that cannot be captured is refused by an error that says what, where, and how to fix it."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import flex_attention

from autopar.capture import capture, source_location
from autopar.errors import CaptureError

HERE = __file__
X = torch.ones(8, 4)


class Does(nn.Module):
    def __init__(self, body: Callable[[Does, torch.Tensor], object]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("graph", torch.eye(8).to_sparse(), persistent=False)  # most read no such thing
        self.scale = torch.tensor(0.5)
        self.body = body

    def forward(self, x: torch.Tensor) -> object:
        return self.body(self, x)


class Tripled(torch.autograd.Function):
    """Draws random numbers, so that no operator can call it."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * torch.rand_like(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def branch(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def number(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def selected(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def flexible(self: Does, x: torch.Tensor) -> torch.Tensor:
    return flex_attention(x[None, None], x[None, None], x[None, None])  # type: ignore[return-value]


OTHER = ModuleType("other")  # a file, whose globals are not looked at
OUTSIDE = torch.rand(4, 512)


def kept_elsewhere(self: Does, x: torch.Tensor) -> torch.Tensor:
    OTHER.kept.append(x)
    return OTHER.kept[0] * 2  # type: ignore[no-any-return]


def places(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


def rejoined(self: Does, x: torch.Tensor) -> torch.Tensor:
    y, mask = self.lin(x), x[:, 0] > 0
    return torch.cat([y[mask], y[~mask]]) * torch.arange(8, device=x.device)[:, None]


def rejoined_labels(self: Does, x: torch.Tensor) -> torch.Tensor:
    y, mask = self.lin(x), x[:, 0] > 0
    return nn.functional.cross_entropy(torch.cat([y[mask], y[~mask]]), x.argmax(1))


def function(self: Does, x: torch.Tensor) -> torch.Tensor:
    return Tripled.apply(self.lin(x))


def hook(self: Does, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def changed_input(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def changed_weight(self: Does, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.lin.weight.clamp_(-1, 1)
    return self.lin(x)


def differentiable_buffer(self: Does, x: torch.Tensor) -> torch.Tensor:
    self.kept = self.kept * self.lin(x).mean(0)
    return x + self.kept


def gradient(self: Does, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(self.lin(x).sum(), x, create_graph=True)[0]


def packed(self: Does, x: torch.Tensor) -> torch.Tensor:
    return nn.utils.rnn.pack_padded_sequence(x[..., None], x[:, 0].long(), batch_first=True).data


def strided(self: Does, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.as_strided((2,), (1,)).zero_()
    return y


def through_data(self: Does, x: torch.Tensor) -> torch.Tensor:
    y = self.lin(x).sigmoid()
    y.data[0].clamp_(0)
    return y


def conditional(self: Does, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))


def read_number(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * self.scale.item()


def elsewhere(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x @ OUTSIDE


def seeded(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * random.Random(x.sum()).random()


def array(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.mean(x.detach().cpu().numpy()))


def loaded(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([float(n) for n in range(1100)]).sum()


def broken(self: Does, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


def tangent(self: Does, x: torch.Tensor) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(x, torch.ones_like(x)).sin())


def turned_buffer(self: Does, x: torch.Tensor) -> torch.Tensor:
    return x + self.kept.unsqueeze_(0)


def quantized(self: Does, x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(self.lin(x), 0.1, 0, -128, 127)


def observed(self: Does, x: torch.Tensor) -> torch.Tensor:
    on, low, high, scale = (torch.ones(1) for _ in range(4))
    numbers = low, high, scale, on.int()
    return torch.fused_moving_avg_obs_fake_quant(self.lin.weight, on, on, *numbers, 0.01, -128, 127, -1) @ x.t()


def sparse(self: Does, x: torch.Tensor) -> torch.Tensor:
    return torch.mm(self.graph, self.lin(x))


def resized(self: Does, x: torch.Tensor) -> torch.Tensor:
    return self.lin(x).detach().resize_(3)


def test_a_tensor_from_nowhere_is_refused() -> None:
    OTHER.kept = []  # type: ignore[attr-defined]
    capture(Does(kept_elsewhere), X)
    with pytest.raises(CaptureError, match="a tensor that is neither an argument, nor in a module, nor made in forward"):
        capture(Does(kept_elsewhere), X)


@pytest.mark.parametrize(
    "body, said, fix",
    [
        (branch, "the control flow of Does depends on the values of a tensor", "torch.where"),
        (number, "a number depends on the values of a tensor", "torch.where"),
        (selected, "the shape of a result of forward depends on the values", "keep every size fixed"),
        (flexible, "flex_attention is not an operator", "scaled_dot_product_attention"),
        (places, "the shape of a result of forward depends on the values", "keep every size fixed"),
        (rejoined, "the shape of an operand of aten.mul.Tensor depends on the values", "keep every size fixed"),
        (rejoined_labels, "the shape of an operand of aten.cross_entropy_loss.default depends on the", "keep every size fixed"),
        (function, "the backward of Tripled would be lost: it is an autograd.Function", "torch.library.custom_op"),
        (hook, r"a hook on a tensor of shape \(8, 4\) would be lost", "torch.library.custom_op"),
        (changed_input, "aten.add_.Tensor changes the input x", "compute a new tensor"),
        (changed_weight, "aten.clamp_.default changes the parameter lin.weight", "compute a new tensor"),
        (differentiable_buffer, "forward replaces the buffer kept by what has a gradient", "torch.no_grad"),
        (gradient, "torch.autograd.grad inside of forward would be lost", "write the gradient out"),
        (packed, "pack_padded_sequence makes a shape that depends on the values", "the padded batch"),
        (strided, "aten.zero_.default writes through a view by as_strided", "torch.where, cat or stack"),
        (through_data, "aten.clamp_.default writes through .data into a tensor with a gradient", "under no_grad"),
        (conditional, "cond contains a graph of its own", "without torch.cond"),
        (elsewhere, r"a tensor that is neither an argument nor in a module: float32\[\d+", "register_buffer"),
        (seeded, "forward seeds Python's random generator with a tensor", "torch.rand"),
        (array, "forward converts a tensor to a NumPy array", "torch.library.custom_op"),
        (read_number, "forward asks a tensor for its value", "number of Python"),
        (loaded, "forward uses a tensor that the graph cannot contain", "register it as a buffer"),
        (tangent, "levels of forward-mode differentiation are no operators", "torch.func.jvp"),
        (turned_buffer, "aten.unsqueeze_.default changes the buffer kept", "the form that returns its result"),
        (quantized, "fake_quantize_per_tensor_affine_cachemask has no fake implementation", "with other operators"),
        (observed, "obs_fake_quant.default writes into running_min, running_max, scale, zero_point", "returns its result"),
        (resized, "aten.resize_.default changes the size of a tensor", "reshape"),
        (sparse, "forward computes with a sparse tensor", "to_dense"),
        (broken, "Does cannot be captured: no such thing", "without autopar"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_line(
    body: Callable[[Does, torch.Tensor], object], said: str, fix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError, match=said) as refusal:
        capture(Does(body), X)
    assert fix in refusal.value.details["fix"]
    assert HERE in refusal.value.details["at"]
    assert capfd.readouterr().err == ""


SCALAR, ROW, LAYER = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
LAYERS, TABLES, HELD = [LAYER], {"rows": nn.Embedding(8, 4)}, weakref.ref(LAYER.weight)
TRAINED: dict[str, tuple[Callable[[Does, torch.Tensor], torch.Tensor], str]] = {
    "a global number": (lambda self, x: self.lin(x) * SCALAR, r"float32\[\]"),
    "a global row": (lambda self, x: self.lin(x) + ROW, r"float32\[4\]"),
    "a list of modules": (lambda self, x: LAYERS[0](self.lin(x)), r"float32\[4, 4\]"),
    "a dict of tables": (lambda self, x: TABLES["rows"](x.argmax(1)) + self.lin(x), r"float32\[8, 4\]"),
    "a weak reference": (lambda self, x: self.lin(x) @ HELD(), r"float32\[4, 4\]"),
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_parameter_that_no_module_has_is_refused_as_what_it_is(case: str) -> None:
    """Before, as a tensor of the CPU, to be made on the device of an input, or as one that the graph cannot contain."""
    body, shape = TRAINED[case]
    with pytest.raises(CaptureError, match=f"forward uses a parameter that is not in a module: {shape}\n"):
        capture(Does(body), X)
    capture(Does(lambda self, x: self.lin(x) * LAYER.weight.shape[0] + len(LAYERS)), X)


def test_a_refusal_of_capture_names_the_line_that_did_it() -> None:
    with pytest.raises(CaptureError) as refusal:
        capture(Does(function), X)
    line = function.__code__.co_firstlineno + 1
    assert refusal.value.details["at"] == f"{HERE}:{line} in function"


def test_autograd_functions_and_hooks_work_again_after_capture() -> None:
    with pytest.raises(CaptureError):
        capture(Does(function), X)
    x = X.clone().requires_grad_()
    y = Tripled.apply(x)
    y.register_hook(lambda gradient: gradient * 2)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad[0, 0] == 6
    assert torch.equal(torch.tensor([1, 2]), torch.arange(1, 3))


def test_the_line_may_be_of_a_package_whose_name_begins_as_torchs_does() -> None:
    package = f"{Path(torch.__file__).parent}geo/layers.py"
    stack = f'File "{package}", line 3, in forward\nFile "{torch.__file__}", line 4, in linear\n'
    assert source_location.from_text(stack) == f"{package}:3 in forward"

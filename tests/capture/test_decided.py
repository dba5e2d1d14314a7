"""Integer or single-element buffers that decide a size or a branch: their values are known, and must not change later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, InputError
from autopar.plan.options import Options
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from tests.capture import interpreter

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Body = Callable[["Padded", torch.Tensor], torch.Tensor]


class Padded(nn.Module):
    """A linear layer, and what a test does with integers that the module holds as buffers, as audio codecs do."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.body = nn.Linear(6, 6), body
        self.register_buffer("kernel", torch.tensor(7), persistent=False)
        self.register_buffer("stride", torch.tensor(2))
        self.register_buffer("sizes", torch.tensor([2, 1, 3]))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("inited", torch.Tensor([True]))
        self.register_buffer("scale", torch.tensor([2.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


def branch(self: Padded, y: torch.Tensor) -> torch.Tensor:
    return y.sin() if self.kernel > 3 else y


def padding(self: Padded, y: torch.Tensor) -> torch.Tensor:
    """As EnCodec pads: from lengths and buffers, by formulas with tensors."""
    total = self.kernel - self.stride
    frames = torch.ceil((y.shape[-1] - self.kernel + total) / self.stride + 1).to(torch.int64) - 1
    extra = frames * self.stride + self.kernel - total - y.shape[-1]
    left = total // 2
    wide = functional.pad(y, (left, total - left + extra))
    return wide[..., : wide.shape[-1] - max(left, extra)]


def parts(self: Padded, y: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.mean(1) for part in y.split(self.sizes.tolist(), 1)])


def also_a_value(self: Padded, y: torch.Tensor) -> torch.Tensor:
    return y[:, : self.stride] * self.stride + self.steps


def flag(self: Padded, y: torch.Tensor) -> torch.Tensor:
    """As EnCodec asks whether its codebook is initialised: a flag among floating numbers."""
    return y.sin() * self.inited if self.inited else y


READING = [branch, padding, parts, also_a_value, flag]


@pytest.mark.parametrize("body", READING)
def test_what_a_buffer_decides_is_known(body: Body) -> None:
    interpreter.check(Padded(body), X)


def test_only_what_was_read_is_told() -> None:
    assert set(capture(Padded(also_a_value), X).decided.values) == {"stride"}
    assert set(capture(Padded(padding), X).decided.values) == {"kernel", "stride"}
    assert not capture(Padded(lambda self, y: y + self.kernel), X).decided.values


def set_in_place(parallel: nn.Module) -> None:
    parallel.get_buffer("kernel").fill_(5)


def replaced(parallel: nn.Module) -> None:
    parallel.kernel = torch.tensor(5)


@pytest.mark.parametrize("change", [set_in_place, replaced])
def test_a_call_after_it_has_changed_is_refused(change: Callable[[nn.Module], None]) -> None:
    parallel = autopar.parallelize(Padded(branch), X, (1,), dynamic={"batch": 0})
    wanted = Padded(branch).eval()(X.repeat(2, 1))
    for _ in range(2):
        torch.testing.assert_close(parallel(X.repeat(2, 1)), wanted)
    torch.testing.assert_close(parallel.eval()(X.repeat(2, 1)), wanted)
    change(parallel)
    with pytest.raises(InputError, match=r"kernel has another value .*\n  captured  7\n  now       5\n  at .*in branch"):
        parallel(X)


def test_loading_the_same_values_is_no_change() -> None:
    parallel = autopar.parallelize(Padded(parts), X, (1,))
    parallel.load_state_dict(Padded(parts).state_dict())
    torch.testing.assert_close(parallel(X), Padded(parts)(X))


@pytest.mark.parametrize("body", [padding, parts])
def test_numbers_are_the_users_on_a_mesh(body: Body, pool: WorkerPool) -> None:
    assert verify(Padded(body), X, (2,), None, Options(), pool).ok


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_flag_is_asked_in_the_dtype_of_the_model(precision: str) -> None:
    parallel = autopar.parallelize(Padded(flag), X, (1,), precision=precision)
    assert parallel(X).isfinite().all()
    with torch.no_grad():
        parallel.get_buffer("inited").zero_()
    with pytest.raises(InputError, match="inited has another value"):
        parallel(X)


def counting(self: Padded, y: torch.Tensor) -> torch.Tensor:
    y = y.sin() if self.steps < 3 else y
    self.steps += 1
    return y


def test_a_branch_on_what_forward_counts_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"forward depends on the value of steps, and writes it\n  at .*in counting"):
        capture(Padded(counting), X)


def counted(self: Padded, y: torch.Tensor) -> torch.Tensor:
    self.steps += 1
    return y.sin() if self.kernel > 3 else y


def test_what_forward_counts_beside_it_is_kept() -> None:
    assert set(capture(Padded(counted), X).decided.values) == {"kernel"}


@pytest.mark.parametrize("model", [Padded(branch).to("meta"), Padded(lambda self, y: y if self.scale.sum() > 1 else y.sin())])
def test_what_has_no_value_or_is_no_integer_is_refused(model: nn.Module) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(model, X)

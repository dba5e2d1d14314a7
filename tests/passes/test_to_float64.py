"""`promote` and `without_dropout` keep names and change only numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.passes import normalise
from autopar.passes.no_dropout import without_dropout
from autopar.passes.to_float64 import promote
from tests.capture import interpreter
from tests.capture.models import MODELS
from tests.passes.programs import program


def test_every_float_is_double_and_every_name_stays() -> None:
    for build in list(MODELS.values())[::3]:
        model, sample = build()
        single = normalise(capture(model, sample).program)
        double = promote(single)
        assert list(double.values) == list(single.values)
        assert [op.target for op in double.ops] == [op.target for op in single.ops]
        assert not [value for value in double.values.values() if value.dtype.is_floating_point and value.dtype.itemsize < 8]


def test_fills_and_casts_are_double() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().float() + torch.full((3,), -3.4e38).half().float() + torch.arange(3.0)

    double = promote(program(body, torch.ones(3)))
    (found,) = interpreter.run(double, {"tensors.0": torch.full((3,), 1 / 3, dtype=torch.double)})
    assert found.dtype is torch.double


def test_without_dropout_a_program_is_certain_and_has_the_same_ops() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(F.dropout(x, 0.5), x, x, dropout_p=0.9)

    x = torch.randn(1, 1, 4, 4)
    noisy = capture(Noisy(), x).program
    certain = without_dropout(noisy)
    assert [op.name for op in certain.ops] == [op.name for op in noisy.ops]
    (found,) = interpreter.run(certain, {"x": x})
    torch.testing.assert_close(found, F.scaled_dot_product_attention(x, x, x))

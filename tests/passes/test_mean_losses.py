"""`means` turns means into divided sums, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autopar.ir.schema import bound
from autopar.passes.dead_code_elimination import dead
from autopar.passes.mean_losses import means
from tests.capture import interpreter
from tests.passes.programs import program

torch.manual_seed(0)
SCORES, IMAGE = torch.randn(6, 5), torch.randn(2, 5, 3, 3)
TARGET = torch.tensor([0, -100, 4, 2, -100, 1])
PIXELS = torch.randint(0, 5, (2, 3, 3)).masked_fill(torch.rand(2, 3, 3) < 0.5, 3)
CHANCES = torch.softmax(torch.randn(6, 5), -1)
WEIGHT = torch.rand(5) + 0.5

LOSSES = [
    (lambda x, t: F.cross_entropy(x, t), SCORES, TARGET),
    (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), SCORES, TARGET),
    (lambda x, t: F.cross_entropy(x, t, ignore_index=3), IMAGE, PIXELS),
    (lambda x, t: F.cross_entropy(x, t), SCORES, CHANCES),
    (lambda x, t: F.cross_entropy(x, t), SCORES[0], CHANCES[0]),
    (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2), IMAGE, torch.softmax(IMAGE, 1)),
    (lambda x, t, w: F.cross_entropy(x, t, weight=w), SCORES, TARGET, WEIGHT),
    (lambda x, t, w: F.cross_entropy(x, t, weight=w, label_smoothing=0.1), SCORES, TARGET, WEIGHT),
    (lambda x, t, w: F.cross_entropy(x, t, weight=w), SCORES, CHANCES, WEIGHT),
    (lambda x, t, w: F.nll_loss(x.log_softmax(1), t, weight=w, ignore_index=3), IMAGE, PIXELS, WEIGHT),
    (lambda x, t: F.nll_loss(x.log_softmax(1), t), SCORES, TARGET),
    (lambda x, t: F.cross_entropy(x, t), SCORES, torch.full((6,), -100)),
    (lambda x, t: F.cross_entropy(x, t), SCORES.bfloat16(), TARGET),
    (lambda x, t: F.cross_entropy(x, t), SCORES.half(), TARGET),
    (lambda x, t: F.mse_loss(x, t), SCORES, CHANCES),
    (lambda x, t: F.l1_loss(x, t), SCORES, CHANCES),
    (lambda x, t: F.smooth_l1_loss(x, t, beta=0.5), SCORES, CHANCES),
    (lambda x, t: F.huber_loss(x, t, delta=0.5), SCORES, CHANCES),
    (lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), SCORES, CHANCES),
    (lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=w), SCORES, CHANCES, WEIGHT),
    (lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="mean"), SCORES, CHANCES),
    (lambda x, t: F.soft_margin_loss(x, t), SCORES, CHANCES),
]


@pytest.mark.filterwarnings("ignore:reduction")  # F.kl_div's own advice
@pytest.mark.parametrize("loss, tensors", [(loss, tensors) for loss, *tensors in LOSSES])
def test_a_divided_sum_is_the_mean_in_value_and_gradient(
    loss: Callable[..., torch.Tensor], tensors: list[torch.Tensor]
) -> None:
    given = [tensors[0].clone().requires_grad_(), *tensors[1:]]
    captured = program(loss, *given)
    divided = dead(means(captured))
    assert all(bound(op).get("reduction") != 1 for op in divided.ops)
    named = {f"tensors.{i}": tensor for i, tensor in enumerate(given)}
    (found,), expected = interpreter.run(divided, named), loss(*given)
    assert found.dtype == expected.dtype
    exact = {"atol": 1e-6, "rtol": 1e-5} if found.dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    torch.testing.assert_close(found, expected, equal_nan=True, **exact)
    gradients = [torch.autograd.grad(result, given[0])[0] for result in (found, expected)]
    torch.testing.assert_close(*gradients, equal_nan=True, **exact)


def test_a_loss_that_is_a_sum_is_not_divided() -> None:
    captured = program(lambda x, t: F.cross_entropy(x, t, reduction="sum"), SCORES, TARGET)
    assert str(means(captured)) == str(captured)


def test_the_sum_of_many_half_precision_losses_does_not_overflow() -> None:
    scores, target = torch.zeros(40000, 8, dtype=torch.half), torch.zeros(40000, dtype=torch.long)
    (found,) = interpreter.run(
        means(program(lambda x, t: F.cross_entropy(x, t), scores, target)), {"tensors.0": scores, "tensors.1": target}
    )
    torch.testing.assert_close(found, torch.tensor(8.0).log().half())

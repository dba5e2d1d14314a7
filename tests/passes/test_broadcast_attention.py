"""`expanded` expands operands that attention broadcasts, `grouped` groups heads that it repeats; numbers are unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autopar.passes.broadcast_attention import expanded, grouped
from tests.capture import interpreter
from tests.passes.programs import program, targets

SHAPES = {  # of query, and of key and value; how many are expanded
    "one head of keys": ((2, 4, 8, 3), (2, 1, 8, 3), 2),
    "one batch of keys": ((2, 4, 8, 3), (1, 4, 8, 3), 2),
    "keys without a batch": ((2, 4, 8, 3), (4, 8, 3), 2),
    "one head of queries": ((2, 1, 8, 3), (2, 4, 8, 3), 1),
    "nothing": ((2, 4, 8, 3), (2, 4, 8, 3), 0),
    "three dims": ((4, 8, 3), (1, 8, 3), 0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_expanded_operands_is_that_of_broadcast_ones_in_value_and_gradient(name: str) -> None:
    query, keys, count = SHAPES[name]
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (query, keys, keys)]
    found = expanded(program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *given))
    assert targets(found).count("expand.default") == count
    (output,) = interpreter.run(found, {f"tensors.{place}": tensor for place, tensor in enumerate(given)})
    expected = F.scaled_dot_product_attention(*given, is_causal=True)
    torch.testing.assert_close(output, expected)
    pairs = zip(*(torch.autograd.grad(one.square().sum(), given) for one in (output, expected)), strict=True)
    for gradient, wanted in pairs:
        torch.testing.assert_close(gradient, wanted)


def repeating(heads: int, times: int, dim: int = 2) -> Callable[..., torch.Tensor]:
    """Attention to keys and values whose heads are repeated as transformers does where it is traced."""

    def repeat(x: torch.Tensor) -> torch.Tensor:
        batch, _, length, width = x.shape
        shape = [batch, heads, length, width]
        shape.insert(dim, times)
        return x.unsqueeze(dim).expand(shape).reshape(batch, heads * times, length, width)

    return lambda q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)


def halves(*heads: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, count, 8, 16, dtype=dtype, requires_grad=True) for count in heads]


def test_attention_to_repeated_heads_is_that_to_grouped_ones_in_value_and_gradient() -> None:
    given = halves(6, 2, 2)
    found = grouped(program(repeating(2, 3), *given))
    assert targets(found) == ["scaled_dot_product_attention.default"]
    (output,) = interpreter.run(found, {f"tensors.{place}": tensor for place, tensor in enumerate(given)})
    expected = repeating(2, 3)(*given)
    torch.testing.assert_close(output, expected)
    for gradient, wanted in zip(*(torch.autograd.grad(one.sum(), given) for one in (output, expected)), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("attend", "given"),
    [
        pytest.param(repeating(2, 3), halves(6, 2, 2, dtype=torch.float32), id="in single precision"),
        pytest.param(repeating(2, 3, dim=1), halves(6, 2, 2), id="heads one after the other, three times"),
        pytest.param(
            lambda q, k, v: F.scaled_dot_product_attention(q, k.unsqueeze(2).expand(2, 2, 3, 8, 16).reshape(2, 6, 8, 16), v),
            halves(6, 2, 6),
            id="keys alone",
        ),
    ],
)
def test_other_attention_stays_as_it_is(attend: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> None:
    before = program(attend, *given)
    assert targets(grouped(before)) == targets(before)

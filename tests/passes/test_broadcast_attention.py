"""`expanded` expands what attention broadcasts, and gives the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autopar.passes.broadcast_attention import expanded
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

"""A product costs the same however it is written."""

from __future__ import annotations

import pytest
import torch

from autopar.cost_models.catalog import DEVICES
from autopar.ir.program import Value
from tests.cost_models.cost_ops import Built, op, x

H100, BF16 = DEVICES["h100"], torch.bfloat16
M, K, N = 4096, 2048, 8192
A, B, AT, BT = (x(*shape, dtype=BF16) for shape in ((M, K), (K, N), (K, M), (N, K)))


def added(*shape: int) -> Value:
    """What is added to a product: it has no gradient, and is small."""
    return x(*shape, dtype=BF16, grad=False)


PRODUCT = op("aten.mm.default", A, B)
SPELLINGS = {
    "linear": op("aten.linear.default", A, BT),
    "matmul": op("aten.matmul.default", A, B),
    "linalg_matmul": op("aten.linalg_matmul.default", A, B),
    "einsum": op("aten.einsum.default", "mk,kn->mn", (A, B)),
    "einsum, transposed": op("aten.einsum.default", "km,nk->mn", (AT, BT)),
    "tensordot": op("aten.tensordot.default", A, B, (1,), (0,)),
    "inner": op("aten.inner.default", A, BT),
    "chain_matmul": op("aten.chain_matmul.default", (A, B)),
    "multi_dot": op("aten.linalg_multi_dot.default", (A, B)),
    "bmm of one": op("aten.bmm.default", x(1, M, K, dtype=BF16), x(1, K, N, dtype=BF16)),
    "1x1 convolution": op("aten.conv1d.default", x(1, K, M, dtype=BF16), x(N, K, 1, dtype=BF16)),
}
ADDED = {  # a row is read and added
    "addmm": op("aten.addmm.default", added(N), A, B),
    "addbmm of one": op("aten.addbmm.default", added(N), x(1, M, K, dtype=BF16), x(1, K, N, dtype=BF16)),
    "baddbmm of one": op("aten.baddbmm.default", added(N), x(1, M, K, dtype=BF16), x(1, K, N, dtype=BF16)),
    "linear with a bias": op("aten.linear.default", A, BT, added(N)),
}
VECTORS = {
    "dot": op("aten.dot.default", x(K), x(K)),
    "vdot": op("aten.vdot.default", x(K), x(K)),
    "vecdot": op("aten.linalg_vecdot.default", x(K), x(K)),
    "matmul": op("aten.matmul.default", x(K), x(K)),
    "mv": op("aten.mv.default", x(1, K), x(K)),
}


def seconds(built: Built) -> tuple[float, float]:
    price = built.pricer(H100)
    return price.forward_seconds(*built.shapes), price.backward_seconds(*built.shapes)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_product_cost_the_same(name: str) -> None:
    assert seconds(SPELLINGS[name]) == pytest.approx(seconds(PRODUCT), rel=1e-9)


@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_product_costs_no_more_than_reading_it(name: str) -> None:
    price, plain = ADDED[name].pricer(H100), PRODUCT.pricer(H100)
    work, without = price.forward(*ADDED[name].shapes), plain.forward(*PRODUCT.shapes)
    assert (work.flops, work.kernels) == (without.flops, 1)
    assert work.bytes == without.bytes + N * BF16.itemsize
    assert seconds(ADDED[name]) == pytest.approx(seconds(PRODUCT), rel=1e-9)


@pytest.mark.parametrize("name", VECTORS)
def test_spellings_of_one_inner_product_cost_the_same(name: str) -> None:
    assert seconds(VECTORS[name]) == pytest.approx(seconds(VECTORS["dot"]), rel=1e-9)
    assert VECTORS[name].pricer(H100).flops(*VECTORS[name].shapes) == 2 * K


def test_a_bilinear_layer_costs_its_two_products() -> None:
    built = op("aten.bilinear.default", x(8, 3), x(8, 5), x(7, 3, 5))
    assert built.pricer(H100).flops(*built.shapes) == 2 * 8 * 7 * 3 * 5 + 2 * 8 * 3 * 5


def test_a_chain_of_matrices_is_multiplied_in_the_cheapest_order() -> None:
    built = op("aten.linalg_multi_dot.default", (x(2, 100), x(100, 3), x(3, 50)))
    assert built.pricer(H100).flops(*built.shapes) == 2 * (2 * 100 * 3 + 2 * 3 * 50)

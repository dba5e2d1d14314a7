"""Identities of the roofline; `test_kernels.py` tests the efficiency of kernels."""

from __future__ import annotations

import math

import pytest
import torch

from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.compute import Work, peak, pricer, roofline
from autopar.ir.program import Op, Value
from tests.cost_models.cost_ops import Built, index, op, x

H100 = DEVICES["h100"].at_peak()
BF16 = torch.bfloat16
ATTENTION = "aten.scaled_dot_product_attention.default"


def attention(*, causal: bool = False, queries: int = 128, dtype: torch.dtype = BF16) -> Built:
    query, key, value = (x(2, 8, length, 64, dtype=dtype) for length in (queries, 128, 128))
    return op(ATTENTION, query, key, value, None, 0.0, causal)


def price(built: Built) -> float:
    return built.pricer(H100)(*built.shapes)


def forward(built: Built) -> Work:
    return built.pricer(H100).forward(*built.shapes)


def backward(built: Built) -> Work:
    return built.pricer(H100).gradient(*built.shapes)


@pytest.mark.parametrize(
    ("built", "flops"),
    [
        (op("aten.linear.default", x(2, 3, 5), x(7, 5), x(7)), 2 * 6 * 5 * 7),
        (op("aten.addmm.default", x(7), x(6, 5), x(5, 7)), 2 * 6 * 5 * 7),
        (op("aten.mm.default", x(6, 5), x(5, 7)), 2 * 6 * 5 * 7),
        (op("aten.bmm.default", x(3, 6, 5), x(3, 5, 7)), 3 * 2 * 6 * 5 * 7),
        (op("aten.baddbmm.default", x(3, 6, 7), x(3, 6, 5), x(3, 5, 7)), 3 * 2 * 6 * 5 * 7),
        (op("aten.matmul.default", x(2, 3, 6, 5), x(5, 7)), 6 * 2 * 6 * 5 * 7),
        (op("aten.matmul.default", x(6, 5), x(5)), 2 * 6 * 5),
        (op("aten.matmul.default", x(5), x(5)), 2 * 5),
        (op("aten.conv2d.default", x(2, 3, 8, 8), x(5, 3, 3, 3)), 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)),
        (op("aten.conv2d.default", x(2, 4, 8, 8), x(6, 2, 3, 3), None, (1, 1), (0, 0), (1, 1), 2), 2 * (2 * 6 * 36) * (2 * 9)),
        (
            op("aten.gru.input", x(5, 2, 7), x(1, 2, 3), (x(9, 7), x(9, 3), x(9), x(9)), True, 1, 0.0, True, False, False),
            2 * 5 * 2 * 9 * (7 + 3),
        ),
        (attention(), 4 * 2 * 8 * 128 * 128 * 64),
        (attention(causal=True), 2 * 2 * 8 * 128 * 128 * 64),
        (op("aten.gelu.default", x(4, 5)), 20),
        (op("aten.add.Tensor", index(4, 5), 1), 0),
    ],
)
def test_operations_are_those_of_the_formula(built: Built, flops: int) -> None:
    assert forward(built).flops == flops


def test_a_convolution_s_operations_equal_those_of_its_transpose() -> None:
    convolution = op("aten.conv2d.default", x(2, 3, 8, 8), x(5, 3, 3, 3))
    transposed = op("aten.conv_transpose2d.input", x(2, 5, 6, 6), x(5, 3, 3, 3))
    assert forward(convolution).flops == forward(transposed).flops


def test_bytes_are_read_once_and_written_once() -> None:
    built = op("aten.linear.default", x(6, 5, dtype=BF16), x(7, 5, dtype=BF16))
    assert forward(built) == Work(flops=420, bytes=2 * (30 + 35 + 42), kernels=1)


def test_an_embedding_reads_only_the_rows_it_picks_and_writes_the_whole_gradient() -> None:
    built = op("aten.embedding.default", x(1000, 5), index(2, 3))
    assert forward(built).bytes == 6 * 8 + 2 * (30 * 4)
    assert backward(built).bytes == 30 * 4 + 6 * 8 + 5000 * 4


@pytest.mark.parametrize(("grads", "products"), [((True, True), 2), ((True, False), 1), ((False, True), 1)])
def test_the_backward_of_a_product_is_a_product_for_each_operand_with_a_gradient(
    grads: tuple[bool, bool], products: int
) -> None:
    built = op("aten.linear.default", x(6, 5, grad=grads[0]), x(7, 5, grad=grads[1]))
    assert backward(built).flops == products * forward(built).flops
    assert backward(built).kernels == products


def test_the_backward_of_attention_is_two_and_a_half_forwards() -> None:
    assert backward(attention()).flops == 2.5 * forward(attention()).flops


def test_causal_attention_costs_half_once_it_is_bound_by_operations() -> None:
    built = [op(ATTENTION, *(x(4, 32, 4096, 128, dtype=BF16) for _ in range(3)), None, 0.0, causal) for causal in (True, False)]
    assert price(built[0]) == pytest.approx(price(built[1]) / 2)


@pytest.mark.parametrize("factor", ["m", "n", "k"])
@pytest.mark.parametrize("parts", [2, 8])
def test_splitting_a_factor_divides_the_operations(factor: str, parts: int) -> None:
    built = op("aten.linear.default", x(16, 64), x(32, 64))
    m, n, k = (size // (parts if name == factor else 1) for name, size in {"m": 16, "n": 32, "k": 64}.items())
    local = built.pricer(H100)
    shapes = ((m, k), (n, k)), ((m, n),)
    assert local.forward(*shapes).flops * parts == forward(built).flops
    assert local.gradient(*shapes).flops * parts == backward(built).flops


def test_a_split_op_never_costs_more_than_the_whole() -> None:
    built = op("aten.linear.default", x(1024, 4096), x(4096, 4096))
    local = built.pricer(H100)
    prices = [local(((1024, 4096), (4096 // n, 4096)), ((1024, 4096 // n),)) for n in (1, 2, 4, 8, 4096)]
    assert prices == sorted(prices, reverse=True)


@pytest.mark.parametrize(
    "built",
    [
        op("aten.reshape.default", x(4, 6), (8, 3)),
        op("aten.transpose.int", x(4, 6), 0, 1),
        op("aten.unsqueeze.default", x(4, 6), 0),
        op("aten.dropout.default", x(4, 6), 0.0, True),
        op("aten.dropout.default", x(4, 6), 0.5, False),
    ],
)
def test_views_cost_nothing_forward_and_backward(built: Built) -> None:
    assert price(built) == 0


def test_the_gradient_of_a_slice_is_written_whole() -> None:
    built = op("aten.slice.Tensor", x(4, 6), 0, 0, 2)
    assert forward(built) == Work()
    assert backward(built).bytes == (12 + 24) * 4


def test_the_gradient_of_an_add_is_handed_on_and_that_of_a_broadcast_operand_is_summed() -> None:
    assert backward(op("aten.add.Tensor", x(4, 6), x(4, 6))) == Work()
    assert backward(op("aten.add.Tensor", x(4, 6), x(6))).bytes == (24 + 6) * 4


def test_an_op_without_gradient_has_no_backward() -> None:
    assert backward(op("aten.linear.default", x(6, 5, grad=False), x(7, 5, grad=False))) == Work()


@pytest.mark.parametrize(
    "built", [attention(), op("aten.gelu.default", x(64, 64)), op("aten.linear.default", x(512, 512), x(512, 512))]
)
def test_the_price_is_forward_plus_backward(built: Built) -> None:
    local = built.pricer(H100)
    shapes = built.shapes
    assert local(*shapes) == local.forward_seconds(*shapes) + local.backward_seconds(*shapes)
    work = local.forward(*shapes)
    arithmetic = work.flops / peak(built.operands[0].dtype, H100)
    assert local.forward_seconds(*shapes) == roofline(work, arithmetic, H100.bandwidth, H100.launch)


def test_the_roofline_is_the_largest_of_its_three_times() -> None:
    launch, memory, none = Work(bytes=1, kernels=2), Work(bytes=10**12, kernels=1), Work()
    assert roofline(launch, 1e-9, H100.bandwidth, H100.launch) == 2 * H100.launch
    assert roofline(memory, 1e-9, H100.bandwidth, H100.launch) == 1e12 / H100.bandwidth
    assert roofline(memory, 10.0, H100.bandwidth, H100.launch) == 10.0
    assert roofline(none, 0.0, H100.bandwidth, H100.launch) == 0


def test_a_large_product_takes_the_time_of_the_data_sheet() -> None:
    n = 16384
    built = op("aten.mm.default", x(n, n, dtype=BF16, grad=False), x(n, n, dtype=BF16, grad=False))
    assert price(built) == pytest.approx(2 * n**3 / 989.4e12)


def test_a_dtype_without_a_peak_runs_at_the_float32_rate() -> None:
    assert peak(torch.complex64, H100) == H100.flops["float32"]
    assert peak(BF16, H100) == H100.flops["bfloat16"]


@torch.library.custom_op("autopar_test::twice", mutates_args=())
def twice(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@twice.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def test_an_operator_that_no_table_names_is_priced_by_its_bytes() -> None:
    given, result = (Value(name=name, shape=(1000, 1000), dtype=torch.float32) for name in ("v", "r"))
    unknown = Op(name="op", target="autopar_test.twice.default", args=(), results=(result,))
    work = pricer(unknown, {"v": given}, H100).forward((), ((1000, 1000),))
    assert (work.bytes, work.flops) == (4 * 10**6, 10**6)


def test_prices_are_in_seconds() -> None:
    # A block of GPT-3, batch 1 x 2048, forward: 24 b s h^2 + 4 b s^2 h operations
    h, s = 12288, 2048
    linears = [(h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)]
    local = [op("aten.linear.default", x(1, s, k, dtype=BF16), x(n, k, dtype=BF16)) for k, n in linears]
    flops = sum(forward(built).flops for built in local)
    assert flops == 24 * s * h * h
    assert math.fsum(built.pricer(H100).forward_seconds(*built.shapes) for built in local) == pytest.approx(flops / 989.4e12)

"""Laws of kernel prices, and the microbenchmarks that check them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import catalog
from autopar.cost_models.kernel_rates import reached
from autopar.cost_models.kernels import at_head_dim, attention_seconds, products_seconds
from autopar.errors import MeshError
from autopar.ir.device import Device
from autopar.ir.kernel_rates import AttentionRate, ProductRate
from autopar.operators.flops import Product, ProductSizes
from benchmarks import kernels
from tests.cost_models.cost_ops import Built, op, x

DEVICES = {name: reached(device) for name, device in catalog.DEVICES.items()}
HALF, LEFT, RIGHT = torch.float16, frozenset({0}), frozenset({1})
devices = st.sampled_from(list(DEVICES.values()))
dtypes = st.sampled_from(["float64", "float32", "bfloat16", "float16", "int8"])
dims = st.one_of(st.integers(1, 300), st.integers(1, 70000))
sizes = st.builds(ProductSizes, st.integers(1, 200), dims, dims, dims)


def one(of: ProductSizes) -> Product:
    return Product(sizes=of, left=LEFT, right=RIGHT)


def seconds(of: ProductSizes, dtype: str, device: Device) -> float:
    return products_seconds([one(of)], device.flops[dtype], device)


@given(sizes, st.sampled_from(ProductSizes._fields), st.integers(1, 5000), dtypes, devices)
def test_a_larger_product_is_never_cheaper(of: ProductSizes, grown: str, by: int, dtype: str, device: Device) -> None:
    larger = of._replace(**{grown: getattr(of, grown) + by})
    assert seconds(of, dtype, device) <= seconds(larger, dtype, device)


@given(sizes, st.sampled_from(ProductSizes._fields), st.integers(2, 16), dtypes, devices)
def test_parts_of_a_product_take_at_least_half_of_the_whole(
    of: ProductSizes, split: str, parts: int, dtype: str, device: Device
) -> None:
    """One tile more than there are processors takes two waves, of which parts that split their sums need one."""
    part = of._replace(**{split: -(-getattr(of, split) // parts)})
    assert parts * seconds(part, dtype, device) >= seconds(of, dtype, device) / 2


@given(sizes, dtypes, devices)
def test_no_product_is_faster_than_the_fraction_of_the_peak(of: ProductSizes, dtype: str, device: Device) -> None:
    assert device.product is not None
    assert seconds(of, dtype, device) >= of.flops / device.flops[dtype] / device.product.fraction * (1 - 1e-9)


@given(sizes, devices)
def test_a_product_costs_the_same_transposed(of: ProductSizes, device: Device) -> None:
    assert seconds(of, "float16", device) == seconds(ProductSizes(of.batch, of.n, of.m, of.k), "float16", device)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_a_long_product_of_full_waves_reaches_the_fraction(device: Device) -> None:
    assert device.product is not None
    of = ProductSizes(1, 128 * device.product.processors, 256 * 16, 1 << 20)
    assert of.flops / seconds(of, "float16", device) == pytest.approx(
        device.product.fraction * device.flops["float16"], rel=0.01
    )


def test_one_tile_more_than_a_wave_takes_another_wave() -> None:
    device = DEVICES["a100-80gb"]
    full, more = (seconds(ProductSizes(108 * waves, 128, 256, 8192), "float16", device) for waves in (1, 2))
    assert more == pytest.approx(2 * full)
    assert seconds(ProductSizes(109, 128, 256, 8192), "float16", device) > 1.2 * full


@given(sizes)
def test_the_products_of_a_backward_make_the_gradients_of_both_sides(of: ProductSizes) -> None:
    left, right = one(of).backward((0, 1))
    assert (left.sizes, right.sizes) == (ProductSizes(of.batch, of.m, of.k, of.n), ProductSizes(of.batch, of.k, of.n, of.m))
    assert left.flops == right.flops == of.flops


def attention(keys: int, *, queries: int = 1024, dim: int = 128, causal: bool = False) -> list[Product]:
    of = ProductSizes(32, queries, keys, dim), ProductSizes(32, queries, dim, keys)
    return [Product(sizes=one, left=LEFT, right=RIGHT, causal=causal) for one in of]


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(8, 512), st.booleans(), st.integers(0, 1), devices)
def test_attention_grows_with_its_keys_and_never_beats_the_peak(
    keys: int, more: int, dim: int, causal: bool, way: int, device: Device
) -> None:
    def price(keys: int) -> tuple[float, int]:
        products = attention(keys, dim=dim, causal=causal)
        flops = sum(product.flops for product in products)
        return attention_seconds(products, flops, device.flops["float16"], device, way), flops

    (less, flops), (longer, _) = price(keys), price(keys + more)
    assert less <= longer
    assert less >= flops / device.flops["float16"]


def test_attention_reaches_half_its_rate_where_the_keys_are_as_many_as_its_start_costs() -> None:
    device = DEVICES["h100"]
    assert device.attention is not None
    for way, rates in enumerate((device.attention.forward, device.attention.backward)):
        products = attention(510, causal=True)
        flops = sum(product.flops for product in products)
        assert flops / attention_seconds(products, flops, device.flops["float16"], device, way) == pytest.approx(rates[128] / 2)


@given(st.integers(1, 512), st.integers(1, 512))
def test_a_wider_head_takes_no_less_time(dim: int, other: int) -> None:
    narrow, wide = sorted((dim, other))
    for device in DEVICES.values():
        assert device.attention is not None
        for rates in (device.attention.forward, device.attention.backward):
            assert narrow / at_head_dim(rates, narrow) <= wide / at_head_dim(rates, wide) * (1 + 1e-12)


CALLS = {
    "product": op("aten.linear.default", x(512, 768, dtype=HALF), x(3072, 768, dtype=HALF), x(3072, dtype=HALF)),
    "attention": op("aten.scaled_dot_product_attention.default", *(x(4, 12, 512, 64, dtype=HALF) for _ in range(3))),
    "norm": op("aten.layer_norm.default", x(4096, 1024, dtype=HALF), (1024,), x(1024, dtype=HALF)),
    "dropout": op("aten.dropout.default", x(4096, 1024, dtype=HALF), 0.1, True),
    "stream": op("aten.gelu.default", x(4096, 1024, dtype=HALF)),
    "convolution": op(
        "aten.conv2d.default", x(8, 64, 28, 28, dtype=HALF), x(128, 32, 3, 3, dtype=HALF), None, (1, 1), (1, 1), (1, 1), 2
    ),
}


@pytest.mark.parametrize("built", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_no_kernel_is_faster_than_the_data_sheet(built: Built, device: Device) -> None:
    real, sheet = built.pricer(device), built.pricer(device.at_peak())
    assert real.forward_seconds(*built.shapes) >= sheet.forward_seconds(*built.shapes) > 0
    assert real.backward_seconds(*built.shapes) >= sheet.backward_seconds(*built.shapes) > 0


@pytest.mark.parametrize(("kind", "share"), [("norm", (0.52, 0.23)), ("dropout", (0.77, 0.90)), ("stream", (0.85, 0.85))])
def test_kernels_bound_by_memory_reach_the_share_of_their_kind(kind: str, share: tuple[float, float]) -> None:
    device, built = DEVICES["v100-32gb"], CALLS[kind]
    real, works = built.pricer(device), built.pricer(device).forward(*built.shapes)
    assert real.forward_seconds(*built.shapes) == pytest.approx(works.bytes / (share[0] * device.bandwidth))
    back = real.gradient(*built.shapes)
    assert real.backward_seconds(*built.shapes) == pytest.approx(back.bytes / (share[1] * device.bandwidth))


def head(words: int) -> Built:
    """The head of GPT-2 medium in the H200's run of benchmarks/one_gpu.py, 8 x 1024 tokens."""
    return op(
        "aten.linear.default",
        x(8192, 1024, dtype=torch.bfloat16, grad=True),
        x(words, 1024, dtype=torch.bfloat16, grad=True),
    )


def test_matrices_whose_rows_are_not_aligned_are_multiplied_as_slowly_as_was_measured() -> None:
    odd, even = head(50257), head(50264)
    h200 = DEVICES["h200"]
    price = odd.pricer(h200)(*odd.shapes)
    assert price == pytest.approx(20.65e-3, rel=0.05)  # its three cutlass kernels with "align1", benchmarks/results/one_gpu.txt
    # "tripling that layer's execution time": Netflix, Scaling LLM Post-Training, 2026
    for name in ("a100-80gb", "h100", "h200"):
        slower, faster = (built.pricer(DEVICES[name])(*built.shapes) for built in (odd, even))
        assert 2.5 < slower / faster < 5.5
    compiled = dataclasses.replace(h200, compiled=True)  # Inductor pads
    assert odd.pricer(compiled)(*odd.shapes) == pytest.approx(even.pricer(compiled)(*even.shapes), rel=0.01)
    single = (x(8192, 1024), x(50257, 1024)), (x(8192, 1024), x(50264, 1024))  # on ordinary cores
    ordinary = [op("aten.linear.default", *operands) for operands in single]
    slower, faster = (built.pricer(h200)(*built.shapes) for built in ordinary)
    assert slower == pytest.approx(faster, rel=0.01)


@pytest.mark.parametrize("dtype, picoseconds", [(torch.bfloat16, 3.0), (torch.float32, 3.2)], ids=str)
def test_a_broadcast_product_takes_what_was_measured_by_its_elements(dtype: torch.dtype, picoseconds: float) -> None:
    """Weights of norms in bfloat16, statistics in float32, in Llama 3.2 1B on an H200: benchmarks/results/one_gpu.txt."""
    h200, rows, width = DEVICES["h200"], 8192, 2048
    other = (width,) if dtype is torch.bfloat16 else (rows, 1)
    built = op("aten.mul.Tensor", x(rows, width, dtype=dtype), x(*other, dtype=dtype, grad=False))
    price = built.pricer(h200)
    assert price.forward_seconds(*built.shapes) == pytest.approx(picoseconds * 1e-12 * rows * width, rel=0.1)
    assert price.backward_seconds(*built.shapes) == pytest.approx(picoseconds * 1e-12 * rows * width, rel=0.1)
    plain = op("aten.mul.Tensor", x(rows, width, dtype=dtype), x(rows, width, dtype=dtype, grad=False))
    assert plain.pricer(h200).forward_seconds(*plain.shapes) == pytest.approx(
        plain.pricer(h200).forward(*plain.shapes).bytes / h200.streaming
    )


def test_a_power_limit_slows_products_only() -> None:
    limited = dataclasses.replace(DEVICES["h100"], power=0.85)
    large = op("aten.mm.default", x(8192, 8192, dtype=HALF), x(8192, 8192, dtype=HALF))
    price, slower = (large.pricer(device).forward_seconds(*large.shapes) for device in (DEVICES["h100"], limited))
    assert price < slower <= price / 0.85
    stream = CALLS["stream"]
    assert stream.pricer(limited)(*stream.shapes) == stream.pricer(DEVICES["h100"])(*stream.shapes)


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf])
def test_rates_that_no_device_has_are_refused(bad: float) -> None:
    with pytest.raises(MeshError, match=r"a product's fraction of the peak is .*, not a positive finite number"):
        ProductRate(processors=1, fraction=bad, wave=0.0, source="")
    with pytest.raises(MeshError, match="a product's unaligned fraction of the peak is"):
        ProductRate(processors=1, fraction=1.0, unaligned=bad, wave=0.0, source="")
    with pytest.raises(MeshError, match="attention's rate at head dim 64 is"):
        AttentionRate(forward={64: 1e12}, backward={64: bad}, start=(0.0, 0.0), source="")
    with pytest.raises(MeshError, match="device h100's share of bandwidth of norm is"):
        dataclasses.replace(DEVICES["h100"], achieved={"norm": (bad, 1.0)})
    if bad != math.inf:
        with pytest.raises(MeshError, match="device h100's rate of addresses is"):
            dataclasses.replace(DEVICES["h100"], addresses=bad)
    with pytest.raises(MeshError, match="device h100's bfloat16 rate is"):
        dataclasses.replace(DEVICES["h100"], flops={"bfloat16": bad})


# The largest median error on any device, of those rows that the law is fitted to or should predict. Products within training
# steps are slower than isolated ones, up to 40% (L4), as docs/prices.md says.
BOUNDS = {
    "attention": 0.05,
    "op enc-1st-layernorm, backward": 0.1,
    "op enc-1st-layernorm, forward": 0.25,
    "op enc-MLP-gelu, backward": 0.3,
    "op enc-MLP-gelu, forward": 0.15,
    "op enc-attention-dropout": 0.02,
    "op enc-attention-softmax": 0.02,
    "op enc-attention-score": 0.25,
    "op enc-attention-context": 0.35,
    "op enc-post-attention-dropout, forward": 0.15,
    "op enc-post-MLP-dropout, forward": 0.15,
    "op enc-post-attention-dropout, backward": 0.5,  # several kernels of TorchScript, where one would do
    "op enc-post-MLP-dropout, backward": 0.5,
    "product, forward, Megatron": 0.2,
    "product": 0.45,
}


def test_prices_are_near_published_microbenchmarks() -> None:
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in kernels.rows():
        kind = next(kind for kind in BOUNDS if row.kind.startswith(kind))
        errors[kind, row.device].append(row.error)
    assert {kind for kind, _ in errors} == set(BOUNDS)
    assert sum(map(len, errors.values())) == 1476
    for (kind, device), found in errors.items():
        assert statistics.median(map(abs, found)) < BOUNDS[kind], (kind, device)

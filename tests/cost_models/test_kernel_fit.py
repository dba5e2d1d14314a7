"""Coefficients are recovered from timings that follow the laws, exact and noisy, without a GPU."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.kernel_fit import (
    AttentionTiming,
    MemoryTiming,
    ProductTiming,
    attention_rate,
    bandwidth_shares,
    interference,
    product_rate,
)
from autopar.cost_models.kernel_profile import Kernel, fitted, probes
from autopar.cost_models.kernel_rates import reached
from autopar.errors import MeshError
from autopar.ir.device import Device
from autopar.ir.kernel_rates import AttentionRate, ProductRate
from autopar.operators.flops import ProductSizes
from tests.cost_models.cost_ops import Built, op, x

HALF = torch.bfloat16
A100 = reached(DEVICES["a100-80gb"])
BASE = A100.at_peak()
TRUE = dataclasses.replace(
    A100,
    product=ProductRate(processors=108, fraction=0.71, wave=7e-6, source="made up"),
    attention=AttentionRate(
        forward={64: 1.5e14, 128: 1.8e14}, backward={64: 1.1e14, 128: 1.4e14}, start=(250.0, 600.0), source="made up"
    ),
    achieved={"stream": (0.8, 0.7), "norm": (0.5, 0.3), "dropout": (0.4, 0.45)},
)


def attention(dim: int, *, causal: bool) -> Built:
    return op(
        "aten.scaled_dot_product_attention.default", *(x(8, 16, 1024, dim, dtype=HALF) for _ in range(3)), None, 0.0, causal
    )


def model(width: int = 2048, tokens: int = 16384) -> list[Built]:
    """The operators of a transformer's block."""
    return [
        op("aten.layer_norm.default", x(tokens, width, dtype=HALF), (width,), x(width, dtype=HALF), x(width, dtype=HALF)),
        op("aten.linear.default", x(tokens, width, dtype=HALF), x(3 * width, width, dtype=HALF)),
        attention(64, causal=True),
        attention(64, causal=False),
        attention(128, causal=True),
        op("aten.dropout.default", x(tokens, width, dtype=HALF), 0.1, True),
        op("aten.linear.default", x(tokens, width, dtype=HALF), x(4 * width, width, dtype=HALF)),
        op("aten.gelu.default", x(tokens, 4 * width, dtype=HALF)),
        op("aten.linear.default", x(tokens, 4 * width, dtype=HALF), x(width, 4 * width, dtype=HALF)),
    ]


def kernels(device: Device) -> list[Kernel]:
    found = [Kernel.of(built.op, built.values, device) for built in model()]
    return [*found, *probes(found, device)]


def timed(device: Device, noise: float = 0.0) -> list[tuple[float, float]]:
    """What the kernels take on a device, give or take some noise."""
    dice = random.Random(0)

    def off() -> float:
        return 1 + noise * dice.uniform(-1, 1)

    return [
        (
            kernel.price.forward_seconds(kernel.operands, kernel.results) * off(),
            kernel.price.backward_seconds(kernel.operands, kernel.results) * off(),
        )
        for kernel in kernels(device)
    ]


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-3), (0.03, 0.08)])
def test_a_device_is_recovered_from_what_its_kernels_take(noise: float, within: float) -> None:
    found = fitted(kernels(BASE), timed(TRUE, noise), BASE, 108)
    assert found.product is not None
    assert found.attention is not None
    assert TRUE.product is not None
    assert TRUE.attention is not None
    assert found.product.fraction == pytest.approx(TRUE.product.fraction, rel=within)
    assert found.product.wave == pytest.approx(TRUE.product.wave, rel=0.01 if not noise else 0.5)
    assert found.attention.forward == pytest.approx(TRUE.attention.forward, rel=within)
    assert found.attention.backward == pytest.approx(TRUE.attention.backward, rel=within)
    assert found.attention.start == pytest.approx(TRUE.attention.start, rel=0.01 if not noise else 0.3)
    for kind, shares in TRUE.achieved.items():
        assert found.share(kind) == pytest.approx(shares, rel=0.03 if not noise else within)


def test_a_profile_of_one_size_prices_another() -> None:
    found = fitted(kernels(BASE), timed(TRUE), BASE, 108)
    for built in model(width=5120, tokens=4096):
        prices = [built.pricer(device)(*built.shapes) for device in (found, TRUE)]
        assert prices[0] == pytest.approx(prices[1], rel=0.03)


def test_the_probes_are_attention_over_every_length_and_products_with_a_short_inner_dim() -> None:
    found = [Kernel.of(built.op, built.values, BASE) for built in model()]
    probed = list(probes(found, BASE))
    lengths = {kernel.operands[0][2] for kernel in probed if kernel.price.attention}
    assert lengths == {512, 1024, 2048, 4096, 8192}
    products = [kernel.products(0)[0].sizes for kernel in probed if not kernel.price.attention]
    assert {(of.m, of.n, of.k) for of in products if of} == {(16384, 6144, 256), (16384, 8192, 256), (16384, 2048, 256)}


@pytest.mark.parametrize("bad", [-1e-3, math.nan, math.inf, 0.0])
def test_times_that_are_none_are_refused(bad: float) -> None:
    sizes = ProductSizes(1, 4096, 4096, 4096), ProductSizes(1, 4096, 4096, 1024)
    with pytest.raises(MeshError, match="a measured product's time is"):
        product_rate([ProductTiming(sizes=(of,), seconds=bad) for of in sizes], 3e14, 108, "")
    with pytest.raises(MeshError, match="a measured attention's time is"):
        attention_rate(
            [AttentionTiming(dim=64, keys=512, causal=True, way=way, operations=10**9, seconds=bad) for way in (0, 1)], ""
        )
    with pytest.raises(MeshError, match="a measured norm operator's time is"):
        bandwidth_shares([MemoryTiming(kind="norm", way=0, bytes=10**6, seconds=bad)], 1e12)
    with pytest.raises(MeshError, match="a measured product and message's"):
        interference(1e-3, bad, 1e-3)


def test_too_few_timings_are_refused() -> None:
    one = ProductTiming(sizes=(ProductSizes(1, 4096, 4096, 4096),), seconds=1e-3)
    with pytest.raises(MeshError, match="needs at least two of them, of different sizes"):
        product_rate([one, one], 3e14, 108, "")
    with pytest.raises(MeshError, match="needs a forward and a backward of every head dim"):
        attention_rate([AttentionTiming(dim=64, keys=512, causal=True, way=0, operations=10**9, seconds=1e-3)], "")
    with pytest.raises(MeshError, match="the times of every kernel"):
        fitted(kernels(BASE), [], BASE, 108)

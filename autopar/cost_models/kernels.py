"""Kernel laws: the seconds of arithmetic in real kernels, matrix products by tiles and waves, fused attention by length.

    product     min over tiles  waves (2 tm tn K / (g peak / P) + w tm tn / (128 x 256))
    attention   operations / (R keys / (keys + S0))

A product of batch x M x N results is cut into tiles of tm x tn, which P processors compute in waves, all of a wave at the same
time: the last wave takes as long as a full one (NVIDIA, "Matrix Multiplication Background User's Guide", 2023, sections 3 and
4). If tiles do not fill one wave, the sums over K are split among the idle processors, and adding them up takes w again.
Without tiles, on the ordinary cores, a product takes its operations at g times their peak: so do those with vectors, and those
in float32. The price grows with batch, M, N and K, since each tile's does.

Attention keeps a tile of queries while it walks over the keys: its start costs as much as S0 more keys (Dao,
"FlashAttention-2", 2023; the charts of its repository follow this law within 4% from 512 to 16384 keys,
the forward alone within 9%).

Both are at least the price at peak, for any coefficients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.ir.device import Device, Seconds
from autopar.operators.flops import Product, ProductSizes

# Tiles of cuBLAS's kernels for tensor cores, M x N. Smaller ones reload operands too often to reach the same rate.
TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64))
AREA = 128 * 256
DEPTH = 64  # fewest summands in a part of a split sum


def products_seconds(products: Iterable[Product], peak: float, device: Device, *, aligned: bool = True) -> Seconds:
    """Seconds of matrix products, one after the other, at a peak in operations per second, by the device's `product`."""
    rate = device.product
    assert rate is not None, "the device has no coefficients of products"
    ordinary = min(peak, device.flops["float32"]) * rate.fraction * device.power
    reached = max(ordinary, peak * min(rate.fraction, 1.0 if aligned else rate.unaligned) * device.power)
    total = 0.0
    for product in products:
        plain = product.flops / (ordinary if product.sizes else reached)
        if product.sizes and ordinary < reached:  # tensor cores
            plain = min(plain, tiled(product.sizes, reached, rate.processors, rate.wave))
        total += plain
    return total


@functools.lru_cache(maxsize=1 << 16)
def tiled(sizes: ProductSizes, reached: float, processors: int, wave: Seconds) -> Seconds:
    """Seconds of one product in the best tiles; `reached` operations per second by all processors in long full waves.

    >>> round(tiled(ProductSizes(1, 1024, 2048, 4096), 2e14, 64, 0.0) * 1e6, 2)    # 64 tiles of 128 x 256, one wave
    85.9
    """
    each = reached / processors
    return min(operations / each + waves * wave for operations, waves in tilings(sizes, processors))


def tilings(sizes: ProductSizes, processors: int) -> Iterator[tuple[float, float]]:
    """Per way to cut a product: operations of the busiest processor, and waves in units of 128 x 256 tiles.

    Sums are whole or, if tiles leave processors idle, split among these.
    """
    for rows, columns in TILES:
        tiles = sizes.batch * -(-sizes.m // rows) * -(-sizes.n // columns)
        area, waves = rows * columns, -(-tiles // processors)
        yield 2.0 * waves * area * sizes.k, waves * area / AREA
        parts = min(processors // tiles, sizes.k / DEPTH) if tiles else 1
        if parts > 1:
            yield 2.0 * area * sizes.k / parts, 2 * area / AREA


def attention_seconds(products: Sequence[Product], operations: int, peak: float, device: Device, way: int) -> Seconds:
    """Seconds of so many operations of fused attention, by the device's `attention`; `way` 0 forward, 1 backward.

    The first of the products is the scores. A dtype that is not half precision is slower as its peak is.
    """
    scores, rate = products[0], device.attention
    assert rate is not None, "the device has no coefficients of attention"
    assert scores.sizes is not None, "attention knows its sizes"
    keys, start = scores.sizes.n, rate.start[scores.causal]
    reached = at_head_dim(rate.backward if way else rate.forward, scores.sizes.k) * min(1.0, peak / device.flops["float16"])
    return operations * (1 + start / keys) / min(reached, peak) if keys else 0.0


def at_head_dim(rates: Mapping[int, float], dim: int) -> float:
    """The rate at a head dim: linear between those that are known, constant above; below, as the exponentials are as many for
    fewer operations, in proportion.

    >>> [at_head_dim({64: 100, 128: 140}, dim) for dim in (32, 64, 96, 256)]
    [50.0, 100.0, 120.0, 140.0]
    """
    known = sorted(rates)
    above = next((place for place, size in enumerate(known) if size >= dim), None)
    if above is None:
        return float(rates[known[-1]])
    if above == 0:
        return rates[known[0]] * dim / known[0]
    low, high = known[above - 1], known[above]
    return rates[low] + (rates[high] - rates[low]) * (dim - low) / (high - low)


__all__ = ["at_head_dim", "attention_seconds", "products_seconds", "tiled", "tilings"]

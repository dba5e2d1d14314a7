"""Efficiencies of kernels on the catalog's devices, each coefficient with its source; the laws are in `kernels`.

Rows named here are those of `benchmarks/measured`. Rates not measured on any device of a kind are taken from the nearest
measured one, and say so. Nothing is fitted to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.device import Device
from autopar.ir.kernel_rates import AttentionRate, ProductRate

TERA = 1e12

# Shares of the memory bandwidth, forward and backward: medians of the rows of micro.csv that name the operator, profiles of
# Megatron's operators on V100, A100 and L4, bytes counted as `compute` counts them (`python benchmarks/kernels.py`): "norm" is
# "op enc-1st-layernorm", "dropout" is "op enc-attention-dropout". A plain "stream" lies between the backward of dropout (0.90,
# 0.89, 0.77) and GELU, whose arithmetic shows (0.82, 0.74, 0.76; backward 0.66, 0.61, 0.60): at 0.85 the steps of small models
# in mpt.csv, which it decides, are met.
ACHIEVED: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "v100": {"stream": (0.85, 0.85), "norm": (0.52, 0.23), "dropout": (0.77, 0.90)},
    "a100": {"stream": (0.85, 0.85), "norm": (0.53, 0.23), "dropout": (0.74, 0.89)},
    "l4": {"stream": (0.77, 0.77), "norm": (0.79, 0.29), "dropout": (0.77, 0.77)},
}

# Operations per cycle and processor in half precision of matrices whose rows are no multiples of 16 bytes, which kernels load
# element by element. Measured on one H200 alone, the others are taken to do as many: products with GPT-2's 50,257 words reach
# 122 TFLOP/s, which is 528 of them (benchmarks/results/one_gpu.txt). Netflix ("Scaling LLM Post-Training", 2026) found a head
# three times as slow without padding, and does not say on what. At their peaks, processors do 2048 on A100, 4096 on H100, 8192
# on B200, 1024 on V100, T4, L4 and L40S, and 512 on the others.
UNALIGNED = 512

# Elements per second and processor of torch's pointwise kernels where an operand is broadcast or strides differ
# (`elementwise_kernel` with an offset calculator): 3.0 ps an element on the H200 of benchmarks/results/one_gpu.txt for products
# in bfloat16, 3.2 in float32, though their bytes differ by two. Clocks of the others are about the same.
ADDRESSES = 2.45e9

TILE_BYTES = 128 * 256 * 2  # results of a tile in half precision
# Keys that starting a tile of queries costs: not causal, causal. FlashAttention-2's rows of micro.csv from 512 on, within 4%
# (the forward alone: 9%).
START = (200.0, 510.0)
# Forward over backward rate: FlashAttention-2 reaches 73% and 63% of an A100's peak (T. Dao, "FlashAttention-2", 2023).
FORWARD_OVER_BACKWARD = 73 / 63
BACKWARD = 2.5  # forwards' operations in a backward, ibid. section 4.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The efficiencies of one device's kernels.

    `processors` multiply matrices, a tile each at a time, at `fraction` of the peak; `achieved` are shares of the memory's
    bandwidth; `source` is that of the fraction. `unaligned` is the share of the peak where matrices are not aligned.
    """

    processors: int
    fraction: float
    source: str
    attention: AttentionRate
    achieved: Mapping[str, tuple[float, float]]
    unaligned: float = 1.0


def _apart(both: Mapping[int, float], source: str) -> AttentionRate:
    """Rates by head dim in 10^12 operations per second, of a forward and a backward together: what each reaches alone."""
    back = (1 / FORWARD_OVER_BACKWARD + BACKWARD) / (1 + BACKWARD)
    backward = {dim: rate * TERA * back for dim, rate in both.items()}
    forward = {dim: rate * FORWARD_OVER_BACKWARD for dim, rate in backward.items()}
    return AttentionRate(forward=forward, backward=backward, start=START, source=source)


def _scaled(rates: Mapping[int, float], factor: float) -> dict[int, float]:
    return {dim: rate * factor for dim, rate in rates.items()}


FLASH2_A100 = {64: 179.0, 128: 199.0}
FLASH1_A100 = {64: 105.0, 128: 96.0}
FLASH2 = "FlashAttention-2, 'attention forward+backward' rows of A100-SXM-80 in micro.csv"
LIKE_A100 = "assumed, nothing measured: FlashAttention-2's share of the peak on A100"
LIKE_FLASH1 = (
    "assumed, nothing measured, and no FlashAttention-2 for it: FlashAttention-1's share of the peak on A100, micro.csv"
)

A100 = Kernels(
    processors=108,
    fraction=0.786,
    source="fit on mpt.csv, A100-80 rows; best single products reach 0.87 (micro.csv)",
    attention=_apart(FLASH2_A100, FLASH2),
    achieved=ACHIEVED["a100"],
    unaligned=UNALIGNED / 2048,
)
A100_40 = replace(A100, fraction=0.765, source="fit on mpt.csv, A100-40 rows; Megatron's linears reach 0.84 (micro.csv)")
H100 = Kernels(
    processors=132,
    fraction=0.652,
    source="fit on mpt.csv and titan.csv, H100 rows, at 700 W; best single products reach 0.80 (micro.csv)",
    attention=AttentionRate(
        forward={64: 332 * TERA, 128: 366 * TERA},
        backward={64: 279 * TERA, 128: 328 * TERA},
        start=START,
        source="FlashAttention-2, rows of H100-SXM-80 in micro.csv, 'attention forward' and 'attention forward+backward'",
    ),
    achieved=ACHIEVED["a100"],
    unaligned=UNALIGNED / 4096,
)
V100 = Kernels(
    processors=80,
    fraction=0.60,
    source="fit on the V100 runs of oneflow_gpt.csv and aceso.csv; Megatron's linears reach 0.68 (micro.csv)",
    attention=_apart(_scaled(FLASH1_A100, 125 / 312), LIKE_FLASH1),
    achieved=ACHIEVED["v100"],
    unaligned=UNALIGNED / 1024,
)
L4 = Kernels(
    processors=58,
    fraction=0.50,
    source="fit on the L4 runs of mist.csv and aceso.csv; Megatron's linears reach 0.29 to 0.60, long ones less (micro.csv)",
    attention=_apart(_scaled(FLASH2_A100, 121 / 312 * 0.50 / 0.786), f"{LIKE_A100}, at L4's clock"),
    achieved=ACHIEVED["l4"],
    unaligned=UNALIGNED / 1024,
)

KERNELS: dict[str, Kernels] = {
    "v100-32gb": V100,
    "a100-40gb": A100_40,
    "a100-80gb": A100,
    "h100": H100,
    "h200": H100,  # the same processors and power; only its memory differs
    "b200": Kernels(
        processors=148,
        fraction=0.652,
        source="assumed, nothing measured: g of H100, the architecture before it",
        attention=replace(
            H100.attention,
            forward=_scaled(H100.attention.forward, 148 / 132),
            backward=_scaled(H100.attention.backward, 148 / 132),
            source="assumed, nothing measured: FlashAttention-2, without Blackwell's own instructions: H100's by processors",
        ),
        achieved=ACHIEVED["a100"],
        unaligned=UNALIGNED / 8192,
    ),
    "l4": L4,
    "l40s": Kernels(
        processors=142,
        fraction=0.786,
        source="assumed, nothing measured: g of A100; L4, its architecture, is held back by its 72 W",
        attention=_apart(_scaled(FLASH2_A100, 362.05 / 312), LIKE_A100),
        achieved=ACHIEVED["l4"],
        unaligned=UNALIGNED / 1024,
    ),
    "t4": Kernels(
        processors=40,
        fraction=0.50,
        source="assumed, nothing measured: g of L4, which has as little power, 72 W and 70 W",
        attention=_apart(_scaled(FLASH1_A100, 65 / 312 * 0.50 / 0.786), f"{LIKE_FLASH1}, at T4's clock"),
        achieved=ACHIEVED["v100"],
        unaligned=UNALIGNED / 1024,
    ),
    "rtx4090": Kernels(
        processors=128,
        fraction=0.786,
        source="assumed, nothing measured: g of A100, as for RTX 3090, the board before it",
        attention=_apart(_scaled(FLASH2_A100, 165.2 / 312), LIKE_A100),
        achieved=ACHIEVED["l4"],
    ),
    "rtx3090": Kernels(
        processors=82,
        fraction=0.786,
        source="assumed: g of A100, its architecture; squares on an RTX 3090 Ti reach the peak (micro.csv)",
        attention=_apart(_scaled(FLASH2_A100, 71.2 / 312), LIKE_A100),
        achieved=ACHIEVED["a100"],
    ),
    "rtx3080-10gb": Kernels(
        processors=68,
        fraction=0.786,
        source="assumed, nothing measured: g of A100, the same architecture",
        attention=_apart(_scaled(FLASH2_A100, 59.5 / 312), LIKE_A100),
        achieved=ACHIEVED["a100"],
    ),
    "rtx2060-6gb": Kernels(
        processors=30,
        fraction=0.60,
        source="assumed, nothing measured: g of V100, the architecture before it",
        attention=_apart(_scaled(FLASH1_A100, 25.8 / 312), LIKE_FLASH1),
        achieved=ACHIEVED["v100"],
    ),
}

# Another kernel than FlashAttention-2, for who prices a program that runs it: dataclasses.replace(device, attention=...).
MPT_TRITON: dict[str, AttentionRate] = {
    name: AttentionRate(
        forward={64: forward * TERA},
        backward={64: backward * TERA},
        start=START,
        source=f"LLM Foundry's Triton FlashAttention, fit on mpt.csv, {name.split('-')[0].upper()} rows",
    )
    for name, forward, backward in (("a100-40gb", 164, 79), ("a100-80gb", 164, 79), ("h100", 238, 153))
}

# Megatron's causal softmax, which reads half of its operands, of 2048 keys (A100: 4096), for who prices a program that runs it:
# dataclasses.replace(device, achieved={**achieved, "softmax": ...}). Medians of "op enc-attention-softmax" in micro.csv.
MEGATRON_SOFTMAX: dict[str, tuple[float, float]] = {"v100-32gb": (0.98, 1.09), "l4": (1.04, 1.20), "a100-40gb": (0.57, 0.86)}


def reached(device: Device) -> Device:
    """A catalog device with the efficiencies of its kernels.

    A wave of tiles takes, beside its arithmetic, what its results take to be stored as a stream. So the products of attention
    that is not fused, whose sums are short, are priced within 9% of the rows of V100, A100 and L4 in the median.
    """
    kernels = KERNELS[device.name]
    wave = kernels.processors * TILE_BYTES / (device.bandwidth * kernels.achieved["stream"][0])
    product = ProductRate(
        processors=kernels.processors,
        fraction=kernels.fraction,
        wave=wave,
        source=kernels.source,
        unaligned=kernels.unaligned,
    )
    addresses = kernels.processors * ADDRESSES
    return replace(device, product=product, attention=kernels.attention, achieved=kernels.achieved, addresses=addresses)


__all__ = ["ACHIEVED", "KERNELS", "MEGATRON_SOFTMAX", "MPT_TRITON", "Kernels", "reached"]

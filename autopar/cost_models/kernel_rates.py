"""What kernels reach on the devices of the catalog, each coefficient with its source; the laws are in `kernels`.

Rows named here are those of `benchmarks/measured`. What was measured on no device of a kind is taken from the nearest one that
was, and says so. Nothing is fitted to a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.kernel_rates import AttentionRate, ProductRate
from autopar.ir.mesh import Device

TERA = 1e12

# Shares of the memory bandwidth, forward and backward: medians of the V100's rows of micro.csv that name the operator, 15 each,
# bytes counted as `compute` counts them: "op enc-1st-layernorm"; "op enc-post-MLP-dropout" less the bias and the residual that
# it adds at the rate of a stream (`bias_dropout_add` of Aceso's flex_ops.py, whose profiler wants no gradient of the bias); and
# for all others "op enc-MLP-gelu" (0.82, 0.66) and "op enc-attention-softmax" (0.98, 1.09) together. No other device has rows.
ACHIEVED: Mapping[str, tuple[float, float]] = {"stream": (0.85, 0.85), "norm": (0.52, 0.23), "dropout": (0.65, 0.48)}

# Norms and dropout fall short of a stream by what they compute beside it (reductions, random numbers). L4 has 5.8 times as many
# float32 operations for each byte of its bandwidth as V100 (data sheets: 101 and 17.4), so that this is hidden: assumed. So
# have L40S and RTX 4090 (106 and 82).
AS_STREAM: Mapping[str, tuple[float, float]] = dict.fromkeys(ACHIEVED, ACHIEVED["stream"])

# Seconds of a wave of tiles beside their arithmetic: squares of 1024 to 4096 on A100, H100 and V100, "gemm" rows of micro.csv;
# from 2 to 7 microseconds the error hardly changes.
WAVE = 5e-6
# Keys that starting a tile of queries costs: not causal, causal. FlashAttention-2's rows of micro.csv from 512 on, within 4%
# (the forward alone: 9%).
START = (200.0, 510.0)
# Forward over backward rate: FlashAttention-2 reaches 73% and 63% of an A100's peak (T. Dao, "FlashAttention-2", 2023).
FORWARD_OVER_BACKWARD = 73 / 63
BACKWARD = 2.5  # forwards' operations in a backward, ibid. section 4.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the kernels of one device reach; `achieved` are shares of the memory bandwidth."""

    product: ProductRate
    attention: AttentionRate
    achieved: Mapping[str, tuple[float, float]] = field(default_factory=lambda: ACHIEVED)


def _product(processors: int, fraction: float, source: str) -> ProductRate:
    return ProductRate(processors=processors, fraction=fraction, wave=WAVE, source=source)


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
    product=_product(108, 0.786, "fit on mpt.csv, A100 rows; best single products reach 0.87 (micro.csv)"),
    attention=_apart(FLASH2_A100, FLASH2),
)
H100 = Kernels(
    product=_product(
        132, 0.664, "fit on mpt.csv and titan.csv, H100 rows, at 700 W; best single products reach 0.80 (micro.csv)"
    ),
    attention=AttentionRate(
        forward={64: 332 * TERA, 128: 366 * TERA},
        backward={64: 279 * TERA, 128: 328 * TERA},
        start=START,
        source="FlashAttention-2, rows of H100-SXM-80 in micro.csv, 'attention forward' and 'attention forward+backward'",
    ),
)
V100 = Kernels(
    product=_product(80, 0.70, "fit on Megatron's linears in micro.csv: 0.67 forward, 0.80 backward; best squares 0.78"),
    attention=_apart(_scaled(FLASH1_A100, 125 / 312), LIKE_FLASH1),
)
L4 = Kernels(
    product=_product(58, 0.42, "fit on mist.csv, L4 rows at 1050 of 2040 MHz; best squares reach 0.59 (micro.csv)"),
    attention=_apart(_scaled(FLASH2_A100, 121 / 312 * 0.42 / 0.786), f"{LIKE_A100}, at L4's clock"),
    achieved=AS_STREAM,
)

KERNELS: dict[str, Kernels] = {
    "v100-32gb": V100,
    "a100-40gb": A100,
    "a100-80gb": A100,
    "h100": H100,
    "h200": H100,  # the same processors and power; only its memory differs
    "l4": L4,
    "l40s": Kernels(
        product=_product(142, 0.786, "assumed, nothing measured: g of A100; L4, its architecture, is held back by its 72 W"),
        attention=_apart(_scaled(FLASH2_A100, 362.05 / 312), LIKE_A100),
        achieved=AS_STREAM,
    ),
    "t4": Kernels(
        product=_product(40, 0.42, "assumed, nothing measured: g of L4, which has as little power, 72 W and 70 W"),
        attention=_apart(_scaled(FLASH1_A100, 65 / 312 * 0.42 / 0.786), f"{LIKE_FLASH1}, at T4's clock"),
    ),
    "rtx4090": Kernels(
        product=_product(128, 0.786, "assumed, nothing measured: g of A100, as for RTX 3090, the board before it"),
        attention=_apart(_scaled(FLASH2_A100, 165.2 / 312), LIKE_A100),
        achieved=AS_STREAM,
    ),
    "rtx3090": Kernels(
        product=_product(
            82, 0.786, "assumed: g of A100, its architecture; squares on an RTX 3090 Ti reach the peak (micro.csv)"
        ),
        attention=_apart(_scaled(FLASH2_A100, 71.2 / 312), LIKE_A100),
    ),
    "rtx3080-10gb": Kernels(
        product=_product(68, 0.786, "assumed, nothing measured: g of A100, the same architecture"),
        attention=_apart(_scaled(FLASH2_A100, 59.5 / 312), LIKE_A100),
    ),
    "rtx2060-6gb": Kernels(
        product=_product(30, 0.70, "assumed, nothing measured: g of V100, the architecture before it"),
        attention=_apart(_scaled(FLASH1_A100, 25.8 / 312), LIKE_FLASH1),
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


def reached(device: Device) -> Device:
    """A device of the catalog with what its kernels reach."""
    kernels = KERNELS[device.name]
    return replace(device, product=kernels.product, attention=kernels.attention, achieved=kernels.achieved)


__all__ = ["ACHIEVED", "KERNELS", "MPT_TRITON", "Kernels", "reached"]

"""Prices of kernels beside published microbenchmarks: the rows of measured/micro.csv that an operator of the catalog expresses.

    python benchmarks/kernels.py            by kind and device: rows, median error, median and largest absolute error
    python benchmarks/kernels.py --rows     every row

An error is predicted over measured time, less one. Isolated products run faster than they do within a training step, where the
chip is hot and operands lie as the model has them: the catalog has what steps reach (docs/prices.md), so that products are
priced slower than isolated rows.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.compute import pricer
from autopar.cost_models.kernel_rates import MEGATRON_SOFTMAX
from autopar.ir.device import Device, Seconds
from autopar.ir.program import Argument, Op, Ref, Value

MICRO = Path(__file__).parent / "measured" / "micro.csv"
# What micro.csv calls the devices of the catalog; other boards (PCIe, A800, GH200, ...) have other clocks or no entry.
BOARDS = {
    "A100-SXM-80": "a100-80gb", "A100-80": "a100-80gb", "A100-40": "a100-40gb", "H100-SXM-80": "h100", "H100": "h100",
    "H200": "h200", "V100-32": "v100-32gb", "V100-SXM2-16": "v100-32gb", "L4": "l4",
}  # fmt: skip
HALF = torch.float16
TOKENS = 16384  # of FlashAttention's charts: batch x sequence, with 2048 features over all heads
FEATURES = 2048
SQUARES = (1024, 2048, 4096, 8192, 10240)  # of "best square"

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row of the table: its predicted and its measured time."""

    kind: str
    device: str
    what: str
    predicted: Seconds
    measured: Seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One operator on half-precision operands, with the arguments after the first of them, and after all.

    `frozen` are the places of operands of which no gradient is computed.
    """

    target: str
    operands: tuple[Shape, ...]
    result: Shape
    second: tuple[Argument, ...] = ()
    rest: tuple[Argument, ...] = ()
    frozen: tuple[int, ...] = ()

    def seconds(self, device: Device, ways: str) -> Seconds:
        """Seconds of the "forward", the "backward", or of both ("forward+backward")."""
        values = {
            f"v{p}": Value(name=f"v{p}", shape=s, dtype=HALF, requires_grad=p not in self.frozen)
            for p, s in enumerate(self.operands)
        }
        first, *others = map(Ref, values)
        args = first, *self.second, *others, *self.rest
        made = Value(name="made", shape=self.result, dtype=HALF, requires_grad=True)
        op = Op(name="op", target=self.target, args=args, results=(made,))
        price, shapes = pricer(op, values, device), (self.operands, (self.result,))
        return ("forward" in ways) * price.forward_seconds(*shapes) + ("backward" in ways) * price.backward_seconds(*shapes)


def product(m: int, n: int, k: int) -> Kernel:
    """A linear layer without bias."""
    return Kernel(target="aten.linear.default", operands=((m, k), (n, k)), result=(m, n))


def attention(batch: int, heads: int, length: int, dim: int, causal: bool) -> Kernel:
    """Fused attention of queries, keys and values of one length."""
    shape = batch, heads, length, dim
    target = "aten.scaled_dot_product_attention.default"
    return Kernel(target=target, operands=(shape,) * 3, result=shape, rest=(None, 0.0, causal))


def megatron(name: str, batch: int, length: int, hidden: int, heads: int) -> list[Kernel]:
    """The operators that one entry of Aceso's profiler of Megatron runs; empty for those that are told too little of."""
    tokens, scores, dim = (length, batch, hidden), (batch * heads, length, length), hidden // heads
    wide = (length, batch, 4 * hidden)
    added = [
        Kernel(target="aten.add.Tensor", operands=(tokens, (hidden,)), result=tokens, frozen=(1,)),
        Kernel(target="aten.dropout.default", operands=(tokens,), result=tokens, rest=(0.1, True)),
        Kernel(target="aten.add.Tensor", operands=(tokens, tokens), result=tokens),
    ]
    known = {
        "enc-1st-layernorm": [
            Kernel(
                target="aten.layer_norm.default", operands=(tokens, (hidden,), (hidden,)), result=tokens, second=((hidden,),)
            )
        ],
        "enc-attention-softmax": [Kernel(target="aten.softmax.int", operands=(scores,), result=scores, rest=(-1,))],
        "enc-attention-dropout": [Kernel(target="aten.dropout.default", operands=(scores,), result=scores, rest=(0.1, True))],
        "enc-MLP-gelu": [Kernel(target="aten.gelu.default", operands=(wide,), result=wide)],
        **dict.fromkeys(("enc-post-attention-dropout", "enc-post-MLP-dropout"), added),
        "enc-attention-score": [
            Kernel(target="aten.bmm.default", operands=((*scores[:2], dim), (scores[0], dim, length)), result=scores)
        ],
        "enc-attention-context": [
            Kernel(target="aten.bmm.default", operands=(scores, (*scores[:2], dim)), result=(*scores[:2], dim))
        ],
    }
    return known.get(name, [])


def compared(rows: Sequence[dict[str, str]]) -> Iterator[Compared]:
    """The rows that an operator of the catalog expresses."""
    for row in rows:
        board, kind, what = row["device"].split(" (")[0], row["kind"], row["shape or bytes"]
        if board not in BOARDS:
            continue
        device, numbers = DEVICES[BOARDS[board]], [int(number) for number in re.findall(r"\d+", what)]
        if softmax := MEGATRON_SOFTMAX.get(device.name):
            device = replace(device, achieved={**device.achieved, "softmax": softmax})
        for label, predicted, operations in predictions(kind, what, numbers, device):
            measured = seconds(float(row["value"]), row["unit"], operations)
            yield Compared(kind=label, device=device.name, what=f"{what} ({board})", predicted=predicted, measured=measured)


def predictions(kind: str, what: str, numbers: list[int], device: Device) -> Iterator[tuple[str, Seconds, int]]:
    """The label of a row's kind, its predicted seconds, and the operations that it counts; nothing if it is not expressed."""
    ways = "backward" if kind.endswith("backward") else "forward"
    if kind.startswith("gemm") and "fp8" not in kind and "tp 8" not in kind:
        found = sizes(what, numbers, kind, device)
        if found:
            m, n, k = found
            if kind.endswith("gradient of the input"):
                n, k = k, n
            label = f"product, {ways}, Megatron" if "Megatron" in kind else "product"
            yield label, product(m, n, k).seconds(device, ways), 2 * m * n * k
    elif kind.startswith("attention") and "FlashAttention-2" in kind and len(numbers) == 2:
        (dim, length), both, causal = numbers, "forward+backward" in kind, "causal" in kind
        batch, heads = max(1, TOKENS // length), FEATURES // dim
        operations = 4 * batch * heads * length**2 * dim // (1 + causal)
        one = attention(batch, heads, length, dim, causal).seconds(device, "forward+backward" if both else "forward")
        yield kind, one, int(operations * (3.5 if both else 1))
    elif kind.startswith("op "):
        batch, length, hidden, heads, _ = numbers
        found_here = megatron(kind.split()[1].rstrip(","), batch, length, hidden, heads)
        if found_here:
            yield kind, sum(one.seconds(device, ways) for one in found_here), 0


def sizes(what: str, numbers: list[int], kind: str, device: Device) -> tuple[int, int, int] | None:
    """M, N and K of a product; of the best of some squares the one that is predicted to be the best."""
    if "best square" in kind:
        side = max(SQUARES, key=lambda n: n**3 / product(n, n, n).seconds(device, "forward"))
        return side, side, side
    match what.partition(" ")[0], numbers:
        case "MxKxN", (m, k, n):
            return m, n, k
        case "MxNxK", (m, n, k):
            return m, n, k
        case _, (m, k, _, n) if " by " in what:
            return m, n, k
        case _, (m, n, k) if re.fullmatch(r"\d+x\d+x\d+", what):
            return m, n, k
    return None


def seconds(value: float, unit: str, operations: int) -> Seconds:
    """A measured time."""
    return operations / (value * 1e12) if unit == "TFLOP/s" else value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def rows() -> list[Compared]:
    """All rows of the table that are expressed."""
    with MICRO.open(newline="") as file:
        return list(compared(list(csv.DictReader(file))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="every row")
    options, found = parser.parse_args(), rows()
    if options.rows:
        for row in found:
            times = f"{row.predicted * 1e6:>10.1f}{row.measured * 1e6:>10.1f} us {row.error:>+7.1%}"
            print(f"{row.kind:<58}{row.device:<11}{times}  {row.what}")
        return
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in found:
        groups[row.kind, row.device].append(row.error)
    print(f"{'kind':<58}{'device':<11}{'rows':>5}{'median':>9}{'|median|':>9}{'largest':>9}")
    for (kind, name), errors in groups.items():
        sizes_of = [abs(error) for error in errors]
        line = f"{statistics.median(errors):>+9.1%}{statistics.median(sizes_of):>9.1%}{max(sizes_of):>9.1%}"
        print(f"{kind:<58}{name:<11}{len(errors):>5}{line}")
    print(f"{len(found)} rows")


if __name__ == "__main__":
    main()

"""Profiles a GPU by a program's operators: which timings determine which coefficients, and what else to time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.cost_models.compute import Pricer, Shapes, Work, pricer
from autopar.cost_models.kernel_fit import (
    AttentionTiming,
    MemoryTiming,
    ProductTiming,
    attention_rate,
    bandwidth_shares,
    product_rate,
)
from autopar.errors import MeshError
from autopar.ir.device import Device, Seconds
from autopar.ir.program import Op, Ref, Value
from autopar.operators import row_of
from autopar.operators.flops import Product

LENGTHS = (512, 1024, 2048, 4096, 8192)  # of sequences over which attention is timed
TOKENS = 16384  # batch x sequence of these, as in FlashAttention's charts
SHORT = 256  # an inner dim so short that what a wave takes beside its arithmetic shows
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An operator at the shapes that it has on one device, forward and backward."""

    op: Op
    given: tuple[Value, ...]  # its operands
    price: Pricer

    @staticmethod
    def of(op: Op, values: Mapping[str, Value], device: Device) -> Kernel:
        """The kernel of an op on a device; `values` holds its operands."""
        return Kernel(op=op, given=tuple(values[name] for name in op.operands), price=pricer(op, values, device))

    @property
    def operands(self) -> Shapes:
        """The shapes of its operands."""
        return tuple(value.shape for value in self.given)

    @property
    def results(self) -> Shapes:
        """The shapes of its results."""
        return tuple(value.shape for value in self.op.results)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its first operand."""
        return (*self.given, *self.op.results)[0].dtype

    @property
    def kind(self) -> str:
        """What its row says: "attention", "norm", "dropout", ...; empty if nothing."""
        kind = row_of(self.op).kind
        return kind.name.lower() if kind else ""

    def work(self, way: int) -> Work:
        """Its work, forward (0) or backward (1)."""
        return (self.price.gradient if way else self.price.forward)(self.operands, self.results)

    def products(self, way: int) -> list[Product]:
        """The matrix products that it consists of; none if it is not a product."""
        if self.price.operations is None:
            return []
        found = list(self.price.operations(self.operands, self.results))
        return [made for product in found for made in product.backward(self.price.gradients)] if way else found


def probes(kernels: Sequence[Kernel], device: Device) -> Iterator[Kernel]:
    """The additional kernels that a fit needs: a program's attention over other lengths, its products with a short inner
    dim.
    """
    seen = set[object]()
    for kernel in kernels:
        if kernel.dtype not in HALF:
            continue
        if kernel.price.attention and len(kernel.operands) == 3 and len(kernel.operands[0]) == 4:
            _, heads, _, dim = kernel.operands[0]
            rest = kernel.op.args[3:], kernel.op.kwargs
            if ("attention", heads, dim, rest) not in seen:
                seen.add(("attention", heads, dim, rest))
                yield from (_attention(kernel, heads, length, dim, device) for length in LENGTHS)
        elif kernel.products(0) and not kernel.price.attention:
            for product in kernel.products(0):
                if product.sizes and (product.sizes.m, product.sizes.n) not in seen:
                    seen.add((product.sizes.m, product.sizes.n))
                    yield _product(product.sizes.m, product.sizes.n, kernel.dtype, device)


def _attention(kernel: Kernel, heads: int, length: int, dim: int, device: Device) -> Kernel:
    """A kernel of attention over another length."""
    shape = max(1, TOKENS // length), heads, length, dim
    values = {name: Value(name=name, shape=shape, dtype=kernel.dtype, requires_grad=True) for name in ("q", "k", "v")}
    made = Value(name="made", shape=shape, dtype=kernel.dtype, requires_grad=True)
    op = replace(kernel.op, args=(*map(Ref, values), *kernel.op.args[3:]), results=(made,))
    return Kernel.of(op, values, device)


def _product(m: int, n: int, dtype: torch.dtype, device: Device) -> Kernel:
    """A product with a short inner dim."""
    shapes = {"left": (m, SHORT), "right": (SHORT, n)}
    values = {name: Value(name=name, shape=shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()}
    made = Value(name="made", shape=(m, n), dtype=dtype, requires_grad=True)
    op = Op(name="short", target="aten.mm.default", args=tuple(map(Ref, values)), results=(made,))
    return Kernel.of(op, values, device)


def fitted(kernels: Sequence[Kernel], seconds: Sequence[tuple[Seconds, Seconds]], base: Device, processors: int) -> Device:
    """`base` with the coefficients that these timings, forward and backward of each kernel, give: all but those of unaligned
    products and of addresses.

    Kernels as short as a launch are uninformative, and so are memory-bound products. Raises MeshError if timings are missing,
    not positive, or of too few kernels.
    """
    if len(kernels) != len(seconds):
        raise MeshError("a fit needs the times of every kernel", kernels=len(kernels), times=len(seconds))
    products, attention, memory = list[ProductTiming](), list[AttentionTiming](), list[MemoryTiming]()
    for kernel, times in zip(kernels, seconds, strict=True):
        for way, time in enumerate(times):
            work = kernel.work(way)
            if not work.kernels or 0 < time < 2 * work.kernels * base.launch:
                continue
            sizes = [product.sizes for product in kernel.products(way)]
            if not sizes:
                memory.append(MemoryTiming(kind=_class(kernel.kind), way=way, bytes=work.bytes, seconds=time))
            elif kernel.dtype not in HALF or None in sizes:
                continue
            elif kernel.price.attention:
                attention.append(_over(kernel, way, work.flops, time))
            elif work.bytes < 0.5 * base.bandwidth * abs(time):
                products.append(ProductTiming(sizes=tuple(size for size in sizes if size), seconds=time))
    source = f"measured on {base.name}, torch {torch.__version__}"
    unaligned = base.product.unaligned if base.product else 1.0
    return replace(
        base,
        product=replace(product_rate(products, base.flops["float16"], processors, source), unaligned=unaligned),
        attention=attention_rate(attention, source) if attention else base.attention,
        achieved={**base.achieved, **bandwidth_shares(memory, base.bandwidth)},
        source=f"{base.source}; kernels {source}",
    )


def _class(kind: str) -> str:
    """The class of a kind of memory-bound operators."""
    return kind if kind in ("norm", "dropout") else "stream"


def _over(kernel: Kernel, way: int, operations: int, time: Seconds) -> AttentionTiming:
    scores = kernel.products(0)[0]
    assert scores.sizes is not None, "attention knows its sizes"
    return AttentionTiming(
        dim=scores.sizes.k, keys=scores.sizes.n, causal=scores.causal, way=way, operations=operations, seconds=time
    )


__all__ = ["Kernel", "fitted", "probes"]

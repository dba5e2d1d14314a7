"""The price of an operator at its local shapes: a roofline, forward and backward.

    seconds = max(operations / peak, bytes / bandwidth, kernels x launch)

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", 2009. Peaks are peaks: no efficiency
is assumed, since a measured profile says it better: it has a rate for the forward and the backward of each operator.

Forward: operands are read once, results written once, and so is what autograd keeps inside (a mask, statistics). Operations
are 2 m n k for a matrix product, 2 x outputs x window for a convolution, 4 b h q k d for attention (half of it when causal),
else one per element. A view costs nothing.

Backward: each operand of a product that needs a gradient costs one more product; attention 2.5 times its forward, five products
for two (T. Dao, FlashAttention-2, 2023, section 4.1). Other operators read the results' gradients and what autograd kept, and
write the operands' gradients. A gradient that is handed on as it is (of an add, say) costs nothing. Adding up the gradients of
a value that has several consumers is not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from autopar.analysis.saved_tensors import ATTENTION, DROPOUT, NOTHING, SavedTensors, saved
from autopar.ir.layout import Shape
from autopar.ir.mesh import Device, Seconds
from autopar.ir.program import Op, Value, aten, filled, overload
from autopar.operators import view_of
from autopar.operators.call import Call

Shapes = Sequence[Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What kernels do: floating-point operations, bytes moved to and from memory, and how many kernels there are."""

    flops: int = 0
    bytes: int = 0
    kernels: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(flops=self.flops + other.flops, bytes=self.bytes + other.bytes, kernels=self.kernels + other.kernels)


def seconds(work: Work, dtype: torch.dtype, device: Device) -> Seconds:
    """The roofline's time of some work in one dtype; no kernels take no time."""
    return roofline(work, peak(dtype, device), device)


def roofline(work: Work, peak: float, device: Device) -> Seconds:
    """The time of some work at a peak in operations per second."""
    if not work.kernels:
        return 0.0
    return max(work.flops / peak, work.bytes / device.bandwidth, work.kernels * device.launch)


def peak(dtype: torch.dtype, device: Device) -> float:
    """Operations per second; a dtype that the device's data sheet does not name runs at the float32 rate."""
    return device.flops.get(str(dtype).removeprefix("torch."), device.flops["float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """An operator that is a matrix product: the two operands that are multiplied, and its operations at given shapes."""

    factors: tuple[int, int]
    flops: Callable[[Shapes, Shapes], int]


def _times_last(position: int) -> Callable[[Shapes, Shapes], int]:
    """2 x results x the last dim of an operand."""
    return lambda operands, results: 2 * math.prod(results[0]) * (operands[position][-1] if operands[position] else 1)


def _convolution(operands: Shapes, results: Shapes) -> int:
    """2 x outputs x window; the weight is (out, in / groups, window...)."""
    return 2 * math.prod(results[0]) * math.prod(operands[1][1:])


def _transposed(operands: Shapes, results: Shapes) -> int:
    """2 x inputs x window; the weight is (in, out / groups, window...)."""
    return 2 * math.prod(operands[0]) * math.prod(operands[1][1:])


def _recurrent(operands: Shapes, results: Shapes) -> int:
    """2 x steps x batch x elements of the matrices; sequence and states have three dims, biases one."""
    return 2 * math.prod(operands[0][:2]) * sum(math.prod(shape) for shape in operands if len(shape) == 2)


FIRST = Product(factors=(0, 1), flops=_times_last(0))
SECOND = Product(factors=(1, 2), flops=_times_last(1))  # operand 0 is added
WINDOW = Product(factors=(0, 1), flops=_convolution)
TRANSPOSED = Product(factors=(0, 1), flops=_transposed)

PRODUCTS: dict[str, Product] = {
    "aten.linear.default": FIRST,
    "aten.matmul.default": FIRST,
    "aten.mm.default": FIRST,
    "aten.bmm.default": FIRST,
    "aten.mv.default": FIRST,
    "aten.dot.default": FIRST,
    "aten.addmm.default": SECOND,
    "aten.addmv.default": SECOND,
    "aten.baddbmm.default": SECOND,
    "aten.conv1d.default": WINDOW,
    "aten.conv2d.default": WINDOW,
    "aten.conv3d.default": WINDOW,
    "aten.conv1d.padding": WINDOW,
    "aten.conv2d.padding": WINDOW,
    "aten.conv3d.padding": WINDOW,
    "aten.convolution.default": WINDOW,
    "aten.conv_transpose1d.default": TRANSPOSED,
    "aten.conv_transpose2d.input": TRANSPOSED,
    "aten.conv_transpose3d.input": TRANSPOSED,
    "transformers.grouped_mm_fallback.default": FIRST,
    "aten.lstm.input": Product(factors=(0, 3), flops=_recurrent),  # the sequence, two states, the weights
    **{f"aten.{name}.input": Product(factors=(0, 2), flops=_recurrent) for name in ("gru", "rnn_tanh", "rnn_relu")},
}

# Operators that read only the elements they pick: twice the result, and the index. The operand they pick from.
PICKS: dict[str, int] = {
    "aten.embedding.default": 0,
    "aten.index.Tensor": 0,
    "aten.index_select.default": 0,
    "aten.gather.default": 0,
}

# Operators whose result's gradient is the operand's gradient as it is, where the shapes are equal: the operands.
HANDED_ON: dict[str, tuple[int, ...]] = {
    "aten.add.Tensor": (0, 1),
    "aten.add.Scalar": (0,),
    "aten.sub.Tensor": (0,),
    "aten.sub.Scalar": (0,),
    "aten.clone.default": (0,),
    "aten.contiguous.default": (0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricer:
    """The price of one op as a function of its local shapes: `pricer(operands, results)` is seconds, forward and backward.

    Shapes are those of the tensor operands in the order of `Op.operands`, and of the results.
    """

    device: Device
    peak: float  # operations per second in the dtype that it computes in
    operands: tuple[int, ...]  # bytes per element
    results: tuple[int, ...]
    free: bool  # no kernel in the forward
    product: Product | None
    attention: float  # operations per query row, key and channel: 4, or 2 when causal; 0 for other operators
    counted: Callable[[Shapes, Shapes], int] | None  # operations, by the user's own formula
    picks: int | None  # the operand of which only the picked elements are read
    continuous: bool  # whether it computes with floating-point numbers
    backward: bool
    gradients: tuple[int, ...]  # operands that need a gradient
    results_with_gradient: tuple[int, ...]
    handed_on: frozenset[int]
    saved: SavedTensors
    rates: tuple[float, float] | None  # measured, of the forward and the backward

    def __call__(self, operands: Shapes, results: Shapes) -> Seconds:
        return self.forward_seconds(operands, results) + self.backward_seconds(operands, results)

    def forward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        """Seconds of one forward at these local shapes."""
        return self._seconds(self.forward(operands, results), 0)

    def backward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        """Seconds of one backward; 0 where no gradient is needed."""
        return self._seconds(self.gradient(operands, results), 1) if self.backward else 0.0

    def _seconds(self, work: Work, which: int) -> Seconds:
        """At the measured rate if there is one: operations of products and attention, bytes of other operators."""
        if not self.rates or not work.kernels:
            return roofline(work, self.peak, self.device)
        return max(self.amount(work) / self.rates[which], self.device.launch)

    def amount(self, work: Work) -> int:
        """What a measured rate counts: operations of products and attention, bytes of other operators."""
        return work.flops if self.product is not None or self.attention else work.bytes

    def forward(self, operands: Shapes, results: Shapes) -> Work:
        """Operations, bytes and kernels of one forward."""
        if self.free:
            return Work()
        read = sum(math.prod(s) * size for s, size in zip(operands, self.operands, strict=True))
        written = sum(math.prod(s) * size for s, size in zip(results, self.results, strict=True))
        if self.picks is not None:
            read += written - math.prod(operands[self.picks]) * self.operands[self.picks]
        inside = self.saved.local_internal(operands, results)
        return Work(flops=self.flops(operands, results), bytes=read + written + inside, kernels=1)

    def flops(self, operands: Shapes, results: Shapes) -> int:
        """Floating-point operations of one forward."""
        if self.product is not None:
            return self.product.flops(operands, results)
        if self.attention:
            # q k^T is b h q k d, and the weighted sum b h q k e
            query, key, value = operands[:3]
            return int(self.attention * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]) / 2)
        if self.counted is not None:
            return self.counted(operands, results)
        if not self.continuous:
            return 0
        if self.picks is not None:
            return math.prod(results[0])
        return max(math.prod(shape) for shape in (*operands, *results))

    def gradient(self, operands: Shapes, results: Shapes) -> Work:
        """Operations, bytes and kernels of one backward."""
        if not self.backward:
            return Work()
        if self.product is not None:
            return self._product_gradient(self.product, operands, results)
        written = [p for p in self.gradients if not (p in self.handed_on and operands[p] == results[0])]
        if self.free:  # a view's gradient is a view too, unless the view leaves out or repeats elements
            same = len(results) == 1 and math.prod(operands[0]) == math.prod(results[0])
            written = [] if same else written
        if not written:
            return Work()
        moved = sum(math.prod(results[p]) * self.results[p] for p in self.results_with_gradient)
        moved += sum(math.prod(operands[p]) * self.operands[p] for p in (*written, *self.saved.operands))
        moved += sum(math.prod(results[p]) * self.results[p] for p in self.saved.results)
        moved += self.saved.local_internal(operands, results)
        forward = self.flops(operands, results)
        times = 2.5 if self.attention else 2 if self.counted else 1
        return Work(flops=int(times * forward), bytes=moved, kernels=1)

    def _product_gradient(self, product: Product, operands: Shapes, results: Shapes) -> Work:
        """One product per factor that needs a gradient, one sum per operand that is added."""
        given = math.prod(results[0]) * self.results[0]
        sizes = [math.prod(s) * size for s, size in zip(operands, self.operands, strict=True)]
        factors = [p for p in self.gradients if p in product.factors]
        added = [p for p in self.gradients if p not in product.factors]
        both = sum(sizes[p] for p in product.factors)
        return Work(
            flops=len(factors) * product.flops(operands, results) + len(added) * math.prod(results[0]),
            bytes=len(factors) * (given + both) + sum(given + sizes[p] for p in added),
            kernels=len(factors) + len(added),
        )


def pricer(op: Op, values: Mapping[str, Value], device: Device) -> Pricer:
    """The pricer of one op on one device; `values` gives its operands. Build it once, call it for each candidate.

    An operator that no table names is priced by its bytes and one operation per element, or by its formula in torch's flop
    counter: then its backward is twice its forward, as that of a product is.
    """
    operands = tuple(values[name] for name in op.operands)
    backward = op.requires_grad
    kept = saved(op, values, cpu=device.cpu) if backward else NOTHING
    arguments = Call.of(op).arguments if op.target == ATTENTION or op.target in DROPOUT else {}
    idle = op.target in DROPOUT and (arguments.get("train") is False or arguments.get("p") == 0)
    dtype = dtype_of(op, operands)
    return Pricer(
        device=device,
        peak=peak(dtype, device),
        operands=tuple(value.dtype.itemsize for value in operands),
        results=tuple(value.dtype.itemsize for value in op.results),
        free=idle or view_of(op),
        product=PRODUCTS.get(op.target),
        attention=(2.0 if arguments.get("is_causal") else 4.0) if op.target == ATTENTION else 0.0,
        counted=_counted(op),
        picks=PICKS.get(op.target),
        continuous=dtype.is_floating_point or dtype.is_complex,
        backward=backward,
        gradients=tuple(p for p, value in enumerate(operands) if value.requires_grad) if backward else (),
        results_with_gradient=tuple(p for p, value in enumerate(op.results) if value.requires_grad),
        handed_on=frozenset(HANDED_ON.get(op.target, ())),
        saved=kept,
        rates=device.rates.get(op.target),
    )


def _counted(op: Op) -> Callable[[Shapes, Shapes], int] | None:
    """The formula that was given to `torch.utils.flop_counter.register_flop_formula` for an operator of another library."""
    formula = None if aten(op.target) else flop_registry.get(overload(op.target).overloadpacket)
    if formula is None:
        return None

    def count(operands: Shapes, results: Shapes) -> int:
        feed = iter(operands)
        args, kwargs = filled(op.args, op.kwargs, lambda _: torch.empty(next(feed), device="meta"))
        made = [torch.empty(shape, device="meta") for shape in results]
        return int(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))

    return count


def dtype_of(op: Op, operands: Sequence[Value]) -> torch.dtype:
    """The dtype it computes in: that of its first floating-point operand, else of its first result."""
    given = (*operands, *op.results)
    found = next((value.dtype for value in given if value.dtype.is_floating_point or value.dtype.is_complex), None)
    return found or given[0].dtype

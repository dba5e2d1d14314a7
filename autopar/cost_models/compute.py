"""The price of an operator at its local shapes: a roofline, forward and backward.

    seconds = max(seconds of its operations, bytes / bandwidth, kernels x launch)

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", 2009. If the device has
efficiencies, products and attention take the time of real kernels (`autopar.cost_models.kernels`), and memory traffic the share
of the bandwidth that such a kernel reaches; else peaks are used. A measured profile may have a rate for the forward and the
backward of an operator instead.

Forward: operands are read once, results written once, and so is what autograd keeps inside (a mask, statistics). Operations
are those of the products that an operator's row names (`autopar.operators.flops`), else one per element. A view costs nothing.

Backward: one more product for each side of a product that needs a gradient; fused attention computes its scores once more (T.
Dao, FlashAttention-2, 2023, section 4.1). Norms and dropout read the results' gradients and what autograd kept, and write the
operands' gradients, in one kernel. Others read and write what the operators that torch dispatches in their backward do, each a
kernel (`analysis.traffic`), or as much as norms where these are not known. A pointwise kernel with a broadcast operand computes
an address for every element, which may take longer than its bytes. A gradient that is handed on as it is (of an add, say) costs
nothing. Of a value with several consumers the gradients are added up, one after the other: two are read and one is
written for each but the last consumer, as `Op.summed` tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from autopar.analysis.saved_tensors import NOTHING, SavedTensors, saved
from autopar.cost_models.kernels import attention_seconds, products_seconds
from autopar.ir.device import Device, Seconds
from autopar.ir.kernel_rates import ALIGNMENT
from autopar.ir.layout import Shape
from autopar.ir.program import Fused, Op, Value, aten, filled, overload
from autopar.operators import Rule, fit, row_of, view_of, writes
from autopar.operators.call import Call, Local
from autopar.operators.facts import OpKind
from autopar.operators.flops import Product, contraction

Shapes = Sequence[Shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of kernels: floating-point operations, bytes moved to and from memory, and the number of kernels."""

    flops: int = 0
    bytes: int = 0
    kernels: int = 0
    strided: int = 0  # bytes among them of pointwise kernels that compute an address for every element,
    computed: int = 0  # so many elements

    def __add__(self, other: Work) -> Work:
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})


def roofline(work: Work, arithmetic: Seconds, bandwidth: float, launch: Seconds, addresses: float = math.inf) -> Seconds:
    """The time of some work, given the seconds of its operations, at so many `addresses` per second; zero without kernels."""
    moving = (work.bytes - work.strided) / bandwidth + max(work.strided / bandwidth, work.computed / addresses)
    return max(arithmetic, moving, work.kernels * launch) if work.kernels or work.bytes else 0.0


def peak(dtype: torch.dtype, device: Device) -> float:
    """Operations per second; a dtype that the device's data sheet does not name runs at the float32 rate."""
    return device.flops.get(str(dtype).removeprefix("torch."), device.flops["float32"])


Operations = Callable[[Shapes, Shapes], Sequence[Product]]  # the products of an op at local shapes of operands and results


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
    writes: bool  # into its first operand, of which it reads nothing
    operations: Operations | None  # None: one per element
    matrices: bool  # whether its products are of its operands as they lie in memory
    fused: bool  # one kernel runs all of its products, and one their backward
    attention: bool
    draws: bool
    single: bool  # one kernel runs its backward, whatever torch dispatches on meta tensors
    shares: tuple[float, float]  # of the memory bandwidth that its kernels reach, forward and backward
    picks: int | None  # the operand of which only the picked elements are read
    continuous: bool  # whether it computes with floating-point numbers
    pointwise: bool  # whether a result's element is computed from those in its place
    backward: bool
    gradients: tuple[int, ...]  # operands that need a gradient
    results_with_gradient: tuple[int, ...]
    handed_on: frozenset[int]
    saved: SavedTensors
    part: Fused | None  # of a kernel of several ops
    summed: tuple[int, ...]  # operands whose gradient is added to that of later ops,
    adding: float  # at so many bytes per second
    rates: tuple[float, float] | None  # measured, of the forward and the backward

    def __call__(self, operands: Shapes, results: Shapes) -> Seconds:
        return self.forward_seconds(operands, results) + self.backward_seconds(operands, results)

    def forward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        """Seconds of one forward at these local shapes."""
        return self._seconds(self.forward(operands, results), operands, results, 0)

    def backward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        """Seconds of one backward; 0 where no gradient is needed."""
        if not self.backward:
            return 0.0
        sums = sum(max(size / self.adding, self.device.launch) for size in self.sums(operands))
        return self._seconds(self.gradient(operands, results), operands, results, 1) + sums

    def sums(self, operands: Shapes) -> list[int]:
        """Bytes read and written to add each of its gradients to those of later ops."""
        return [3 * math.prod(operands[p]) * self.operands[p] for p in self.summed]

    def _seconds(self, work: Work, operands: Shapes, results: Shapes, way: int) -> Seconds:
        """Seconds at the measured rate if there is one (0: none of the backward), else by its kernels; `way` 0 forward, 1
        backward.
        """
        if self.rates and self.rates[way] and work.kernels:
            return max(self.amount(work) / self.rates[way], self.device.launch)
        arithmetic = self._arithmetic(work, operands, results, way) if work.flops else 0.0
        bandwidth = self.device.bandwidth * self.shares[way]
        return roofline(work, arithmetic, bandwidth, self.device.launch, self.device.addresses)

    def _arithmetic(self, work: Work, operands: Shapes, results: Shapes, way: int) -> Seconds:
        """Seconds of the operations alone, by the laws of `kernels` where the device has their coefficients."""
        device, at_peak = self.device, work.flops / self.peak
        if self.operations is None or (device.attention if self.attention else device.product) is None:
            return at_peak
        products = self.operations(operands, results)
        if self.attention:
            return attention_seconds(products, work.flops, self.peak, device, way)
        if way:
            products = [made for product in products for made in product.backward(self.gradients)]
        other = work.flops - sum(product.flops for product in products)  # adding up the gradients of what is added
        return products_seconds(products, self.peak, device, aligned=self._aligned(operands, results)) + other / self.peak

    def _aligned(self, operands: Shapes, results: Shapes) -> bool:
        """Whether the rows of all its matrices, which are those of its backward too, begin at multiples of `ALIGNMENT`."""
        if not self.matrices or not self.device.aligns:
            return True
        shapes = zip((*operands, *results), (*self.operands, *self.results), strict=True)
        return all(shape[-1] * size % ALIGNMENT == 0 for shape, size in shapes if len(shape) > 1)

    def amount(self, work: Work) -> int:
        """The unit of a measured rate: operations for products, bytes for other operators."""
        return work.flops if self.operations is not None else work.bytes

    def forward(self, operands: Shapes, results: Shapes) -> Work:
        """Operations, bytes and kernels of one forward."""
        if self.free:
            return Work()
        if self.writes:  # as many elements of the first operand as the largest of the others has, which it reads
            given = [math.prod(s) * size for s, size in zip(operands[1:], self.operands[1:], strict=True)]
            return Work(flops=0, bytes=sum(given) + max(given), kernels=1)
        if self.part:
            return self._part(self.part, operands, results)
        read = sum(math.prod(s) * size for s, size in zip(operands, self.operands, strict=True))
        written = sum(math.prod(s) * size for s, size in zip(results, self.results, strict=True))
        if self.picks is not None:
            read += written - math.prod(operands[self.picks]) * self.operands[self.picks]
        moved = read + written + self.saved.local_internal(operands, results)
        broadcast = self.pointwise and any(math.prod(shape) > 1 and shape != results[0] for shape in operands)
        strided, computed = (moved, math.prod(results[0])) if broadcast else (0, 0)
        return Work(flops=self.flops(operands, results), bytes=moved, kernels=1, strided=strided, computed=computed)

    def _part(self, part: Fused, operands: Shapes, results: Shapes) -> Work:
        """The forward's share in a kernel of several ops, whose launch is that of what it writes."""
        like = [results[0] if p == self.picks else shape for p, shape in enumerate(operands)]
        read = sum(math.prod(like[p]) * (self.results[0] if p == self.picks else self.operands[p]) for p in part.operands)
        written = sum(math.prod(results[p]) * self.results[p] for p in part.results) + self._mask(operands, results)
        return Work(flops=self.flops(operands, results), bytes=read + written, kernels=len(part.results))

    def _part_gradient(self, part: Fused, operands: Shapes, results: Shapes) -> Work:
        """The backward's share in a kernel of several ops; of a view that is a kernel of its own, that of its part."""
        sizes = [math.prod(s) * size for s, size in zip(operands, self.operands, strict=True)]
        made = [math.prod(s) * size for s, size in zip(results, self.results, strict=True)]
        gradients = [p for p in part.gradients if p in self.gradients]
        written = [min(sizes[p], made[0]) if self.free else sizes[p] for p in gradients]
        read = sum(made[p] for p in part.arriving if p in self.results_with_gradient)
        read += sum(sizes[p] for p in part.again) + sum(made[p] for p in self.saved.results if p in part.results)
        read += self._mask(operands, results)
        summed = not self.free and any(math.prod(operands[p]) < max(map(math.prod, results)) for p in gradients)
        if summed:  # over other dims than the rest of the backward, which is read once more for it
            read += sum(made[p] for p in self.results_with_gradient) + sum(sizes[p] for p in self.saved.operands)
        return Work(flops=self.backward_flops(operands, results), bytes=read + sum(written), kernels=bool(written))

    def _mask(self, operands: Shapes, results: Shapes) -> int:
        """Bytes of a dropout's mask: random numbers are kept, other intermediate results are computed again."""
        return self.saved.local_internal(operands, results) if self.draws else 0

    def flops(self, operands: Shapes, results: Shapes) -> int:
        """Floating-point operations of one forward."""
        if self.operations is not None:
            return sum(product.flops for product in self.operations(operands, results))
        if not self.continuous:
            return 0
        if self.picks is not None:
            return math.prod(results[0])
        return max(math.prod(shape) for shape in (*operands, *results))

    def gradient(self, operands: Shapes, results: Shapes) -> Work:
        """Operations, bytes and kernels of one backward."""
        if not self.backward:
            return Work()
        if self.operations is not None and not self.fused:
            return self._products_gradient(self.operations(operands, results), operands, results)
        written = [p for p in self.gradients if not (p in self.handed_on and operands[p] == results[0])]
        if self.free:  # a view's gradient is a view too, unless the view leaves out or repeats elements
            same = len(results) == 1 and math.prod(operands[0]) == math.prod(results[0])
            written = [] if same else written
        if self.part and (written or not self.free):
            return self._part_gradient(self.part, operands, results)
        if not written:
            return Work()
        if self.saved.traffic is not None and not self.single:
            moved, strided, computed = self.saved.local_traffic(operands, results)
            flops, kernels = self.backward_flops(operands, results), self.saved.kernels
            return Work(flops=flops, bytes=moved, kernels=kernels, strided=strided, computed=computed)
        moved = sum(math.prod(results[p]) * self.results[p] for p in self.results_with_gradient)
        moved += sum(math.prod(operands[p]) * self.operands[p] for p in (*written, *self.saved.operands))
        moved += sum(math.prod(results[p]) * self.results[p] for p in self.saved.results)
        moved += self.saved.local_internal(operands, results)
        return Work(flops=self.backward_flops(operands, results), bytes=moved, kernels=1)

    def backward_flops(self, operands: Shapes, results: Shapes) -> int:
        """Operations of one backward, without summing the gradients of added operands."""
        if self.operations is None:
            return self.flops(operands, results)
        products = self.operations(operands, results)
        return sum(made.flops for product in products for made in product.backward(self.gradients))

    def _products_gradient(self, products: Sequence[Product], operands: Shapes, results: Shapes) -> Work:
        """A product for each side of one that needs a gradient, a sum for each operand that is added."""
        given = math.prod(results[0]) * self.results[0]
        sizes = [math.prod(s) * size for s, size in zip(operands, self.operands, strict=True)]
        multiplied = frozenset().union(*(product.left | product.right for product in products))
        added = [p for p in self.gradients if p not in multiplied]
        sides = [
            given + sum(sizes[p] for p in product.left | product.right)
            for product in products
            for side in (product.left, product.right)
            if not side.isdisjoint(self.gradients)
        ]
        return Work(
            flops=self.backward_flops(operands, results) + len(added) * math.prod(results[0]),
            bytes=sum(sides) + sum(given + sizes[p] for p in added),
            kernels=len(sides) + len(added),
        )


def pricer(op: Op, values: Mapping[str, Value], device: Device) -> Pricer:
    """The pricer of one op on one device; `values` gives its operands. Build it once, call it for each candidate.

    An operator without operations in its row is priced by its bytes and one operation per element, or by its formula in torch's
    flop counter: then its backward takes twice its forward, like that of a product.
    """
    row, call = row_of(op), Call.of(op, values)
    backward = op.requires_grad
    dtype = dtype_of(op, call.operands)
    part = op.fused if op.target not in device.rates else None
    return Pricer(
        device=device,
        peak=peak(dtype, device),
        operands=tuple(value.dtype.itemsize for value in call.operands),
        results=tuple(value.dtype.itemsize for value in op.results),
        free=view_of(op, values) and not writes(op),
        writes=view_of(op, values) and bool(writes(op)),
        operations=_operations(op, row, call, values),
        matrices=row.flops is contraction,
        fused=row.flops is None or row.kind is OpKind.ATTENTION,
        attention=row.kind is OpKind.ATTENTION,
        draws=row.kind is OpKind.DROPOUT,
        single=row.kind in (OpKind.ATTENTION, OpKind.DROPOUT, OpKind.NORM),
        shares=device.share(row.kind.name.lower() if row.kind and not part else ""),
        picks=next(iter(call.positions(row.picks)), None),
        continuous=dtype.is_floating_point or dtype.is_complex,
        pointwise=bool(aten(op.target)) and torch.Tag.pointwise in overload(op.target).tags,
        backward=backward,
        gradients=tuple(p for p, value in enumerate(call.operands) if value.requires_grad) if backward else (),
        results_with_gradient=tuple(p for p, value in enumerate(op.results) if value.requires_grad),
        handed_on=frozenset(p for name in row.hands_on for p in call.positions(name)),
        saved=saved(op, values, cpu=device.cpu) if backward else NOTHING,
        part=part,
        summed=op.summed if backward else (),
        adding=device.rates.get("aten.add.Tensor", (device.streaming, 0.0))[0],
        rates=device.rates.get(op.target),
    )


def _operations(op: Op, row: Rule, call: Call, values: Mapping[str, Value]) -> Operations | None:
    """The products of an op by its row, else by torch's flop counter; None if neither knows it."""
    flops, fitted = row.flops, fit(op, values) if row.flops else None
    if flops is None or fitted is None:
        return _counted(op)
    return lambda operands, results: flops(call, Local(fitted=fitted, operands=operands, results=results, parts=()))


def _counted(op: Op) -> Operations | None:
    """The formula that was given to `torch.utils.flop_counter.register_flop_formula` for an operator of another library."""
    formula = None if aten(op.target) else flop_registry.get(overload(op.target).overloadpacket)
    if formula is None:
        return None
    all_of_them = frozenset(range(len(op.operands)))

    def count(operands: Shapes, results: Shapes) -> list[Product]:
        feed = iter(operands)
        args, kwargs = filled(op.args, op.kwargs, lambda _: torch.empty(next(feed), device="meta"))
        made = [torch.empty(shape, device="meta") for shape in results]
        flops = int(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))
        return [Product(sizes=None, counted=flops, left=all_of_them, right=all_of_them)]

    return count


def dtype_of(op: Op, operands: Sequence[Value]) -> torch.dtype:
    """The dtype it computes in: that of its first floating-point operand, else of its first result."""
    given = (*operands, *op.results)
    found = next((value.dtype for value in given if value.dtype.is_floating_point or value.dtype.is_complex), None)
    return found or given[0].dtype

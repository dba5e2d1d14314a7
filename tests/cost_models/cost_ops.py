"""Ops and values for the tests of cost models, written as short as `op("aten.gelu.default", x(4, 8))`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.analysis.saved_tensors import SavedTensors, saved
from autopar.cost_models.compute import Pricer, pricer
from autopar.ir.device import Device
from autopar.ir.program import Argument, Op, Ref, Value, filled, overload

Shape = tuple[int, ...]


def x(*shape: int, dtype: torch.dtype = torch.float32, grad: bool | None = None) -> Value:
    """An operand; it needs a gradient unless it is said not to, or is no floating-point tensor."""
    return Value(name="", shape=shape, dtype=dtype, requires_grad=dtype.is_floating_point if grad is None else grad)


def index(*shape: int) -> Value:
    """An operand of indices."""
    return x(*shape, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An op with the values of its operands."""

    op: Op
    values: Mapping[str, Value]

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(self.values[name] for name in self.op.operands)

    @property
    def shapes(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """The global shapes of operands and results."""
        return tuple(v.shape for v in self.operands), tuple(v.shape for v in self.op.results)

    def saved(self, *, cpu: bool = False) -> SavedTensors:
        return saved(self.op, self.values, cpu=cpu)

    def pricer(self, device: Device) -> Pricer:
        return pricer(self.op, self.values, device)


def op(target: str, *args: object, **kwargs: object) -> Built:
    """An op whose results have the shapes that the operator gives on meta tensors."""
    values: dict[str, Value] = {}

    def place(part: object) -> Argument:
        if isinstance(part, tuple):
            return tuple(map(place, part))
        if isinstance(part, Value):
            name = f"v{len(values)}"
            values[name] = Value(name=name, shape=part.shape, dtype=part.dtype, requires_grad=part.requires_grad)
            return Ref(name)
        return part  # type: ignore[return-value]

    placed = tuple(map(place, args))
    keywords = tuple((name, place(part)) for name, part in kwargs.items())
    out = run(Op(name="op", target=target, args=placed, kwargs=keywords, results=()), values, "meta")
    grad = any(value.requires_grad for value in values.values())
    results = tuple(
        Value(name=f"r{i}", shape=tuple(t.shape), dtype=t.dtype, requires_grad=grad and t.dtype.is_floating_point)
        for i, t in enumerate(out)
    )
    return Built(op=Op(name="op", target=target, args=placed, kwargs=keywords, results=results), values=values)


def tensors(values: Mapping[str, Value], device: str) -> dict[str, torch.Tensor]:
    """Tensors for the values: ones, or zeros for indices."""
    return {
        name: torch.full(value.shape, float(value.dtype.is_floating_point), device=device)
        .to(value.dtype)
        .requires_grad_(value.requires_grad)
        for name, value in values.items()
    }


def run(op: Op, values: Mapping[str, Value], device: str) -> list[torch.Tensor]:
    """The op's results on this device."""
    given = tensors(values, device)
    return call(op, given)


def call(op: Op, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The op's results for these operands."""
    args, kwargs = filled(op.args, op.kwargs, lambda ref: given[ref.name])
    out = overload(op.target)(*args, **kwargs)
    return [out] if isinstance(out, torch.Tensor) else list(out)

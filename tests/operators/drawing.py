"""Calls of operators on tensors drawn at random: what the examples of rules are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from autopar.ir.program import Argument, Op, Ref, Value, filled, overload


@dataclass(frozen=True, slots=True)
class T:
    """A random tensor; `high` is the bound of integers."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    high: int = 3
    grad: bool = True

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.dtype == torch.int64:
            return torch.randint(0, self.high, self.shape, generator=generator)
        return torch.randn(self.shape, dtype=self.dtype, generator=generator)


@dataclass(frozen=True, slots=True)
class Positive(T):
    """A random tensor of values between `low`, 0.1, and `low` + 0.8."""

    low: float = 0.1

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(self.shape, dtype=self.dtype, generator=generator) * 0.8 + self.low


@dataclass(frozen=True, slots=True)
class Signs(T):
    """Ones and minus ones."""

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return (torch.rand(self.shape, dtype=self.dtype, generator=generator) < 0.5).to(self.dtype) * 2 - 1


@dataclass(frozen=True, slots=True)
class Places(T):
    """Integers below `high`, different ones along the last `dims` dims."""

    dims: int = 1

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        lead = self.shape[: len(self.shape) - self.dims]
        order = torch.rand((*lead, self.high), generator=generator).argsort(-1)
        return order[..., : math.prod(self.shape[len(lead) :])].reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Labels(Places):
    """The first half of different integers below `high`, then -1."""

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        drawn = Places.draw(self, generator)
        drawn[..., self.shape[-1] // 2 :] = -1
        return drawn


@dataclass(frozen=True, slots=True)
class Ends(T):
    """Where groups of `high` rows end, that have any number of rows."""

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randint(0, self.high, self.shape, generator=generator).sort()[0]
        drawn[-1] = self.high
        return drawn.to(self.dtype)


@dataclass(frozen=True, slots=True)
class From(T):
    """Integers from `low` to below `high`."""

    low: int = 0

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(self.low, self.high, self.shape, generator=generator)


@dataclass(frozen=True, slots=True)
class Definite(T):
    """Symmetric positive definite matrices."""

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(self.shape, dtype=self.dtype, generator=generator)
        return drawn @ drawn.mT + torch.eye(self.shape[-1], dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Example:
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()

    def build(self, target: str, seed: int = 0) -> tuple[Op, dict[str, Value], dict[str, torch.Tensor]]:
        """The op, its values by name, and its operands."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        grads: dict[str, bool] = {}

        def ref(part: object) -> Argument:
            if isinstance(part, (tuple, list)):
                return tuple(map(ref, part))
            if isinstance(part, T):
                name = f"x{len(tensors)}"
                tensors[name] = part.draw(generator)
                grads[name] = part.grad
                return Ref(name)
            return part  # type: ignore[return-value]

        args = tuple(map(ref, self.args))
        kwargs = tuple((name, ref(value)) for name, value in self.kwargs)
        given, named = filled(args, kwargs, lambda ref: tensors[ref.name])
        found = overload(target)(*given, **named)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        values = {
            name: Value(name=name, shape=tuple(x.shape), dtype=x.dtype, requires_grad=differentiable(x) and grads[name])
            for name, x in tensors.items()
        }
        outs = tuple(Value(name=f"y{i}", shape=tuple(r.shape), dtype=r.dtype) for i, r in enumerate(results))
        return Op(name="y", target=target, args=args, kwargs=kwargs, results=outs), values, tensors


def differentiable(tensor: torch.Tensor | Value) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def ex(*args: object, **kwargs: object) -> Example:
    return Example(args, tuple(kwargs.items()))


def t(*shape: int) -> T:
    return T(shape)


def half(*shape: int) -> T:
    return T(shape, torch.bfloat16)


def pos(*shape: int) -> T:
    return Positive(shape)


def buffer(*shape: int) -> T:
    """Positive numbers that need no gradient."""
    return Positive(shape, grad=False)


def ints(*shape: int, high: int = 3) -> T:
    return T(shape, torch.int64, high)


def bools(*shape: int) -> T:
    return T(shape, torch.bool)


def signs(*shape: int) -> T:
    return Signs(shape, grad=False)


def places(*shape: int, high: int, dims: int = 1) -> T:
    return Places(shape, torch.int64, high, dims=dims)


def labels(*shape: int) -> T:
    return Labels(shape, torch.int64, shape[-1])


def between(*shape: int, low: int, high: int) -> T:
    return From(shape, torch.int64, high, low=low)


def definite(*shape: int) -> T:
    return Definite(shape)


def cplx(*shape: int) -> T:
    return T(shape, torch.complex128)

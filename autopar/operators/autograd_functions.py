"""Operators that call a user's `autograd.Function`, with its own gradients.

    y = Rounded.apply(x)      ->      y = torch.ops.autopar_function.Rounded(x)

The tensors are operands; all other arguments are part of the operator, so other numbers make another operator. The rule of an
operator is found by running it on small parts, at several scales.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import Function

from autopar.ir.program import overload
from autopar.operators.checking.discover import discover_rule
from autopar.operators.checking.register import check_rule, register_rule
from autopar.operators.registry import FOUND, REGISTERED
from autopar.operators.rule import Rule

NAMESPACE = "autopar_function"
OPERAND = ...  # in the arguments of a function, the place of a tensor
CONSTANTS = (bool, int, float, complex, str, torch.dtype, type(None))
SCALES = (1e-3, 1.0, 1e3)  # of operands and of incoming gradients: a clamp shows in one of them
NEAR = 1e-9  # of the largest element of a result or a gradient
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedFunction:
    """A function with its arguments other than tensors, and the form of its result."""

    function: type[Function]
    arguments: tuple[object, ...]  # constants, and OPERAND for each tensor
    results: int
    several: bool  # whether it returns a tuple
    views: frozenset[int]  # results that share the memory of an operand, which no operator may return
    detached: frozenset[int]  # floating results that the function marks as not differentiable

    def __call__(self, *operands: torch.Tensor) -> Any:
        """Apply the function: a tensor, or a tuple of several."""
        feed = iter(operands)
        found = self.function.apply(*(next(feed) if one is OPERAND else one for one in self.arguments))  # type: ignore[no-untyped-call]
        made = tuple(one.clone() if i in self.views else one for i, one in enumerate(found if self.several else (found,)))
        return made if self.results > 1 else made[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOperator:
    """An operator of `NAMESPACE`, whose rule is that of operands of these kinds."""

    name: str
    call: AppliedFunction
    kinds: tuple[object, ...]

    @property
    def target(self) -> str:
        """The operator's name in programs."""
        return f"{NAMESPACE}.{self.name}.default"

    def __call__(self, *operands: torch.Tensor) -> object:
        """The function's result, computed by the operator."""
        made = overload(self.target)(*operands)
        results = made if self.call.results > 1 else (made,)
        found = tuple(one.detach() if i in self.call.detached else one for i, one in enumerate(results))
        return found if self.call.several else found[0]


DEFINED: dict[str, FunctionOperator] = {}  # the operators of this process, by name


def _constants(args: Sequence[object]) -> tuple[object, ...] | None:
    """The arguments of a function with OPERAND for tensors; None where something else than a constant stands among them."""
    found = tuple(OPERAND if isinstance(one, torch.Tensor) else one for one in args)
    return found if all(one is OPERAND or _constant(one) for one in found) else None


def _constant(value: object) -> bool:
    return all(map(_constant, value)) if isinstance(value, (list, tuple)) else isinstance(value, CONSTANTS)


def tried(function: type[Function], args: Sequence[object]) -> AppliedFunction | None:
    """Probe a function by a call on these arguments; None if no operator can call it.

    That is if it, or its backward, writes into an operand, if it draws random numbers, which would differ between ranks, or if
    it returns anything but tensors.
    """
    given = _constants(args)
    operands = [one for one in args if isinstance(one, torch.Tensor)]
    if given is None or not operands:
        return None
    before, state = [one._version for one in operands], torch.get_rng_state()
    found: object = function.apply(*args)  # type: ignore[no-untyped-call]
    results = found if isinstance(found, tuple) else (found,)
    if [one._version for one in operands] != before or not torch.equal(torch.get_rng_state(), state):
        return None
    if not results or not all(isinstance(one, torch.Tensor) for one in results):
        return None
    _differentiate([one for one in results if one.requires_grad], operands)
    if [one._version for one in operands] != before:
        return None
    differentiable = any(one.requires_grad for one in results)
    memory = {one.untyped_storage().data_ptr() for one in operands}
    views = frozenset(i for i, one in enumerate(results) if one.untyped_storage().data_ptr() in memory)
    return AppliedFunction(
        function=function,
        arguments=given,
        results=len(results),
        several=isinstance(found, tuple),
        views=views,
        detached=frozenset(
            i for i, one in enumerate(results) if differentiable and one.is_floating_point() and not one.requires_grad
        ),
    )


def _differentiate(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
    """Run the backward of some results; its errors matter only to those who need the gradients."""
    wanted = [one for one in operands if one.requires_grad]
    if results and wanted:
        with contextlib.suppress(Exception):
            torch.autograd.grad(
                results, wanted, [torch.ones_like(one) for one in results], retain_graph=True, allow_unused=True
            )


def operator_of(call: AppliedFunction, example: Sequence[torch.Tensor]) -> FunctionOperator:
    """The operator that makes a call, with a rule for operands like those of the example.

    Operands with another number of dims, or dims of size 1 elsewhere, make another operator, since the rule may differ.
    """
    kinds = tuple((one.is_floating_point(), *(size == 1 for size in one.shape)) for one in example)
    known = next((one for one in DEFINED.values() if _same(one.call, call) and one.kinds == kinds), None)
    if known is None:
        known = FunctionOperator(name=_free_name(call), call=call, kinds=kinds)
        define(known)
        FOUND[known.target] = _rule(known, example)
    return known


def _same(one: AppliedFunction, other: AppliedFunction) -> bool:
    """Whether two calls are the same, also in the types of constants: 1 is not True."""
    return one == other and repr(one.arguments) == repr(other.arguments)


def _free_name(call: AppliedFunction) -> str:
    """A name that tells the function, and is not taken."""
    said = re.sub(r"\W", "_", call.function.__qualname__.rpartition(".")[2]).strip("_") or "function"
    return next(name for name in _numbered(said) if name not in DEFINED)


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def define(made: FunctionOperator) -> None:
    """Make an operator in this process."""
    call = made.call
    operands = sum(one is OPERAND for one in call.arguments)
    taken = ", ".join(f"Tensor x{i}" for i in range(operands))
    returned = "Tensor" if call.results == 1 else f"({', '.join(['Tensor'] * call.results)})"
    _LIBRARY.define(f"{made.name}({taken}) -> {returned}")
    _LIBRARY.impl(made.name, call, "Autograd")
    _LIBRARY.impl(made.name, torch.no_grad()(call), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{made.name}", torch.no_grad()(call), lib=_LIBRARY)
    DEFINED[made.name] = made


def _rule(made: FunctionOperator, example: Sequence[torch.Tensor]) -> Rule:
    """The rule of an operator; it runs whole if no rule is found that also holds for much smaller and larger numbers."""
    op = overload(made.target)
    try:
        found = discover_rule(op, example)
        for scale in SCALES:
            scaled = [one * scale if one.is_floating_point() else one for one in example]
            if all(bool(one.isfinite().all()) for one in _results(made, scaled)):
                check_rule(op, scaled, rule=found.rule, linear=found.linear, averages=found.averages)
        register_rule(op, found.rule, linear=found.linear, averages=found.averages)
    except Exception:  # RuleError, or whatever someone else's code raises
        whole = [", ".join(["_..."] * count) for count in (len(example), made.call.results)]
        register_rule(op, " -> ".join(whole))
    rule = REGISTERED.pop(made.target)
    try:
        return replace(rule, whole_gradient=not _additive(made, example))
    except Exception:  # of the backward
        return replace(rule, whole_gradient=True)


def _additive(made: FunctionOperator, example: Sequence[torch.Tensor]) -> bool:
    """Whether the backward of a sum of gradients is the sum of their backwards, for gradients of several sizes."""
    generator = torch.Generator().manual_seed(0)
    operands = [one.clone().requires_grad_(one.is_floating_point()) for one in example]
    wanted = [one for one in operands if one.requires_grad]
    results = [one for one in _results(made, operands) if one.requires_grad]
    if not results:
        return True

    def backward(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(results, wanted, gradients, retain_graph=True, allow_unused=True, materialize_grads=True)

    for scale in SCALES:
        one, two = ([scale * torch.randn(r.shape, dtype=r.dtype, generator=generator) for r in results] for _ in range(2))
        both = backward([a + b for a, b in zip(one, two, strict=True)])
        if not all(near(a + b, total) for a, b, total in zip(backward(one), backward(two), both, strict=True)):
            return False
    return True


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors in double precision are equal up to rounding, beside the largest finite element of one.

    A gradient with rounded constants, or with terms that cancel, differs by parts of that.
    """
    finite = expected.detach()[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(found, expected, rtol=NEAR, atol=NEAR * largest, equal_nan=True)


def _results(made: FunctionOperator, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    found: Any = made(*operands)
    return found if made.call.several else (found,)


__all__ = ["DEFINED", "NAMESPACE", "SCALES", "AppliedFunction", "FunctionOperator", "define", "near", "operator_of", "tried"]

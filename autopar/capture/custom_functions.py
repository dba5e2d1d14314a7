"""Captures an `autograd.Function`: traces only its forward if its gradient equals autograd's, which is checked numerically.

Others become operators (`autopar.operators.autograd_functions`). Functions are run on random operands, in a separate thread
where nothing is traced; large operands are replaced by small ones in which equal sizes stay equal.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.function import Function, FunctionCtx
from torch.utils import _pytree as pytree

from autopar.operators.autograd_functions import SCALES, FunctionOperator, near, operator_of, tried
from autopar.operators.checking.probe import LARGE, SMALL

_LIMIT = 2**22  # elements of the operands

_Found = TypeVar("_Found")
Handler = Callable[[type[Function], tuple[object, ...]], object]


@contextlib.contextmanager
def intercepted(handler: Handler) -> Iterator[None]:
    """Let a handler answer for a function's `apply` in this thread; it returns NotImplemented to leave that to torch."""
    tracing = threading.get_ident()
    base: Any = Function.__mro__[1]  # torch has no other place: Function.apply calls the `apply` that this class inherits

    def apply(cls: Any, /, *args: object, **kwargs: object) -> object:
        if threading.get_ident() == tracing and (found := handler(cls, args)) is not NotImplemented:
            return found
        return super(base, cls).apply(*args, **kwargs)

    before = vars(base).get("apply")
    base.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del base.apply
        else:
            base.apply = before


def by_autograd(function: type[Function], args: Sequence[object]) -> bool:
    """Whether a function has the results and gradients that autograd gives for its forward; False if it cannot be run."""
    return apart(lambda: _equal(function, args if _elements(args) <= _LIMIT else _small(args))) is True


def as_operator(function: type[Function], args: Sequence[object]) -> FunctionOperator | None:
    """The operator that calls a function on operands like these; None if no operator can call it."""
    ways: list[Callable[[Sequence[object]], list[object]]] = [_small, list] if _elements(args) <= _LIMIT else [_small]
    made = (apart(functools.partial(_operator, function, args, way, below)) for way in ways for below in (2, 1))
    return next(filter(None, made), None)  # an index 1 may be out of range


def _operator(
    function: type[Function], args: Sequence[object], sized: Callable[[Sequence[object]], list[object]], below: int
) -> FunctionOperator | None:
    """The operator that calls a function, tried on random operands with integers less than `below`."""
    generator = torch.Generator().manual_seed(0)
    operands = _operands(sized(args), 1.0, lambda shape: torch.randint(below, shape, generator=generator), generator)
    call = tried(function, operands)
    return operator_of(call, [one.detach() for one in operands if isinstance(one, torch.Tensor)]) if call else None


def apart(run: Callable[[], _Found]) -> _Found | None:
    """The result of a call in a separate thread; None if it raises anything: the code is the user's."""
    found: list[_Found] = []

    def target() -> None:
        with contextlib.suppress(Exception):
            found.append(run())

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return found[0] if found else None


def _elements(args: Sequence[object]) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))


def _small(args: Sequence[object]) -> list[object]:
    """The arguments with large dims made small, as meta tensors; equal sizes stay equal."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    sizes = {size for tensor in tensors for size in tensor.shape}
    free = (size for size in SMALL if size not in sizes)
    least = {size: next(free, size) if size >= LARGE else size for size in sorted(sizes, reverse=True)}

    def shrunk(tensor: torch.Tensor) -> torch.Tensor:
        shape = [least[size] for size in tensor.shape]
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    return list(pytree.tree_map_only(torch.Tensor, shrunk, list(args)))


def _equal(function: type[Function], args: Sequence[object]) -> bool:
    """Compare with all integers 0 and, where the function accepts it, all 1: a mask of zeros would hide every difference."""
    try:
        if not _alike(function, args, 0):
            return False
    except Exception:  # the user's function may raise anything
        return False
    try:
        return _alike(function, args, 1)
    except Exception:  # an index 1 may be out of range
        return True


def _alike(function: type[Function], args: Sequence[object], integer: int) -> bool:
    """Whether results and gradients agree for this value of all integers, at every scale, and no operand is written."""
    generator = torch.Generator().manual_seed(0)
    written = False

    def results(given: list[object], size: float, *, applied: bool) -> list[torch.Tensor]:
        nonlocal written
        before = _versions(given)
        found = [*_results(function, given, size, applied=applied)]
        written |= applied and _versions(given) != before
        return found

    pairs = [
        (value, expected)
        for scale in SCALES
        for size in SCALES
        for given in [_operands(args, scale, lambda shape: torch.full(shape, integer), generator)]
        for value, expected in zip(results(given, size, applied=True), results(given, size, applied=False), strict=True)
    ]
    return not written and all(
        near(value, expected) and value.requires_grad == expected.requires_grad for value, expected in pairs
    )


def _versions(given: Sequence[object]) -> list[int]:
    """How often each tensor has been written."""
    return [leaf._version for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _operands(
    args: Sequence[object], scale: float, integers: Callable[[torch.Size], torch.Tensor], generator: torch.Generator
) -> list[object]:
    """The arguments with random double-precision tensors for floating ones, and `integers` for the others."""

    def real(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.is_floating_point():
            return integers(leaf.shape).to(leaf.dtype)
        drawn = torch.randn(leaf.shape, dtype=torch.float64, generator=generator) * scale
        return drawn.requires_grad_(leaf.requires_grad)

    return list(pytree.tree_map_only(torch.Tensor, real, list(args)))


def _results(function: Any, given: list[object], scale: float, *, applied: bool) -> Iterator[torch.Tensor]:
    """The results of a function, run by `apply` or by its forward alone, and the gradients of its operands."""
    if applied:
        out = function.apply(*given)
    elif function.setup_context is not Function.setup_context:
        out = function.forward(*given)
    else:
        out = function.forward(FunctionCtx(), *given)
    results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    wanted = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    yield from results
    differentiable = [result for result in results if result.requires_grad]
    incoming = [torch.linspace(-scale, scale, one.numel(), dtype=one.dtype).reshape(one.shape) for one in differentiable]
    if differentiable:
        yield from torch.autograd.grad(differentiable, wanted, incoming, allow_unused=True, materialize_grads=True)

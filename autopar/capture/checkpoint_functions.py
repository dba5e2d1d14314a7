"""Inlines checkpoint functions: an `autograd.Function` that runs a callable without a graph, and again in its backward.

Many repositories have their own from before torch had one (`CheckpointFunction` of guided-diffusion, and its descendants):

    forward     with torch.no_grad(): return run_function(*inputs)
    backward    with torch.enable_grad(): out = run_function(*detached inputs)
                torch.autograd.grad(out, inputs + parameters, gradients)

The callable is traced in the function's place, and the planner decides what is recomputed. A trial checks that the function
does nothing else, by passing it a known callable and comparing results and gradients: those of the function's arguments, and of
a tensor that the callable closes over, for which some functions compute gradients and others do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.autograd.function import Function
from torch.utils import _pytree as pytree

from autopar.capture.custom_functions import apart
from autopar.operators.autograd_functions import SCALES, near

_SHAPE = 2, 3  # of the tensors of a trial, whose callable decides the shape of its result


class UnknownLeafError(Exception):
    """A callable uses a tensor for which the function that calls it computes no gradient."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor argument of a function, by its position."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A function's call of its argument at position `place`, with its tensor arguments given by position.

    `free`: tensors that the callable closes over get gradients too, as by `torch.autograd.backward`, if any argument does.
    """

    place: int
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    free: bool

    def result(self, given: Sequence[object]) -> object:
        """The callable's result, in place of that of a function with these arguments.

        Raises UnknownLeafError if it depends on a tensor to which the function would not pass a gradient.
        """
        run: Any = given[self.place]
        args, kwargs = pytree.tree_map_only(_Place, lambda place: given[place.number], (self.args, self.kwargs))
        result = run(*args, **kwargs)
        trained = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        if not (self.free and trained) and _reaches_others(result, trained):
            raise UnknownLeafError
        return result


def checkpoint_of(function: type[Function], args: Sequence[object]) -> Checkpoint | None:
    """The call that a function makes of one of its arguments, if it does nothing else; None otherwise."""
    callables = [place for place, one in enumerate(args) if callable(one) and not isinstance(one, torch.Tensor)]
    return apart(lambda: _found(function, args, callables[0])) if len(callables) == 1 else None


def _found(function: type[Function], args: Sequence[object], place: int) -> Checkpoint | None:
    """The call that all trials find: with one result and several, at every scale of operands and gradients; else None."""
    with warnings.catch_warnings(action="ignore"):  # of another device's autocast
        trials = [
            _Trial(function, args, place, several, scale).checkpoint(size)
            for several in (False, True)
            for scale in SCALES
            for size in SCALES
        ]
    return trials[0] if all(one == trials[0] for one in trials) else None


@dataclass(slots=True)
class _Trial:
    """A function run on random tensors and a callable made for the trial."""

    function: Any
    args: Sequence[object]
    place: int
    several: bool
    scale: float
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = field(default_factory=list)

    def checkpoint(self, size: float) -> Checkpoint | None:
        """The call that the function makes, if it equals that call in results, and gradients for incoming ones of a `size`."""
        generator = torch.Generator().manual_seed(0)
        given = [self._operand(one, generator) for one in self.args]
        places = {one.data_ptr(): number for number, one in enumerate(given) if isinstance(one, torch.Tensor)}
        own = torch.randn(_SHAPE, dtype=torch.float64, generator=generator).requires_grad_()
        leaves = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]

        def run(*args: object, **kwargs: object) -> object:
            read = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            seen = {one.data_ptr() for one in read}
            placed = pytree.tree_map_only(torch.Tensor, lambda one: _Place(places[one.data_ptr()]), (args, kwargs))
            self.calls.append(placed)
            mixed = _mixed([*read, *(one for one in leaves if one.data_ptr() not in seen), own])
            return (mixed, mixed.cos()) if self.several else mixed

        given[self.place] = run
        found = list(_with_gradients(self.function.apply(*given), [*leaves, own], size))
        args, kwargs = self.calls[0]
        if any(call != self.calls[0] for call in self.calls):
            return None
        made = Checkpoint(place=self.place, args=args, kwargs=kwargs, free=found[-1] is not None)
        expected = list(_with_gradients(replace(made, free=True).result(given), [*leaves, own], size))
        compared = zip(found, expected, strict=True) if made.free else zip(found[:-1], expected[:-1], strict=True)
        alike = all(one is not None and other is not None and near(one, other) for one, other in compared)
        return made if alike else None

    def _operand(self, one: object, generator: torch.Generator) -> object:
        if not isinstance(one, torch.Tensor):
            return one
        if not one.is_floating_point():
            return torch.zeros(_SHAPE, dtype=one.dtype)
        return (torch.randn(_SHAPE, dtype=torch.float64, generator=generator) * self.scale).requires_grad_()


def _mixed(read: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor that depends differently on every element of the given ones, with gradients that depend on all others."""
    ramp = torch.linspace(0.5, 1.5, 6, dtype=torch.float64).reshape(_SHAPE)
    sums = [((number + 1) * ramp * one.double().sin()).sum() for number, one in enumerate(read)]
    return ramp * torch.stack(sums).sum().sin()


def _with_gradients(out: object, leaves: Sequence[torch.Tensor], size: float) -> Iterator[torch.Tensor | None]:
    """The results, and the gradients that a backward accumulates in the leaves."""
    results = [one for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
    incoming = [torch.linspace(-size, size, one.numel(), dtype=one.dtype).reshape(one.shape) for one in results]
    torch.autograd.backward(results, incoming)
    yield from (one.detach() for one in results)
    for one in leaves:
        yield one.grad
        one.grad = None


def _reaches_others(result: object, known: Sequence[torch.Tensor]) -> bool:
    """Whether a result depends on a leaf that needs a gradient, along a path that avoids the known tensors."""
    ends = {one.grad_fn for one in known if one.grad_fn is not None}
    leaves = {id(one) for one in known if one.grad_fn is None}
    results = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad]
    if any(one.grad_fn is None and id(one) not in leaves for one in results):
        return True
    seen, left = set(ends), [one.grad_fn for one in results if one.grad_fn is not None]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            return True
        left += [following for following, _ in node.next_functions if following is not None]
    return False


__all__ = ["Checkpoint", "UnknownLeafError", "checkpoint_of"]

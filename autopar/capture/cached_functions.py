"""Functions that cache the tensors they make by `functools.lru_cache`: tables of positions, windows, bases.

A tensor from a cache would appear in the trace as a constant from outside, and one that is cached during tracing has no values.
So caches that hold tensors are cleared before and after tracing; they refill at the next call.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.capture.known_values import computed_from
from autopar.capture.python_places import owners
from autopar.capture.python_state import CarriedTensorError


def clear_cached_tensors(model: nn.Module) -> None:
    """Clear tensor-holding caches of the functions that a model's classes and files refer to."""
    for function, _ in _caching(model):
        function.cache_clear()


def refuse_varying(model: nn.Module, given: Iterable[torch.Tensor]) -> None:
    """Raise CarriedTensorError if a cache holds a tensor that is computed from given ones, or from random numbers."""
    for function, tensors in _caching(model):
        if any(computed_from(one, given) for one in tensors):
            raise CarriedTensorError(
                f"{function.__qualname__} keeps what its first call computed, from arguments, parameters or random numbers; "
                "the graph would compute it in every step",
                fix="compute it before the capture, into a buffer",
            )


def _caching(model: nn.Module) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """The functions whose caches hold tensors, and these tensors."""
    for owner in owners(model):
        for function in [*vars(owner).values()]:
            if hasattr(type(function), "cache_clear"):
                kept = [one for one in gc.get_referents(function) if isinstance(one, dict | list | tuple | torch.Tensor)]
                tensors = [leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor)]
                if tensors:
                    yield function, tensors


__all__ = ["clear_cached_tensors", "refuse_varying"]

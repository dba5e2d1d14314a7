"""Recomputation in compiled modules: torch's partitioner does it, following a policy, instead of saved tensor hooks.

    with kept(False):
        y = relu(x)            its node in the traced graph is marked: y is recomputed in the backward

Unmarked values are saved, or recomputed where the partitioner finds that cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MARK = "autopar: recomputed"

Returned = TypeVar("Returned")


def kept(keep: bool) -> AbstractContextManager[object]:
    """Enter around traced calls: whether autograd may save their results or must recompute them."""
    return nullcontext() if keep else traceback.annotate({MARK: True})


def recomputing(function: Callable[..., Returned], *inputs: torch.Tensor) -> Returned:
    """`function(*inputs)`, traced; its backward recomputes the marked values."""
    result: Returned = checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts)
    return result


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    found: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    found = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return found


def _policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    marks = traceback.get_current_meta().get("custom") or {}
    recomputed = marks.get(MARK) and not _saves_cpu_generator(operator, args)
    return CheckpointPolicy.MUST_RECOMPUTE if recomputed else CheckpointPolicy.PREFER_SAVE


def _saves_cpu_generator(operator: object, args: Sequence[object]) -> bool:
    """Whether torch would save the state of the CPU's generator to recompute an operator: one that may draw, like attention.

    torch 2.13 mistakes that state for an opaque input, the mesh of a DTensor, and the forward fails with an AssertionError.
    """
    on_cpu = any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args)
    return on_cpu and torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())  # higher-order operators have none


__all__ = ["kept", "recomputing"]

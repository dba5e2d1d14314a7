"""`torch.vmap` as the batched operators that it stands for, while a model is traced.

    torch.vmap(lambda row: row.sin() @ w)(x)        ->        sin(x) @ w

torch.export records the levels of a vmap, which are no operators. Here the function is traced apart, below them, on the tensors
that it is given; what that found is what the model calls. Tensors that the function reads from around it stay the model's own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_isolated_graphmodule
from torch.utils import _pytree as pytree

_Function = Callable[..., Any]


def spelt(original: Callable[..., _Function]) -> Callable[..., _Function]:
    """`torch.vmap` whose outermost calls in this thread are traced apart."""
    tracing, inside = threading.get_ident(), [False]

    def vmap(func: _Function, *options: Any, **named: Any) -> _Function:
        batched = original(func, *options, **named)

        @functools.wraps(func)
        def called(*args: Any, **kwargs: Any) -> Any:
            if inside[0] or threading.get_ident() != tracing:
                return batched(*args, **kwargs)
            inside[0] = True
            try:
                with torch._C.DisableTorchFunction():
                    found = get_isolated_graphmodule(batched, args, kwargs)
            finally:
                inside[0] = False
            return _run(found, pytree.tree_leaves((args, kwargs)))

        return called

    return vmap


def _run(found: fx.GraphModule, given: list[Any]) -> Any:
    """The results of what was traced, of flat arguments."""
    return found.forward(given)


__all__ = ["spelt"]

"""Traces `torch.vmap` and other transforms of `torch.func` into the operators that they run.

    torch.vmap(lambda row: row.sin() @ w)(x)        ->        sin(x) @ w
    torch.func.grad(lambda x: x.sin().sum())(x)     ->        mul(expand(ones), cos(x))

torch.export records the levels of a transform, which are no operators. Instead, the function is traced separately on its actual
operands, below those levels, and the model calls the resulting operators. Tensors that the function closes over remain the
model's own. The implementations behind `torch.func` are replaced, since a model may have imported its functions by name.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._functorch import apis, eager_transforms, vmap
from torch.fx.experimental.proxy_tensor import get_isolated_graphmodule
from torch.utils import _pytree as pytree

from autopar.capture import source_location
from autopar.errors import CaptureError
from autopar.operators import rule_of

_Function = Callable[..., Any]


class Transforms:
    """The transforms of one tracing: the outermost calls in this thread are traced separately."""

    def __init__(self) -> None:
        self._thread, self._inside = threading.get_ident(), False
        self._forward = False  # whether what is traced uses forward-mode differentiation

    def replaced(self) -> Iterator[tuple[ModuleType, str, _Function]]:
        """The implementations behind torch's transforms, as (owner, name), each with its replacement."""
        yield apis, "vmap_impl", self.apart(vmap.vmap_impl)
        for name in ("grad_impl", "grad_and_value_impl", "_jvp_with_argnums"):
            yield eager_transforms, name, self.apart(getattr(eager_transforms, name))
        yield eager_transforms, "_vjp_with_argnums", self.pulled_back(eager_transforms._vjp_with_argnums)
        yield torch.func, "linearize", self.refused(torch.func.linearize, "torch.func.jvp, which computes the same tangents")

    def apart(self, original: _Function) -> _Function:
        """A transform, applied to its function and arguments, as the operators that it calls."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            if self._inside:
                self._forward |= "jvp" in original.__name__
                return original(*args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

            def of_tensors(*tensors: torch.Tensor) -> Any:
                filled = dict(zip(places, tensors, strict=True))
                given, named = pytree.tree_unflatten([filled.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
                self._forward |= "jvp" in original.__name__
                return original(*given, **named)

            return self._run(of_tensors, [leaves[place] for place in places])

        return called

    def pulled_back(self, original: _Function) -> _Function:
        """`vjp`, whose second result is called later and so runs the function again."""

        def called(func: _Function, *primals: Any, **options: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return original(func, *primals, **options)

            def results(*primals: Any) -> Any:
                out, _, *aux = original(func, *primals, **options)
                return out, aux

            def pull(cotangents: Any, *primals: Any) -> Any:
                return original(func, *primals, **options)[1](cotangents)

            def pulling(cotangents: Any, **_: Any) -> Any:
                return self.apart(pull)(cotangents, *primals)

            out, aux = self.apart(results)(*primals)
            return out, pulling, *aux

        return called

    def refused(self, original: _Function, instead: str) -> _Function:
        """A transform that needs concrete numbers, replaced by an error."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            at = source_location.of_frame(sys._getframe(1))
            raise CaptureError(f"torch.func.{original.__name__} folds what it computes to numbers", at=at, fix=instead)

        return called

    def _run(self, function: _Function, tensors: list[torch.Tensor]) -> Any:
        """Trace a function of tensors and call the resulting operators."""
        self._forward = False
        found = self._traced(function, tensors, norms=True)
        if self._forward:
            found = self._traced(function, tensors, norms=False)
        found.graph.eliminate_dead_code()  # tangents that are 0
        replay = _Replay(found, garbage_collect_values=False)
        replay.extra_traceback = False
        return replay.run(*tensors)

    def _traced(self, function: _Function, tensors: list[torch.Tensor], *, norms: bool) -> fx.GraphModule:
        self._inside = True
        try:
            with torch._C.DisableTorchFunction():
                return get_isolated_graphmodule(function, tuple(tensors), {}, decomposition_table=_spelt(norms))
        finally:
            self._inside = False


@functools.cache
def _spelt(norms: bool) -> Mapping[torch._ops.OpOverload, _Function]:
    """Decompositions for operators that torch can decompose and that have no rule.

    With `norms` also for norms, whose statistics have no gradient, and whose backward omits results that are not requested. In
    forward mode, torch itself treats the statistics as constants.
    """
    pure = [op for op in decomposition_table if isinstance(op, torch._ops.OpOverload) and not op._schema.is_mutable]
    found = {op for op in pure if re.search("native_(layer|group|batch)_norm|_fused_rms_norm", op._schema.name)}
    return {op: decomposition_table[op] for op in pure if (norms if op in found else rule_of(str(op)) is None)}


class _Replay(fx.Interpreter):
    """Calls what was traced; raises CaptureError where a result without gradient is read of an operator that has one."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target is operator.getitem and isinstance(result, torch.Tensor) and not result.requires_grad:
            several = self.env[n.all_input_nodes[0]]
            lost = result.is_floating_point() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in several)
            if lost and not all("backward" in str(user.target) for user in n.users):
                at, name = source_location.of_frame(sys._getframe(1)), n.all_input_nodes[0].target
                fix = "write out what the function does, with tensor operators"
                raise CaptureError(f"{name} inside of a transform of torch.func has results without a gradient", at=at, fix=fix)
        return result


__all__ = ["Transforms"]

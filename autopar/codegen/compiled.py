"""`torch.compile` for parallel modules: it sees the whole program of one micro-batch; with Inductor passes for collectives.

around   the frame is not traced, but what it calls is: the loop over micro-batches, say
eager    neither is: checks of a call, which talk to other ranks; what micro-batches share; the backward, which autograd runs
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch._inductor
from torch import fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from autopar.codegen.names import STATE
from autopar.errors import InputError
from autopar.ir.conversion import FETCHES
from autopar.runtime.bucketed_collectives import PAIRS
from autopar.runtime.gradient_accumulation import accumulate_gradients, start_once, wait_once
from autopar.runtime.rematerialize.manager import offload

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

# Copies on streams of their own, in hooks on what autograd saves: these are not traced.
HOOKED = {offload, *(PAIRS["__".join(ways)][0] for ways in FETCHES.values())}
SHARED = {accumulate_gradients, wait_once}  # what they return goes from one micro-batch to the next

# Inductor's own scheduling of collectives: https://github.com/pytorch/pytorch/blob/main/torch/_inductor/config.py
PASSES = "aten_distributed_optimizations"
OPTIONS: dict[str, bool | str] = {
    f"{PASSES}.enable_overlap_scheduling": True,
    f"{PASSES}.collective_bucketing": True,
    f"{PASSES}.insert_overlap_deps": True,
    f"{PASSES}.collective_estimator": "analytical",  # measured, ranks could disagree
}


def around(function: Wrapped) -> Wrapped:
    """A function that is not traced, although its callees are."""
    found: Wrapped = torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]
    return found


def eager(function: Wrapped) -> Wrapped:
    """A function that is not traced, and neither are its callees."""
    found: Wrapped = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function. Dynamo recompiles each code object a few times only, whatever modules it is called with."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


class Untraced:
    """A context manager for untraced frames: Dynamo supports no generators, not even around a frame."""

    @eager
    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._inner = make()

    @eager
    def __enter__(self) -> None:
        self._inner.__enter__()

    @eager
    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


def uses(graph: fx.Graph, name: str) -> bool:
    """Whether an emitted program uses an object of the module's state: `rng_state` if it draws random numbers, or
    `rematerializer` if it marks what its backward recomputes, gathers again or fetches.
    """
    return any(node.op == "get_attr" and node.target == f"{STATE}.{name}" for node in graph.nodes)


def traceable(graph: fx.Graph) -> bool:
    """Whether `torch.compile` can trace an emitted program."""
    called = [node for node in graph.nodes if node.op == "call_function"]
    once = (PAIRS[node.args[2]][0] for node in called if node.target is start_once)
    return HOOKED.isdisjoint(node.target for node in called) and HOOKED.isdisjoint(once)


def shared_weights(graph: fx.Graph) -> fx.Graph | None:
    """The part of an emitted program that makes the weights shared by all micro-batches of a step; None if there are none.

    It runs eagerly, once per step, before the micro-batches, whose program then keeps nothing and is traced whole.
    """
    found, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in SHARED:
            _copy(node, found, copied)
    found.output(())
    return found if copied else None


def _copy(node: fx.Node, into: fx.Graph, copied: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node of another graph after its inputs; chains are short, since they belong to a weight."""
    if node not in copied:
        copied[node] = into.node_copy(node, lambda operand: _copy(operand, into, copied))
    return copied[node]


@around
def compiling() -> bool:
    """Whether `torch.compile` traces calls made from here; `torch.compiler.is_compiling` answers only inside of traced code."""
    return callable(get_eval_frame_callback())


def inductor_options(*, overlap: bool = True, async_tensor_parallel: bool = False) -> dict[str, bool | str]:
    """Options of Inductor that let it schedule, join and fuse the collectives of a parallel module, on CUDA.

        compiled = torch.compile(parallel, options=autopar.inductor_options())

    Args:
        overlap: overlap collectives with computation, and join small ones (`aten_distributed_optimizations`).
        async_tensor_parallel: cut products next to an all-gather or reduce-scatter into parts that overlap with it, if all
            devices of an axis can access each other's memory (CUDA).

    Raises:
        InputError: this release of torch lacks these options.
    """
    options = {**(OPTIONS if overlap else {}), **({"_micro_pipeline_tp": True} if async_tensor_parallel else {})}
    known = set(torch._inductor.list_options())
    if unknown := [name for name in options if name not in known]:
        raise InputError(
            f"Inductor of torch {torch.__version__} has no option {unknown[0]}",
            options=", ".join(unknown),
            fix="torch 2.11 to 2.13 have them all; or autopar.inductor_options(overlap=False)",
        )
    return options


__all__ = ["Untraced", "around", "compiling", "eager", "inductor_options", "shared_weights", "traceable", "uses"]

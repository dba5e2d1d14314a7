"""Random operators under `torch.compile`: opaque to the compiler, which would otherwise draw numbers of its own.

Ranks must draw equal or independent numbers, as the plan says, and a recomputation must draw the same ones again. As in eager
mode (`autopar.runtime.random`), each call draws from a seed that is computed when the graph runs, here from a tensor with the
model's seed and the call number. For dropout only the mask is opaque; the rest can be fused. The backward of any other operator
runs it again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from autopar.ir.program import overload
from autopar.runtime.drawing import drawn, seed_from
from autopar.runtime.world import Axis

TENSOR = "a tensor"  # where a call has one


def traced(
    operator: Callable[..., Tensor], numbers: Tensor, index: int, axes: Sequence[Axis], /, *args: object, **kwargs: object
) -> Tensor | Sequence[Tensor]:
    """A random operator in a traced graph; `numbers` has the model's seed and the call number."""
    places = [(axis.name, axis.index) for axis in axes]
    if operator is torch.ops.aten.dropout.default:
        x, rate, training = args
        assert isinstance(x, Tensor)
        assert isinstance(rate, float)
        return _dropout(x, rate, _call(operator, index, places, (TENSOR, rate, True), {}), numbers) if training and rate else x
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    constant, named = tree_map_only(Tensor, lambda x: TENSOR, (args, kwargs))
    found: list[Tensor] = draw(_call(operator, index, places, constant, named), numbers, tensors)
    return found[0] if _single(operator) else found


def _dropout(x: Tensor, rate: float, call: str, numbers: Tensor) -> Tensor:
    kept: Tensor = dropout_mask(call, numbers, x.detach()).to(x.dtype)
    return x * (kept if rate == 1 else kept / (1 - rate))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _single(operator: torch._ops.OpOverload) -> bool:
    return len(operator._schema.returns) == 1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _call(
    operator: torch._ops.OpOverload,
    index: int,
    places: Sequence[tuple[str, int]],
    args: Sequence[object],
    kwargs: dict[str, object],
) -> str:
    """A call as text, without its tensors, so that a graph can hold it and a graph cache can store it."""
    return json.dumps([str(operator), index, places, [*args], kwargs], default=_named)


def _named(value: object) -> object:
    """Text for a constant that JSON cannot express."""
    return {"device": str(value)} if isinstance(value, torch.device) else {"torch": str(value).removeprefix("torch.")}


def _read(found: dict[str, object]) -> object:
    """Read a constant written by `_named`."""
    match found:
        case {"torch": str(name)}:
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
    return found


@functools.lru_cache(maxsize=1024)
def _parsed(call: str) -> tuple[str, int, list[tuple[str, int]], list[object], dict[str, object]]:
    target, index, places, args, kwargs = json.loads(call, object_hook=_read)
    return target, index, [(name, at) for name, at in places], args, kwargs


def _run(call: str, numbers: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call; without `numbers`, for tensors without data, nothing is drawn."""
    target, index, places, args, kwargs = _parsed(call)
    operator, rest = overload(target), iter(tensors)
    given, named = tree_map(lambda x: next(rest) if x == TENSOR else x, (args, kwargs))
    if numbers is None:
        found = operator(*given, **named)
    else:
        found = drawn(operator, seed_from((*numbers.tolist(), index, *places)), *given, **named)
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


@torch.library.custom_op("autopar::draw", mutates_args=())
def draw(call: str, numbers: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The results of a random operator."""
    given = {x.untyped_storage()._cdata for x in tensors}
    return [x.clone() if x.untyped_storage()._cdata in given else x for x in _run(call, numbers, tensors)]


@draw.register_fake
def _(call: str, numbers: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in _run(call, None, tensors)]


# Not a `custom_op`: autograd records nothing inside one.
torch.library.define("autopar::draw_backward", "(str call, Tensor numbers, Tensor[] tensors, Tensor[] gradients) -> Tensor[]")


@torch.library.impl("autopar::draw_backward", ("cpu", "cuda"))
def _(call: str, numbers: Tensor, tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """The gradients of a random operator's tensors, from the same draw; zeros for tensors that have none."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        pairs = [(y, g) for y, g in zip(_run(call, numbers, inputs), gradients, strict=True) if y.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [
        torch.zeros_like(x) if gradient is None else torch.empty_like(x).copy_(gradient)  # with the strides of the fake tensor
        for x in inputs
        for gradient in [next(found) if x.requires_grad else None]
    ]


@torch.library.register_fake("autopar::draw_backward")  # type: ignore[untyped-decorator]
def _(call: str, numbers: Tensor, tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in tensors]


def _keep(ctx: object, inputs: tuple[str, Tensor, list[Tensor]], output: list[Tensor]) -> None:
    ctx.call, numbers, tensors = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(numbers, *tensors)  # type: ignore[attr-defined]


def _gradients(ctx: object, gradients: list[Tensor]) -> tuple[None, None, list[Tensor]]:
    numbers, *tensors = ctx.saved_tensors  # type: ignore[attr-defined]
    return None, None, torch.ops.autopar.draw_backward(ctx.call, numbers, tensors, [*gradients])  # type: ignore[attr-defined]


draw.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("autopar::dropout_mask", mutates_args=())
def dropout_mask(call: str, numbers: Tensor, x: Tensor) -> Tensor:
    """A boolean mask, shaped like `x`, of the elements that a dropout keeps."""
    (scaled,) = _run(call, numbers, [torch.ones_like(x)])
    return scaled != 0


@dropout_mask.register_fake
def _(call: str, numbers: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


__all__ = ["traced"]

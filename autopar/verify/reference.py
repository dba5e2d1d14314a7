"""Runs the user's module as the user calls it, as the reference for the captured program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture import Captured
from autopar.capture.meta_copy import dense_buffers
from autopar.capture.returned import read_result
from autopar.capture.trace_guards import unasked
from autopar.operators import row_named, writes
from autopar.operators.certain_draws import certain_classes
from autopar.operators.facts import OpKind
from autopar.passes.no_dropout import CONSTANTS, DRAWS
from autopar.runtime.storage import local_part_like, to_local

Loss = Callable[[Sequence[torch.Tensor]], torch.Tensor | None]  # of outputs


def module_results(
    model: nn.Module, sample: object, captured: Captured, loss: Loss | None = None
) -> dict[tuple[str, str], torch.Tensor]:
    """Outputs, gradients and written buffers of the user's module, whose buffers are restored afterwards.

    There are no gradients under `torch.no_grad()`. Compiled parts run eagerly, because `_NoDropout` does not see compiled
    random numbers. `loss` says what is differentiated, by default `differentiated_sum`.
    """
    program, (args, kwargs) = captured.program, arguments(sample)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(dense_buffers(model))
    written = {name for op in program.ops for name in writes(op)}
    buffers |= {name: parameters[name] for name in written & parameters.keys()}  # frozen ones
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    held = {p.names[0]: parameters[p.names[0]] for p in program.parameters if p.used and parameters[p.names[0]].requires_grad}
    held = held if torch.is_grad_enabled() else {}
    with torch.compiler.set_stance("force_eager"), _NoDropout():
        outputs = _outputs(model(*args, **kwargs), captured)
        leaves = (*model.parameters(), *pytree.tree_leaves((args, kwargs)))
        found = _gradients((loss or differentiated_sum)(outputs), held, leaves)
    result = {("output", end.path): output.detach().clone() for end, output in zip(program.outputs, outputs, strict=False)}
    result |= {("gradient", name): gradient for name, gradient in found.items()}
    now = dict(dense_buffers(model)) | {name: buffer for name, buffer in buffers.items() if name in parameters}
    for name, buffer in now.items():
        if name in before and (name in written or not torch.equal(buffer, before[name])):  # forward may register others
            result["buffer", name] = buffer.detach().clone()
    with torch.no_grad():
        for name, buffer in buffers.items():
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, buffer)
            buffer.copy_(before[name])
    return result


def _gradients(
    loss: torch.Tensor | None, held: Mapping[str, torch.Tensor], leaves: Iterable[object]
) -> dict[str, torch.Tensor]:
    """The gradients of a loss, zero where there is none; the `.grad` of the leaves is restored afterwards.

    Uses `backward`, which a reentrant checkpoint requires, without dispatching it to the active mode: within its own handler
    that mode would not see what a checkpoint recomputes.
    """
    before = {leaf: leaf.grad for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_leaf}
    for leaf in before:
        leaf.grad = None
    try:
        if loss is not None:
            unasked(torch.autograd.backward)(loss)
        return {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in held.items()}
    finally:
        for leaf, gradient in before.items():
            leaf.grad = gradient


def _outputs(result: object, captured: Captured) -> Sequence[torch.Tensor]:
    """The captured outputs among a module's results, without a cache that it also returns."""
    tensors, returned, _ = read_result(result)
    paths, found = captured.signature.returned.paths, dict(zip(returned.paths, tensors, strict=True))
    return [found[path] for path in paths] if found.keys() >= set(paths) else tensors


def arguments(sample: object) -> tuple[tuple[object, ...], dict[str, object]]:
    """The positional and keyword arguments in a sample."""
    if isinstance(sample, Mapping):
        return (), {str(name): value for name, value in sample.items()}
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), {}


def differentiated_sum(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A fixed weighted sum of the differentiable scalars, or of all differentiable outputs if none is a scalar."""
    differentiable = [o for o in outputs if o.requires_grad]
    scalars = [o for o in differentiable if not o.ndim]
    if not differentiable:
        return None
    return torch.stack([_weighed(o, place + 1) for place, o in enumerate(scalars or differentiable)]).sum()


def _weighed(output: torch.Tensor, factor: int) -> torch.Tensor:
    """A fixed weighted sum of an output; of a DTensor, this rank's part of the sum."""
    weights = local_part_like(loss_weights(output.shape, factor, output.dtype), output)
    total = (to_local(output) * weights).sum()
    return total.real if total.is_complex() else total


def loss_weights(shape: Sequence[int], factor: int, dtype: torch.dtype) -> torch.Tensor:
    """The weights of an output's elements in `differentiated_sum`, all different."""
    count = torch.arange(factor, factor + math.prod(shape), dtype=torch.float64).reshape(tuple(shape))
    return torch.complex(count.cos(), count.sin()) if dtype.is_complex else count.cos()


class _NoDropout(TorchFunctionMode):
    """Sets dropout rates to 0 in every function that has one, and replaces random tensors as `without_dropout` does."""

    def __torch_function__(
        self, func: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        kind = row_named(name.removesuffix("_")).kind
        if "dropout" in name and not name.startswith("native"):
            return args[0] if args else given["input"]
        if name == "multi_head_attention_forward":  # implemented in Python: functions that it calls do not reach this mode
            args = (*args[:10], 0.0, *args[11:])
        if kind is OpKind.ATTENTION:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                given["dropout_p"] = 0.0
        if kind is OpKind.RECURRENT:  # the dropout rate is the only float among the arguments
            args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        if name == "rrelu":
            args, given = args[:3], {n: a for n, a in given.items() if n != "training"}
        with _NoDraws() if isinstance(func, FunctionType) else nullcontext():  # type: ignore[no-untyped-call]
            found: object = func(*args, **given)  # type: ignore[operator]
        return _certain(name, args, given, found)


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random tensors in functions that are implemented in Python, whose calls `_NoDropout` does not see."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        given = dict(kwargs or {})
        return _certain(func.overloadpacket.__name__, args, given, func(*args, **given))


def _certain(name: str, args: Sequence[object], given: Mapping[str, object], found: object) -> object:
    """The result of a function, or if it is random, the replacement that `without_dropout` uses."""
    kind = row_named(name.removesuffix("_")).kind
    if kind not in DRAWS or not isinstance(found, torch.Tensor):
        return found
    if kind is OpKind.DRAW_CLASSES:
        return certain_classes(args[0] if args else given["input"], found.shape[-1])
    number = _least(args, given) if kind is OpKind.DRAW_INTEGERS else CONSTANTS[kind]
    own = found.requires_grad and not name.endswith("_")  # autograd has it for the backward of the draw
    return torch.fill(found, number) if own else found.fill_(number)


def _least(args: Sequence[object], given: Mapping[str, object]) -> int:
    """The smallest integer that a function draws: its arguments have `(high)` or `(low, high)`, among tensors and sizes."""
    ends = [one for one in args if isinstance(one, int)] + [given[name] for name in ("high", "to") if name in given]
    low = given.get("low", given.get("from", ends[0] if len(ends) > 1 else 0))
    return low if isinstance(low, int) else 0


__all__ = ["Loss", "arguments", "differentiated_sum", "module_results"]

"""Guards around tracing: raise an error for what torch.export would drop silently, and help it over what it rejects.

An `autograd.Function` is traced through its forward only, a tensor hook leaves no trace at all, and `torch.tensor([1, 2])` or
`x[[1, 2]]` on the meta device has no numbers. The first two are refused; the others are made of operators that carry them.
What only looks at values to refuse them, or to find out what a mask is, looks away: `autopar.capture.assertions`. Bags of
embeddings are spelt out: `autopar.capture.embedding_bag`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import Function
from torch.distributions import Distribution

from autopar.capture import assertions, embedding_bag, source_location
from autopar.errors import CaptureError

LITERAL_LIMIT = 1024  # elements of a literal tensor that may be written out as operators


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """While this is open, `Function.apply` and tensor hooks raise CaptureError and literal tensors keep their numbers."""
    with (
        _replaced(Function, "apply", classmethod(_apply(vars(Function)["apply"]))),
        _replaced(torch.Tensor, "register_hook", _refuse_hook),
        _replaced(torch.Tensor, "register_post_accumulate_grad_hook", _refuse_hook),
        _replaced(torch.autograd, "grad", _refuse_grad),
        _replaced(nn.utils.rnn, "pack_padded_sequence", _refuse_packing),
        _replaced(torch, "autocast", _Autocast),
        _replaced(torch, "get_autocast_dtype", _of_the_cpu(torch.get_autocast_dtype)),
        _replaced(torch, "is_autocast_enabled", _of_the_cpu(torch.is_autocast_enabled)),
        _replaced(nn.functional, "embedding_bag", embedding_bag.spelt(nn.functional.embedding_bag)),
        _replaced(torch, "tensor", _literal(torch.tensor)),
        _replaced(torch, "as_tensor", _as_literal(torch.as_tensor)),
        _replaced(torch, "from_numpy", _as_literal(torch.from_numpy)),
        _replaced(torch.Tensor, "__getitem__", _indexed(torch.Tensor.__getitem__)),
        _replaced(torch.Tensor, "__setitem__", _indexed(torch.Tensor.__setitem__)),
        _replaced(torch.Tensor, "__bool__", assertions.passed(torch.Tensor.__bool__)),
        _replaced(torch.Tensor, "item", assertions.passed(torch.Tensor.item)),
        _replaced(Distribution, "_validate_args", False),
        _replaced(nn.modules.transformer, "_detect_is_causal_mask", _said_causal),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: type | object, name: str, stand_in: object) -> Iterator[None]:
    own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:  # it was inherited
            delattr(owner, name)


def _apply(original: classmethod[Function, ..., object]) -> Callable[..., object]:
    def apply(cls: type[Function], *args: object, **kwargs: object) -> object:
        if cls.__module__ == "torch.utils.checkpoint":  # the planner decides what is recomputed: run the block as it is
            run, _preserve, *rest = args
            assert callable(run)
            return run(*rest)
        if cls.__module__.partition(".")[0] == "torch":
            return original.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"the backward of {cls.__qualname__} would be lost: it is an autograd.Function",
            at=source_location.here(),
            fix="make it an operator with torch.library.custom_op and register_autograd",
        )

    return apply


def _refuse_hook(tensor: torch.Tensor, *_: object) -> None:
    raise CaptureError(
        f"a hook on a tensor of shape {tuple(tensor.shape)} would be lost",
        at=source_location.here(),
        fix="write what the hook does as an operator with its own backward (torch.library.custom_op)",
    )


def _refuse_grad(*_: object, **__: object) -> None:
    raise CaptureError(
        "torch.autograd.grad inside of forward would be lost: only the forward is traced",
        at=source_location.here(),
        fix="write the gradient out in forward, or leave its penalty out of the parallel model",
    )


def _refuse_packing(*_: object, **__: object) -> None:
    raise CaptureError(
        "pack_padded_sequence makes a shape that depends on the values of a tensor",
        at=source_location.here(),
        fix="run the recurrent layer over the padded batch, and select or mask what it returns",
    )


class _Autocast(torch.autocast):
    """`torch.autocast("meta")`, as `torch.autocast(x.device.type)` becomes while tracing, records the casts of the CPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _of_the_cpu(original: Callable[..., object]) -> Callable[..., object]:
    """A question about a device type, asked of the CPU for `meta`, as `x.device.type` becomes while tracing."""

    def asked(*device_type: str, **named: str) -> object:
        given = ("cpu" if device == "meta" else device for device in device_type)
        return original(*given, **{name: "cpu" if device == "meta" else device for name, device in named.items()})

    return asked


def _said_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """`is_causal` of nn.Transformer as the caller gave it, without inspecting the mask: `passes.causal_masks` does that."""
    return is_causal is True


def _as_literal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def as_tensor(data: object, dtype: torch.dtype | None = None, **rest: object) -> torch.Tensor:
        return original(data, dtype=dtype, **rest) if _numbers(data) is None else torch.tensor(data, dtype=dtype)

    return as_tensor


def _literal(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tensor(data: object, *, dtype: torch.dtype | None = None, device: object = None, **rest: object) -> torch.Tensor:
        found = _numbers(data)
        if found is None or len(found[1]) > LITERAL_LIMIT:
            return original(data, dtype=dtype, device=device, **rest)
        shape, numbers = found
        common = dtype or _dtype(data, numbers)
        if not numbers:
            return torch.zeros(shape, dtype=common, device="meta")
        if not shape:
            return torch.full((), numbers[0], dtype=common, device="meta")
        return torch.cat([torch.full((1,), number, dtype=common, device="meta") for number in numbers]).reshape(shape)

    return tensor


def _indexed(original: Callable[..., object]) -> Callable[..., object]:
    """`x[index]` and `x[index] = y` with the lists in the index made literal tensors."""

    def at(x: torch.Tensor, index: object, *value: object) -> object:
        if isinstance(index, tuple):
            return original(x, tuple(map(_spelt, index)), *value)
        return original(x, _spelt(index), *value)

    return at


def _spelt(index: object) -> object:
    """A list in an index as a literal tensor; a flat list of truth values as the places of the true ones."""
    if not isinstance(index, list) or _numbers(index) is None:
        return index
    if all(isinstance(number, bool) for number in index):
        return torch.tensor([place for place, number in enumerate(index) if number])
    return torch.tensor(index)


def _numbers(data: object) -> tuple[tuple[int, ...], list[bool | int | float]] | None:
    """Shape and numbers of an array or of nested lists of Python numbers; None for anything else."""
    if isinstance(data, (np.ndarray, np.generic)):
        return _numbers(data.tolist())
    if isinstance(data, (bool, int, float)):
        return (), [data]
    if not isinstance(data, (list, tuple)):
        return None
    if not data:
        return (0,), []
    parts = [_numbers(part) for part in data]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or any(part[0] != known[0][0] for part in known):
        return None
    return (len(known), *known[0][0]), [number for _, numbers in known for number in numbers]


def _dtype(data: object, numbers: list[bool | int | float]) -> torch.dtype:
    """The dtype that `torch.tensor` gives to these numbers."""
    if isinstance(data, (np.ndarray, np.generic)):
        return getattr(torch, data.dtype.name)  # type: ignore[no-any-return]
    if not numbers or any(isinstance(number, float) for number in numbers):
        return torch.get_default_dtype()
    return torch.bool if all(isinstance(number, bool) for number in numbers) else torch.int64

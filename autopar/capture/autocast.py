"""Writes the casts of autocast into the program, by the `autocast` entry of an operator's row.

While forward is traced, operands of the functions that it calls are cast as well, since autocast does nothing on the meta
device: then dtypes that Python reads (`y.dtype`, `x.to(y.dtype)`, `torch.finfo(y.dtype)`) are those that the user sees.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

from autopar.operators import rule_of
from autopar.operators.facts import Autocast


def dtype(statics: Sequence[object]) -> torch.dtype:
    """The autocast dtype of a region `wrap_with_autocast(device type, dtype, enabled, ...)`."""
    device, given = statics[0], statics[1]
    return given if isinstance(given, torch.dtype) else torch.get_autocast_dtype(str(device))


def operand_dtype(target: str, operands: Sequence[torch.dtype], lower: torch.dtype) -> torch.dtype | None:
    """The dtype to which an op's floating operands are cast; None if autocast does not cast them."""
    rule = rule_of(target)
    match rule.autocast if rule else None:
        case Autocast.LOWER:
            return lower
        case Autocast.FP32:
            return torch.float32
        case Autocast.WIDEST:
            return torch.float32 if torch.float32 in operands else lower
    return None


def castable(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether autocast casts a tensor of this dtype: floating, not double, and not of the wanted dtype already."""
    return given.is_floating_point and given not in (torch.float64, wanted)


def cast(function: object, args: tuple[object, ...]) -> tuple[object, ...]:
    """The arguments of a torch function, cast as autocast would where forward has enabled it.

    Arguments of functions that write in place are left alone, since autocast does not cast for them.
    """
    name = str(getattr(function, "__name__", ""))
    if name.endswith("_") and not name.endswith("__"):
        return args
    device = next((one for one in ("cuda", "cpu") if torch.is_autocast_enabled(one)), "")
    if not device:
        return args
    lower = torch.get_autocast_dtype(device)
    operands = [leaf.dtype for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    wanted = operand_dtype(_overload(name.strip("_")), operands, lower)
    if wanted is None:
        return args

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted) if castable(tensor.dtype, wanted) else tensor

    found: tuple[object, ...] = pytree.tree_map_only(torch.Tensor, given, args)
    return found


@functools.lru_cache
def _overload(name: str) -> str:
    """The overload of an operator that autocast casts for; the given name if it has no rule."""
    packet = getattr(torch.ops.aten, name, None)
    targets = [f"aten.{name}.{overload}" for overload in (packet.overloads() if packet is not None else ())]
    cast = (target for target in targets if (rule := rule_of(target)) is not None and rule.autocast is not None)
    return next(cast, name)

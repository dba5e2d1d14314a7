"""What autocast casts, so that the casts can be written into the program: the `autocast` of an operator's row says it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.operators import rule_of
from autopar.operators.facts import Autocast


def dtype(statics: Sequence[object]) -> torch.dtype:
    """The dtype of a region `wrap_with_autocast(device type, dtype, enabled, ...)`."""
    device, given = statics[0], statics[1]
    return given if isinstance(given, torch.dtype) else torch.get_autocast_dtype(str(device))


def operand_dtype(target: str, operands: Sequence[torch.dtype], lower: torch.dtype) -> torch.dtype | None:
    """The dtype to which an op's floating operands are cast; None if autocast leaves them."""
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
    """Whether autocast touches a tensor of this dtype: floating, not double, and not what it should be."""
    return given.is_floating_point and given not in (torch.float64, wanted)

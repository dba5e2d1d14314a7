"""The norm of a module's gradients, whatever layouts its parameters have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def norm_of(parameters: Iterable[nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of all gradients of these parameters as one vector, the same on every rank; 0 where there is none."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


__all__ = ["norm_of"]

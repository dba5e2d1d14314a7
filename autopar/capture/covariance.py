"""Traceable `torch.cov` and `torch.corrcoef`: torch's own read the number of observations, a size, from a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """`torch.cov` (aten/src/ATen/native/Correlation.cpp)."""
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    given = [one for one in (fweights, aweights) if one is not None]
    if not given:
        around = rows - rows.sum(1, keepdim=True) / rows.shape[1]
        return torch.true_divide(around @ around.t().conj(), max(rows.shape[1] - correction, 0)).squeeze()
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    around = rows - (rows * weights).sum(1, keepdim=True) / total
    return torch.true_divide(around @ (around * weights).t().conj(), (total - lost).clamp(min=0)).squeeze()


def correlation(input: Tensor) -> Tensor:
    """`torch.corrcoef`."""
    found = covariance(input)
    if not found.dim():
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation.unsqueeze(1) / deviation
    return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1)) if found.is_complex() else found.clip(-1, 1)

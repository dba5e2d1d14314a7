"""The norm of a module's gradients, whatever layouts its parameters have.

Every part of a gradient counts once, on the first of the ranks that hold it; one number is reduced over each axis. DTensor's
own norm would be dispatched for every parameter, and warns of its two all-reduces on a mesh of two axes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import InputError


def number_of(name: str, given: object, *, least: float = -math.inf) -> float:
    """A norm, or the type of one, that was given. Raises InputError for what is none, and for one below the least."""
    try:
        found = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
        found = math.nan
    if not found >= least:
        raise InputError(f"{name}={given!r} is no norm", fix="a number that is not negative; inf for the largest")
    return found


@torch.no_grad()
def norm_of(parameters: Iterable[nn.Parameter], norm_type: float) -> torch.Tensor:
    """The norm of all gradients of these parameters as one vector, the same on every rank; 0 where there is none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mesh = next((gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)), None)
    if mesh is None or norm_type <= 0:
        norm = nn.utils.get_total_norm(gradients, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    dtype = functools.reduce(torch.promote_types, (gradient.dtype.to_real() for gradient in gradients))
    parts = [_part(gradient) for gradient in gradients if _counts(gradient, mesh)]
    own = nn.utils.get_total_norm([part for part in parts if part.numel()], norm_type)  # nothing has no largest element
    # For powers; and it may be of no gradient, or of some on the host.
    own = own.to(mesh.device_type, torch.promote_types(dtype, torch.float32))
    return _joined(own, mesh, norm_type).to(dtype)


def _part(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _counts(gradient: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether this rank is the first that holds its part of a gradient."""
    placements = gradient.placements if isinstance(gradient, DTensor) else (Replicate(),) * mesh.ndim
    return not any(
        isinstance(place, Replicate) and at for place, at in zip(placements, mesh.get_coordinate() or (), strict=True)
    )


def _joined(own: torch.Tensor, mesh: DeviceMesh, norm_type: float) -> torch.Tensor:
    """The norm of all ranks' vectors together, from the norm of each."""
    largest = math.isinf(norm_type)
    found = own.clone() if largest else own**norm_type
    for axis in range(mesh.ndim):
        dist.all_reduce(found, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return found if largest else found ** (1 / norm_type)


__all__ = ["norm_of", "number_of"]

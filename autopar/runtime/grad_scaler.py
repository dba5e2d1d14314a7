"""Loss scaling over ranks that hold parts of the gradients: a step is skipped on all ranks, or on none."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.runtime.world import Context


class ScaledState(Protocol):
    """The loss scale of a parallel module."""

    scaler: torch.amp.GradScaler | None

    @property
    def context(self) -> Context: ...


@runtime_checkable
class ScaledModule(Protocol):
    """A parallel module."""

    @property
    def autopar(self) -> ScaledState: ...


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for a parallel module, whose ranks may hold parts of gradients.

    torch's own checks for finite gradients only among the ranks over which the *first* gradient is split: if others are split
    differently, or are in another pipeline stage, ranks would disagree on whether to step. This one asks all ranks::

        scaler = autopar.GradScaler(parallel)
        scaler.scale(parallel(*batch)).backward()       # or parallel.step(*batch), which then scales its loss
        scaler.unscale_(optimizer)                      # before gradients are clipped
        scaler.step(optimizer)
        scaler.update()

    Args:
        parallel: what `autopar.parallelize` returned; from now on its `step` scales the loss, and returns it unscaled.
        options: those of `torch.amp.GradScaler`: init_scale, growth_factor, backoff_factor, growth_interval, enabled.

    Raises InputError for another module.
    """

    def __init__(self, parallel: ScaledModule, **options: float) -> None:
        if not isinstance(parallel, ScaledModule):
            what = f"a {type(parallel).__name__} was not made by autopar.parallelize"
            raise InputError(what, fix="autopar.GradScaler(parallel); for a module of one process torch.amp.GradScaler")
        device = parallel.autopar.context.device
        super().__init__(device.type, **options)  # type: ignore[arg-type]
        self.over_ranks = parallel.autopar.context.device_mesh is not None
        self.scale(torch.zeros((), device=device))  # makes the scale, which the ranks of a pipeline without a loss need too
        parallel.autopar.scaler = self

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = found or {found_inf.device: found_inf}  # a rank without gradients must answer the others
        if self.over_ranks:
            for flag in flags.values():
                dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flags


__all__ = ["GradScaler"]

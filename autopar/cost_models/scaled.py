"""A cost model whose kernels or links are faster or slower than another's by one factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compute import Shapes
from autopar.cost_models.cost_model import CostModel, OpCost
from autopar.cost_models.optimizers import Optimizer
from autopar.ir.device import Device, Link, Seconds
from autopar.ir.kernel_rates import positive
from autopar.ir.program import Op, Value


class ScaledCostModel:
    """The prices of a `base`, divided by a speed.

    `kernels` is the speed of ops, local conversions and the optimizer, `links` that of collectives and of moves to the host:
    1.2 is 20% faster. Latencies and launches are scaled with the rest. The laws of `CostModel` hold as they do for the base.
    Raises MeshError for a speed that is not positive and finite.
    """

    def __init__(self, base: CostModel, *, kernels: float = 1.0, links: float = 1.0) -> None:
        positive("a cost model's", {"speed of kernels": kernels, "speed of links": links})
        self.base, self.kernels, self.links = base, kernels, links
        self.name = f"{base.name}, kernels x {kernels:g}, links x {links:g}"

    def op_cost(self, op: Op, values: Mapping[str, Value], device: Device) -> OpCost:
        """The base's, divided by the speed of kernels."""
        return _ScaledOpCost(base=self.base.op_cost(op, values, device), speed=self.kernels)

    def collective_seconds(self, kind: str, size: NDArray[np.float64], ranks: int, link: Link) -> NDArray[np.float64]:
        """The base's, divided by the speed of links."""
        return self.base.collective_seconds(kind, size, ranks, link) / self.links

    def copy_seconds(self, moved: NDArray[np.float64], device: Device) -> NDArray[np.float64]:
        """The base's, divided by the speed of kernels."""
        return self.base.copy_seconds(moved, device) / self.kernels

    def offload_seconds(self, size: float, device: Device) -> Seconds:
        """The base's, divided by the speed of links."""
        return self.base.offload_seconds(size, device) / self.links

    def optimizer_seconds(self, stored: float, optimizer: Optimizer, device: Device) -> Seconds:
        """The base's, divided by the speed of kernels."""
        return self.base.optimizer_seconds(stored, optimizer, device) / self.kernels

    def host_optimizer_seconds(self, stored: float, optimizer: Optimizer, device: Device) -> Seconds:
        """The base's: another device has the same host."""
        return self.base.host_optimizer_seconds(stored, optimizer, device)

    def disk_seconds(self, read: float, written: float, device: Device) -> Seconds:
        """The base's: another device has the same disk."""
        return self.base.disk_seconds(read, written, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaledOpCost:
    base: OpCost
    speed: float

    def forward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        return self.base.forward_seconds(operands, results) / self.speed

    def backward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        return self.base.backward_seconds(operands, results) / self.speed


__all__ = ["ScaledCostModel"]

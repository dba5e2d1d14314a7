"""The interface of cost models, and the default one.

class Congested(CatalogCostModel):
    name = "congested"

    def collective_seconds(self, kind, size, ranks, link):
        return 3 * super().collective_seconds(kind, size, ranks, link)

autopar.plan(model, batch, mesh=(2, 4), device="h100", cost_model=Congested())
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models import collectives, links, optimizers
from autopar.cost_models.compute import Shapes, pricer
from autopar.cost_models.optimizers import Optimizer
from autopar.ir.device import Device, Link, Seconds
from autopar.ir.program import Op, Value


class OpCost(Protocol):
    """Seconds of one op on one device as a function of its local shapes: tensor operands as in `Op.operands`, and results."""

    def forward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        """Seconds of one forward."""
        ...

    def backward_seconds(self, operands: Shapes, results: Shapes) -> Seconds:
        """Seconds of one backward; 0 where no gradient is needed."""
        ...


@runtime_checkable
class CostModel(Protocol):
    """Prices of everything in a training step, in seconds on one device.

    A model must obey these laws, on which the integer program relies (`tests/cost_models/test_cost_model.py` checks them):

    - every price is nonnegative;
    - a collective is affine in bytes, `a + b * size`: weights of a bucket share one latency `a`, which the program subtracts
    from each of them and charges once (`formulation.fixed_charges`); - a collective is monotone in bytes, and free on an axis
    of one device; - equal arguments have equal prices: candidates of equal local shapes are priced once.

    Subclass `CatalogCostModel` to replace one of them.
    """

    name: str  # as a plan's options keep it

    def op_cost(self, op: Op, values: Mapping[str, Value], device: Device) -> OpCost:
        """The cost of an op; `values` holds its operands at their global shapes."""
        ...

    def collective_seconds(self, kind: str, size: NDArray[np.float64], ranks: int, link: Link) -> NDArray[np.float64]:
        """A collective ("all_gather", "reduce_scatter", "all_reduce", "all_to_all") for each of these buffer sizes.

        `size` is in bytes: the larger side's buffer on one rank, what is gathered, scattered, reduced or exchanged.
        """
        ...

    def copy_seconds(self, moved: NDArray[np.float64], device: Device) -> NDArray[np.float64]:
        """A local conversion (slice, pad, rounding) that reads and writes so many bytes in all."""
        ...

    def offload_seconds(self, size: float, device: Device) -> Seconds:
        """Seconds to move so many bytes to host memory and back; inf if the device has no host link."""
        ...

    def optimizer_seconds(self, stored: float, optimizer: Optimizer, device: Device) -> Seconds:
        """Seconds of an optimizer step over a parameter of which one device stores so many bytes."""
        ...

    def host_optimizer_seconds(self, stored: float, optimizer: Optimizer, device: Device) -> Seconds:
        """Seconds of the optimizer's step over the parameters that the host stores for one device; inf if its bandwidth is
        unknown.
        """
        ...

    def disk_seconds(self, read: float, written: float, device: Device) -> Seconds:
        """Seconds to read and write so many bytes on the disk for one device; inf if no disk is known."""
        ...


class CatalogCostModel:
    """Kernels under a roofline, alpha-beta collectives and memory traffic: the figures of the catalog or of a profile."""

    name = "catalog"

    def op_cost(self, op: Op, values: Mapping[str, Value], device: Device) -> OpCost:
        """The kernels of `compute.pricer` under a roofline, or the measured rate of the operator."""
        return pricer(op, values, device)

    def collective_seconds(self, kind: str, size: NDArray[np.float64], ranks: int, link: Link) -> NDArray[np.float64]:
        """The alpha-beta line of `collectives.seconds`, or the measured one."""
        return collectives.seconds(kind, size, ranks, link)

    def copy_seconds(self, moved: NDArray[np.float64], device: Device) -> NDArray[np.float64]:
        """Memory traffic at the bandwidth that plain kernels reach, at least a kernel's launch."""
        return np.maximum(moved / device.streaming, device.launch)

    def offload_seconds(self, size: float, device: Device) -> Seconds:
        """Two copies over the host link (`links.host_seconds`)."""
        return links.host_seconds(size, device)

    def optimizer_seconds(self, stored: float, optimizer: Optimizer, device: Device) -> Seconds:
        """Memory traffic of the optimizer (`optimizers.step_seconds`), or the measured seconds."""
        return optimizers.step_seconds(stored, optimizer, device)

    def host_optimizer_seconds(self, stored: float, optimizer: Optimizer, device: Device) -> Seconds:
        """Memory traffic of the optimizer in the host's memory (`optimizers.host_step_seconds`)."""
        return optimizers.host_step_seconds(stored, optimizer, device)

    def disk_seconds(self, read: float, written: float, device: Device) -> Seconds:
        """By the disk's rates, of its data sheet or as measured (`Disk.seconds`)."""
        return device.disk.seconds(read, written) if device.disk else math.inf


CATALOG = CatalogCostModel()

__all__ = ["CATALOG", "CatalogCostModel", "CostModel", "OpCost"]

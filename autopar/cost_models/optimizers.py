"""Optimizers: their state per parameter, and the bytes that a step moves.

State is kept in the parameter's dtype, as torch.optim does. A step reads the parameter, its gradient and the state once and
writes the parameter and the state once. LARS reads the parameter and the gradient a second time, since it scales by their
norms; LAMB writes its update and reads it and the parameter again. A step is limited by memory bandwidth, and its launches
are shared by all parameters (torch's foreach kernels). On a CPU torch steps one parameter after the other. Other temporary
memory of a step is as counted in torch 2.13.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InputError
from autopar.ir.device import Bytes, Device, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The costs of an optimizer; `states` and `moved` are multiples of the parameter's own bytes."""

    name: str
    states: int  # tensors of the parameter's size that it keeps
    moved: int  # tensors of that size that one step reads or writes
    source: str
    # Temporary tensors of a step. torch's foreach implementation, of all parameters at once: so many of each one's size.
    foreach_scratch: int = 0
    # Its for-loop implementation, on CPUs, of one parameter after the other: of the previous one's size, and of its own.
    loop_scratch: tuple[int, int] = (0, 0)

    def scratch(self, sizes: Sequence[Bytes], *, cpu: bool) -> Bytes:
        """The temporary memory of a step, given the bytes of each parameter.

        >>> optimizer("adamw").scratch([30, 50], cpu=False), optimizer("adamw").scratch([30, 50], cpu=True)
        (80, 130)
        """
        if not cpu:
            return self.foreach_scratch * sum(sizes)
        last, own = self.loop_scratch
        return max((last * before + own * size for before, size in itertools.pairwise((0, *sizes))), default=0)


def _optimizer(
    name: str, states: int, source: str, *, twice: int = 0, foreach_scratch: int = 0, loop_scratch: tuple[int, int] = (0, 0)
) -> Optimizer:
    """`twice` counts the tensors that are read or written a second time."""
    moved = 2 * states + 3 + twice
    return Optimizer(
        name=name, states=states, moved=moved, source=source, foreach_scratch=foreach_scratch, loop_scratch=loop_scratch
    )


def with_states(entry: Optimizer, states: int) -> Optimizer:
    """The optimizer with another number of states, all of which each step reads and writes."""
    return replace(entry, states=states, moved=entry.moved + 2 * (states - entry.states))


NONE = _optimizer("none", 0, "nothing is trained")  # of inference
OPTIMIZERS: dict[str, Optimizer] = {
    entry.name: entry
    for entry in (
        _optimizer("sgd", 0, "torch.optim.SGD"),
        _optimizer("sgd-momentum", 1, "torch.optim.SGD: momentum_buffer"),
        _optimizer("adam", 2, "torch.optim.Adam: exp_avg, exp_avg_sq", foreach_scratch=1, loop_scratch=(1, 2)),
        _optimizer("adamw", 2, "torch.optim.AdamW: exp_avg, exp_avg_sq", foreach_scratch=1, loop_scratch=(1, 2)),
        _optimizer("nadam", 2, "torch.optim.NAdam: exp_avg, exp_avg_sq", foreach_scratch=1, loop_scratch=(1, 2)),
        _optimizer("radam", 2, "torch.optim.RAdam: exp_avg, exp_avg_sq", foreach_scratch=1, loop_scratch=(0, 2)),
        _optimizer("adamax", 2, "torch.optim.Adamax: exp_avg, exp_inf", foreach_scratch=1, loop_scratch=(0, 1)),
        _optimizer("adadelta", 2, "torch.optim.Adadelta: square_avg, acc_delta", foreach_scratch=2, loop_scratch=(1, 2)),
        _optimizer("adagrad", 1, "torch.optim.Adagrad: sum", foreach_scratch=2, loop_scratch=(1, 1)),
        _optimizer("rmsprop", 1, "torch.optim.RMSprop: square_avg", foreach_scratch=1, loop_scratch=(1, 1)),
        _optimizer("lion", 1, "X. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023: momentum"),
        _optimizer("lars", 1, "Y. You et al., Large Batch Training of Convolutional Networks, 2017: momentum", twice=2),
        _optimizer("lamb", 2, "Y. You et al., Large Batch Optimization for Deep Learning, 2019: two moments", twice=3),
    )
}


def optimizer(name: object) -> Optimizer:
    """The optimizer with this name. Raises InputError for a name that is not in the table.

    >>> optimizer("adamw").states
    2
    """
    if isinstance(name, Optimizer):
        return name
    key = str(name).lower()
    if key not in OPTIMIZERS:
        close = difflib.get_close_matches(key, OPTIMIZERS, n=1, cutoff=0.5) if isinstance(name, str) else []
        raise InputError(
            f"no optimizer is called {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            optimizers=", ".join(OPTIMIZERS),
            fix="give one of these names, or an autopar.cost_models.optimizers.Optimizer with your own numbers",
        )
    return OPTIMIZERS[key]


def step_seconds(bytes_of_parameter: float, optimizer: Optimizer, device: Device) -> Seconds:
    """Seconds of one step over a parameter of which one device stores `bytes_of_parameter` bytes.

    Measured seconds are interpolated linearly between sizes, from 0 below the least, and extrapolated beyond the largest.
    """
    if known := device.updates.get(optimizer.name):
        sizes = sorted(known)
        if bytes_of_parameter > sizes[-1]:
            return known[sizes[-1]] * bytes_of_parameter / sizes[-1]
        return float(np.interp(bytes_of_parameter, [0, *sizes], [0.0, *map(known.__getitem__, sizes)]))
    rate, _ = device.rates.get(f"optimizer.{optimizer.name}", (device.streaming, 0.0))
    return bytes_of_parameter * optimizer.moved / rate


def host_step_seconds(bytes_of_parameter: float, optimizer: Optimizer, device: Device) -> Seconds:
    """Seconds of one step over the parameters that the host stores for one device: they move once, at the host's bandwidth.

    torch's fused kernels on the CPU (`torch.optim.AdamW(..., fused=True)`) go over parameter, gradient and state once.
    """
    return bytes_of_parameter * optimizer.moved / device.host_bandwidth if device.host_bandwidth else math.inf

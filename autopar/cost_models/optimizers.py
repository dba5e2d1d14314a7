"""Optimizers: the state they keep beside each parameter, and the bytes that a step moves.

State is kept in the parameter's dtype, as torch.optim does. A step reads the parameter, its gradient and the state once and
writes the parameter and the state once. LARS reads the parameter and the gradient a second time, since it scales by their
norms; LAMB writes its update and reads it and the parameter again. A step is limited by memory bandwidth, and its launches
are shared by all parameters (torch's foreach kernels).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from autopar.errors import InputError
from autopar.mesh import Device, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What an optimizer costs; `states` and `moved` are multiples of the parameter's own bytes."""

    name: str
    states: int  # tensors of the parameter's size that it keeps
    moved: int  # tensors of that size that one step reads or writes
    source: str


def _optimizer(name: str, states: int, source: str, *, again: int = 0) -> Optimizer:
    """`again` counts the tensors that are read or written a second time."""
    return Optimizer(name=name, states=states, moved=2 * states + 3 + again, source=source)


OPTIMIZERS: dict[str, Optimizer] = {
    entry.name: entry
    for entry in (
        _optimizer("sgd", 0, "torch.optim.SGD"),
        _optimizer("sgd-momentum", 1, "torch.optim.SGD: momentum_buffer"),
        _optimizer("adam", 2, "torch.optim.Adam: exp_avg, exp_avg_sq"),
        _optimizer("adamw", 2, "torch.optim.AdamW: exp_avg, exp_avg_sq"),
        _optimizer("nadam", 2, "torch.optim.NAdam: exp_avg, exp_avg_sq"),
        _optimizer("radam", 2, "torch.optim.RAdam: exp_avg, exp_avg_sq"),
        _optimizer("adamax", 2, "torch.optim.Adamax: exp_avg, exp_inf"),
        _optimizer("adadelta", 2, "torch.optim.Adadelta: square_avg, acc_delta"),
        _optimizer("adagrad", 1, "torch.optim.Adagrad: sum"),
        _optimizer("rmsprop", 1, "torch.optim.RMSprop: square_avg"),
        _optimizer("lion", 1, "X. Chen et al., Symbolic Discovery of Optimization Algorithms, 2023: momentum"),
        _optimizer("lars", 1, "Y. You et al., Large Batch Training of Convolutional Networks, 2017: momentum", again=2),
        _optimizer("lamb", 2, "Y. You et al., Large Batch Optimization for Deep Learning, 2019: two moments", again=3),
    )
}


def optimizer(name: object) -> Optimizer:
    """The optimizer of this name. Raises InputError for a name that is not in the table.

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
    """Seconds of one step over the parameters that one device stores, which take `bytes_of_parameter` bytes."""
    rate, _ = device.rates.get(f"optimizer.{optimizer.name}", (device.bandwidth, 0.0))
    return bytes_of_parameter * optimizer.moved / rate

"""Collectives in flight: issued on an axis, and waited for later.

    buffer = all_gather_start(x, axis)         returns at once; the buffer holds the result after
    wait(buffer, "all_gather", axis)

These are functional collectives, which keep their buffers until somebody waits for them: code that ends a pass early must call
`wait_for_abandoned`. Under a profiler every call and every wait is a range that names the collective and the axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed  # registers the operators of `_c10d_functional`

from autopar.runtime.first_message import before_message
from autopar.runtime.lost_ranks import lost
from autopar.runtime.profiler_ranges import named_range, profiling
from autopar.runtime.world import Axis

# By process group and place in it, the buffers to which collectives write until somebody waits for them, by their storage.
_in_flight: dict[tuple[str, int], dict[int, torch.Tensor]] = defaultdict(dict)


def all_reduce_start(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Issue an all-reduce in place; returns `x`, which holds the sum over all ranks after `wait`.

    When compiled it gets its own buffer, which Inductor may reuse: torch.compile supports no collective that returns its
    operand.
    """
    functional = torch.ops._c10d_functional
    reduce = functional.all_reduce if torch.compiler.is_compiling() else functional.all_reduce_
    return _started(from_sendable(issue("all_reduce", axis, reduce, to_sendable(x), "sum"), x.dtype), axis)


def all_gather_start(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Issue an all-gather; returns a buffer `(size, *x.shape)`, which holds the tensors of all ranks after `wait`."""
    sent = to_sendable(x.contiguous().reshape(1, *x.shape))
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    return _started(from_sendable(issue("all_gather", axis, gather, sent, axis.size), x.dtype), axis)


def reduce_scatter_start(rows: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Issue a reduce-scatter of contiguous `rows`, one per rank; returns this rank's sum, valid after `wait`."""
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    buffer = issue("reduce_scatter", axis, scatter, to_sendable(rows), "sum", axis.size)[0]
    return _started(from_sendable(buffer, rows.dtype), axis)


def issue(collective: str, axis: Axis, operator: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
    """Call an operator of `_c10d_functional` on an axis; under a profiler in a range that names both.

    Raises RankError if the process group was destroyed.
    """
    before_message()
    try:
        if not profiling():
            return operator(*arguments, axis.group)
        with named_range(f"{collective} over {axis.name}"):
            return operator(*arguments, axis.group)
    except RuntimeError as error:
        if torch.distributed.is_initialized():
            raise
        raise lost(error, f"{collective} over axis {axis.name}") from error


def wait(issued: torch.Tensor, collective: str, axis: Axis) -> torch.Tensor:
    """Wait for the collective on an axis that writes to a tensor; returns the tensor or a view of it.

    Raises RankError, which says which rank died, if the collective fails.
    """
    if not torch.compiler.is_compiling():
        _in_flight[_place(axis)].pop(_storage(issued), None)
    try:
        if not profiling():
            return _wait_tensor(issued)
        with named_range(f"wait for {collective} over {axis.name}"):
            return _wait_tensor(issued)
    except RuntimeError as error:
        raise lost(error, f"{collective} over axis {axis.name}") from error


def wait_for_abandoned(axes: Iterable[Axis]) -> None:
    """Wait for abandoned collectives that `*_start` functions issued over some axes, after an exception ended a pass.

    Functional collectives keep their buffers until somebody waits for them.
    """
    for axis in axes:
        for buffer in [*_in_flight[_place(axis)].values()]:
            wait(buffer, "a message of a pass that an exception ended", axis)


def to_sendable(x: torch.Tensor) -> torch.Tensor:
    """A view of booleans as bytes and of complex numbers as pairs: not every backend supports these dtypes."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.view(torch.uint8) if x.dtype is torch.bool else x


def from_sendable(received: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_sendable`: a view of received data in the original dtype."""
    return torch.view_as_complex(received) if dtype.is_complex else received.view(dtype)


def _started(buffer: torch.Tensor, axis: Axis) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        _in_flight[_place(axis)][_storage(buffer)] = buffer
    return buffer


def _place(axis: Axis) -> tuple[str, int]:
    return axis.group, axis.index


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _wait_tensor(issued: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(issued)
    return waited

"""Records which collectives a step issues, and when it issues and awaits them, for comparison with the plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.mesh import MEMORY
from autopar.runtime.offload import listener
from autopar.runtime.world import Axis

KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "dispatch_rows": "all_to_all",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective that this rank took part in; `bytes` is its larger buffer (an all-gather's output, else the input)."""

    kind: str
    axis: str
    bytes: int
    where: str  # "forward" or "backward"; weights gathered again for the backward count as backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """What a rank did from `start` to `stop`, in seconds of its own clock.

    It issued the `number`-th collective of the step ("issue"), waited for it ("wait"), or ran an op ("compute").
    """

    what: str
    name: str
    number: int
    start: float
    stop: float


class _Recorder(TorchDispatchMode):
    """Logs every functional collective, of the backward too: autograd's threads inherit dispatch modes."""

    def __init__(self, axes: Sequence[Axis], log: list[Issued]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = {axis.group: axis.name for axis in axes if axis.group}
        self.log = log

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kind = KINDS.get(func.overloadpacket.__name__) if func.namespace in ("_c10d_functional", "autopar") else None
        if kind:
            tensor, group = args[0], args[-1]
            assert isinstance(tensor, torch.Tensor)
            assert isinstance(group, str)
            size = tensor.nbytes * (int(str(args[1])) if kind == "all_gather" else 1)
            if func.namespace == "autopar":  # sizes depend on the data; the op has the number of rows that the plan counts
                size = int(str(args[-2])) * math.prod(tensor.shape[1:]) * tensor.itemsize
            self.log.append(Issued(kind=kind, axis=self.axes.get(group, group), bytes=size, where=_where()))
        return func(*args, **(kwargs or {}))


def _where() -> str:
    """The current pass."""
    return "forward" if torch._C._current_graph_task_id() < 0 else "backward"


class _Stopwatch(_Recorder):  # type: ignore[no-untyped-call]
    """Logs when collectives are issued and awaited, and when ops run.

    A collective is identified by the storage that it writes to. Waiting for it a second time takes no time and counts as an op.
    """

    def __init__(self, axes: Sequence[Axis], log: list[Issued], times: list[Occurrence]) -> None:
        super().__init__(axes, log)
        self.times = times
        self.flying: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name, before, start = func.overloadpacket.__name__, len(self.log), time.perf_counter()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        stop = time.perf_counter()
        what, number = "compute", -1
        if len(self.log) > before:
            what, number = "issue", before
            if isinstance(result, torch.Tensor):
                self.flying[result.untyped_storage()._cdata] = number
        elif name == "wait_tensor" and isinstance(args[0], torch.Tensor):
            number = self.flying.pop(args[0].untyped_storage()._cdata, -1)
            what = "wait" if number >= 0 else "compute"
        self.times.append(Occurrence(what=what, name=name, number=number, start=start, stop=stop))
        return result


@contextmanager
def timed(axes: Sequence[Axis]) -> Iterator[tuple[list[Issued], list[Occurrence]]]:
    """Collect the collectives issued inside, in order, with the times at which each was issued and awaited and each op ran."""
    log: list[Issued] = []
    times: list[Occurrence] = []
    with _Stopwatch(axes, log, times):
        yield log, times


@contextmanager
def recorded(axes: Sequence[Axis]) -> Iterator[list[Issued]]:
    """Collect every functional collective that this rank issues inside, in order, and its copies between
    memories.

    `axes`, from the `Context`, name the process groups; any other group is logged under its own name.
    """
    log: list[Issued] = []

    def copied(kind: str, size: int) -> None:
        log.append(Issued(kind=kind, axis=MEMORY, bytes=size, where=_where()))

    token = listener.set(copied)
    try:
        with _Recorder(axes, log):
            yield log
    finally:
        listener.reset(token)

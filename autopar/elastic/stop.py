"""Requests to stop: SIGTERM, which schedulers and torchrun send, and the end of the process that started this one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from autopar.runtime.lost_ranks import exchanging

LOG = logging.getLogger("autopar")
EXIT = 128 + signal.SIGTERM  # as a shell reports it: torchrun takes it for a failure, and starts the rank again


class StopRequest:
    """Inside of `with`, SIGTERM is a request to stop that all ranks honour together between two steps.

    If an error ends the training instead, the signal takes its usual effect afterwards, even if it came before: a process that
    was told to stop does not wait for messages that never come.

    The end of the parent process is a request too, since nobody watches the run any more. Python handles signals in the main
    thread only; in other threads they keep their usual effect.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._asked = False
        self._before: signal.Handlers | object = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]  # what signal.signal returned
        if self._asked and isinstance(error, Exception):  # it cannot save: others have died, and wait for this one to end
            LOG.error("told to stop after an error: %s", error)
            os.kill(os.getpid(), signal.SIGTERM)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._asked or os.getppid() != self._parent


def anywhere(*flags: bool, group: dist.ProcessGroup | None) -> list[bool]:
    """Whether each flag is set on any rank; one message of a few bytes on the host.

    Raises RankError if a rank has died.
    """
    if group is None:
        return list(flags)
    found = torch.tensor(flags, dtype=torch.int32)
    with exchanging("the end of a step"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in found]


__all__ = ["EXIT", "StopRequest", "anywhere"]

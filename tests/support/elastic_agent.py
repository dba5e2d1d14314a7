"""A stand-in for torchrun in elastic runs, with processes forked from one server (`tests.support.forked`).

Each start has torchrun's environment and a store of its own. When a process dies, the others get the same grace period as from
torchrun: SIGTERM, and SIGKILL after a while.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.forked import FORKED, prints_into

HOST = "127.0.0.1"
GRACE = 20.0  # seconds until processes that do not leave are killed


class Generation:
    """The processes of one start: `function(*arguments)` on so many ranks; what they print is in the file `log`."""

    def __init__(self, world: int, log: Path, function: Callable[..., object], arguments: Sequence[object]) -> None:
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        given = (world, self.store.port, str(log), function, tuple(arguments))
        self.ranks: list[BaseProcess] = [FORKED.Process(target=_rank, args=(rank, *given)) for rank in range(world)]
        for process in self.ranks:
            process.start()

    def number(self, rank: int) -> int:
        """The process id of a rank."""
        found = self.ranks[rank].pid
        assert found is not None, "it was started"
        return found

    @property
    def running(self) -> bool:
        return all(process.is_alive() for process in self.ranks)

    def end(self) -> list[int]:
        """Wait for all ranks; those that outlive another are told to leave, and killed at last. Exit codes by rank."""
        while self.running:
            time.sleep(0.01)
        if any(process.exitcode for process in self.ranks):
            for process in self.ranks:
                if process.is_alive():
                    process.terminate()
        until = time.monotonic() + GRACE
        for process in self.ranks:
            process.join(max(0.0, until - time.monotonic()))
        for process in self.ranks:
            if process.is_alive():
                process.kill()
                process.join()
        return [int(process.exitcode or 0) for process in self.ranks]


@contextmanager
def started(world: int, log: Path, function: Callable[..., object], arguments: Sequence[object]) -> Iterator[Generation]:
    """A generation that leaves no process behind, whatever happens."""
    generation = Generation(world, log, function, arguments)
    try:
        yield generation
    finally:
        for process in generation.ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(rank: int, world: int, port: int, log: str, function: Callable[..., object], arguments: Sequence[object]) -> None:
    """One rank, whose prints go to a file."""
    prints_into(Path(log))
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    try:
        torch.set_num_threads(1)
        function(*arguments)
    except Exception:
        traceback.print_exc()
        sys.exit(1)

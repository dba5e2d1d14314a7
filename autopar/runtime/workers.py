"""A pool of worker processes on this machine: one per rank, gloo over loopback.

One fresh interpreter imports what is needed and forks the workers, by default for every run, so that none sees what another
left behind (torch keeps DTensor meshes, and with them the names of process groups, in caches of the process). It shares
nothing with the caller, so the pool works from notebooks, from scripts without a `__main__` guard and under pytest:

    with WorkerPool(8) as pool:
        results = pool.run("package.module:function", payload)      # function(payload) on every rank, default group set up
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from autopar.errors import AutoparError
from autopar.runtime.worker import KEY, Task, WorkerResult

GRACE = 5.0  # seconds that the other ranks have to notice that one failed
START = 120.0  # seconds until the workers must have come up


class WorkerError(AutoparError):
    """A worker failed; `rank` says which (-1: none in particular), `__cause__` is its exception where it can be sent."""

    def __init__(self, what: str, /, *, rank: int = -1, **details: object) -> None:
        super().__init__(what, **details)
        self.rank = rank


class WorkerDied(WorkerError):
    """A worker's process ended without an exception."""


class WorkerPool:
    """`world` worker processes of one thread each, new ones for every run unless they are kept.

    `preload` names modules that all of them import, at the cost of one import.
    """

    def __init__(self, world: int, *, preload: Sequence[str] = ()) -> None:
        if KEY in os.environ:
            raise WorkerError(
                "a worker cannot start workers: it was importing the main script, which defines an operator",
                fix='put what the script does under if __name__ == "__main__":, or the operator into a file of its own',
            )
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-")
        self._number = 0
        self._workers: dict[int, tuple[Connection, int]] = {}  # rank -> connection, process id
        key = secrets.token_bytes(16)
        self._listener = Listener(str(Path(self._folder.name, "pool")), backlog=world + 1, authkey=key)
        start = "from autopar.runtime import worker; worker.root()"
        command = [sys.executable, "-c", start, str(self._listener.address), *preload]
        self._process = subprocess.Popen(command, env=_environment(key), stdin=subprocess.DEVNULL)
        self._root: Connection | None = None

    def run(
        self, function: str, payload: object = None, *, ranks: int | None = None, timeout: float = 300.0, keep: bool = False
    ) -> list[object]:
        """`function(payload)` on ranks 0 .. `ranks`-1 (default all), each with a gloo group of that many; results by rank.

        The function is named "package.module:function" and found with the caller's `sys.path`; payload and results travel
        through `torch.save`. With `keep` the workers serve the next run too: right for functions that make one mesh each,
        always in the same order. Raises WorkerError with the worker's traceback when a rank fails, or after `timeout`
        seconds; if a process dies without an exception, the run is tried once more.
        """
        try:
            return self._run(function, payload, ranks, timeout, keep)
        except WorkerDied:
            return self._run(function, payload, ranks, timeout, keep)

    def _run(self, function: str, payload: object, ranks: int | None, timeout: float, keep: bool) -> list[object]:
        ranks = self.world if ranks is None else ranks
        self._start()
        self._number += 1
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            file = str(Path(folder, "payload"))
            torch.save(payload, file, pickle_protocol=4)  # protocol 2, the default, knows no memory formats
            path = tuple(os.path.abspath(place) for place in sys.path)
            task = Task(number=self._number, function=function, payload=file, folder=folder, ranks=ranks, path=path)
            for rank in range(ranks):
                self._workers[rank][0].send(task)
            try:
                answers = self._collect(task, timeout)
                return [torch.load(answers[rank].result, weights_only=False) for rank in range(ranks)]
            finally:
                if not keep:
                    self._kill()

    def close(self) -> None:
        """End the workers; the pool cannot be used again."""
        self._kill()
        if self._root:
            self._root.close()
        self._process.terminate()
        self._process.wait()
        self._listener.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        """Fork the workers that are missing."""
        if self._root is None:
            self._root = self._accept()
        missing = [rank for rank in range(self.world) if rank not in self._workers]
        for rank in missing:
            self._root.send(rank)
        for _ in missing:
            worker = self._accept()
            rank, process = worker.recv()
            self._workers[rank] = worker, process

    def _accept(self) -> Connection:
        """The next connection; an error if the root process died instead of making one."""
        until = time.monotonic() + START
        door: socket.socket = self._listener._listener._socket  # type: ignore[attr-defined]  # accept() itself cannot time out
        while not wait([door], timeout=0.2):
            if self._process.poll() is not None or time.monotonic() > until:
                raise WorkerError(f"the workers did not start: {sys.executable} ended with {self._process.poll()}")
        return self._listener.accept()

    def _collect(self, task: Task, timeout: float) -> dict[int, WorkerResult]:
        """One answer per rank; the first failure gives the others a grace period, then the pool is emptied."""
        answers: dict[int, WorkerResult] = {}
        failed: WorkerResult | None = None
        until = time.monotonic() + timeout
        while len(answers) < task.ranks:
            waiting = {self._workers[rank][0]: rank for rank in range(task.ranks) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for found in ready:
                answer = _receive(found, waiting[found], task)  # type: ignore[arg-type, index]
                answers[answer.rank] = answer
                if answer.traceback and failed is None:
                    failed, until = answer, min(until, time.monotonic() + GRACE)
        late = [rank for rank in range(task.ranks) if rank not in answers]
        if late or any(answer.number < 0 for answer in answers.values()):
            self._kill()
        if failed is None and late:
            raise WorkerError(
                f"{task.function} did not end within {timeout:g} s", late=f"ranks {late}", fix="give run a longer timeout"
            )
        if failed:
            raise _failure(failed, task) from (pickle.loads(failed.error) if failed.error else None)
        return answers

    def _kill(self) -> None:
        for worker, process in self._workers.values():
            worker.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._workers.clear()


def _receive(found: Connection, rank: int, task: Task) -> WorkerResult:
    """What a worker says; one that died says nothing, and its answer has number -1."""
    try:
        answer: WorkerResult = found.recv()
    except (EOFError, OSError):
        return WorkerResult(number=-1, rank=rank, traceback=f"the process of rank {rank} died")
    return answer


def _failure(answer: WorkerResult, task: Task) -> WorkerError:
    lines = answer.traceback.strip().splitlines()
    what = f"{task.function} failed on rank {answer.rank} of {task.ranks}"
    kind = WorkerDied if answer.number < 0 else WorkerError
    return kind(what, rank=answer.rank, worker="\n          ".join(["", *lines]))


def _environment(key: bytes) -> dict[str, str]:
    """One thread per worker, gloo over the loopback interface, and nothing of a torchrun that may have started us."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {
        **{name: text for name, text in os.environ.items() if name not in foreign},
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path),
        KEY: key.hex(),
    }

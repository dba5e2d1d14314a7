"""A pool of worker processes on this machine: one per rank, gloo over loopback.

One fresh interpreter imports what is needed and forks the workers, by default for every run, because torch caches DTensor
meshes, and with them names of process groups, in the process. It shares nothing with the caller, so the pool works from
notebooks, from scripts without a `__main__` guard and under pytest:

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
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from autopar.errors import AutoparError
from autopar.runtime.worker import KEY, Task, WorkerResult

GRACE = 5.0  # seconds that the other ranks get to report after one failed
START = 120.0  # seconds until the workers must have connected
KEPT_RUNS = 16  # runs that workers serve: torch ends a gloo group, but not its threads, which wake up 100 times a second


class WorkerError(AutoparError):
    """A worker failed: `rank` (-1 if no rank in particular), with its exception as `__cause__` if that can be pickled."""

    def __init__(self, what: str, /, *, rank: int = -1, **details: object) -> None:
        super().__init__(what, **details)
        self.rank = rank


class WorkerDied(WorkerError):
    """A worker's process ended without an exception: it was killed, or crashed in native code."""


class WorkerRestartWarning(UserWarning):
    """A worker's process died, so the run was repeated in new workers."""


class WorkerPool:
    """`world` worker processes of one thread each, new ones for every run unless they are kept.

    `preload` names modules that are imported once for all workers. `restarts` counts the runs that were repeated because a
    worker's process died.
    """

    def __init__(self, world: int, *, preload: Sequence[str] = ()) -> None:
        if KEY in os.environ:
            raise WorkerError(
                "a worker process cannot start workers: it was importing the main script, which defines an operator",
                fix='put what the script does under if __name__ == "__main__":, or the operator into a file of its own',
            )
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-")
        self._number = 0
        self.restarts = 0
        self._runs = 0  # that the workers have served
        self._workers: dict[int, tuple[Connection, int]] = {}  # rank -> connection, process id
        key = secrets.token_bytes(16)
        self._listener = Listener(str(Path(self._folder.name, "pool")), backlog=world + 1, authkey=key)
        start = "import gc; gc.disable(); from autopar.runtime import worker; worker.root()"
        command = [sys.executable, "-c", start, str(self._listener.address), *preload]
        self._process = subprocess.Popen(command, env=_environment(key), stdin=subprocess.DEVNULL)
        self._root: Connection | None = None

    def run(
        self, function: str, payload: object = None, *, ranks: int | None = None, timeout: float = 300.0, keep: bool = False
    ) -> list[object]:
        """Run `function(payload)` on ranks 0 .. `ranks`-1, which form the default process group (gloo); results by rank.

        If a process dies without an exception, the run is repeated once, counted in `restarts`, and a WorkerRestartWarning
        says so.

        Args:
            function: "package.module:function", found with the caller's `sys.path`.
            payload: the argument, which like the results is passed by `torch.save`.
            ranks: by default all workers.
            timeout: seconds.
            keep: let the workers serve the next run too, up to `KEPT_RUNS`. Safe for functions that create the same meshes in
                the same order.

        Raises:
            WorkerError: a rank failed, with its traceback, or the timeout ended.
            WorkerDied: a process died in the repeated run too.
        """
        try:
            return self._run(function, payload, ranks, timeout, keep)
        except WorkerDied as died:
            self.restarts += 1
            warnings.warn(f"{died.what}; the run was repeated", WorkerRestartWarning, stacklevel=2)
            return self._run(function, payload, ranks, timeout, keep)

    def _run(self, function: str, payload: object, ranks: int | None, timeout: float, keep: bool) -> list[object]:
        ranks = self.world if ranks is None else ranks
        self._start(ranks)
        self._number += 1
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            file = str(Path(folder, "payload"))
            torch.save(payload, file, pickle_protocol=4)  # protocol 2, the default, cannot pickle memory formats
            path = tuple(os.path.abspath(place) for place in sys.path)
            task = Task(number=self._number, function=function, payload=file, folder=folder, ranks=ranks, path=path)
            for rank in range(ranks):
                self._workers[rank][0].send(task)
            try:
                results = self._collect(task, timeout)
                return [torch.load(results[rank].result, weights_only=False) for rank in range(ranks)]
            finally:
                self._runs += 1
                if not keep or self._runs >= KEPT_RUNS:
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

    def _start(self, ranks: int) -> None:
        """Fork the workers of ranks 0 .. `ranks`-1 that are missing."""
        if self._root is None:
            self._root = self._accept()
        missing = [rank for rank in range(ranks) if rank not in self._workers]
        for rank in missing:
            self._root.send(rank)
        for _ in missing:
            worker = self._accept()
            rank, process = worker.recv()
            self._workers[rank] = worker, process

    def _accept(self) -> Connection:
        """The next connection. Raises WorkerError if the root process died or did not connect in time."""
        until = time.monotonic() + START
        door: socket.socket = self._listener._listener._socket  # type: ignore[attr-defined]  # accept() itself cannot time out
        while not wait([door], timeout=0.2):
            if self._process.poll() is not None or time.monotonic() > until:
                raise WorkerError(f"the workers did not start: {sys.executable} ended with {self._process.poll()}")
        return self._listener.accept()

    def _collect(self, task: Task, timeout: float) -> dict[int, WorkerResult]:
        """The results of all ranks. After the first failure the other ranks get a grace period, then all workers are killed."""
        results: dict[int, WorkerResult] = {}
        failed: WorkerResult | None = None
        until = time.monotonic() + timeout
        while len(results) < task.ranks:
            waiting = {self._workers[rank][0]: rank for rank in range(task.ranks) if rank not in results}
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                result = _receive(connection, waiting[connection], task)  # type: ignore[arg-type, index]
                results[result.rank] = result
                if result.traceback and failed is None:
                    failed, until = result, min(until, time.monotonic() + GRACE)
        missing = [rank for rank in range(task.ranks) if rank not in results]
        if missing or any(result.number < 0 for result in results.values()):
            self._kill()
        if failed is None and missing:
            raise WorkerError(
                f"{task.function} did not end within {timeout:g} s", missing=f"ranks {missing}", fix="give run a longer timeout"
            )
        failed = next((result for result in results.values() if result.number < 0), failed)  # the cause of other ranks' errors
        if failed:
            raise _failure(failed, task) from (pickle.loads(failed.error) if failed.error else None)
        return results

    def _kill(self) -> None:
        for worker, process in self._workers.values():
            worker.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._workers.clear()
        self._runs = 0


def _receive(connection: Connection, rank: int, task: Task) -> WorkerResult:
    """The result that a worker sends; one with number -1 if its process died."""
    try:
        result: WorkerResult = connection.recv()
    except (EOFError, OSError):
        return WorkerResult(number=-1, rank=rank, traceback=f"the process of rank {rank} died")
    return result


def _failure(result: WorkerResult, task: Task) -> WorkerError:
    lines = result.traceback.strip().splitlines()
    what = f"{task.function} failed on rank {result.rank} of {task.ranks}"
    kind = WorkerDied if result.number < 0 else WorkerError
    return kind(what, rank=result.rank, worker="\n          ".join(["", *lines]))


def _environment(key: bytes) -> dict[str, str]:
    """The workers' environment: one thread each, gloo over the loopback interface, no variables of a surrounding torchrun."""
    excluded = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {
        **{name: text for name, text in os.environ.items() if name not in excluded},
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path),
        KEY: key.hex(),
    }

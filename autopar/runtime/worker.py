"""The worker side of `autopar.runtime.workers`: started by the pool as `python -m autopar.runtime.worker ADDRESS MODULE...`.

The first process (the root) imports torch and the modules once and then forks one worker per rank, so that eight workers cost
one import (as long as nothing was computed, the process has one thread and may be forked). Root and
workers each hold a connection to the pool; when it closes, because the pool was closed or its process died, they exit.
"""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor  # before the fork, since every worker needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run: what every rank is told."""

    number: int
    function: str  # "package.module:function"
    payload: str  # file that holds the argument
    folder: str  # where results go
    ranks: int
    path: tuple[str, ...]  # the pool's sys.path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """What a rank says when it is done: the file of its result, or the traceback and (if it can be pickled) the exception."""

    number: int
    rank: int
    result: str = ""
    traceback: str = ""
    error: bytes = b""


KEY = "AUTOPAR_WORKER_KEY"  # of the environment: only workers have it


def connection() -> Connection:
    """A new connection to the pool, whose address is the first argument of the command line."""
    return Client(sys.argv[1], authkey=bytes.fromhex(os.environ[KEY]))


def root() -> None:
    """Fork a worker whenever the pool sends a rank."""
    torch.set_num_threads(1)
    for module in ("torch._dynamo", *sys.argv[2:]):  # torch imports dynamo with the first DTensor: do it once
        importlib.import_module(module)
    pool = connection()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the workers
    while True:
        try:
            rank = pool.recv()
        except (EOFError, OSError):
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pool.close()
            work(rank)


def work(rank: int) -> None:
    """Answer tasks until the pool closes; a thread watches the connection, so that a rank stuck in a collective exits too."""
    pool = connection()
    pool.send((rank, os.getpid()))
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()

    def watch() -> None:
        while True:
            try:
                tasks.put(pool.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    while True:
        pool.send(answer(tasks.get(), rank))


def answer(task: Task, rank: int) -> WorkerResult:
    """Run one task in a process group of its own; leaving the group makes the other ranks' collectives fail at once."""
    try:
        sys.path.extend(place for place in task.path if place not in sys.path)
        importlib.invalidate_caches()
        meeting = Path(task.folder, "rendezvous").as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=task.ranks)
        dist.barrier()  # or a short task may leave while others still connect to its rank
        module, _, name = task.function.partition(":")
        function = importlib.import_module(module).__dict__[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's pickles use names that torch itself gives up
            payload = torch.load(task.payload, weights_only=False)
        result = function(payload)
        file = str(Path(task.folder, f"result{rank}"))
        torch.save(result, file)
        return WorkerResult(number=task.number, rank=rank, result=file)
    except BaseException as error:  # everything, SystemExit too, is the pool's to report
        return WorkerResult(number=task.number, rank=rank, traceback=traceback.format_exc(), error=_pickled(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes:
    try:
        found = pickle.dumps(error)
        pickle.loads(found)
    except Exception:  # an exception that cannot be sent is told by its traceback
        return b""
    return found

"""The worker side of `autopar.runtime.workers`: started by the pool with its address and the modules to import.

The first process (the root) imports torch and the modules once and then forks one worker per rank, so that eight workers cost
one import. It computes nothing, so it has one thread and may be forked. Root and workers each hold a connection to the pool;
when it closes, because the pool was closed or its process died, they exit.
"""

from __future__ import annotations

import gc
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
    """One run, in the form in which it is sent to every rank."""

    number: int
    function: str  # "package.module:function"
    payload: str  # file that holds the argument
    folder: str  # where results go
    ranks: int
    path: tuple[str, ...]  # the pool's sys.path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """What a rank sends after a run: the file of its result, or the traceback and (if it can be pickled) the exception."""

    number: int
    rank: int
    result: str = ""
    traceback: str = ""
    error: bytes = b""


KEY = "AUTOPAR_WORKER_KEY"  # environment variable with the key of the pool's connections; only workers have it


def connection() -> Connection:
    """A new connection to the pool, at the address in the first command line argument."""
    return Client(sys.argv[1], authkey=bytes.fromhex(os.environ[KEY]))


def root() -> None:
    """Fork a worker for every rank number that the pool sends."""
    torch.set_num_threads(1)
    for module in ("torch._dynamo", *sys.argv[2:]):  # torch imports dynamo with the first DTensor: do it once
        importlib.import_module(module)
    gc.freeze()  # the garbage collector of a worker scans its own objects only, not all of torch
    gc.enable()
    pool = connection()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
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
    """Run tasks until the pool closes; a thread watches the connection, so that a rank stuck in a collective exits too."""
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
        pool.send(run_task(tasks.get(), rank))


def run_task(task: Task, rank: int) -> WorkerResult:
    """Run one task in a new process group, which is destroyed at the end so that other ranks' collectives fail at once."""
    try:
        sys.path.extend(place for place in task.path if place not in sys.path)
        importlib.invalidate_caches()
        rendezvous = Path(task.folder, "rendezvous").as_uri()
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=task.ranks)
        dist.barrier()  # or a short task may end while other ranks still connect to this one
        module, _, name = task.function.partition(":")
        function = importlib.import_module(module).__dict__[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's pickles use names that torch deprecates
            payload = torch.load(task.payload, weights_only=False)
        result = function(payload)
        file = str(Path(task.folder, f"result{rank}"))
        torch.save(result, file)
        return WorkerResult(number=task.number, rank=rank, result=file)
    except BaseException as error:  # everything, SystemExit too, is reported by the pool
        return WorkerResult(number=task.number, rank=rank, traceback=traceback.format_exc(), error=_pickled(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes:
    try:
        found = pickle.dumps(error)
        pickle.loads(found)
    except Exception:  # the traceback is sent anyway
        return b""
    return found

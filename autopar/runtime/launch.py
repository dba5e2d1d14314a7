"""Starting a function on several processes of this machine, for scripts that torchrun did not start."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from autopar.errors import InputError, MeshError, RankError
from autopar.runtime.process_environment import ProcessEnvironment

HOST = "127.0.0.1"
MEETING = timedelta(minutes=30)  # until all ranks must have come


def launch(fn: Callable[..., object], nprocs: int, args: Sequence[object] = ()) -> None:
    """Run `fn(*args)` in `nprocs` new processes on this machine, each with the environment that torchrun would set.

    They meet at a free port of this machine. Returns when all have ended; if one fails, the others are ended. In processes
    started by torchrun, Slurm or Open MPI it just calls the function, so one script works everywhere.

    Args:
        fn: a function that a new process can import: from a module, or from a script that calls launch below `if __name__ ==
            "__main__":`.
        nprocs: the number of processes, one per device.
        args: its arguments, which are pickled.

    Raises:
        RankError: the first error of any rank, with its traceback.
        InputError: the function or an argument cannot be sent to another process.
        MeshError: `nprocs` is not a number of processes, or not that of the running ones.

    >>> import autopar
    >>> autopar.launch(print, nprocs=1, args=["rank 0"])
    """
    if isinstance(nprocs, bool) or not isinstance(nprocs, int) or nprocs < 1:
        raise MeshError(f"nprocs={nprocs!r} is not a number of processes", fix="a number from 1 on")
    found = ProcessEnvironment.of(os.environ)
    if found.launcher:
        if found.world != nprocs:
            what = f"launch starts {nprocs} processes, and {found.launcher} started {found.world} already"
            raise MeshError(what, fix=f"nprocs={found.world}, or a script that {found.launcher} did not start")
        fn(*args)
        return
    try:
        pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what = f"launch cannot send {getattr(fn, '__qualname__', fn)} and its arguments to other processes: {error}"
        raise InputError(what, fix="a function at the top level of a file, and arguments that pickle") from error
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=MEETING)  # type: ignore[attr-defined]
    _run(fn, nprocs, tuple(args), store.port)


def _run(fn: Callable[..., object], world: int, args: tuple[object, ...], port: int) -> None:
    """Run all ranks to their end; whatever ends this one ends them."""
    spawned = (world, port, fn, args)
    running = start_processes(_rank, spawned, nprocs=world, join=False, start_method="spawn")  # type: ignore[no-untyped-call]
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        while not running.join():
            pass
    except ProcessRaisedException as error:
        what = f"{name} failed on rank {error.error_index} of {world}"
        raise RankError(what, worker="\n" + str(error).strip()) from error
    except ProcessExitedException as error:
        how = error.signal_name or f"exit code {error.exit_code}"
        raise RankError(
            f"rank {error.error_index} of {world} ended without an exception: {how}",
            fix='see what it printed; a script calls launch below if __name__ == "__main__":',
        ) from error
    finally:
        for process in running.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(rank: int, world: int, port: int, fn: Callable[..., object], args: tuple[object, ...]) -> None:
    """One rank: the store that it meets the others at is that of the process that started it."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    try:
        fn(*args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


__all__ = ["launch"]

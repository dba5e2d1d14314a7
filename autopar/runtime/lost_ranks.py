"""When a collective fails because a process has died: the processes that are left find out which one.

Every process listens at a port that the store of the process group knows, and accepts nothing: the kernel answers as long as
the process lives, whatever it is waiting for, and no longer. The first rank whose collective fails asks all others, and leaves
what it found in the store, for those whose collectives fail later because it ended.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

from autopar.errors import RankError

PATIENCE = 5.0  # seconds until a process that has closed its connections has ended, too
TIMEOUT = 2.0  # seconds until a machine that does not answer counts as lost
BACKLOG = 4096  # connections that wait to be accepted, which they never are
DEAD = "autopar/dead"


def listen() -> None:
    """Let other ranks see that this process is alive until it ends; once per process group of all ranks."""
    store, rank = _get_default_store(), dist.get_rank()
    if store.check([_key(rank)]):
        return
    listener = socket.create_server((_own_address(), 0), backlog=BACKLOG)
    host, port = listener.getsockname()
    store.set(_key(rank), f"{host}:{port}")
    listener.detach()  # nobody closes it but the kernel


@contextmanager
def exchanging(where: str) -> Iterator[None]:
    """Raise RankError if a collective within fails; see `lost`."""
    try:
        yield
    except RuntimeError as error:
        raise lost(error, where) from error


def lost(error: RuntimeError, where: str) -> RankError:
    """The error to raise for a collective that failed: which ranks died, as far as can be found out.

    Args:
        error: what torch raised.
        where: the collective, as named in the message.
    """
    reason = str(error).partition("\n")[0][:200]
    if not dist.is_initialized():
        what = f"{where} failed: the process group of this process was destroyed"
        return RankError(what, reason=reason, fix="call destroy_process_group() when no parallel module is used any more")
    rank = dist.get_rank()
    try:
        found = _agreed_dead(_get_default_store(), rank)
    except RuntimeError:
        what = f"rank 0, or the process that holds the ranks' store, died: rank {rank} waited in {where}"
        return RankError(what, reason=reason, fix="look at the log of rank 0")
    if not found:
        return RankError(f"{where} failed on rank {rank}, but every rank lives", reason=reason)
    named = f"rank{'s' if ',' in found else ''} {found}"
    return RankError(
        f"{named} died: rank {rank} waited in {where}",
        reason=reason,
        fix=f"look at the log of {named}: out of memory, killed, or an error of its own",
    )


def _agreed_dead(store: Store, rank: int) -> str:
    """The ranks that have died, as the first rank to ask found them; raises RuntimeError if the store died."""
    others = [other for other in range(dist.get_world_size()) if other != rank]
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if store.check([DEAD]):
            return store.get(DEAD).decode()
        if dead := [other for other in others if not _lives(store, other)]:
            return store.compare_set(DEAD, "", ", ".join(map(str, dead))).decode()
        time.sleep(0.1)
    return ""


def _lives(store: Store, rank: int) -> bool:
    """Whether a rank's process answers; one that never listened counts as alive."""
    if not store.check([_key(rank)]):
        return True
    host, _, port = store.get(_key(rank)).decode().rpartition(":")
    try:
        socket.create_connection((host, int(port)), TIMEOUT).close()
    except OSError:
        return False
    return True


def _key(rank: int) -> str:
    return f"autopar/listens/{rank}"


def _own_address() -> str:
    """The address at which the rendezvous, and so the other machines, reach this one; the loopback where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])

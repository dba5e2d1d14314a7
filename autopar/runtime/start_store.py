"""A fresh rendezvous store for every start of the processes, although torchrun reuses its store across restarts.

torchrun keeps one store over all restarts of its workers, including the keys of earlier starts: addresses of processes that are
gone, where new ones would wait for each other. So each start agrees on a prefix of its own, under which the store is empty.
torchrun provides no name that would serve: its restart count differs from node to node.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from autopar.errors import RankError

WAIT = timedelta(minutes=30)  # torch's default for process groups
POLL = 0.01  # seconds
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun


def kept_store(environment: Mapping[str, str], world: int) -> Store | None:
    """torchrun's store, from its environment; None if the processes were started otherwise and share no old store."""
    if RESTARTS not in environment or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return dist.TCPStore(address, port, world, is_master=False, timeout=WAIT)  # type: ignore[attr-defined]


def start_store(store: Store, rank: int, world: int, wait: timedelta = WAIT) -> Store:
    """The store under a prefix that only the processes of this start know; all of them call it.

    Rank 0 makes the prefix. Each other rank asks for it with a unique key, under which rank 0 answers. Requests left from
    earlier starts are answered too, but nobody reads those answers. Rank 0 continues once all others have the prefix.

    Raises RankError if a rank does not ask in time.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"autopar/asks/{rank}", word)
        store.wait([f"autopar/answer/{word}"], wait)
        name = store.get(f"autopar/answer/{word}").decode()
        store.add(f"autopar/{name}/known", 1)
        return PrefixStore(name, store)
    name, until, answered = uuid.uuid4().hex, time.monotonic() + wait.total_seconds(), dict[int, bytes]()
    while store.add(f"autopar/{name}/known", 0) < world - 1:
        for other in range(1, world):
            key = f"autopar/asks/{other}"
            if store.check([key]) and answered.get(other) != (asked := store.get(key)):
                answered[other] = asked
                store.set(f"autopar/answer/{asked.decode()}", name)
        if time.monotonic() > until:
            what = f"rank 0 waited {wait.total_seconds():g} s for {world - 1} others to meet it"
            raise RankError(what, fix="see why they have not started")
        time.sleep(POLL)
    return PrefixStore(name, store)


__all__ = ["kept_store", "start_store"]

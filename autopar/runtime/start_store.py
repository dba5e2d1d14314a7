"""The store at which the processes of one start meet, where torchrun has started others at it before.

torchrun keeps one store over all restarts of its workers, with what each start has left there: addresses of processes that are
gone, at which the next ones wait for each other. So each start finds a name of its own, under which the store is empty. Of the
names that torchrun gives none is that: its count of restarts differs from node to node.
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
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # what torchrun sets


def kept_store(environment: Mapping[str, str], world: int) -> Store | None:
    """torchrun's store, as its environment has it; None where the processes were started otherwise, and share no old one."""
    if RESTARTS not in environment or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return dist.TCPStore(address, port, world, is_master=False, timeout=WAIT)  # type: ignore[attr-defined]


def start_store(store: Store, rank: int, world: int, wait: timedelta = WAIT) -> Store:
    """The store under a name that only the processes of this start know; all of them call it.

    Rank 0 makes the name. Each other rank asks for it with a word of its own, under which it is answered; what earlier ones
    asked is answered, too, and read by nobody. Rank 0 goes on when all others have the name.

    Raises RankError if one of them does not ask within the time.
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

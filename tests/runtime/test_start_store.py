"""The store of one start is empty, whatever earlier starts left in the store that torchrun keeps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from autopar.errors import RankError
from autopar.runtime.start_store import kept_store, start_store


def client(server: dist.TCPStore) -> dist.Store:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))


def test_the_ranks_of_each_start_share_a_store_that_no_other_start_has_written_to() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seen = set()
    for start, world in enumerate((3, 2, 4, 1, 3)):
        with ThreadPoolExecutor(world) as ranks:
            found = list(ranks.map(lambda rank, world=world: start_store(client(server), rank, world), range(world)))
        assert not found[0].check(["address"])
        found[-1].set("address", str(start))
        assert all(store.get("address") == str(start).encode() for store in found)
        seen.add(server.num_keys())
    assert len(seen) == 5


def test_a_rank_that_does_not_come_is_an_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RankError, match=r"rank 0 waited 0\.2 s for 1 others"):
        start_store(client(server), 0, 2, timedelta(seconds=0.2))


def test_processes_that_torchrun_did_not_start_keep_their_store() -> None:
    assert kept_store({"RANK": "0", "MASTER_PORT": "29500"}, 2) is None
    assert kept_store({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}, 2) is None

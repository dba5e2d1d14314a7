"""Workers of the pool, as libraries expect processes to be: torchrun's variables."""

from __future__ import annotations

import os

import torch.distributed as dist


def launched() -> None:
    """Say to a worker of the pool what torchrun would, of the process group that it has."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

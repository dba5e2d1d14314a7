"""A process dies in the middle of a step: the others report which one, and the collective in which they waited for it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import RankError
from tests.support.forked import ended

DIES = 3  # on a mesh (2, 2), where it shares an axis with ranks 1 and 2, and none with rank 0
BUILDING = "in_parallelize"
PLACES = {  # after how many collectives of its second step
    BUILDING: (0, "the comparison of the ranks' programs"),
    "before_the_call": (0, "the comparison of the ranks' calls"),
    "in_the_forward": (1, "all_gather over axis (dp|tp|dp_tp)"),
    "in_the_backward": (3, "(all_gather|the reduction of gradients) over axis (dp|tp|dp_tp)"),
}
DESTROYED = "after_the_process_group"  # which every rank destroys between the steps


class Dying(TorchDispatchMode):
    """Kills the process when it is to issue one collective more than it may."""

    def __init__(self, collectives: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = collectives

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ != "wait_tensor":
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


class Deadly(nn.Module):
    """Kills the process that calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return x


def rank_runs(rank: int, place: str, folder: Path) -> None:
    """One rank: two steps, of which the second does not end; writes the error and the seconds until it came."""
    dist.init_process_group("gloo", init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=4)
    torch.manual_seed(0)
    x, started = torch.randn(8, 8), time.monotonic()
    between = Deadly() if place == BUILDING and rank == DIES else nn.GELU()
    model = nn.Sequential(nn.Linear(8, 16), between, nn.Linear(16, 8))
    try:
        parallel = autopar.parallelize(model, x, {"dp": 2, "tp": 2}, device="h100", strategy="fsdp", outputs="whole")
        parallel(x).sum().backward()
        dist.barrier()
        started = time.monotonic()
        collectives = PLACES[place][0] if rank == DIES and place in PLACES else 1000
        if place == DESTROYED:
            dist.destroy_process_group()
        elif not collectives:
            os.kill(os.getpid(), signal.SIGKILL)
        with Dying(collectives):
            parallel(x).sum().backward()
    except RankError as error:
        (folder / f"{rank}").write_text(f"{time.monotonic() - started}\n{error}")


def ranks_run(folder: Path) -> None:
    """Fork the ranks of one place after the other, and wait for them."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for place in (*PLACES, DESTROYED):
        (folder / place).mkdir()
        children = []
        for rank in range(4):
            children.append(os.fork())
            if not children[-1]:
                try:
                    rank_runs(rank, place, folder / place)
                finally:
                    os._exit(0)
        for child in children:
            os.waitpid(child, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks wrote, by place."""
    written = tmp_path_factory.mktemp("ranks")
    assert ended(ranks_run, written, timeout=500) == 0
    return written


@pytest.mark.parametrize("place", PLACES)
def test_the_ranks_that_are_left_say_which_one_died_and_where_they_waited(place: str, folder: Path) -> None:
    for rank in range(DIES):
        seconds, text = (folder / place / f"{rank}").read_text().split("\n", 1)
        assert float(seconds) < 60, "on however busy a machine"
        assert re.match(f"rank {DIES} died: rank {rank} waited in {PLACES[place][1]}\n", text), text


def test_a_call_without_its_process_group_says_so(folder: Path) -> None:
    for rank in range(4):
        text = (folder / DESTROYED / f"{rank}").read_text().split("\n", 1)[1]
        assert re.match(r"all_gather over axis \w+ failed: the process group of this process was destroyed\n", text), text

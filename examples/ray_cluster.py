"""Jobs that share a Ray cluster: they come, go and grow as `autopar.allocate` says, and each goes on where it was.

python examples/ray_cluster.py /tmp/jobs           a local cluster of four CPU actors; pip install "autopar[ray]"

Every round the jobs that there are get their shares. A share of n devices is n actors, the ranks of a process group, which load
the job's last checkpoint onto the layouts of their own plan, train some steps and save. At the end each job's losses are
compared with those of a run on one process that nothing moved.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar import elastic

DEVICES, BATCH, AT_ONCE = 4, 24, 4  # devices of the cluster, samples of a batch, steps of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training: how wide its model is, its steps, the round in which it comes, and what a step takes on n devices."""

    width: int
    steps: int
    comes: int
    curve: Mapping[int, float]


JOBS = {
    "first": Job(width=64, steps=16, comes=0, curve={1: 1.0, 2: 0.55, 4: 0.3}),
    "second": Job(width=32, steps=8, comes=1, curve={1: 0.5, 2: 0.3}),
    "third": Job(width=48, steps=4, comes=2, curve={1: 0.4, 2: 0.22, 4: 0.15}),
}


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.body(x), target)


def train(job: Job, until: int, folder: Path) -> None:
    """This rank's part of a job's steps up to `until`, from where its checkpoints in the folder end."""

    def build() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(job.width)
        return Model(job.width), (torch.empty(BATCH, 16), torch.empty(BATCH, 16))

    def train_step(state: elastic.TrainingState, batch: object) -> torch.Tensor:
        x, target = batch  # type: ignore[misc]
        state.optimizer.zero_grad()
        loss = state.model.step(x, target)
        state.optimizer.step()
        if os.environ.get("RANK", "0") == "0":
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([state.step, loss.item(), int(os.environ.get("WORLD_SIZE", "1"))]) + "\n")
        return loss

    folder.mkdir(parents=True, exist_ok=True)
    x = torch.randn(240, 16, generator=torch.Generator().manual_seed(1))
    elastic.run(
        build,
        train_step,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data=DataLoader(TensorDataset(x, x.sin()), BATCH, shuffle=True),
        steps=until,
        checkpoints=folder / "checkpoints",
        every=until,
        device="cpu",
        strategy="fsdp",
    )


@ray.remote(num_cpus=1)
class Rank:
    """One device of the cluster."""

    def address(self) -> tuple[str, int]:
        """Where this actor can be met by others: its node, and a port that is free there."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, rank: int, world: int, meeting: tuple[str, int], job: Job, until: int, folder: Path) -> None:
        """Be a rank of so many, as under torchrun."""
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {name: str(number) for name, number in names.items()}
        os.environ |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
        train(job, until, folder)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def start(actors: Sequence[Rank], job: Job, until: int, folder: Path) -> list[ray.ObjectRef[None]]:
    """Have the actors of a share train; what they have not done yet."""
    meeting = ray.get(actors[0].address.remote())
    return [actor.run.remote(rank, len(actors), meeting, job, until, folder) for rank, actor in enumerate(actors)]


def rounds(folder: Path) -> Iterator[autopar.ClusterAllocation]:
    """Train all jobs to their end, in shares that are chosen anew each round."""
    cluster, actors = autopar.Cluster(devices=DEVICES), [Rank.remote() for _ in range(DEVICES)]
    done, present, number = dict.fromkeys(JOBS, 0), dict.fromkeys(JOBS, 0), 0
    while any(done[name] < job.steps for name, job in JOBS.items()):
        here = {name: job for name, job in JOBS.items() if job.comes <= number and done[name] < job.steps}
        asked = [
            autopar.TrainingJob(name=name, steps=job.steps - done[name], curve=job.curve, present=present[name], migration=0.1)
            for name, job in here.items()
        ]
        allocation = autopar.allocate(asked, cluster, goal="throughput")
        yield allocation
        running = {share.name: share.devices for share in allocation.shares if share.devices}
        ends = {name: min(done[name] + AT_ONCE, here[name].steps) for name in running}
        free = iter(actors)
        started = [
            start(list(itertools.islice(free, devices)), here[name], ends[name], folder / name)
            for name, devices in running.items()
        ]
        ray.get([result for results in started for result in results])
        done, present, number = done | ends, dict.fromkeys(JOBS, 0) | running, number + 1


def losses(folder: Path) -> list[tuple[int, float, int]]:
    """Step, loss and number of ranks of all steps that were taken in a folder."""
    return [tuple(json.loads(line)) for line in (folder / "losses.jsonl").read_text().splitlines()]


def main(folder: Path) -> None:
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=DEVICES, include_dashboard=False, runtime_env=paths, log_to_driver=False)
    for number, allocation in enumerate(rounds(folder)):
        print(f"round {number}")
        print(allocation)
    ray.shutdown()
    for name, job in JOBS.items():
        moved = losses(folder / name)
        train(job, job.steps, folder / f"{name} alone")
        alone = losses(folder / f"{name} alone")
        apart = max(abs(mine[1] - theirs[1]) for mine, theirs in zip(moved, alone, strict=True))
        assert [step for step, _, _ in moved] == [step for step, _, _ in alone], name
        print(f"{name}: {len(moved)} steps on {[world for _, _, world in moved]} ranks, losses apart by {apart:.1e}")
        assert apart < 1e-6, name


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

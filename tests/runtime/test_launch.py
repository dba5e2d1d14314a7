"""Running a function on several processes, and reading a process's rank from the launcher's environment."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import InputError, MeshError, RankError
from autopar.ir.mesh import Mesh
from autopar.runtime.process_environment import ProcessEnvironment, first_node, rendezvous
from autopar.runtime.world import connect


def add(folder: str) -> None:
    connect(Mesh.of(2), device="cpu")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    Path(folder, str(dist.get_rank())).write_text(str(int(total)))


def add_and_fail(folder: str) -> None:
    add(folder)
    if dist.get_rank() == 1:
        raise ValueError("rank one does not want to")
    time.sleep(600)


def test_ranks_form_a_group_and_the_first_error_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="add_and_fail failed on rank 1 of 2") as caught:
        autopar.launch(add_and_fail, nprocs=2, args=(str(tmp_path),))
    assert "ValueError: rank one does not want to" in str(caught.value)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["3", "3"]
    assert multiprocessing.active_children() == []


def test_under_another_launcher_it_is_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    found: list[int] = []
    autopar.launch(found.append, nprocs=1, args=(3,))
    assert found == [3]
    with pytest.raises(MeshError, match="launch starts 2 processes, and torchrun started 1"):
        autopar.launch(found.append, nprocs=2, args=(3,))


def test_what_cannot_be_sent_or_counted_is_refused() -> None:
    with pytest.raises(InputError, match="cannot send"):
        autopar.launch(lambda: None, nprocs=2)
    with pytest.raises(MeshError, match="nprocs=0"):
        autopar.launch(print, nprocs=0)


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[07-09]",
    "SLURM_JOB_ID": "12",
}
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    "environment, rank, world, local, launcher",
    [
        ({}, 0, 1, 0, ""),
        (TORCHRUN, 5, 8, 1, "torchrun"),
        (SLURM, 3, 4, 1, "Slurm"),
        (MPI, 1, 2, 1, "Open MPI"),
        (SLURM | TORCHRUN, 5, 8, 1, "torchrun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, 0, 1, 0, ""),  # a batch script beside no srun
    ],
)
def test_the_rank_is_that_of_the_launcher(
    environment: dict[str, str], rank: int, world: int, local: int, launcher: str
) -> None:
    wanted = ProcessEnvironment(rank=rank, world=world, local=local, launcher=launcher)
    assert ProcessEnvironment.of(environment) == wanted


def test_processes_meet_where_the_environment_says() -> None:
    def place(environment: dict[str, str]) -> str:
        return rendezvous(ProcessEnvironment.of(environment), environment)

    assert place(TORCHRUN) == "env://"
    assert place(SLURM) == "tcp://n07:20012"
    assert place(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "5"}) == "tcp://head:5"
    assert place(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == "tcp://127.0.0.1:29500"
    with pytest.raises(MeshError, match="Open MPI does not say where 2 processes meet"):
        place(MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert [first_node(nodes) for nodes in ("a,b", "a[3,7]", "a[3-7],b", "")] == ["a", "a3", "a3", None]


@pytest.mark.parametrize("rank, what", [("x", "not a number"), ("8", "says rank 8 of a world of 8")])
def test_an_environment_that_makes_no_sense_is_refused(rank: str, what: str) -> None:
    with pytest.raises(MeshError, match=what):
        ProcessEnvironment.of(TORCHRUN | {"RANK": rank})


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(MeshError, match=r"process 1 of this machine \(counted from 0\) has no GPU of its own: there is 1"):
        connect(Mesh.of(2), device="cuda")

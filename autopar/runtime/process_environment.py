"""Reads rank and world size from the environment of the launcher: torchrun, `autopar.launch`, Slurm or Open MPI."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from autopar.errors import MeshError
from autopar.ir.mesh import check_devices
from autopar.runtime.start_store import kept_store, start_store

PORT = 29500  # torch's default
# The launchers and their variables for rank, world size and rank within the node. For Slurm they are the variables of a step: a
# batch script that runs without srun has a rank, but is a single process whatever the number of tasks.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnvironment:
    """The rank of this process in the world and within its node, and its launcher ("" for a plain process)."""

    rank: int = 0
    world: int = 1
    local: int = 0
    launcher: str = ""

    @staticmethod
    def of(environment: Mapping[str, str]) -> ProcessEnvironment:
        """The environment of the first launcher whose variables are set; torchrun may itself run inside a Slurm step.

        Raises MeshError if a variable is not a number, or if the rank is not in the world.

        >>> ProcessEnvironment.of({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}).rank
        3
        """
        for launcher, names in LAUNCHERS.items():
            if names[0] not in environment or names[1] not in environment:
                continue
            texts = {name: environment.get(name, "0") for name in names}
            if not all(re.fullmatch(r"\d{1,10}", text) for text in texts.values()):
                shown = ", ".join(f"{name}={text}" for name, text in texts.items())
                raise MeshError(
                    f"the environment of {launcher} has a rank or world that is not a number: {shown}", fix="unset them"
                )
            rank, world, local = (int(text) for text in texts.values())
            if rank >= world:
                what = f"the environment of {launcher} says rank {rank} of a world of {world}"
                raise MeshError(what, fix=f"unset {names[0]} and {names[1]}, or start the script anew")
            return ProcessEnvironment(rank=rank, world=world, local=local, launcher=launcher)
        return ProcessEnvironment()


def world_size(declared: object = None) -> int:
    """The number of devices: as declared, else the size of the default group, else the number of processes started.

    Raises MeshError for a number below one.
    """
    if declared is not None:
        if isinstance(declared, bool) or not isinstance(declared, int) or declared < 1:
            raise MeshError(f"devices={declared!r} is not a number of devices", fix="a number from 1 on")
        check_devices(declared)
        return declared
    return dist.get_world_size() if dist.is_initialized() else ProcessEnvironment.of(os.environ).world


def started() -> bool:
    """Whether this process is part of a world: it has joined a process group, or a launcher started it as one of several."""
    return dist.is_initialized() or ProcessEnvironment.of(os.environ).launcher != ""


def rendezvous(found: ProcessEnvironment, environment: Mapping[str, str]) -> str:
    """Where the processes meet, as torch's `init_method`.

    MASTER_ADDR and MASTER_PORT if they are set. Otherwise the first node of a Slurm step, or this machine if Open MPI runs all
    processes on it, at a port derived from the job number.

    Raises MeshError if no address is known.
    """
    if found.launcher == "torchrun":
        return "env://"
    address = environment.get("MASTER_ADDR")
    if address is None and found.launcher == "Slurm":
        address = first_node(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    if address is None and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(found.world):
        address = "127.0.0.1"
    if not address:
        what = f"{found.launcher or 'nothing'} does not say where {found.world} processes meet"
        raise MeshError(what, fix="export MASTER_ADDR (the host of rank 0), for Open MPI by mpirun -x MASTER_ADDR")
    job = environment.get("SLURM_JOB_ID", "")
    port = environment.get("MASTER_PORT") or (str(20000 + int(job) % 10000) if job.isdecimal() else str(PORT))
    return f"tcp://{address}:{port}"


def first_node(nodes: str) -> str | None:
    """The first host of Slurm's list.

    >>> first_node("rack[07-09,12],other")
    'rack07'
    """
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return match[1] + (match[2] or "") if match else None


def join_world(backend: str) -> None:
    """Initialise the default process group from the launcher's environment."""
    found = ProcessEnvironment.of(os.environ)
    kept = kept_store(os.environ, found.world) if found.launcher == "torchrun" else None
    if kept is not None:
        store = start_store(kept, found.rank, found.world)
        dist.init_process_group(backend, store=store, rank=found.rank, world_size=found.world)
    elif found.launcher in ("", "torchrun"):
        dist.init_process_group(backend)
    else:
        meet = rendezvous(found, os.environ)
        dist.init_process_group(backend, init_method=meet, rank=found.rank, world_size=found.world)


__all__ = ["ProcessEnvironment", "first_node", "join_world", "rendezvous", "started", "world_size"]

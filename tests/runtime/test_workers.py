"""The worker pool: results by rank, errors with rank and traceback, and a pool that can be used after an error."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.workers import WorkerDied, WorkerError, WorkerPool, WorkerRestartWarning
from autopar.runtime.world import connect


def add(value: torch.Tensor) -> tuple[int, torch.Tensor]:
    dist.all_reduce(value)
    return dist.get_rank(), value


@pytest.mark.parametrize("ranks", [8, 1, 4])
def test_every_rank_gets_the_payload_and_returns_its_result(pool: WorkerPool, ranks: int) -> None:
    results = pool.run(f"{__name__}:add", torch.ones(3), ranks=ranks)
    assert [(rank, total.tolist()) for rank, total in results] == [(rank, [ranks] * 3) for rank in range(ranks)]  # type: ignore[misc]


def fail_on_2(_: None) -> None:
    if dist.get_rank() == 2:
        raise MeshError("no such mesh", fix="another one")
    dist.all_reduce(torch.ones(1))


def test_an_error_in_one_worker_is_raised_here_with_its_rank_and_traceback(pool: WorkerPool) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerError, match="failed on rank 2 of 8") as raised:
        pool.run(f"{__name__}:fail_on_2")
    assert time.monotonic() - started < 10, "the others do not wait for the one that failed"
    assert raised.value.rank == 2
    assert "in fail_on_2" in str(raised.value)
    assert isinstance(raised.value.__cause__, MeshError)
    pool.run(f"{__name__}:add", torch.ones(1))


def die_on_1(_: None) -> None:
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1))


def hang_on_1(_: None) -> None:
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


def test_a_worker_that_dies_or_hangs_is_replaced(pool: WorkerPool) -> None:
    before = pool.restarts
    with pytest.raises(WorkerDied), pytest.warns(WorkerRestartWarning, match="failed on rank 1 of 2; the run was repeated"):
        pool.run(f"{__name__}:die_on_1", ranks=2)
    assert pool.restarts == before + 1
    pool.run(f"{__name__}:add", torch.ones(1), ranks=2)
    with pytest.raises(WorkerError, match="did not end within 1 s"):
        pool.run(f"{__name__}:hang_on_1", ranks=2, timeout=1.0)
    assert len(pool.run(f"{__name__}:add", torch.ones(1), ranks=2)) == 2


def test_a_function_that_does_not_exist_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="KeyError"):
        pool.run(f"{__name__}:nothing")


def test_a_script_without_a_main_guard_may_use_a_pool_and_its_workers_die_with_it(tmp_path: Path) -> None:
    (tmp_path / "autopar_who.py").write_text("import os\ndef am_i(_): return os.getpid()\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "from autopar.runtime.workers import WorkerPool\n"
        "pool = WorkerPool(2)\n"
        "print(*pool.run('autopar_who:am_i', keep=True), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    workers = [int(process) for process in ran.stdout.split()]
    assert len(workers) == 2, ran.stderr
    until = time.monotonic() + 10
    while any(Path("/proc", str(process)).exists() for process in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path("/proc", str(process)).exists() for process in workers)


def wrong_mesh(_: None) -> str:
    with pytest.raises(MeshError) as raised:
        connect(Mesh.of((2, 4)))
    return str(raised.value)


def test_a_mesh_that_is_not_as_large_as_the_world_says_how_to_launch(pool: WorkerPool) -> None:
    message = pool.run(f"{__name__}:wrong_mesh", ranks=4)[0]
    assert str(message).startswith("the mesh (axis0=2, axis1=4) has 8 devices, but 4 processes run")
    assert "torchrun --nproc-per-node 8" in str(message)
    assert "plan needs no processes" in str(message)


def test_without_processes_a_mesh_of_one_works_and_a_larger_one_is_refused() -> None:
    context = connect(Mesh.of({"dp": 1, "tp": 1}))
    assert context.device_mesh is None
    assert context.coordinates == (0, 0)
    assert str(context.axis("tp")) == "tp[0 of 1]"
    with pytest.raises(MeshError, match="1 process runs"):
        connect(Mesh.of(2))

"""What is saved in the background is what there was when the save began, in tensors without dims, too."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn import functional

import autopar
from autopar.elastic.storage import CommittingWriter, begin
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool

TRAINED = threading.Event()  # before that, no writer writes


class LateFiles(FileSystemWriter):
    def write_data(self, *args: Any) -> Any:
        TRAINED.wait(60)
        return super().write_data(*args)


class Late(CommittingWriter, LateFiles):
    """The writer of elastic runs, as late."""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return functional.mse_loss(self.body(x) * self.scale, x.sin())


def saved(where: tuple[Path, bool]) -> None:
    """Saves, trains meanwhile, and reads what was saved; `users`: as docs/integrations.md says."""
    folder, users = where
    TRAINED.clear()
    parallel = autopar.parallelize(Scaled(), torch.ones(8, 8), (2,), device="h100", strategy="fsdp")
    optimizer, group = torch.optim.AdamW(parallel.parameters(), lr=0.1), dist.new_group(backend="gloo")
    expected = {name: full_tensor(tensor.detach()).clone() for name, tensor in parallel.state_dict().items()}
    if users:
        stager = DefaultStager(StagingOptions(False, False, False, False))
        writer, state = LateFiles(folder / "state"), parallel.state_dict()
        saving = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)
    else:
        (folder / "partial").mkdir(exist_ok=True)
        late = Late(folder / "partial", folder / "state", b"", lambda: None)
        saving = begin(parallel.state_dict(), late, group)
    for _ in range(2):
        parallel.step(torch.ones(8, 8))
        optimizer.step()
    TRAINED.set()
    saving.result()
    dist.barrier()
    found = parallel.state_dict()
    assert not full_tensor(found["scale"].detach()).equal(expected["scale"])
    dcp.load(found, checkpoint_id=folder / "state")
    torch.testing.assert_close({name: full_tensor(tensor.detach()) for name, tensor in found.items()}, expected, rtol=0, atol=0)


def test_tensors_without_dims_are_saved_as_they_were(pool: WorkerPool, tmp_path: Path) -> None:
    for users in (False, True):
        (folder := tmp_path / str(users)).mkdir()
        pool.run(f"{__name__}:saved", (folder, users), ranks=2, keep=True)

"""One checkpoint on disk, by torch.distributed.checkpoint: committed by a rename, and read without executing anything in it.

    .step-00000040.5f0c...partial/       while every rank writes its parts
    step-00000040/                       once all parts are on the disk

A rename is atomic in the file system, so a folder with the final name is complete.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint_files import CheckpointReader, sync, without_single_process_warning

REST = "training.pt"


class CommittingWriter(FileSystemWriter):
    """Writes into a folder that gets its final name when all parts are there; the coordinator then calls `committed`."""

    def __init__(self, partial: Path, target: Path, rest: bytes, committed: Callable[[], None]) -> None:
        super().__init__(partial)
        self.partial, self.target, self.rest, self.committed = partial, target, rest, committed

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """End a save; torch calls this on the coordinator when all ranks have written."""
        with (self.partial / REST).open("wb") as file:
            file.write(self.rest)
            file.flush()
            os.fsync(file.fileno())
        super().finish(metadata, results)
        sync(self.partial)
        if self.target.exists():  # of a run before, which was resumed from an older one
            discard(self.target)
        self.partial.rename(self.target)
        sync(self.target.parent)
        self.committed()


def discard(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a half-removed one does not count."""
    gone = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def packed(rest: Mapping[str, Any]) -> bytes:
    """Pack the whole part of a state into bytes. Raises CheckpointError for objects that could not be read back safely."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(rest), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        what = "the state of the scheduler, the optimizer or the loader cannot be stored"
        lines = str(error).splitlines()
        said = next((line for line in lines if "Unsupported" in line), lines[0] if lines else "").strip()
        raise CheckpointError(
            what, error=said[:200], fix="a state of tensors, numbers, texts and containers of them"
        ) from error
    return buffer.getvalue()


class TrainingReader(CheckpointReader):
    """Reads a checkpoint of `CommittingWriter`. Raises CheckpointError for a damaged one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.instead = f"remove {folder}: the training goes on from the checkpoint before"

    def rest(self) -> Mapping[str, Any]:
        """The part of the state that was saved whole."""
        try:
            found = torch.load(self.folder / REST, weights_only=True)
            if not isinstance(found, dict) or not isinstance(found.get("step"), int):
                raise ValueError(f"{REST} is not of a training")
        except (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            raise self.damaged(error) from error
        return found

    def check(self, index: Metadata) -> None:
        """Raise ValueError unless it is an index of tensors whose files exist with their recorded lengths."""
        if wrong := [name for name, one in index.state_dict_metadata.items() if not isinstance(one, TensorStorageMetadata)]:
            raise ValueError(f"{wrong[0]} is not a tensor")
        super().check(index)

    def damaged(self, error: Exception) -> CheckpointError:
        """The error for a checkpoint that cannot be read."""
        said = str(error).partition("\n")[0]
        if isinstance(error, pickle.UnpicklingError):  # torch advises to execute what the file says
            said = "it has what no checkpoint has"
        what = f"the checkpoint {self.folder.name} is damaged"
        return CheckpointError(what, error=said, folder=self.folder, fix=self.instead)


def begin(tensors: dict[str, torch.Tensor], writer: CommittingWriter, group: dist.ProcessGroup | None) -> Future[Metadata]:
    """Copy this rank's parts to the host and start writing them; a single process writes them synchronously.

    torch's own copy leaves out DTensors without dims, which would be written as later steps have them.
    """
    if group is None:
        done: Future[Metadata] = Future()
        try:
            with without_single_process_warning():
                done.set_result(state_dict_saver.save(tensors, storage_writer=writer, no_dist=True))
        except (CheckpointException, OSError) as error:
            done.set_exception(error)
        return done
    copied = {name: tensor if tensor.dim() else tensor.detach().clone() for name, tensor in tensors.items()}
    saved = state_dict_saver.async_save(copied, storage_writer=writer, process_group=group)
    assert isinstance(saved, Future), "a writer that stages by itself has one future"
    return saved


__all__ = ["CommittingWriter", "TrainingReader", "begin", "discard", "packed"]

"""The checkpoint folder of a training run: written during steps, committed atomically, with the last few kept."""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from autopar.elastic.storage import CommittingWriter, TrainingReader, begin, discard, packed
from autopar.errors import CheckpointError
from autopar.runtime.checkpoint_files import first_failure, load_checkpoint, reason_of
from autopar.runtime.lost_ranks import lost

LOG = logging.getLogger("autopar")
NAME = re.compile(r"step-(\d+)")
UNFINISHED = re.compile(r"\.step-\d+\.\w+")  # of what was being written, or removed, when its process ended
SHOWN = 4  # names in an error
GRACE = 5.0  # seconds


class Checkpoints:
    """The checkpoints in a folder that all ranks see; all ranks call every method except `pending`.

    `keep` is how many are kept. `group` contains all ranks, on the host (None for one process), and is used for checkpoints
    only, since a thread sends its messages.
    """

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None) -> None:
        self.folder, self.keep, self.group = folder, keep, group
        self._rank = dist.get_rank(group) if group else 0
        self._saving: tuple[int, Future[Metadata]] | None = None
        self._token = self._of_rank_0(uuid.uuid4().hex)

    def latest(self) -> TrainingReader | None:
        """The newest checkpoint as rank 0 sees it; removes what earlier processes left unfinished."""
        found = ""
        if self._rank == 0:
            for left in self._entries(UNFINISHED):
                shutil.rmtree(left, ignore_errors=True)
            found = max((path.name for path in self._entries(NAME)), key=_step, default="")
        found = self._of_rank_0(found)
        return TrainingReader(self.folder / found) if found else None

    def load(self, reader: TrainingReader, tensors: dict[str, torch.Tensor]) -> None:
        """Load this rank's parts in place. Raises CheckpointError if the checkpoint is of another model or optimizer."""
        self._check(reader, tensors)
        load_checkpoint(tensors, reader, group=self.group, alone=self.group is None)

    def save(self, step: int, tensors: dict[str, torch.Tensor], rest: Mapping[str, Any]) -> None:
        """Start writing the checkpoint of a step once the previous one is committed; the tensors may change afterwards."""
        self.wait()
        target, partial = self.folder / f"step-{step:08}", self.folder / f".step-{step:08}.{self._token}"
        writer = CommittingWriter(partial, target, packed(rest), lambda: self._prune(step))
        self._saving = step, begin(tensors, writer, self.group)

    @property
    def failed(self) -> bool:
        """Whether the checkpoint being written is known to have failed."""
        return bool(self._saving and self._saving[1].done() and self._saving[1].exception())

    def wait(self) -> None:
        """Wait until the checkpoint being written is committed. Raises CheckpointError if it cannot be."""
        if self._saving is None:
            return
        step, saved = self._saving
        self._saving = None
        try:
            saved.result()
        except (CheckpointException, OSError) as error:
            raise self._unwritten(step, error) from error
        except RuntimeError as error:
            raise lost(error, f"the checkpoint of step {step}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        """If another error ends the training, give the checkpoint being written a few seconds to be committed."""
        if self._saving is not None:
            try:
                self._saving[1].exception(GRACE)
            except TimeoutError:
                LOG.warning("the checkpoint of step %d was not finished", self._saving[0])

    def _prune(self, step: int) -> None:
        """Remove all but the newest few; runs on rank 0, in the writing thread."""
        LOG.info("checkpoint of step %d", step)
        known = sorted(self._entries(NAME), key=lambda path: _step(path.name))
        for old in known[: -self.keep]:
            discard(old)

    def _entries(self, pattern: re.Pattern[str]) -> list[Path]:
        return [path for path in self.folder.iterdir() if pattern.fullmatch(path.name)] if self.folder.is_dir() else []

    def _of_rank_0(self, text: str) -> str:
        box = [text]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def _check(self, reader: TrainingReader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise CheckpointError unless the checkpoint has exactly these tensors of all ranks."""
        own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        wanted, every = own, [own]
        if self.group is not None:
            every = [own] * dist.get_world_size(self.group)
            dist.all_gather_object(every, own, group=self.group)
            wanted = {name: one for rank in every for name, one in rank.items()}
        known = reader.read_metadata().state_dict_metadata
        stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(one.size), one.properties.dtype)  # type: ignore[union-attr]  # the reader refuses others
            for name, one in known.items()
        }
        differs = [name for name in sorted(wanted.keys() & stored.keys()) if wanted[name] != stored[name]]
        missing, more = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        if not (differs or missing or more):
            return
        of = "optimizer" if all(name.startswith("optimizer.") for name in (*differs, *missing, *more)) else "model"
        raise CheckpointError(
            f"the checkpoint {reader.folder.name} is of another {of}",
            differs="; ".join(f"{name}: {_said(stored[name])} there, {_said(wanted[name])} here" for name in differs[:SHOWN]),
            missing=_listed(missing),
            more=_listed(more),
            folder=reader.folder,
            fix=f"the {of} that wrote it, or another folder: checkpoints=",
        )

    def _unwritten(self, step: int, error: BaseException) -> CheckpointError:
        """The error for a checkpoint that could not be written; removes its remains."""
        rank, reason = first_failure(error) if isinstance(error, CheckpointException) else (self._rank, error)
        if self._rank == 0:
            for left in self._entries(UNFINISHED):
                shutil.rmtree(left, ignore_errors=True)
        whole = max((path.name for path in self._entries(NAME)), key=_step, default="none")
        differ = isinstance(reason, ValueError)  # torch's, where what ranks would write does not make whole tensors
        fix = "the same model and optimizer on every rank" if differ else "make room or lower keep="
        free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
        return CheckpointError(
            f"the checkpoint of step {step} was not written",
            error=f"{reason_of(reason)}, on rank {rank}",
            folder=f"{self.folder}, {free / 2**20:,.0f} MiB free",
            whole=whole,
            fix=f"{fix}, and start again: the training goes on from the last whole one",
        )


def _step(name: str) -> int:
    found = NAME.fullmatch(name)
    return int(found[1]) if found else -1


def _said(kind: tuple[tuple[int, ...], torch.dtype]) -> str:
    return f"{str(kind[1]).removeprefix('torch.')} of {list(kind[0])}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


__all__ = ["Checkpoints"]

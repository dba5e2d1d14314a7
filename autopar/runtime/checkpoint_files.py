"""Folders of torch.distributed.checkpoint: read without running what they say, and errors that say what is wrong with one.

torch unpickles the index of a checkpoint, and every entry other than a tensor, executing whatever the pickle calls.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from autopar.errors import CheckpointError
from autopar.runtime.lost_ranks import lost

METADATA = ".metadata"
KNOWN = {  # what torch's index of a checkpoint is made of
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
}  # fmt: skip
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


class _Index(pickle.Unpickler):
    """Unpickles torch's index, refusing all names except those that an index needs."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or dtype of a name in the pickle."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        path = module.partition(".")[0] == "pathlib" and name in PATHS
        if dtype or path or name in KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class CheckpointReader(FileSystemReader):
    """Reads a checkpoint. Raises CheckpointError if it is damaged or missing."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.folder = Path(folder)
        self.instead = "an undamaged one, of this model and these optimizers"  # of one whose parts cannot be read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index: what the checkpoint contains, and where."""
        try:
            with (self.folder / METADATA).open("rb") as file:
                found = _Index(file).load()
            if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
                raise ValueError("it has no index")
            self.check(found)
        except (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.UnpicklingError) as error:
            raise self.damaged(error) from error
        return found

    def check(self, index: Metadata) -> None:
        """Raise ValueError or OSError unless the files of an index have at least their recorded lengths."""
        for name, end in _ends(index).items():
            if Path(name).name != name or (self.folder / name).stat().st_size < end:
                raise ValueError(f"{name} is shorter than {end} bytes")

    def damaged(self, error: Exception) -> CheckpointError:
        """The error for a checkpoint that cannot be read."""
        there = self.folder.is_dir()
        said = str(error).partition("\n")[0]
        fix = "an older checkpoint" if there else "the folder into which every rank saved"
        what = f"the checkpoint {self.folder.name} is {'damaged' if there else 'not there'}"
        return CheckpointError(what, error=said if there else None, folder=self.folder, fix=fix)


def _ends(index: Metadata) -> dict[str, int]:
    """The files of an index, with the end of the last entry in each, in bytes."""
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


class _RenamingFiles(FileSystem):
    """Files of which one takes the place of another in one step."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Keep a file: what replaces it comes next."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file the name of another, which it replaces."""
        os.replace(path, new_path)


class ReplacingWriter(FileSystemWriter):
    """Writes a checkpoint into the folder of an older one, which counts until all parts of the new one are on the disk: they
    have names of their own, and the new index replaces the old one last."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, overwrite=True)
        self.folder, self.fs = Path(folder), _RenamingFiles()

    @property
    def _own(self) -> str:
        return f"__{self.save_id[:8]}"

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan of this rank, without torch's warning that there is an older checkpoint."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans of all ranks, with names of files that no other save has; torch calls this on one rank."""
        named = [(plan, plan.storage_data) for plan in super().prepare_global_plan(plans)]
        return [replace(p, storage_data=replace(s, prefix=f"{self._own}{s.prefix}")) for p, s in named]

    def discard(self) -> None:
        """Remove what a failed save has written, on the rank that names the files."""
        for file in self.folder.glob(f"{self._own}*.distcp"):
            file.unlink(missing_ok=True)

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Replace the index, then remove what it does not name; torch calls this on one rank when all have written."""
        super().finish(metadata, results)
        sync(self.folder)
        for file in self.folder.glob("__*.distcp"):
            if file.name not in _ends(metadata):
                file.unlink()


def sync(folder: Path) -> None:
    """Flush the entries of a folder to the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class _Planner(DefaultLoadPlanner):
    """Loads entries other than tensors, restricted to tensors, numbers, strings and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a loaded entry in its place."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def save_checkpoint(state: dict[str, Any], folder: Path) -> None:
    """Write this rank's parts in place of an older checkpoint, if the folder has one; every rank calls it.

    Raises CheckpointError if it cannot be written, on every rank; the older one is then as it was. Raises RankError if a rank
    dies.
    """
    writer = ReplacingWriter(folder)
    try:
        with without_single_process_warning():
            state_dict_saver.save(state, storage_writer=writer)
    except CheckpointException as error:
        writer.discard()
        rank, reason = first_failure(error)
        raise CheckpointError(
            f"the checkpoint {folder.name} was not written",
            error=f"{reason_of(reason)}, on rank {rank}",
            folder=folder,
            whole="the one that was there before" if (folder / METADATA).exists() else "none",
            fix="make room, or another folder",
        ) from error
    except RuntimeError as error:
        raise lost(error, f"the checkpoint {folder.name}") from error


def load_checkpoint(
    state: dict[str, Any], reader: CheckpointReader, *, group: dist.ProcessGroup | None = None, alone: bool = False
) -> None:
    """Load this rank's parts in place, also if another number of ranks wrote the checkpoint; every rank calls it.

    Args:
        state: tensors, objects with a `state_dict`, and dicts of them.
        reader: of the checkpoint.
        group: the ranks; by default all.
        alone: whether this process loads by itself.

    Raises CheckpointError if the checkpoint is damaged, or lacks a part of `state`; RankError if a rank dies.
    """
    try:
        with without_single_process_warning():
            state_dict_loader.load(state, storage_reader=reader, planner=_Planner(), process_group=group, no_dist=alone)
    except CheckpointException as error:
        _, reason = first_failure(error)
        what = f"the checkpoint {reader.folder.name} cannot be read"
        raise CheckpointError(what, error=reason_of(reason), folder=reader.folder, fix=reader.instead) from error
    except RuntimeError as error:
        raise lost(error, f"the checkpoint {reader.folder.name}") from error


@contextmanager
def without_single_process_warning() -> Iterator[None]:
    """Suppress torch's warning that there is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The rank of the first failure, and its error: one of the operating system if there is one.

    An error raised while torch closes a file hides, in its context, why the file could not be written.
    """
    failed = sorted((rank, failure[0]) for rank, failure in error.failures.items())
    pairs = [(rank, one) for rank, reason in failed for one in _chain(reason)]
    return next(((rank, one) for rank, one in pairs if isinstance(one, OSError)), pairs[0])


def reason_of(error: BaseException) -> str:
    """What an error says, in a line."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).partition("\n")[0] or type(error).__name__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it followed."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


__all__ = [
    "CheckpointReader",
    "ReplacingWriter",
    "first_failure",
    "load_checkpoint",
    "reason_of",
    "save_checkpoint",
    "sync",
    "without_single_process_warning",
]

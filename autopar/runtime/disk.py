"""Tensors on the disk: memory-mapped files without a name, whose checksums are known while nothing reads or writes them.

Files have no name in their folder (`tempfile.TemporaryFile`), so their space is freed when the process ends, however it ends.
Blocks are reserved before a file is mapped: a full disk is an error then, and not a signal later.

A separate thread reads weights one after the other in chunks, overlapping with computation; for CUDA through two pinned
buffers, one of which is filled while the other is copied to the device. What is read is compared with the checksum taken at the
last write: the exclusive or of all words (`torch.hash_tensor`), computed at memory speed. A tensor whose version in torch shows
a later write gets a new checksum.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch

from autopar.errors import DiskError
from autopar.runtime.memory_tracker import other_device
from autopar.runtime.offload import copy_stream, tell
from autopar.runtime.rematerialize.recompute import Tensors

CHUNK = 32 << 20  # bytes that are read at once
WORD = 8  # bytes; a chunk is a whole number of words
MASK = (1 << 8 * WORD) - 1


@dataclass(slots=True)
class File:
    """A mapped file: the device that it is for, its folder, and the checksum of a version, by torch's counters of writes."""

    device: torch.device
    folder: str
    checksum: int = 0
    version: tuple[int, int] | None = None  # of the tensor and of the DTensor around it; None before anything is known
    around: int = 0  # the latter as it is now
    mapping: weakref.ref[torch.UntypedStorage] | None = None  # which forgets the file when nothing maps it any more


_files: dict[int, File] = {}  # by the address of what is mapped
_reads: dict[tuple[int, ...], Future[None]] = {}  # by the addresses of what is read to


def folder_of(named: str) -> str:
    """The folder for files: the one that the user named, else that of temporary files (TMPDIR)."""
    return named or tempfile.gettempdir()


def empty_on_disk(shape: Sequence[int], dtype: torch.dtype, device: torch.device, folder: str) -> torch.Tensor:
    """A tensor in a new file, for a device. Raises DiskError if the disk has no room for it."""
    size = max(1, torch.Size(shape).numel() * dtype.itemsize)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            with other_device():
                mapped = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", True, size)
                made: torch.Tensor = torch.empty(0, dtype=dtype).set_(mapped, 0, tuple(shape))  # type: ignore[call-overload]
    except OSError as error:
        what = f"{size / 2**20:.2f} MiB more cannot be written to the disk"
        raise DiskError(what, folder=folder, error=error, fix=f"free some of it, or {DiskError.another}") from error
    key = _address(made)
    mapping = weakref.ref(made.untyped_storage(), lambda _: _files.pop(key, None))
    _files[key] = File(device=device, folder=folder, mapping=mapping)
    return made


def zeros_beside(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros in a file for the same device and in the same folder as a tensor's; they do not affect checksums."""
    found = file_of(tensor)
    with other_device():
        return empty_on_disk(shape, tensor.dtype, found.device, found.folder).zero_()


def to_disk(part: torch.Tensor, folder: str, device: torch.device | None = None) -> torch.Tensor:
    """A tensor copied to its own file, with its checksum; itself on meta, or if it is on the disk already."""
    if part.is_meta or on_disk(part):
        return part
    with torch.no_grad(), other_device():
        made = empty_on_disk(part.shape, part.dtype, device or part.device, folder).copy_(part)
        seal(made)
    return made


def on_disk(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in a file."""
    return tensor.device.type == "cpu" and _address(tensor) in _files


def file_of(*tensors: torch.Tensor) -> File:
    """The file of the first of these tensors that is on the disk; a default one if all are padded copies."""
    found = next((_files[_address(tensor)] for tensor in tensors if on_disk(tensor)), None)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return found or File(device=device, folder=folder_of(""))


def note_writes(tensor: torch.Tensor, around: int) -> None:
    """Tell torch's counter of writes of the DTensor `around` a tensor: what is written through it does not count as written to
    the tensor.
    """
    if _files and on_disk(tensor):
        _files[_address(tensor)].around = around


def seal(tensor: torch.Tensor) -> None:
    """Take the checksum of a tensor on the disk as it is."""
    if _starts(tensor):
        found = _files[_address(tensor)]
        found.checksum, found.version = _checksum(_flat(tensor)), (tensor._version, found.around)


def check(tensor: torch.Tensor, name: str = "a tensor", checksum: int | None = None) -> None:
    """Raise DiskError if a tensor on the disk is not what was written; one with a later write is accepted."""
    if not _starts(tensor):  # a padded copy
        return
    found = _files[_address(tensor)]
    read, version = _checksum(_flat(tensor)) if checksum is None else checksum, (tensor._version, found.around)
    if found.version == version and found.checksum != read:
        raise DiskError(
            f"{name} of shape {tuple(tensor.shape)} on the disk is damaged: it is not what was written",
            folder=found.folder,
            checksum=f"{read:016x}, and {found.checksum:016x} when it was written",
            fix=f"load a checkpoint; {DiskError.another}. What is written through `.data` looks so, too: use torch.no_grad()",
        )
    found.checksum, found.version = read, version


def start_read(weights: Tensors) -> tuple[torch.Tensor, ...]:
    """Start reading weights from the disk; the results are valid after `wait_read`."""
    tell("read", weights)
    device = file_of(*weights).device
    read = tuple(torch.empty_like(weight, device=device, requires_grad=False) for weight in weights)
    pairs = [(weight.detach(), new) for weight, new in zip(weights, read, strict=True)]
    if device.type == "cuda":  # the memory may still be read by what was there before
        copy_stream(device).wait_stream(torch.cuda.current_stream(device))
    _reads[_key(read)] = _reader().submit(_read, pairs)
    return read


def wait_read(read: Tensors) -> None:
    """Wait for weights that are being read. Raises DiskError if one is damaged."""
    _reads.pop(_key(read)).result()
    for tensor in read:
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).wait_stream(copy_stream(tensor.device))
            tensor.record_stream(copy_stream(tensor.device))


def write(gradients: Tensors, like: File, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Write gradients to files in the folder of a weight's, in this dtype."""
    tell("write", gradients)
    for gradient in gradients:
        with torch.no_grad(), other_device():
            kept = empty_on_disk(gradient.shape, dtype, like.device, like.folder).copy_(gradient)
            seal(kept)
        yield kept


def _starts(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the start of its file, where the rest, if any, is padding."""
    return on_disk(tensor) and tensor.is_contiguous() and not tensor.storage_offset()


def _address(tensor: torch.Tensor) -> int:
    """The address where a tensor's file is mapped, whichever part the tensor has."""
    return tensor.untyped_storage().data_ptr()


def _key(read: Tensors) -> tuple[int, ...]:
    return tuple(map(_address, read))


@cache
def _reader() -> ThreadPoolExecutor:
    """One thread: the disk reads one file after the other."""
    return ThreadPoolExecutor(1, "autopar-disk")


def _read(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each weight to its new memory, chunk by chunk, and compare its checksum; removes it from the list, which the thread
    holds for longer.
    """
    with torch.no_grad():
        while pairs:
            weight, new = pairs.pop(0)
            checksum, source, target = 0, _flat(weight), new.view(-1).view(torch.uint8)
            for place, start in enumerate(range(0, len(source), CHUNK)):
                part, there = source[start : start + CHUNK], target[start : start + CHUNK]
                read = _staged(part, there, place % 2) if new.is_cuda else there.copy_(part)
                checksum ^= _checksum(read)
            check(weight, "a weight", checksum)


def _staged(part: torch.Tensor, there: torch.Tensor, place: int) -> torch.Tensor:
    """Copy a chunk to a CUDA device through one of two pinned buffers; returns the chunk in the buffer."""
    buffer, copied = _buffers(there.device)[place]
    copied.synchronize()  # the copy that read this buffer before
    staged = buffer[: len(part)].copy_(part)
    stream = copy_stream(there.device)
    with torch.cuda.stream(stream):
        there.copy_(staged, non_blocking=True)
        copied.record(stream)
    return staged


@cache
def _buffers(device: torch.device) -> tuple[tuple[torch.Tensor, torch.cuda.Event], ...]:
    """Two pinned buffers for a device, each with the event of its last copy."""
    return tuple((torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in range(2))  # type: ignore[no-untyped-call]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)


def _checksum(flat: torch.Tensor) -> int:
    """The exclusive or of the words of some bytes, the last one filled with zeros."""
    whole = len(flat) // WORD * WORD
    last = int.from_bytes(bytes(flat[whole:].tolist()), "little")
    words = torch.hash_tensor(flat[:whole].view(torch.int64)) if whole else torch.zeros((), dtype=torch.uint64)
    return last ^ (int(words.view(torch.int64)) & MASK)


__all__ = [
    "File", "check", "empty_on_disk", "file_of", "folder_of", "note_writes", "on_disk", "seal", "start_read", "to_disk",
    "wait_read", "write", "zeros_beside",
]  # fmt: skip

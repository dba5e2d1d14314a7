"""Captures each model only once per test run: torch.export takes half the time of small tests.

Captures are cached by content: the pickled module, its class, configuration and attributes, its tensors by shape, dtype and
device (buffers and the sample also by value), and everything else that decides how `forward` runs. Models that cannot be
pickled (with a class inside a test, or a hook) are captured every time, and so is everything in tests/capture.

Workers share captures through a folder: the first rank captures, the others wait for it and read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, MethodType

import torch
from torch import nn

from autopar.capture import Assumptions, Captured, capture
from autopar.capture.assumptions import NOTHING
from autopar.ir.dynamic_dims import InputDim

VALUES = 2**20  # elements up to which values of tensors are compared


class Captures:
    """What has been captured, by content; by all processes that have the folder, if there is one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.found: dict[bytes, Captured] = {}
        self.hits = 0

    def capture(
        self,
        model: nn.Module,
        sample_input: object,
        dtype: torch.dtype | None = None,
        places: Mapping[InputDim, int] | None = None,
        assumptions: Assumptions = NOTHING,
    ) -> Captured:
        """`autopar.capture.capture`, or what it returned for the same content."""
        key = content((model, sample_input, dtype, places, assumptions, *surroundings()))
        if key is None:
            return capture(model, sample_input, dtype, places, assumptions)
        if key in self.found:
            self.hits += 1
        else:
            self.found[key] = self._once(key, lambda: capture(model, sample_input, dtype, places, assumptions))
        return self.found[key]

    def _once(self, key: bytes, make: Callable[[], Captured]) -> Captured:
        """What is made, or what another process has made."""
        if self.folder is None:
            return make()
        file = self.folder / key.hex()
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if file.exists():
                return _loaded(file)
            found = make()
            data = io.BytesIO()
            with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):  # a class inside of a function
                torch.save(found, data, pickle_protocol=4)
                file.write_bytes(data.getvalue())
            return found


def _loaded(file: Path) -> Captured:
    """What another process has captured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's pickles use names that torch deprecates
        found: Captured = torch.load(file, weights_only=False)
    return found


def surroundings() -> tuple[object, ...]:
    """What else a trace depends on."""
    cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda")
    return (*cast, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())


def content(data: object) -> bytes | None:
    """A digest of data; None if some of it cannot be told by its content."""
    file = io.BytesIO()
    try:
        _Content(file).dump(data)
    except Exception:  # whatever a class raises that will not be pickled
        return None
    return hashlib.sha256(file.getvalue()).digest()


class _Content(pickle.Pickler):
    """Pickles tensors as what capture sees of them, and refuses functions and classes that a test has replaced or made."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[int, torch.Tensor] = {}  # kept alive, so that no other one has its id

    def persistent_id(self, found: object) -> object:
        """What stands for a tensor; None for anything else."""
        if not isinstance(found, torch.Tensor):
            return None
        if type(found) not in (torch.Tensor, nn.Parameter):
            raise pickle.PicklingError(type(found))
        self.tensors.setdefault(id(found), found)
        place = list(self.tensors).index(id(found))
        told = found.shape, found.stride(), found.dtype, found.device, found.requires_grad, type(found).__name__
        held = isinstance(found, nn.Parameter) or found.is_meta
        if not held and found.numel() > VALUES:
            raise pickle.PicklingError(found.shape)
        return "tensor", place, str(told), None if held else hash_of(found)

    def reducer_override(self, found: object) -> object:
        """Functions of a test are told by their names no better than its classes."""
        if isinstance(found, MethodType) or (isinstance(found, FunctionType) and "<locals>" in found.__qualname__):
            raise pickle.PicklingError(found)
        return NotImplemented


def hash_of(tensor: torch.Tensor) -> str:
    """A digest of the values of a tensor."""
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

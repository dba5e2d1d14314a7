"""Parses command-line arguments: the model and sample of a TARGET, meshes, constraints and others."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from autopar.errors import AutoparError, MeshError
from autopar.explain.neighbours import OF_TARGET
from autopar.ir.device import Seconds
from autopar.ir.dynamic_dims import DimSizes
from autopar.ir.mesh import Mesh
from autopar.plan.options import AUTO, DISK, HOST

HOW = "file.py:function or package.module:function, a function that returns (model, sample_input), or a saved plan.json"


class UsageError(AutoparError):
    """The command line is wrong, or asks for something impossible."""


@contextmanager
def errors_of_usage() -> Iterator[None]:
    """Inside, errors are of the command line, or of a file that it names."""
    try:
        yield
    except AutoparError as error:
        raise UsageError(error.what, **error.details) from error


def parse_mesh(text: str) -> Mesh:
    """Parse a mesh such as "2,4" or "dp=2,tp=4"; raises UsageError for any other text.

    >>> parse_mesh("dp=2,tp=4")
    Mesh(dp=2, tp=4)
    """
    entries = [re.fullmatch(r"\s*(?:([^=\s]+)\s*=)?\s*(\d{1,10})\s*", entry) for entry in text.split(",")]
    found = [(entry[1], int(entry[2])) for entry in entries if entry]
    named = {name: size for name, size in found if name}
    if len(found) < len(entries) or len(named) not in (0, len(found)):
        raise UsageError(f"{text!r} is not a mesh", fix="the size of every axis: 2,4; or a different name for each: dp=2,tp=4")
    try:
        return Mesh.of(named or tuple(size for _, size in found))
    except MeshError as error:
        raise UsageError(error.what, **error.details) from error


def parse_constraint(text: str) -> tuple[str, str]:
    """Parse a name and a layout such as "*.wte.weight=I, S(0)"; raises UsageError for any other text."""
    name, equals, layout = text.rpartition("=")
    if not equals or not name.strip():
        raise UsageError(f"{text!r} is not a constraint", fix='NAME=LAYOUT, such as "*.wte.weight=I, S(0)"')
    return name.strip(), layout.strip()


def parse_stages(text: str) -> int | list[str]:
    """Parse the number of stages, or the modules at which all but the first begin.

    >>> parse_stages("h.2,h.4")
    ['h.2', 'h.4']
    """
    return int(text) if re.fullmatch(NUMBER, text) else [name.strip() for name in text.split(",")]


def parse_count(text: str) -> int | str:
    """Parse a number; any other word is returned as it is."""
    return int(text) if re.fullmatch(NUMBER, text) else text


# What may go where, as options say it.
OFFLOADS: Mapping[str, bool | str] = {"activations": True, HOST: HOST, DISK: DISK, AUTO: AUTO, "no": False}


def parse_offload(text: str) -> bool | str:
    """Parse what may be offloaded to the host or the disk; raises UsageError for any other word.

    >>> parse_offload("no")
    False
    """
    if text not in OFFLOADS:
        raise UsageError(f"--offload {text} is not known", fix=", ".join(OFFLOADS))
    return OFFLOADS[text]


MOST_COUNTS = 100  # numbers of devices in one question
NUMBER = r"\d{1,18}"  # Python does not read integers of thousands of digits


def parse_devices(text: str) -> list[int]:
    """Parse numbers of devices, ascending: a list, or a range that doubles from its first number and includes its last.

    Raises UsageError for any other text.

    >>> parse_devices("8..64"), parse_devices("6,4")
    ([8, 16, 32, 64], [4, 6])
    """
    span = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", text)
    parts = [part.strip() for part in text.split(",")]
    if span:
        first, last = int(span[1]), int(span[2])
        found = [first << shift for shift in range(64) if first << shift < last] + [last] if 0 < first <= last else []
    else:
        found = [int(part) if re.fullmatch(r"\d{1,9}", part) else 0 for part in parts]
    if not found or min(found) < 1 or len(found) > MOST_COUNTS:
        raise UsageError(f"{text!r} is not a number of devices", fix="8..1024, doubled from the first to the last, or 8,12,16")
    return sorted(set(found))


def parse_seconds(text: str) -> Seconds:
    """Parse seconds such as "1.5s" or "200ms"; raises UsageError for any other text.

    >>> parse_seconds("200ms")
    0.2
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(s|ms|us)\s*", text)
    if not found or float(found[1]) <= 0:
        raise UsageError(f"{text!r} is not a time", fix="a number and its unit: 2s, 150ms")
    return float(found[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[found[2]]


def parse_answer(text: str) -> tuple[str, bool | int]:
    """Parse a line of forward and the answer to its condition.

    >>> parse_answer("model.py:12=False")
    ('model.py:12', False)
    """
    line, _, answer = text.rpartition("=")
    known: dict[str, bool] = {"True": True, "False": False}
    found = known.get(answer, parse_count(answer))
    if not line or isinstance(found, str):
        raise UsageError(f"{text!r} does not answer a line", fix="FILE:LINE=ANSWER: --assume model.py:12=False")
    return line, found


def parse_dynamic(text: str) -> tuple[str, DimSizes]:
    """Parse a name and its dims such as "batch=0" or "batch=input_ids:0,labels:0"; raises UsageError for any other text.

    >>> parse_dynamic("sequence=input_ids:1,labels:1")
    ('sequence', {'input_ids': 1, 'labels': 1})
    """
    name, equals, said = (part.strip() for part in text.partition("="))
    if name and equals and re.fullmatch(NUMBER, said):
        return name, int(said)
    pairs = [re.fullmatch(rf"\s*(.+?)\s*:\s*({NUMBER})\s*", entry) for entry in said.split(",")]
    dims = {pair[1]: int(pair[2]) for pair in pairs if pair}
    if not name or not equals or len(dims) < len(pairs):
        raise UsageError(f"{text!r} does not name a size", fix="NAME=DIM, or NAME=INPUT:DIM,INPUT:DIM: --dynamic batch=0")
    return name, dims


def built(target: str) -> tuple[nn.Module, object]:
    """The model and sample returned by a TARGET, on the meta device; raises UsageError if it does not return them."""
    function = _function(target)
    try:
        with torch.device("meta"):
            made = function()
    except (Exception, SystemExit) as error:
        at = _place(error)
        fix = "a function that is called without arguments" if at is None else None
        raise UsageError(f"{target} failed: {_said(error)}", at=at, fix=fix) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
        raise UsageError(
            f"{target} did not return (model, sample_input)",
            returned=kinds,
            fix="return a tuple of an nn.Module and its sample batch",
        )
    return made[0], made[1]


def _function(target: str) -> Callable[[], object]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name or (place.startswith(".") and not place.endswith(".py")):
        raise UsageError(f"{target!r} does not name a function", fix=HOW)
    module = _file(Path(place), target) if place.endswith(".py") else _module(place, target)
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, held in vars(module).items() if callable(held) and getattr(held, "__module__", "") == module.__name__]
        raise UsageError(f"{place} has no function {name!r}", functions=", ".join(own), fix=HOW)
    return found  # type: ignore[no-any-return]


def _file(path: Path, target: str) -> ModuleType:
    """Import a file, which may import its neighbours, as a script may."""
    if not path.is_file():
        raise UsageError(f"no such file: {path}", target=target, fix=HOW)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    OF_TARGET.enter(path.resolve().parent)
    sys.modules.setdefault(path.stem, module)
    _run(lambda: spec.loader.exec_module(module), target)  # type: ignore[union-attr]
    return module


def _module(name: str, target: str) -> ModuleType:
    """Import a module, also one in the current directory."""
    OF_TARGET.enter(Path.cwd())
    found: list[ModuleType] = []
    try:
        _run(lambda: found.append(importlib.import_module(name)), target)
    except UsageError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and missing.name and f"{name}.".startswith(f"{missing.name}."):
            raise UsageError(f"no such module: {name}", target=target, fix=HOW) from missing
        raise
    return found[0]


def _run(load: Callable[[], object], target: str) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{target} cannot be imported: {_said(error)}", at=_place(error)) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _place(error: BaseException) -> str | None:
    """Where a failure occurred: the last line of its traceback, or the line that is no Python; None if that is a call in this
    file, which never reached the user's function."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    *_, last = traceback.extract_tb(error.__traceback__)
    return None if last.filename == __file__ else f"{last.filename}:{last.lineno} in {last.name}"

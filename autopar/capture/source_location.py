"""The line of the user's model behind an error: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType
from typing import Protocol

import torch

# Frames name files as they were imported, perhaps through a symbolic link (a virtual environment that is one, say).
_OURS = tuple(
    {
        f"{one}{os.sep}"  # not a package with a longer name: torchgeo
        for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
        for one in (folder, folder.resolve())
    }
)
_PYTHON = f"{Path(os.__file__).parent}{os.sep}"
_TRACING = re.compile(r"(torch|autopar)\.")  # prefixes of the names of Python modules
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def foreign(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not file.startswith((*_OURS, "<"))


def _of_python(file: str) -> bool:
    """Whether a file is of Python's standard library, called from a line of the model."""
    return file.startswith(_PYTHON) and "-packages" not in file


@functools.lru_cache(maxsize=4096)
def from_text(stack: str) -> str:
    """The innermost user frame of a printed stack trace, as `file.py:12 in forward`; empty if there is none."""
    frames = [match.groups() for match in _FRAME.finditer(stack)]
    places = [f"{file}:{line} in {name}" for file, line, name in frames if foreign(file)]
    return places[-1] if places else ""


def from_error(error: BaseException) -> str:
    """The innermost user frame of an exception or of the exceptions that caused it."""
    for link in reversed(list(chain(error))):
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if foreign(frame.filename) and not _of_python(frame.filename):
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def of_frame(frame: FrameType) -> str:
    """The innermost user frame of the calls that lead to a frame."""
    while frame.f_back is not None and not foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Stack(Protocol):
    """The interface that torch's tracer needs of a stack when it makes a node."""

    def summary(self) -> traceback.StackSummary:
        """The frames of the stack, the outermost first."""


class Forwards:
    """Replaces torch's `CapturedTraceback` while this thread traces: records only the frame that `from_text` looks for.

    For every node torch looks up all frames of the stack, hundreds, only to keep those of functions called `forward`.
    """

    def __init__(self, original: type) -> None:
        self._original, self._tracing = original, threading.get_ident()

    def extract(self, **asked: bool | int) -> Stack:
        """The stack of the caller."""
        if threading.get_ident() != self._tracing:
            return self._original.extract(**asked)  # type: ignore[attr-defined, no-any-return]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (frame.f_code.co_name == "forward" and foreign(frame.f_code.co_filename)):
            frame = frame.f_back
        return _Innermost(frame and traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, "forward", line=""))


class _Innermost:
    def __init__(self, found: traceback.FrameSummary | None) -> None:
        self._found = found  # not the frame, which would keep the model and its tensors alive

    def summary(self) -> traceback.StackSummary:
        return traceback.StackSummary.from_list([self._found] if self._found else [])


def caller(function: object, frame: FrameType) -> FrameType:
    """The frame that called a torch function: modes are asked from this frame or, for a Python function, from its own."""
    while frame.f_back is not None and frame.f_code.co_filename == torch.overrides.__file__:
        frame = frame.f_back
    own = isinstance(function, FunctionType) and frame.f_code is function.__code__
    return frame.f_back if own and frame.f_back is not None else frame


def by_forward(function: object, frame: FrameType) -> bool:
    """Whether a torch function is called by the model's code or by a layer of torch, and not by the tracer."""
    file = str(frame.f_globals.get("__name__"))
    return not isinstance(function, torch._ops.OpOverload) and (not _TRACING.match(file) or file.startswith("torch.nn."))


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception followed by the chain of its causes."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or link.__context__

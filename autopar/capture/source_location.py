"""The line of the user's model behind an error: the innermost frame that is neither torch's nor ours."""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType

import torch

# Frames name files as they were imported, which may be through a link (a virtual environment that is one, say).
_OURS = tuple(
    {
        f"{one}{os.sep}"  # not a package whose name begins alike: torchgeo
        for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
        for one in (folder, folder.resolve())
    }
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def _foreign(file: str) -> bool:
    return not file.startswith((*_OURS, "<"))


@functools.lru_cache(maxsize=4096)
def from_text(stack: str) -> str:
    """The innermost user frame of a printed stack trace, as `file.py:12 in forward`; empty if there is none."""
    frames = [match.groups() for match in _FRAME.finditer(stack)]
    places = [f"{file}:{line} in {name}" for file, line, name in frames if _foreign(file)]
    return places[-1] if places else ""


def from_error(error: BaseException) -> str:
    """The innermost user frame of an exception or of the exceptions that caused it."""
    for link in reversed(list(chain(error))):
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if _foreign(frame.filename):
                return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def of_frame(frame: FrameType) -> str:
    """The innermost user frame of the calls that lead to a frame."""
    while frame.f_back is not None and not _foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def caller(function: object, frame: FrameType) -> FrameType:
    """The frame that called a function of torch, which asks for modes from this frame or, where it is Python, from its own."""
    while frame.f_back is not None and frame.f_code.co_filename == torch.overrides.__file__:
        frame = frame.f_back
    own = isinstance(function, FunctionType) and frame.f_code is function.__code__
    return frame.f_back if own and frame.f_back is not None else frame


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception followed by the chain of its causes."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or link.__context__

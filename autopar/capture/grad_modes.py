"""Gradient modes that forward queries or sets, besides `torch.no_grad`, which torch.export sees: a graph fixes them."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _contextlib

from autopar.capture import source_location
from autopar.errors import CaptureError

SETTING = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def refuse_frozen(args: tuple[object, ...], given: dict[str, object], frame: FrameType) -> None:
    """Raise CaptureError if forward freezes or unfreezes a parameter: in a graph, a parameter is always one or the other."""
    asked = given.get("requires_grad", args[1] if len(args) > 1 else True)
    if isinstance(args[0], nn.Parameter) and args[0].requires_grad != asked:
        raise CaptureError(
            f"forward sets requires_grad of a parameter of shape {tuple(args[0].shape)}, which is fixed in a graph",
            at=source_location.of_frame(frame),
            fix="freeze it outside of forward; or compute with its detach() there, by torch.func.functional_call for a module",
        )


def replaced() -> list[tuple[type, str, Any]]:
    """Replacements of the methods of `torch.inference_mode` for this thread, by those of `torch.no_grad`, which also disable
    gradients, and which torch.export sees."""
    tracing, inference = threading.get_ident(), torch.inference_mode
    entered: list[torch.no_grad | torch.enable_grad | None] = []  # None for those that torch itself enters
    enter, leave = inference.__enter__, inference.__exit__

    def entering(self: torch.inference_mode) -> object:
        if threading.get_ident() != tracing:
            return enter(self)
        of_forward = source_location.foreign(_caller(sys._getframe(1)).f_code.co_filename)
        mode = torch.no_grad() if self.mode else torch.enable_grad()
        entered.append(mode if of_forward else None)
        return mode.__enter__() if of_forward else enter(self)

    def leaving(self: torch.inference_mode, *error: Any) -> None:
        one = entered.pop() if threading.get_ident() == tracing else None
        one.__exit__(*error) if one else leave(self, *error)

    return [(inference, "__enter__", entering), (inference, "__exit__", leaving)]


def _caller(frame: FrameType) -> FrameType:
    """The frame that enters a context, past the code that turns a context into a decorator."""
    while frame.f_code.co_filename == _contextlib.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def asking(original: Callable[[], bool]) -> Callable[[], bool]:
    """`torch.is_grad_enabled`, with a warning if forward calls it; torch's modules use it only to choose between equal ways."""
    tracing = threading.get_ident()

    def is_grad_enabled() -> bool:
        frame = sys._getframe(1)
        if threading.get_ident() == tracing and source_location.foreign(frame.f_code.co_filename):
            what = "forward asks torch.is_grad_enabled(), to which the graph has the answer of training, also under no_grad"
            warnings.warn(f"{what}, at {source_location.of_frame(frame)}", stacklevel=2)
        return original()

    return is_grad_enabled


__all__ = ["SETTING", "asking", "refuse_frozen", "replaced"]

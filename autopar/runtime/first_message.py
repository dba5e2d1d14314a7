"""What a rank has still to hear from the others before it sends the first message of a call.

Until then it computes what it can. Emitted code calls `before_message` before it issues a message; code traced by torch.compile
does not, so the rank must wait before it runs the program.
"""

from __future__ import annotations

import contextvars
from typing import Protocol

import torch


class Awaited(Protocol):
    """Something to wait for before messages."""

    eager: bool  # whether the last program ran eagerly, so that its messages came by

    def settle(self) -> None:
        """Wait for it, once."""


awaited = contextvars.ContextVar[Awaited | None]("awaited", default=None)


def before_message() -> None:
    """Wait for what must arrive before a message is issued."""
    if not torch.compiler.is_compiling() and (found := awaited.get()) is not None:
        found.settle()


def runs_eagerly() -> None:
    """Record that a call's program runs in Python, not compiled."""
    if not torch.compiler.is_compiling() and (found := awaited.get()) is not None:
        found.eager = True


__all__ = ["Awaited", "awaited", "before_message", "runs_eagerly"]

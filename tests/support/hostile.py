"""The contents of a hostile file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


class Hostile:
    """What makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return Path.touch, (self.mark,)

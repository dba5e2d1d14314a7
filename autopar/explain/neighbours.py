"""Lets a target's file import its neighbours from its own folder, as a script may.

Two targets may have neighbours with the same name, such as `config.py`. Those of a target stay until a target of another folder
is imported, because its forward may import some during capture.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


class Neighbours:
    """The folder that a target imports from, and the previous path."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.path: Sequence[str] = ()

    def enter(self, folder: Path) -> None:
        """Import from this folder, an absolute path, from now on, instead of the previous one."""
        if folder != self.folder:
            self._leave()
            self.folder, self.path = folder, tuple(sys.path)
        sys.path.insert(0, str(folder))

    def _leave(self) -> None:
        """Forget the modules of the folder that nothing else leads to."""
        roots = {root: sys.modules.get(root) for root in {name.partition(".")[0] for name in sys.modules}}
        own = {root: module for root, module in roots.items() if module is not None and self._holds(_place(module))}
        sys.path[:] = [entry for entry in sys.path if entry in self.path or not self._holds(entry)]
        gone = {root for root, module in own.items() if not _found(root, module)}
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            del sys.modules[name]

    def _holds(self, place: str | None) -> bool:
        """Whether a path is in the folder, not counting the packages of an environment in it."""
        if self.folder is None or place is None:
            return False
        path = Path(place).resolve()
        return path.is_relative_to(self.folder) and "site-packages" not in path.relative_to(self.folder).parts


def _place(module: ModuleType) -> str | None:
    """Where a module comes from: its file, or the folder of a package without one."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)


def _found(name: str, module: ModuleType) -> bool:
    """Whether the path leads to this module."""
    spec = PathFinder.find_spec(name)
    return spec is not None and spec.origin is not None and spec.origin == getattr(module, "__file__", None)


OF_TARGET = Neighbours()  # those of the last target of this process, whose path and modules they are

__all__ = ["OF_TARGET"]

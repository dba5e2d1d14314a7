"""Numbers that forward may count in beside its modules: attributes of classes, and globals of the files that define these."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn

from autopar.errors import CaptureError

_Owner = tuple[str, object, dict[str, int | float]]  # what it is called, a class or a module of Python, and its numbers


class OutsideNumbers:
    """The numbers of a model's classes and of their files as they are before it is traced."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind: None for module in model.modules() for kind in type(module).__mro__ if not _of_torch(kind)}
        files = {kind.__module__: sys.modules.get(kind.__module__) for kind in kinds}
        self._before: list[_Owner] = [
            *((f"{kind.__qualname__}.", kind, _numbers(kind)) for kind in kinds),
            *((f"{name}.", file, _numbers(file)) for name, file in files.items() if file is not None),
        ]

    def refuse(self, same: Callable[[], bool]) -> None:
        """Raise CaptureError if one of them was changed, and the program is another one for that; they are put back."""
        found = [
            (label, owner, name, number)
            for label, owner, before in self._before
            for name, number in before.items()
            if (now := vars(owner).get(name)) is not number and now != number
        ]
        if not found:
            return
        try:
            alike = same()
        finally:
            for _, owner, name, number in found:
                setattr(owner, name, number)
        if not alike:
            label, _, name, _ = found[0]
            raise CaptureError(
                f"forward changes {label}{name}, which the graph would have as it was in the first step",
                fix="keep it in a buffer that forward writes, or change it outside of forward and give it as a tensor",
            )


def _of_torch(kind: type) -> bool:
    return kind is object or kind.__module__.partition(".")[0] == "torch"


def _numbers(owner: object) -> dict[str, int | float]:
    return {name: held for name, held in list(vars(owner).items()) if type(held) in (int, float)}


__all__ = ["OutsideNumbers"]

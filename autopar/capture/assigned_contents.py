"""Handles parameters and submodules that forward replaces: `self.net = self.nets[i]`, `self.weight = nn.Parameter(...)`.

A graph would use the replacements of the first step in every step, or start from the old parameter each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from autopar.errors import CaptureError

_FIX = {
    "parameter": "write into it under torch.no_grad(), of a frozen one or a buffer; or let an optimizer change it",
    "submodule": "choose the module outside of forward, or call all of them and choose among their results with torch.where",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The parameters, or the submodules, of one module before forward."""

    kind: str
    path: str
    now: Mapping[str, object]
    before: Mapping[str, object]


class AssignedContents:
    """The parameters and submodules of a model before a call."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = [
            _Table(kind=kind, path=path, now=table, before=dict(table))
            for path, module in model.named_modules()
            for kind, table in (("parameter", module._parameters), ("submodule", module._modules))
        ]

    def refuse(self) -> None:
        """Raise CaptureError if a call replaced or removed one of them."""
        for table in self._tables:
            if name := next((name for name, one in table.before.items() if table.now.get(name) is not one), ""):
                where = f"{table.path}.{name}".strip(".")
                raise CaptureError(f"forward replaces the {table.kind} {where}", fix=_FIX[table.kind])


__all__ = ["AssignedContents"]

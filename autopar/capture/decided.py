"""Integer buffers that decided a size or a branch during tracing, and so must keep their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.errors import CaptureError, InputError
from autopar.ir.program import Program
from autopar.operators import writes


@dataclass(slots=True)
class Decided:
    """The values of such buffers by name, and for each a line of the model that read it.

    `check` compares a buffer with its value when it was written or replaced since the last comparison.
    """

    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)

    @staticmethod
    def of(lines: Mapping[str, str], values: Mapping[str, torch.Tensor], program: Program) -> Decided:
        """The buffers that were read; raises CaptureError if the program writes one."""
        written = {name for op in program.ops for name in writes(op)}
        for name in sorted(written & values.keys()):
            fix = "keep what forward counts apart from what decides a branch; or express the choice with torch.where"
            raise CaptureError(f"forward depends on the value of {name}, and writes it", at=lines[name], fix=fix)
        return Decided({name: value.cpu().clone() for name, value in values.items()}, lines)

    def stored(self, held: Mapping[str, torch.Tensor]) -> Decided:
        """A copy with the parts that a rank stores, for buffers of which it stores only a part."""
        parts = {name: held[name] for name, value in self.values.items() if held[name].shape != value.shape}
        return Decided({**self.values, **{name: part.detach().cpu().clone() for name, part in parts.items()}}, self.lines)

    def check(self, held: Mapping[str, torch.Tensor]) -> None:
        """Raise InputError if a module's buffer no longer has the value that it had at capture."""
        for name, value in self.values.items():
            now = held[name]
            before, version = self.seen.get(name, (None, 0))
            if now is before and now._version == version:
                continue
            if not torch.equal(now.detach().cpu(), value):
                raise InputError(
                    f"{name} has another value than when the model was captured, where it decided a size or a branch",
                    captured=value.tolist(),
                    now=now.tolist(),
                    at=self.lines[name],
                    fix="set it before, and parallelize again",
                )
            self.seen[name] = now, now._version


__all__ = ["Decided"]

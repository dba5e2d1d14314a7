"""Inputs that are sizes: integer tensors whose values are constants of the graph.

    forward(x, length):                       plan(..., static=["length"]), with a sample whose length is 5
        return x[:, : length.item()]    ->    return x[:, :5]

The program has no such input: forward computes from literals instead, whose values are known while it is traced
(`autopar.capture.known_values`). A call with another value is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from autopar.errors import InputError

LIMIT = 1024  # elements of an input whose values may be written into the graph


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInput:
    """The input at a path, and its numbers in every call, in row-major order."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: tuple[int, ...]

    def literal(self) -> torch.Tensor:
        """The input as a literal tensor."""
        return torch.tensor(self.numbers, dtype=self.dtype).reshape(self.shape)

    def check(self, given: torch.Tensor) -> None:
        """Raise InputError if a tensor of this shape has other numbers."""
        found = _numbers(given)
        if found != self.numbers:
            raise InputError(
                f"argument {self.path} is static, and has another value than planned",
                given=_text(found),
                planned=_text(self.numbers),
                fix="plan again with this value, as a plan is for one; or leave it out of static=, if it decides no size",
            )


def read_static(names: Sequence[str], leaves: Mapping[str, object]) -> tuple[StaticInput, ...]:
    """The tensors among a sample's leaves that these names declare static: a leaf by its path, or all leaves of a container.

    Raises InputError for a name that matches no argument, and for a tensor without values or of anything but a few integers.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        what, name = ("a text", names) if isinstance(names, str) else ("no list of names", "lengths")
        raise InputError(f"static={names!r} is {what}", fix=f"static=[{name!r}]: the names of inputs")
    found = []
    for name in names:
        chosen = {path: leaf for path, leaf in leaves.items() if path == name or path.startswith(f"{name}.")}
        if not chosen:
            raise InputError(f"static names {name!r}, which is no argument of the sample", takes=", ".join(leaves))
        found += [_static(path, leaf) for path, leaf in chosen.items() if isinstance(leaf, torch.Tensor)]
    return tuple({one.path: one for one in found}.values())


def as_literals(
    inputs: Mapping[int, StaticInput], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a call with static inputs replaced by literals; `inputs` counts leaves in pytree order."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    changed = [inputs[place].literal() if place in inputs else leaf for place, leaf in enumerate(leaves)]
    result: tuple[tuple[object, ...], dict[str, object]] = pytree.tree_unflatten(changed, spec)
    return result


def _static(path: str, tensor: torch.Tensor) -> StaticInput:
    integer = not (tensor.is_floating_point() or tensor.is_complex())
    said = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if not integer or tensor.numel() > LIMIT:
        fix = "leave it an input; static= is for sizes, counts and flags"
        raise InputError(f"argument {path} cannot be static: it is not made of {LIMIT} integers at most", given=said, fix=fix)
    if tensor.is_meta:
        raise InputError(
            f"argument {path} is static, but on the meta device",
            given=said,
            fix='give a tensor with values: torch.tensor(20, device="cpu")',
        )
    return StaticInput(path=path, shape=tuple(tensor.shape), dtype=tensor.dtype, numbers=_numbers(tensor))


def _numbers(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.detach().flatten().tolist())


def _text(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


__all__ = ["StaticInput", "as_literals", "read_static"]

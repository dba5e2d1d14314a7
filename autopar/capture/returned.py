"""The results of a model: a nested structure of tensors, which the program returns as a flat list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from autopar.capture.assumptions import Assumed
from autopar.capture.nested import STATIC, distinct, known, walk
from autopar.errors import CaptureError
from autopar.ir.program import Static


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnSpec:
    """The structure that the model returns, whose leaves are tensors (`paths`, in order) or constants.

    The outputs that check assumptions follow these: `assumed`.
    """

    spec: pytree.TreeSpec
    paths: tuple[str, ...]
    leaves: tuple[int | tuple[Static], ...]  # the index of a tensor, or a constant in a 1-tuple
    assumed: tuple[Assumed, ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """The paths of all of the program's outputs."""
        return (*self.paths, *(one.path for one in self.assumed))

    def check(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise InputError if an assumption does not hold in a call with these program outputs."""
        for one, found in zip(self.assumed, outputs[len(self.paths) :], strict=True):
            one.check(found)

    @property
    def flat(self) -> ReturnSpec:
        """A specification of the same tensors as a plain list, without the user's classes."""
        places = tuple(range(len(self.paths)))
        return replace(self, spec=pytree.tree_structure(list(places)), leaves=places)

    def rebuild(self, tensors: Sequence[object]) -> object:
        """The structure with these tensors in it, one per path."""
        filled = [tensors[leaf] if isinstance(leaf, int) else leaf[0] for leaf in self.leaves]
        return pytree.tree_unflatten(filled, self.spec)


def read_result(result: object) -> tuple[tuple[torch.Tensor, ...], ReturnSpec, tuple[str, ...]]:
    """The tensors in a model's return value, the structure around them, and the paths of leaves that are dropped."""
    known(result)
    spec = pytree.tree_structure(result)
    tensors: list[torch.Tensor] = []
    paths: list[str] = []
    leaves: list[int | tuple[Static]] = []
    lost = []
    for path, leaf in distinct(walk("", result)):
        if isinstance(leaf, torch.Tensor):
            leaves.append(len(tensors))
            tensors.append(leaf)
            paths.append(path or "0")
        else:
            leaves.append((leaf if isinstance(leaf, STATIC) else None,))
            if not isinstance(leaf, STATIC):
                lost.append(path)
    if not tensors:
        raise CaptureError(
            f"forward returns a {type(result).__name__} without tensors",
            fix="return tensors, containers or a dataclass of them",
        )
    return tuple(tensors), ReturnSpec(spec=spec, paths=tuple(paths), leaves=tuple(leaves)), tuple(lost)


__all__ = ["ReturnSpec", "read_result"]

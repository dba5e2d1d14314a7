"""Functions in attributes of a model that close over its modules or tensors: `self.mlp = lambda x: m.proj(m.fc(x))`.

`copy.deepcopy` takes functions as they are, so that those of a copied model would compute with the weights of the original.
Here they are copied with it: what their closures and defaults hold of the model becomes what stands for it in the copy.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType, MethodType

import torch
from torch import nn

from autopar.capture.python_places import MOST_ELEMENTS

_HOLDING = dict, list, tuple, set, frozenset, MethodType, functools.partial, FunctionType, CellType
_Memo = dict[int, object]  # of copy.deepcopy: by the id of an object, what stands for it in the copy


def copied_model(model: nn.Module, tensors: Mapping[int, torch.Tensor] | None = None) -> nn.Module:
    """A copy of a model, and of the functions in its attributes that know it; `tensors` has what stands for those of the model,
    by their ids. Raises what `copy.deepcopy` does."""
    memo: _Memo = dict(tensors or {})
    closures = _Closures(model, memo)
    made = copy.deepcopy(model, memo)
    closures.fill()
    return made


class _Closures:
    """The functions of a model that are to be copied with it.

    Args:
        model: what is copied.
        memo: that of the copy. Here it gets functions whose closures are empty until `fill`.
    """

    def __init__(self, model: nn.Module, memo: _Memo) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._memo, self._of_model = memo, {*memo, *map(id, tensors), *map(id, model.modules())}
        self._functions: list[tuple[FunctionType, FunctionType]] = []
        self._cells: dict[int, tuple[CellType, CellType]] = {}
        self._known: dict[int, tuple[object, bool]] = {}
        for module in model.modules():
            self._reaches(vars(module).values())

    def fill(self) -> None:
        """Give the copied functions what stands for what the originals know, once the model is copied."""
        for cell, new in self._cells.values():
            new.cell_contents = copy.deepcopy(cell.cell_contents, self._memo)
        for function, now in self._functions:
            now.__defaults__ = copy.deepcopy(function.__defaults__, self._memo)
            now.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, self._memo)

    def _reaches(self, held: Iterable[object]) -> bool:
        """Whether something reaches a module or a tensor of the model; all functions below it are looked at."""
        found = [self._is_of_model(one) for one in held]
        return any(found)

    def _is_of_model(self, one: object) -> bool:
        if id(one) in self._of_model:
            return True
        if not isinstance(one, _HOLDING):
            return False
        if id(one) not in self._known:
            self._known[id(one)] = one, False  # where it holds itself
            self._known[id(one)] = one, self._reaches(_parts(one))
            if isinstance(one, FunctionType) and self._known[id(one)][1]:
                self._copy(one)
        return self._known[id(one)][1]

    def _copy(self, function: FunctionType) -> None:
        """Have the memo say what stands for a function."""
        cells = tuple(map(self._cell, function.__closure__ or ()))
        made = FunctionType(function.__code__, function.__globals__, function.__name__, closure=cells)
        functools.update_wrapper(made, function)
        vars(made).pop("__wrapped__", None)
        vars(made).update(vars(function))
        self._memo[id(function)] = made
        self._functions.append((function, made))

    def _cell(self, before: CellType) -> CellType:
        """What stands for a cell: itself, if it holds nothing of the model."""
        if not self._reaches(_parts(before)):
            return before
        return self._cells.setdefault(id(before), (before, CellType()))[1]


def _parts(held: object) -> Iterable[object]:
    """What a container, a function or a method holds."""
    match held:
        case dict() if len(held) <= MOST_ELEMENTS:
            return held.values()
        case list() | tuple() | set() | frozenset() if len(held) <= MOST_ELEMENTS:
            return held
        case MethodType():
            return (held.__self__,)
        case functools.partial():
            return held.func, held.args, held.keywords
        case FunctionType():
            return *(held.__closure__ or ()), held.__defaults__, held.__kwdefaults__
        case CellType():
            with contextlib.suppress(ValueError):  # an empty one
                return (held.cell_contents,)
    return ()


__all__ = ["copied_model"]

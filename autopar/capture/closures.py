"""Functions in attributes of a model that close over its modules or tensors: `self.mlp = lambda x: m.proj(m.fc(x))`.

`copy.deepcopy` does not copy functions, so those of a copied model would compute with the weights of the original. Here they
are copied too: references to the model in their closures and defaults are replaced by their counterparts in the copy.
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
_Memo = dict[int, object]  # of copy.deepcopy: from the id of an object to its counterpart in the copy


def copied_model(model: nn.Module, tensors: Mapping[int, torch.Tensor] | None = None) -> nn.Module:
    """A copy of a model, and of functions in its attributes that refer to it; `tensors` maps ids of the model's tensors to
    their replacements. Raises what `copy.deepcopy` does."""
    memo: _Memo = dict(tensors or {})
    closures = _Closures(model, memo)
    made = copy.deepcopy(model, memo)
    closures.fill()
    return made


class _Closures:
    """The functions of a model that must be copied with it.

    Args:
        model: the model being copied.
        memo: the memo of the copy. Copied functions are added to it with empty closures, until `fill`.
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
        """Fill the closures and defaults of the copied functions, once the model is copied."""
        for cell, new in self._cells.values():
            new.cell_contents = copy.deepcopy(cell.cell_contents, self._memo)
        for function, now in self._functions:
            now.__defaults__ = copy.deepcopy(function.__defaults__, self._memo)
            now.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, self._memo)

    def _reaches(self, held: Iterable[object]) -> bool:
        """Whether any of these reaches a module or a tensor of the model; visits all functions below them."""
        found = [self._is_of_model(one) for one in held]
        return any(found)

    def _is_of_model(self, one: object) -> bool:
        if id(one) in self._of_model:
            return True
        if not isinstance(one, _HOLDING):
            return False
        if id(one) not in self._known:
            self._known[id(one)] = one, False  # a cycle
            self._known[id(one)] = one, self._reaches(_parts(one))
            if isinstance(one, FunctionType) and self._known[id(one)][1]:
                self._copy(one)
        return self._known[id(one)][1]

    def _copy(self, function: FunctionType) -> None:
        """Enter the copy of a function in the memo."""
        cells = tuple(map(self._cell, function.__closure__ or ()))
        made = FunctionType(function.__code__, function.__globals__, function.__name__, closure=cells)
        functools.update_wrapper(made, function)
        vars(made).pop("__wrapped__", None)
        vars(made).update(vars(function))
        self._memo[id(function)] = made
        self._functions.append((function, made))

    def _cell(self, before: CellType) -> CellType:
        """The copy of a cell; the cell itself if it refers to nothing of the model."""
        if not self._reaches(_parts(before)):
            return before
        return self._cells.setdefault(id(before), (before, CellType()))[1]


def _parts(held: object) -> Iterable[object]:
    """The objects that a container, a function or a method refers to."""
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
            with contextlib.suppress(ValueError):  # an empty cell
                return (held.cell_contents,)
    return ()


__all__ = ["copied_model"]

"""Handles tests whether a mask selects anything: `if mask.any():`, `if tokens.numel() == 0: continue`, `for e in hit:`.

A mixture of experts that is written as a loop skips experts that no token chose. A graph has no branches, and needs none here,
since computing with no rows changes nothing. Such a question is answered "some rows", on these conditions:

    for e in range(n):                 1. what is selected below each question has no rows where its answer is "none": tried on
        i, k = where(chosen == e)         values of the integers and masks that both depend on (`capture.implications`)
        if i.numel() == 0:             2. if all answers are "none", forward equals the program traced with "some" in which
            continue                      these rows are not put back
        y[i] += expert(x[i])           3. the same holds if every other answer is "none"

Where torch itself asks for the number of rows of a selection, which no mode sees, everything is traced again with that number
assumed positive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from autopar.capture import assertions, implications, source_location
from autopar.capture.assumptions import MOST_ASKED
from autopar.capture.equal_masks import node_of
from autopar.capture.implications import Question
from autopar.errors import CaptureError

_LOCATING = (torch.where, torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere)
_NONZERO = (torch.nonzero, torch.Tensor.nonzero)
_UNIQUE = (torch.unique, torch.Tensor.unique)
_SELECTING = (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select)
_BINCOUNT = (torch.bincount, torch.Tensor.bincount)
Nothing = Callable[[int], bool]  # from a question's index to whether nothing is selected below it


class AskedForRows(Exception):
    """Torch asked whether the selections made at these lines have rows."""

    def __init__(self, lines: frozenset[str]) -> None:
        super().__init__()
        self.lines = lines


def some(_: int) -> bool:
    """Answers every question with "some"."""
    return False


def none(_: int) -> bool:
    """Answers every question with "none"."""
    return True


def by_turns(place: int) -> bool:
    """Answers every other question with "none"."""
    return place % 2 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The questions of one tracing: the line of each in order, and the row counts that are 0 where its answer is "none";
    `lines` are those of selections that are tested for having rows."""

    asked: tuple[str, ...] = ()
    empty: tuple[frozenset[sympy.Symbol], ...] = ()
    lines: frozenset[str] = frozenset()

    def without(self, nothing: Nothing) -> frozenset[sympy.Symbol]:
        """The row counts that are 0 if nothing is selected below these questions."""
        return frozenset().union(*(symbols for place, symbols in enumerate(self.empty) if nothing(place)))


UNASKED = Answered()


@dataclass(slots=True, kw_only=True)
class EmptySelections:
    """The questions of one tracing; `nothing` says for each whether the answer is "none"."""

    lines: frozenset[str] = frozenset()
    nothing: Nothing = some
    made: dict[sympy.Symbol, str] = field(default_factory=dict)  # the line that made each selection, by its row count
    questions: list[tuple[str, Question]] = field(default_factory=list)  # in order, each with its line
    below: list[tuple[int, sympy.Symbol, fx.Node]] = field(default_factory=list)  # selections by a mask, each below a question
    first: int = 0  # of the questions that were asked in a row, until something was selected
    selects: bool = False  # whether anything was selected since the last question
    hits: dict[fx.Node, torch.Tensor] = field(default_factory=dict)  # indices where a 1-d mask is true: the mask
    counts: bool = False  # whether any number that was read is a count

    def result(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        asker: FrameType,
    ) -> object:
        """The result of a call of a torch function; `call` runs it."""
        if self.counts:
            args, kwargs = pytree.tree_map_only(RowCount, lambda count: count.number, (args, kwargs))
        if func is torch.Tensor.__len__ and self.long(args[0], source_location.caller(func, asker)):
            return 1
        if func in _BINCOUNT and (counted := _counted(args, kwargs)) is not None:
            return counted
        if (
            func in _UNIQUE
            and len(args) == 1
            and not any(kwargs.get(name) for name in kwargs if name != "sorted")
            and (counted := _counts(args[0])) is not None
        ):
            return self.result(torch.nonzero, (counted,), {}, call, asker).squeeze(-1)  # type: ignore[attr-defined]
        if func in _NONZERO and kwargs.get("as_tuple"):
            return self.result(torch.where, args or (kwargs["input"],), {}, call, asker)
        if func is torch.Tensor.unbind and (hit := self.hit(args[0])) is not None:
            return _Each(self, hit, args[0], source_location.of_frame(asker))
        if func is torch.Tensor.item:
            return self.number(call(func, args, kwargs), args[0], source_location.of_frame(asker))
        mask = _mask(func, args, kwargs)
        if mask is None:
            return call(func, args, kwargs)
        return self.selected(mask, func, args, kwargs, call, source_location.of_frame(asker))

    def long(self, rows: torch.Tensor, asker: FrameType) -> bool:
        """Whether `len(rows)` only tests for rows; raises AskedForRows if the line that made them is not among `lines`."""
        size = rows.shape[0] if rows.dim() else None
        at = self.made.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if at is None or not assertions.asks_for_some(asker.f_code, asker.f_lasti):
            return False
        if at not in self.lines:
            raise AskedForRows(frozenset({at}))
        return True

    def selected(
        self,
        mask: torch.Tensor,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
        at: str,
    ) -> object:
        """The rows that a mask selects, or the indices where it is true."""
        found = call(func, args, kwargs)
        first = found[0] if isinstance(found, tuple) else found
        size = next((one for one in first.shape if isinstance(one, torch.SymInt) and one.node.expr not in self.made), None)
        if size is None or not size.node.expr.is_symbol:
            return found
        node = node_of(mask)
        if node is not None and at in self.lines:
            if self.said(Question(node, True), at):
                torch._check(size > 0)  # type: ignore[no-untyped-call]
            else:
                empty = [0 if isinstance(one, torch.SymInt) else one for one in first.shape]
                return pytree.tree_map(lambda one: one.new_empty(empty), found)
        self.made[size.node.expr] = at
        if node is not None:
            self.below += ((place, size.node.expr, node) for place in range(self.first, len(self.questions)))
            self.selects = True
        if func in _LOCATING and mask.dim() == 1 and (made := node_of(first)) is not None:
            self.hits[made] = mask
        return found

    def hit(self, places: object) -> torch.Tensor | None:
        """The mask whose true indices these are, if they can be iterated one by one; None for any other tensor."""
        if not self.hits or not isinstance(places, torch.Tensor):
            return None
        node = node_of(places)
        while node is not None and node not in self.hits and implications.views(node):
            node = node.all_input_nodes[0]
        return self.hits.get(node) if node is not None else None

    def answer(self, tensor: object, asker: FrameType) -> bool | None:
        """The answer to `bool(tensor)`, if it tests whether anything is selected; None for other questions and torch's own."""
        asks = isinstance(tensor, torch.Tensor) and source_location.foreign(asker.f_code.co_filename)
        node = node_of(tensor) if asks and isinstance(tensor, torch.Tensor) else None
        question = implications.question(node) if node is not None else None
        return None if question is None else self.said(question, source_location.of_frame(asker))

    def said(self, question: Question, at: str) -> bool:
        """The answer to a question; raises CaptureError for a line that keeps asking."""
        if self.selects:
            self.first, self.selects = len(self.questions), False
        self.questions.append((at, question))
        if len(self.questions) > MOST_ASKED and [line for line, _ in self.questions[-MOST_ASKED:]] == [at] * MOST_ASKED:
            what = f"a line asks more than {MOST_ASKED} times whether anything is selected, and a graph has no loops"
            raise CaptureError(what, at=at, fix="a loop of a fixed number of steps")
        return question.some != self.nothing(len(self.questions) - 1)

    def number(self, found: object, tensor: torch.Tensor, at: str) -> object:
        """A number read from a tensor; if it is a count, it can be compared with 0."""
        if not isinstance(found, torch.SymInt) or (node := node_of(tensor)) is None:
            return found
        question = implications.question(node)
        if question is None or not question.some:
            return found
        self.counts = True
        return RowCount(found, lambda: self.said(question, at))

    def answered(self) -> Answered:
        """The questions asked, and the selections that have no rows where the answer is "none"."""
        found = [set[sympy.Symbol]() for _ in self.questions]
        holds = implications.implied([(self.questions[place][1], mask) for place, _, mask in self.below])
        for (place, symbol, _), held in zip(self.below, holds, strict=True):
            found[place] |= {symbol} if held else set()
        return Answered(asked=tuple(line for line, _ in self.questions), empty=tuple(map(frozenset, found)), lines=self.lines)

    def asked_for(self, error: Exception) -> frozenset[str]:
        """The lines of selections that torch tested for rows, according to an error; empty if torch needs more than that."""
        links = list(source_location.chain(error))
        if found := next((link for link in links if isinstance(link, AskedForRows)), None):
            return found.lines
        asked = next((link.cond for link in links if isinstance(link, GuardOnDataDependentSymNode)), None)
        symbols: set[sympy.Symbol] = getattr(asked, "free_symbols", set())
        positive = {symbol: sympy.Symbol(f"some_{symbol}", integer=True, positive=True) for symbol in symbols}
        if (
            asked is None
            or not symbols
            or not symbols <= self.made.keys()
            or asked.subs(positive) not in (sympy.true, sympy.false)
        ):
            return frozenset()
        return frozenset(self.made[symbol] for symbol in symbols) - self.lines


class RowCount:
    """A count: a comparison with 0 calls `ask` for whether it is positive. Otherwise it acts as a SymInt."""

    def __init__(self, number: torch.SymInt, ask: Callable[[], bool]) -> None:
        self.number, self.ask = number, ask

    def __bool__(self) -> bool:
        return self.ask()

    def __int__(self) -> int:
        return int(self.number)

    __index__, __hash__ = __int__, None  # type: ignore[assignment]


def _compared(compare: Callable[[Any, Any], Any]) -> Callable[[RowCount, object], Any]:
    """A comparison of counts; it is a question if all positive counts have the same answer."""

    def asked(self: RowCount, other: object) -> Any:
        other = other.number if isinstance(other, RowCount) else other
        none, one, many = (compare(number, other) for number in (0, 1, 1 << 62)) if type(other) is int else (None, 0, 1)
        if none != one == many:
            return one if self.ask() else none
        return compare(self.number, other)

    return asked


def _number(method: str) -> Callable[..., Any]:
    """A method of a count that forwards to its number."""
    return lambda self, *others: getattr(self.number, method)(
        *(other.number if isinstance(other, RowCount) else other for other in others)
    )


for _compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(RowCount, f"__{_compare.__name__}__", _compared(_compare))
for _name in "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg float".split():
    setattr(RowCount, f"__{_name}__", _number(f"__{_name}__"))


class _Each(tuple[torch.Tensor, ...]):
    """The indices 0 to n - 1 of a mask of length n as one-element tensors, each guarded by a question: the mask there."""

    selections: EmptySelections
    mask: torch.Tensor
    at: str

    def __new__(cls, selections: EmptySelections, mask: torch.Tensor, places: torch.Tensor, at: str) -> _Each:
        node, shape = node_of(mask), tuple(places.shape[1:])
        count = int(mask.shape[0]) if node is None else implications.possible(node)
        numbers = (torch.full(shape, place, dtype=places.dtype, device=places.device) for place in range(count))
        made = super().__new__(cls, numbers)
        made.selections, made.mask, made.at = selections, mask, at
        return made

    def __iter__(self) -> Iterator[torch.Tensor]:
        for place, found in enumerate(super().__iter__()):
            node = node_of(self.mask[place])
            if node is None or self.selections.said(Question(node, True), self.at):
                yield found


def _mask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The mask that a call selects by, or whose true indices it asks for; None for any other call."""
    named = dict(zip(("input", "mask"), args, strict=False)) | kwargs
    found = None
    if func is torch.Tensor.__getitem__:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        found = next((one for one in parts if isinstance(one, torch.Tensor) and one.dtype is torch.bool), None)
    elif func in _SELECTING:
        found = named.get("mask")
    elif func in _LOCATING and (func is not torch.where or len(args) + len(kwargs) == 1):
        found = named.get("input", named.get("condition"))
    return found if isinstance(found, torch.Tensor) else None


def _counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result of torch.bincount; None if it may have more than `minlength` counts, or has weights."""
    named = dict(zip(("input", "weights", "minlength"), args, strict=False)) | kwargs
    length, found = named.get("minlength", 0), None
    if named.get("weights") is None and isinstance(length, int):
        found = _counts(named["input"])
    return None if found is None or len(found) > length else torch.nn.functional.pad(found, (0, length - len(found)))


def _counts(x: object) -> torch.Tensor | None:
    """The count of each number in a tensor, if they all have a known upper bound."""
    most = implications.bounded(node_of(x)) if isinstance(x, torch.Tensor) else None
    return None if most is None or not isinstance(x, torch.Tensor) else torch.nn.functional.one_hot(x.reshape(-1), most).sum(0)

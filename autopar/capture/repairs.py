"""Turns conditional repairs into `where`: `if not torch.isfinite(h).all(): h = torch.clamp(h, -m, m)`.

A graph has no branches. Tracing enters the body of such an `if`, whose last line then assigns the repaired tensor if the
condition holds, and otherwise the previous one:

    if torch.isinf(h).any():                      bad = isinf(h).any()
        m = torch.finfo(h.dtype).max - 1000  ->   h = where(bad, clamp(h, -m, m), h)
        h = torch.clamp(h, -m, m)

If the last line writes into the tensor (`h.clamp_(-m, m)`, `h[torch.isnan(h)] = 0`, `h *= 0.5`), a second write restores the
previous values where the condition does not hold, so that views of the tensor see the result, too.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType

import torch

from autopar.capture import source_location
from autopar.capture.assertions import Span, asked, evaluated, holds, outcome, parsed, span
from autopar.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Repair:
    """An `if` whose last line assigns a tensor or writes into one; other names assigned in its body are not read elsewhere."""

    test: ast.expr
    name: str
    value: Span  # where the new tensor is computed, or the tensor written
    writes: bool = False


@dataclass(slots=True)
class Repairs:
    """The repairs whose bodies are being executed, by frame, with their conditions."""

    entered: list[tuple[FrameType, Repair, torch.Tensor]] = field(default_factory=list)

    def answer(self, tensor: object, asker: FrameType) -> bool | None:
        """The answer to `bool(tensor)` that makes the frame enter the body of a repair; None if there is none."""
        at = asked(asker.f_code, asker.f_lasti) if isinstance(tensor, torch.Tensor) and tensor.is_meta else None
        found = next((one for one in _repairs(asker.f_code.co_filename) if at and holds(one.test, at)), None)
        if found is None or at is None or (said := outcome(found.test, True, at)) is None:
            return None
        condition = evaluated(found.test, asker)
        if isinstance(condition, bool) or not isinstance(asker.f_locals.get(found.name), torch.Tensor):
            return None
        self.entered = [one for one in self.entered if one[0] is not asker or one[1] is not found]
        self.entered.append((asker, found, condition))
        return said

    def result(self, call: Callable[[], object], asker: FrameType) -> object:
        """The result of a call in a frame; at the last line of a repair, the tensor as it is after the `if`."""
        last = (one for one in self.entered if one[0] is asker and _place(asker.f_code, asker.f_lasti) == one[1].value)
        entry = next(last, None)
        if entry is None:
            return call()
        _, repair, condition = entry
        tensor: torch.Tensor = asker.f_locals[repair.name]
        before = tensor.clone() if repair.writes else tensor
        computed = call()
        after = tensor if repair.writes else computed
        if not isinstance(after, torch.Tensor) or (after.shape, after.dtype) != (before.shape, before.dtype):
            return computed
        self.entered = [one for one in self.entered if one is not entry]
        repaired = torch.where(condition, after, before)
        return repaired if not repair.writes else (tensor.copy_(repaired), computed)[1]

    def refuse(self) -> None:
        """Raise CaptureError for a repair whose tensor no traced torch function computed."""
        for frame, _, _ in self.entered:
            what = "the control flow of forward depends on the values of a tensor, and more than one tensor on it"
            raise CaptureError(what, at=source_location.of_frame(frame), fix="express the choice with torch.where")


@functools.lru_cache(maxsize=64)
def _repairs(file: str) -> tuple[Repair, ...]:
    """The repairs in a file."""
    functions = (node for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef))
    return tuple(
        repair
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.If) and not node.orelse
        for repair in _repair(node)
        if all(_assigns(line) for line in node.body[:-1]) and not _temporary(node.body[:-1]) & _read_outside(function, node)
    )


def _repair(branch: ast.If) -> Iterator[Repair]:
    """The repair made by the last line of a branch, if any."""
    match branch.body[-1]:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield Repair(branch.test, name, span(value))
        case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name)) as target]):  # h[where] = 0
            yield Repair(branch.test, name, span(target), writes=True)
        case ast.AugAssign(target=ast.Name(id=name)) as line:  # h *= 0.5
            yield Repair(branch.test, name, span(line), writes=True)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) as call) if _in_place(method):
            yield Repair(branch.test, name, span(call), writes=True)  # h.clamp_(-m, m)


def _in_place(method: str) -> bool:
    """Whether a tensor method writes in place, by its name."""
    return method.endswith("_") and not method.endswith("__")


def _assigns(line: ast.stmt) -> bool:
    """Whether a line assigns to one name."""
    return isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)


def _temporary(lines: list[ast.stmt]) -> set[str]:
    """The names that lines assign to."""
    return {name.id for line in lines for name in _names(line, ast.Store)}


def _read_outside(function: ast.FunctionDef, branch: ast.If) -> set[str]:
    """The names that a function reads outside of a branch, except those that another branch assigns in its first line."""
    inside = {*_names(branch, ast.Load)}
    for other in (node for node in ast.walk(function) if isinstance(node, ast.If)):
        own = _temporary(other.body[:1])
        inside |= {name for line in other.body[1:] for name in _names(line, ast.Load) if name.id in own}
    return {name.id for name in {*_names(function, ast.Load)} - inside}


def _names(node: ast.AST, context: type[ast.expr_context]) -> Iterator[ast.Name]:
    """The names in a piece of source that are read, or those that are assigned."""
    yield from (one for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context))


def _place(code: CodeType, instruction: int) -> Span | None:
    """The source span of the expression that an instruction computes."""
    first, last, left, right = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return None if first is None or last is None or left is None or right is None else (first, last, left, right)

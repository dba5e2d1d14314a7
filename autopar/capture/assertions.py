"""Captures conditions that only reject values: `assert (x >= 0).all()`, or `if (x < 0).any(): raise ...`.

A graph has no branches, but as long as the condition passes, such a check has no effect, so tracing assumes that it does.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
from types import CodeType, FrameType

import torch
from torch.distributions import constraints
from torch.nn.modules.transformer import _detect_is_causal_mask

Span = tuple[int, int, int, int]  # first and last line, first and last column, of a piece of source
Check = ast.Assert | ast.If


def assumed(tensor: object, asker: FrameType) -> bool | None:
    """The answer to `bool(tensor)`, or `tensor.item()`, that lets the check around it pass; None if it is used for anything
    else than a check."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
        return None
    if asker.f_code is _detect_is_causal_mask.__code__:  # nn.Transformer inspects the mask: `passes.causal_masks` does
        return False
    if asker.f_code.co_filename == constraints.__file__:  # a check that raises an error of torch.distributions
        return True
    return _wanted(asker.f_code, asker.f_lasti)


@functools.lru_cache(maxsize=4096)
def _wanted(code: CodeType, instruction: int) -> bool | None:
    """The answer to the condition at this instruction that makes its check pass; None if it is no part of a check."""
    at = asked(code, instruction)
    check = next((check for check in _checks(code.co_filename) if at and holds(check.test, at)), None)
    return outcome(check.test, isinstance(check, ast.Assert), at) if check and at else None


def asked(code: CodeType, instruction: int) -> Span | None:
    """The source span of a condition: bool(...) is a call of its own, else it was computed right before the jump."""
    place = instruction // 2
    if not dis.opname[code.co_code[instruction]].startswith("CALL"):
        place -= 1
        while dis.opname[code.co_code[2 * place]] == "EXTENDED_ARG":
            place -= 1
    first, last, left, right = next(itertools.islice(code.co_positions(), place, None))
    return None if first is None or last is None or left is None or right is None else (first, last, left, right)


@functools.lru_cache(maxsize=64)
def parsed(file: str) -> ast.Module:
    """The syntax tree of a file; an empty one if its source is not available."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # typed interactively, or not Python
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=64)
def _checks(file: str) -> tuple[Check, ...]:
    """The checks in a file: `assert` statements, and `if` statements that end by raising and have no `else`."""
    return tuple(
        node
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise))
    )


def asks_for_some(code: CodeType, instruction: int) -> bool:
    """Whether the result of a call is only tested for being positive or 0: `if not len(x)`, `if len(x) > 0`."""
    at = next(itertools.islice(code.co_positions(), instruction // 2, None))
    place = next((call for call in _calls(code.co_filename) if span(call[0]) == (at[0], at[1], at[2], at[3])), None)
    match place:
        case (
            call,
            ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() | ast.Gt() | ast.LtE()], comparators=[ast.Constant(value=0)]),
        ):
            return left is call
        case (call, ast.Compare(left=left, ops=[ast.Lt() | ast.GtE()], comparators=[ast.Constant(value=1)])):
            return left is call
        case (_, ast.UnaryOp(op=ast.Not())):
            return True
        case (call, ast.If(test=test) | ast.IfExp(test=test)):
            return test is call
    return False


@functools.lru_cache(maxsize=64)
def _calls(file: str) -> tuple[tuple[ast.Call, ast.AST], ...]:
    """The calls in a file, each with its parent node."""
    parts = ((part, whole) for whole in ast.walk(parsed(file)) for part in ast.iter_child_nodes(whole))
    return tuple((part, whole) for part, whole in parts if isinstance(part, ast.Call))


def outcome(test: ast.expr, wanted: bool, at: Span) -> bool | None:
    """The value that the part of a condition at `at` needs for the whole to be `wanted`; None where that is not certain.

    not x               the opposite of x
    x or y, x and y     every part as the whole
    bool(x)             x
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return outcome(inner, not wanted, at)
        case ast.BoolOp(values=parts):
            return next((outcome(part, wanted, at) for part in parts if holds(part, at)), wanted)
        case ast.Call(func=ast.Name(id="bool"), args=[inner]) if span(test) != at:
            return outcome(inner, wanted, at)
    return wanted if span(test) == at else None


def evaluated(test: ast.expr, frame: FrameType) -> torch.Tensor | bool:
    """The value of a condition, with all of its parts evaluated; a tensor if any tensor decides it."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = evaluated(inner, frame)
            return found.logical_not() if isinstance(found, torch.Tensor) else not found
        case ast.BoolOp(op=kind, values=parts):
            values = [evaluated(part, frame) for part in parts]
            either = isinstance(kind, ast.Or)
            if either in [value for value in values if isinstance(value, bool)]:
                return either
            tensors = [value for value in values if isinstance(value, torch.Tensor)]
            return functools.reduce(torch.logical_or if either else torch.logical_and, tensors) if tensors else not either
        case ast.Call(func=ast.Name(id="bool"), args=[inner]) | ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[]):
            return evaluated(inner, frame)
    code = compile(ast.Expression(test), frame.f_code.co_filename, "eval")
    value: object = eval(code, frame.f_globals, frame.f_locals)
    return value.bool() if isinstance(value, torch.Tensor) else bool(value)


def holds(node: ast.expr, at: Span) -> bool:
    """Whether the span `at` lies within a node's source."""
    first, last, left, right = span(node)
    return (first, left) <= (at[0], at[2]) and (at[1], at[3]) <= (last, right)


def span(node: ast.expr | ast.stmt) -> Span:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or node.col_offset

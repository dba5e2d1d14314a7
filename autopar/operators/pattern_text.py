"""Helpers for rules that are functions of shapes, which write patterns tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable


def term(words: Iterable[str]) -> str:
    """The dims of one tensor as text."""
    return " ".join(words) or "()"


def dims(rank: int) -> list[str]:
    """A name for each dim."""
    return [f"d{i}" for i in range(rank)]


def without(rank: int, *gone: int) -> list[str]:
    """A name for each dim, `_` for those that stay whole."""
    return ["_" if d in {g % rank for g in gone} else f"d{d}" for d in range(rank)]


def unread(rank: int) -> str:
    """The dims of a tensor each of which stays whole."""
    return term("_" for _ in range(rank))

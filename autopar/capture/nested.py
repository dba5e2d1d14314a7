"""Nested structures of arguments and results: the paths of their leaves, and which of these are constants."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree

STATIC = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def known(value: object) -> None:
    """Register the dataclasses in a model's arguments or return value as pytree nodes.

    Dataclasses with fields that their constructor does not take remain leaves. Outputs of transformers register themselves when
    they are constructed, but not while torch.export traces, so a class whose module is first imported in forward is constructed
    once more. If it were only registered here, its next instance would register it again, which torch refuses.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(value) if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)]
    made_of_fields = [leaf for leaf in leaves if all(one.init for one in dataclasses.fields(leaf))]
    for kind, leaf in {type(leaf): leaf for leaf in made_of_fields}.items():
        with _untraced():
            again = dataclasses.replace(leaf)
        if pytree.tree_structure(again).is_leaf():
            pytree.register_dataclass(kind)
    if made_of_fields:
        known(value)


@contextmanager
def _untraced() -> Iterator[None]:
    """Make `torch.compiler.is_compiling` return False."""
    was = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was


def distinct(leaves: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """The leaves with unique paths: repeated ones are numbered, so {"a.b": x, "a": {"b": y}} has "a.b" and "a.b#1"."""
    seen: Counter[str] = Counter()
    for path, leaf in leaves:
        yield f"{path}#{seen[path]}" if seen[path] else path, leaf
        seen[path] += 1


def walk(path: str, value: object) -> Iterator[tuple[str, object]]:
    """The leaves of a pytree, in its order, each with a dotted path: {"past": (a, b)} has "past.0" and "past.1"."""
    children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        yield path, value
        return
    names: Iterable[object] = range(len(children))
    if isinstance(value, Mapping):
        names = value.keys()
    elif isinstance(value, tuple):
        names = getattr(type(value), "_fields", names)  # a named tuple
    elif dataclasses.is_dataclass(value):
        names = [one.name for one in dataclasses.fields(value) if getattr(value, one.name) is not None]  # as pytree does
    for name, child in zip(names, children, strict=True):
        yield from walk(f"{path}.{name}" if path else str(name), child)


__all__ = ["STATIC", "distinct", "known", "walk"]

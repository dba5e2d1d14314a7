"""Types of fields that users set: a value of the wrong type is refused when it is given, not when it is first read."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from numbers import Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from autopar.errors import MeshError

NAMES = {float: "a number", int: "a number", str: "a text", bool: "True or False", types.NoneType: "None"}


def check_fields(whose: str, given: object) -> None:
    """Raise MeshError if a field of a dataclass is not of its declared type; any class of numbers is accepted."""
    of: Any = type(given)  # typed as Any, since a type checker wants it hashable
    for name, kind in _types(of).items():
        if not _is(value := getattr(given, name), kind):
            raise MeshError(f"{whose} {name} is {repr(value)[:80]}, not {_words(kind)}")


@functools.cache
def _types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _is(value: object, kind: Any) -> bool:
    """Whether a value is of a type: a number, a string, a dataclass, a mapping, a tuple or a union of types."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in (float, int):
        return isinstance(value, Real) and not isinstance(value, bool)
    if origin in (Union, types.UnionType):
        return any(_is(value, one) for one in inside)
    if origin is tuple:
        kinds = inside[:1] * len(value) if inside[1:] == (...,) and isinstance(value, tuple) else inside
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_is, value, kinds))
    if origin is not None:
        of, to = inside
        return isinstance(value, Mapping) and all(_is(key, of) and _is(held, to) for key, held in value.items())
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, inside))
    if origin is tuple:
        return f"a tuple of {' and '.join(_words(one) for one in inside if one is not ...)}"
    if origin is not None:
        return f"a mapping from {_words(inside[0])} to {_words(inside[1])}"
    return NAMES.get(kind) or f"an autopar {kind.__name__}"


__all__ = ["check_fields"]

"""File access: writes are atomic, and whatever is read is checked against declared types.

The contents of a file are untrusted: they are checked in full before use. A ValueError names the place and the problem:
`collectives.3.bytes is "many", not an integer`.
"""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
LARGEST = 2**63  # what an integer is below: more than any size, and less than what takes long to convert
LONGEST = 2**28  # bytes of a file that is read: a plan of thousands of operators has tens of millions
MOST_ENTRIES = 100_000  # of TOML and YAML, in which people write
MOST_DOTS = 1000  # in a line of TOML: a key of n parts takes tomllib n^2 steps
KINDS: Mapping[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}
NAMES: Mapping[type, str] = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


def write(path: str | Path, text: str) -> None:
    """Write a text file atomically: at any moment, whatever fails, the path holds the complete old or the complete new text.

    The text goes to a temporary file in the same folder, which replaces the file once it is on the disk; several processes may
    write one file at the same time. Permissions are those of a plain write: an existing file keeps its own. A symbolic link is
    followed and kept. Anything but a regular file (a terminal, a pipe) is written directly. Surrogates, which UTF-8 does not
    have, are escaped.

    Raises OSError where a plain write would, and if no file can be created in the folder; the error names the requested path.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            if target.exists():
                with target.open("a"):  # raises what a plain write raises if it may not be written
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = str(path)
        raise


def read(path: str | Path, most: int = LONGEST) -> str:
    """Read a text file of at most so many bytes; never reads more, whatever the path leads to.

    Raises OSError where a plain read would, and ValueError for a longer file or one that is not UTF-8.
    """
    with open(path, "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise ValueError(f"it has more than {most} bytes")
    return found.decode("utf-8")


def parse(text: str) -> object:
    """Parse JSON strictly; raises ValueError for anything outside the standard, or surely unintended.

    That is NaN and infinity, integers from 2**63 on, objects with duplicate keys, and excessive nesting.
    """
    try:
        found: object = json.loads(
            text, object_pairs_hook=_entries, parse_float=_finite, parse_int=_integer, parse_constant=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def parse_toml(text: str) -> dict[str, object]:
    """Parse TOML; raises ValueError for text that is not TOML, and for values that `plain` refuses."""
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"it has a line with more than {MOST_DOTS} dots")
    try:
        return plain(tomllib.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(data: T) -> T:
    """Return the data unchanged if JSON could hold its numbers and a person could have written the rest.

    Raises ValueError for NaN and infinity, integers from 2**63 on, and more than 100,000 entries, counting repetitions: with
    aliases, a few lines of YAML can expand to any number of them.
    """
    left: list[Any] = [data]
    count = 0
    while left:
        held = left.pop()
        if (isinstance(held, int) and abs(held) >= LARGEST) or (isinstance(held, float) and not math.isfinite(held)):
            raise ValueError("it has a number that is not finite or too large")
        if isinstance(held, dict | list | tuple):
            left += [*held, *held.values()] if isinstance(held, dict) else held
            if (count := count + len(held)) > MOST_ENTRIES:
                raise ValueError(f"it has more than {MOST_ENTRIES} entries")
    return data


def typed(kind: type[T], data: object, at: str = "") -> T:
    """Convert parsed JSON to a typed value: a dataclass, a mapping with string or integer keys, a tuple, a number, ...

    Raises ValueError if the data have another type, lack a field or have an unknown one.

    >>> typed(tuple[int, ...], [2, 4])
    (2, 4)
    """
    found: T = _read(kind)(data, at)
    return found


def _entries(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has two entries {next(json.dumps(n) for n in names if names.count(n) > 1)}")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return found


def _integer(text: str) -> int:
    if len(text) > len(str(LARGEST)) or abs(int(text)) >= LARGEST:
        raise ValueError(f"{text[:8]}... is too large a number, of {len(text)} digits")
    return int(text)


def _read(kind: Any) -> Callable[[Any, str], Any]:
    """The reader of a type: a function of the data and their place."""
    if is_dataclass(kind):
        return lambda data, at: _fields(kind, data, at)
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (some,) = (one for one in inside if one is not types.NoneType)
        return lambda data, at: None if data is None else typed(some, data, at)
    if origin is tuple:
        return lambda data, at: _items(inside, data, at)
    if origin is not None:
        return lambda data, at: _mapping(inside[0], inside[1], data, at)
    return lambda data, at: kind(data) if type(data) in KINDS[kind] else _refuse(data, at, NAMES[kind])


def _fields(kind: Any, data: Any, at: str) -> object:
    if not isinstance(data, dict):
        _refuse(data, at, "an object")
    known, hints = {one.name: one for one in fields(kind) if one.init}, get_type_hints(kind)
    if unknown := sorted(data.keys() - known.keys()):
        raise ValueError(f"{_place(at)} has an entry {json.dumps(unknown[0])}, which nothing reads")
    needed = (name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING)
    if missing := [name for name in needed if name not in data]:
        raise ValueError(f"{_place(at)} has no entry {json.dumps(missing[0])}")
    return kind(**{name: typed(hints[name], held, _inside(at, name)) for name, held in data.items()})


def _items(inside: tuple[Any, ...], data: Any, at: str) -> tuple[object, ...]:
    if not isinstance(data, list):
        _refuse(data, at, "a list")
    kinds = inside[:1] * len(data) if inside[1:] == (...,) else inside
    if len(kinds) != len(data):
        raise ValueError(f"{_place(at)} has {len(data)} entries, not {len(kinds)}")
    return tuple(typed(kind, one, _inside(at, place)) for place, (kind, one) in enumerate(zip(kinds, data, strict=True)))


def _mapping(name: Any, kind: Any, data: Any, at: str) -> dict[object, object]:
    if not isinstance(data, dict):
        _refuse(data, at, "an object")
    if name is int and (wrong := [key for key in data if not (key.isascii() and key.isdecimal())]):
        _refuse(wrong[0], at, "an integer, as its entries are")
    keys = {key: _integer(key) if name is int else key for key in data}
    return {keys[key]: typed(kind, held, _inside(at, key)) for key, held in data.items()}


def _refuse(data: object, at: str, wanted: str) -> NoReturn:
    match data:
        case dict():
            kind = "an object"
        case list():
            kind = "a list"
        case _:
            kind = json.dumps(data, default=str)[:80]
    raise ValueError(f"{_place(at)} is {kind}, not {wanted}")


def _inside(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)


def _place(at: str) -> str:
    return at or "it"

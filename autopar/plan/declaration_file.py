"""Reads a declaration from a file: TOML, JSON, or YAML if PyYAML is installed. It is data, never executed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

from autopar import files
from autopar.errors import ConstraintError

LONGEST = 2**20  # bytes of a declaration
SUFFIXES = (".toml", ".json", ".yaml", ".yml")


def load_declaration(config: object) -> Mapping[str, object]:
    """Load a declaration: a mapping is returned as it is, a path is read.

    Raises ConstraintError for a file that is missing, cannot be read, or is a Python file.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | Path):
        raise ConstraintError(f"config is a {type(config).__name__}", fix="a dict, or the path of a TOML, JSON or YAML file")
    path = Path(config)
    if path.suffix == ".py":
        what = f"{path} is a Python file: reading it would run it"
        raise ConstraintError(what, fix=f"import its dict: from {path.stem} import config; parallelize(..., config=config)")
    if path.suffix not in SUFFIXES:
        raise ConstraintError(
            f"config={str(path)!r} is no {', '.join(SUFFIXES)}", fix="a file of one of these formats, or a dict"
        )
    try:
        found = _parse(path.suffix, files.read(path, LONGEST))
    except OSError as error:
        raise ConstraintError(f"{path} cannot be read: {error.strerror}", fix="the path of a file that is there") from error
    except ValueError as error:
        raise ConstraintError(f"{path} is not valid {path.suffix[1:].upper()}: {error}", fix="correct the file") from error
    if not isinstance(found, Mapping):
        raise ConstraintError(f"{path} holds a {type(found).__name__}", fix="a table of keys: docs/declaration.md")
    return found


def _parse(suffix: str, text: str) -> object:
    """Parse a text; raises ValueError if it is not of the format."""
    if suffix == ".toml":
        return files.parse_toml(text)
    if suffix == ".json":
        return files.parse(text)
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise ConstraintError("a YAML file needs PyYAML", fix="pip install pyyaml, or a TOML or JSON file") from error
    try:
        return files.plain(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


__all__ = ["load_declaration"]

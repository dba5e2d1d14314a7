"""What is known of an operator stands in its row: nowhere outside of autopar/operators is there a table of operator names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import torch

from tests.test_architecture import PACKAGE

TARGET = re.compile(r"aten\.\w+(\.\w+)?")
FEW = 2  # plain words that happen to be names of operators too ("slice", "pad") are let pass in a container

TABLES = (
    'RATES = {"dropout": 1, "alpha_dropout": 1, "native_dropout": 2}',
    'FLAGS = {"aten.dropout.default": "train", "aten.batch_norm.default": "training"}',
    'PRODUCTS = frozenset("linear addmm mm bmm".split())',
    'CASTS = ("to.dtype", "_to_copy", "type_as", "view")',
    'NORMS = [name for name in ("layer_norm", "rms_norm", "group_norm")]',
)


def names() -> frozenset[str]:
    """The names of all operators of ATen."""
    every = torch._C._dispatch_get_all_op_names()
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in every if name.startswith("aten::"))


def tables(tree: ast.AST, known: frozenset[str]) -> Iterator[tuple[int, list[str]]]:
    """The line and the operators of every container, or text of words, that lists operators by name."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=parts) | ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                words = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            case ast.Constant(value=str(text)) if id(node) not in prose and not isinstance(node, ast.JoinedStr):
                words = text.split()
            case _:
                continue
        targets = [word for word in words if TARGET.fullmatch(word)]
        short = [word for word in words if word.partition(".")[0] in known]
        if len(targets) > 1 or (len(short) > FEW and 2 * len(short) > len(words)):
            yield node.lineno, targets or short  # type: ignore[attr-defined]


def test_no_table_of_operators_stands_outside_of_their_rows() -> None:
    known, found = names(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] != "operators":
            found += [f"{place}:{line}: {', '.join(words)}" for line, words in tables(ast.parse(path.read_text()), known)]
    assert found == []


@pytest.mark.parametrize("text", TABLES)
def test_a_table_of_operators_is_seen(text: str) -> None:
    assert list(tables(ast.parse(text), names()))

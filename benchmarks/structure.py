"""The structure of the package in figures: what a reader meets before the first function.

    python benchmarks/structure.py                 of this checkout
    python benchmarks/structure.py PATH [PATH]     of others too, side by side

An arrow is an import from one folder or loose module of the package into another. A table of operator names is a literal that
stands outside the folder of operators and holds three or more names of ATen operators. A target is found if its whole name,
"aten.softmax.int", stands in a file of that folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx
import torch

OPERATORS = ("operators", "rules")  # the folder of the rules, under its names over time
PREVIOUS = re.compile(r"^(The same|Those|As (above|before)|Like (the|those) |Nothing will|Such )")
NAME = re.compile(r"^(?:aten\.)?([a-z_][a-z0-9_]*)(?:\.\w+)?$")


@dataclass(frozen=True)
class Checkout:
    """A checkout of the project."""

    root: Path

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        """Every module of the package, by its path in it."""
        package = self.root / "autopar"
        return {path.relative_to(package): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}

    @cached_property
    def rooms(self) -> nx.DiGraph[str]:
        """Folders and loose modules, with an edge for every import between them."""
        rooms = {path.parts[0].removesuffix(".py") for path in self.trees}
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(rooms)
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autopar":
                    for alias in node.names:
                        target = f"{node.module}.{alias.name}".split(".")[1]
                        if target in rooms and target != path.parts[0].removesuffix(".py"):
                            graph.add_edge(path.parts[0].removesuffix(".py"), target)
        return graph

    def nodes(self, kind: type[ast.AST], *, without: tuple[str, ...] = ()) -> Iterator[ast.AST]:
        """Every syntax node of a kind, but in these folders."""
        for path, tree in self.trees.items():
            if path.parts[0] not in without:
                yield from (node for node in ast.walk(tree) if isinstance(node, kind))


def loose_modules(checkout: Checkout) -> int:
    """Modules that stand in no folder."""
    return sum(len(path.parts) == 1 and not path.name.startswith("__") for path in checkout.trees)


def arrows(checkout: Checkout) -> int:
    """Imports between folders and loose modules, each pair once."""
    return int(checkout.rooms.number_of_edges())


def in_cycles(checkout: Checkout) -> int:
    """Folders and loose modules that import each other, directly or not."""
    return sum(len(part) for part in nx.strongly_connected_components(checkout.rooms) if len(part) > 1)


def operator_tables(checkout: Checkout) -> int:
    """Literals outside the folder of operators that hold the names of three or more."""
    return sum(
        sum(map(_operator, _words(node))) >= 3
        for kind in (ast.Dict, ast.Set, ast.List, ast.Tuple, ast.Call)
        for node in checkout.nodes(kind, without=OPERATORS)
    )


def _words(node: ast.AST) -> Iterator[str]:
    """The words of the strings that stand directly in a literal, or in a text that is split at spaces."""
    match node:
        case ast.Dict(keys=parts) | ast.Set(elts=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        case ast.Call(func=ast.Attribute(attr="split", value=ast.Constant(value=str(text)))):
            yield from text.split()


def _operator(word: str) -> bool:
    match = NAME.match(word)
    return match is not None and ("." in word or len(word) > 3) and hasattr(torch.ops.aten, match[1])


def targets_found(checkout: Checkout) -> str:
    """Targets with a rule whose whole name a search finds, of all."""
    folder = next(checkout.root / "autopar" / name for name in OPERATORS if (checkout.root / "autopar" / name).is_dir())
    text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    page = (checkout.root / "docs" / "operators.md").read_text()
    total = int(match[1]) if (match := re.search(r"(\d+) overloads", page)) else 0
    found = set(re.findall(r'"(aten\.\w+\.\w+)"', text))
    return f"{len(found)} of {total}"


def shared_names(checkout: Checkout) -> int:
    """Public classes that two or more files define."""
    names = Counter(
        node.name
        for tree in checkout.trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sum(number > 1 for number in names.values())


def leaning_docstrings(checkout: Checkout) -> int:
    """Docstrings that need the one above."""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) or "" for kind in kinds for node in checkout.nodes(kind))  # type: ignore[arg-type]
    return sum(PREVIOUS.match(text) is not None for text in texts)


def nested_conditionals(checkout: Checkout) -> int:
    """Conditional expressions directly in a branch of another."""
    nested = (ast.IfExp,)
    return sum(isinstance(node.body, nested) or isinstance(node.orelse, nested) for node in checkout.nodes(ast.IfExp))  # type: ignore[attr-defined]


def lines(checkout: Checkout) -> int:
    """Lines of the package."""
    return sum(len((checkout.root / "autopar" / path).read_text().splitlines()) for path in checkout.trees)


FIGURES: tuple[Callable[[Checkout], object], ...] = (
    loose_modules,
    arrows,
    in_cycles,
    operator_tables,
    targets_found,
    shared_names,
    leaning_docstrings,
    nested_conditionals,
    lines,
)


def main() -> None:
    """Print the figures of the checkouts that the command line names."""
    checkouts = [Checkout(Path(name)) for name in sys.argv[1:] or [str(Path(__file__).resolve().parent.parent)]]
    for figure in FIGURES:
        print(f"{figure.__name__.replace('_', ' '):<22}", *(f"{figure(checkout)!s:>14}" for checkout in checkouts))


if __name__ == "__main__":
    main()

"""The structure of the package in figures: what a reader meets before the first function.

    python benchmarks/structure.py                 of this checkout
    python benchmarks/structure.py PATH [PATH]     of others too, side by side
    python benchmarks/structure.py --save PATH     before (PATH) and now, to benchmarks/results/structure.txt

An arrow is an import from one folder or loose module of the package into another. A table of operator names is a literal that
stands outside the folder of operators and lists names of ATen operators: three or more, and more of them than of other words. A
target is found if its whole name, "aten.softmax.int", stands in a file of that folder.
"""

from __future__ import annotations

import ast
import datetime
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "structure.txt"
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
    """Literals outside the folder of operators that list the names of three or more."""
    kinds = (ast.Dict, ast.Set, ast.List, ast.Tuple, ast.Call)
    found = [[*_words(node)] for kind in kinds for node in checkout.nodes(kind, without=OPERATORS)]
    return sum(sum(map(_operator, words)) > max(2, len(words) / 2) for words in found)


def _words(node: ast.AST) -> Iterator[str]:
    """The words of the strings that stand directly in a literal, or in a text that is split at spaces."""
    match node:
        case ast.Dict(keys=parts) | ast.Set(elts=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        case ast.Call(func=ast.Attribute(attr="split", value=ast.Constant(value=str(text)))):
            yield from text.split()


def _operator(word: str) -> bool:
    match = NAME.match(word)
    return match is not None and ("." in word or len(word) > 3) and match[1] in known()


@functools.cache
def known() -> frozenset[str]:
    """The names of all operators of ATen."""
    every = torch._C._dispatch_get_all_op_names()
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in every if name.startswith("aten::"))


def targets_found(checkout: Checkout) -> str:
    """Operators of ATen with a rule whose whole name a search finds, of all."""
    text = "\n".join(path.read_text() for path in (checkout.root / "autopar" / _folder(checkout)).rglob("*.py"))
    targets = [name for name in _of_rules(checkout, "*RULES").split() if name.startswith("aten.")]
    written = sum('"' + name + '"' in text for name in targets)
    return f"{written} of {len(targets)}" if targets else "-"


def rules_by_pattern(checkout: Checkout) -> str:
    """Rows whose rule is a text of dims, of all."""
    return _of_rules(checkout, "sum(r.shapes is None for r in RULES.values()), 'of', len(RULES)") or "-"


def _folder(checkout: Checkout) -> str:
    return next(name for name in OPERATORS if (checkout.root / "autopar" / name).is_dir())


def _of_rules(checkout: Checkout, what: str) -> str:
    """What a checkout's own package prints of its rules; empty where it does not run."""
    code = f"from autopar.{_folder(checkout)} import RULES; print({what})"
    return subprocess.run([sys.executable, "-c", code], cwd=checkout.root, capture_output=True, text=True).stdout.strip()


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


@dataclass(frozen=True)
class Question:
    """What a stranger wants to know, what it took at 29786cc (`before`), and the files that answer it now, each with a text
    that leads there.
    """

    wants: str
    before: str
    files: tuple[tuple[str, str], ...]

    @property
    def now(self) -> str:
        """The files; raises ValueError for one that does not have its text."""
        for file, text in self.files:
            if text not in (ROOT / file).read_text():
                raise ValueError(f"{file} has no {text!r}")
        return ", ".join(f"{file}: {text}" for file, text in self.files)


ARCHITECTURE, FAMILIES = "docs/architecture.md", "autopar/operators/families"
QUESTIONS = (
    Question("the rule of aten.softmax", "5 files, 10 minutes", ((f"{FAMILIES}/normalization.py", '"aten.softmax.int"'),)),
    Question(
        "the memory row of the integer program",
        "6 files, an hour",
        (("docs/integer-program.md", "| budget |"), ("autopar/formulation/memory_rows.py", "class MemoryRows")),
    ),
    Question("the price of an all-gather", "1 file", (("autopar/cost_models/collectives.py", "all_gather      ceil"),)),
    Question(
        "a new device",
        "1 row",
        ((ARCHITECTURE, "| a device |"), ("autopar/cost_models/catalog.py", "ENTRIES = {")),
    ),
    Question(
        "another cost model",
        "5 files, a day; no interface",
        ((ARCHITECTURE, "| a cost model |"), ("autopar/cost_models/cost_model.py", "class CostModel")),
    ),
    Question(
        "where communication overlaps with computing",
        "8 files, a week",
        (
            (ARCHITECTURE, "**`autopar/simulator`**"),
            ("autopar/formulation/overlap.py", "The law, for every region"),
            ("autopar/simulator/timeline.py", "max(C + beta M, M)"),
        ),
    ),
    Question(
        "where a pipeline is planned",
        "23 files, weeks",
        (
            (ARCHITECTURE, "**Pipelines**"),
            ("autopar/planning/pipeline_search.py", "def plan_pipeline"),
            ("autopar/pipeline/schedule.py", "class PipelineSchedule"),
        ),
    ),
)


FIGURES: tuple[Callable[[Checkout], object], ...] = (
    loose_modules,
    arrows,
    in_cycles,
    operator_tables,
    targets_found,
    rules_by_pattern,
    shared_names,
    leaning_docstrings,
    nested_conditionals,
    lines,
)


def figures(checkouts: list[Checkout]) -> Iterator[str]:
    """A line per figure, a column per checkout."""
    for figure in FIGURES:
        name = figure.__name__.replace("_", " ")
        yield " ".join((f"{name:<22}", *(f"{figure(checkout)!s:>14}" for checkout in checkouts)))


def questions() -> Iterator[str]:
    """A line per question, and one per file that answers it."""
    for question in QUESTIONS:
        yield f"{question.wants}: {question.before} before, {len(question.files)} now"
        yield f"    {question.now}"


def main() -> None:
    """Print the figures of the checkouts that the command line names."""
    save, names = "--save" in sys.argv, [name for name in sys.argv[1:] if name != "--save"]
    checkouts = [Checkout(Path(name)) for name in (names or [ROOT])] + [Checkout(ROOT)] * save
    lines = [*figures(checkouts), "", *questions()]
    if save:
        head = f"{datetime.date.today()}, benchmarks/structure.py: before the redesign (29786cc), and now"
        RESULTS.write_text("\n".join([head, "", *lines]) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""The architecture's own laws: imports point one way, and each outside library is known in few places."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autopar"

# A room, a folder or a loose module, may import from the rows above its own: never from below, and never from its own row.
ROWS = (
    ("errors", "files"),
    ("ir", "pipeline"),
    ("operators",),
    ("capture", "runtime", "solver"),
    ("analysis",),
    ("search_space",),
    ("passes", "cost_models"),
    ("plan",),
    ("memory",),
    ("formulation",),
    ("simulator",),
    ("planning",),
    ("codegen",),
    ("parallelize",),
    ("pipelining",),
    ("verify",),
    ("api",),
    ("integrations",),
    ("elastic",),
    ("explain",),
    ("allocate",),
    ("profile",),
    ("__init__",),
    ("__main__",),
)
ROW = {room: number for number, row in enumerate(ROWS) for room in row}
LOOSE = 6  # modules outside of folders, at most: beyond these the root is a list of things without a place

# A library, and the places (a start of the path inside autopar) that may know it.
KNOWN_IN = {
    "torch.fx": ("capture/", "codegen/", "api", "runtime/rematerialize/policy"),  # the api names a type, the policy marks nodes
    "torch.distributed": (
        "runtime/",
        "parallelize",
        "pipelining",
        "integrations/",
        "elastic/",
    ),  # a user's mesh is told by its type
    "safetensors": ("integrations/safetensors",),
    "transformers": ("integrations/transformers", "integrations/generation"),
    "lightning": ("integrations/lightning",),
    "accelerate": ("integrations/accelerate", "integrations/transformers"),
    "pulp": ("solver/",),
    "highspy": ("solver/",),
    "bokeh": ("explain/html/",),
    "jinja2": ("explain/html/",),
    "pytest": ("explain/plan_cost",),
    "time": ("runtime/", "planning/planner", "solver/deadline"),  # no clock decides a plan, but the user's own deadline
}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
DEPENDENT = (
    "The same ",
    "Those ",
    "That of ",
    "As ",
    "Like ",
    "Likewise",
    "Also ",
    "Neither ",
    "Nothing will",
)  # of another one


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """What the laws ask of a file: its dotted imports and names (torch.fx.Node), its docstrings, its public types."""

    place: str
    room: str
    names: frozenset[str]
    imports: frozenset[str]
    documented: bool
    types: tuple[str, ...]  # public classes and type aliases
    docstrings: tuple[str, ...]
    nested: tuple[int, ...]  # lines of conditional expressions within a branch of another

    def knows(self, library: str) -> bool:
        """Whether it imports a library or names something of it."""
        return any(within(name, library) for name in self.names)


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every file of the package, parsed once."""
    return tuple(map(parsed, sorted(PACKAGE.rglob("*.py"))))


def parsed(path: Path) -> Module:
    tree, place = ast.parse(path.read_text()), path.relative_to(PACKAGE)
    nodes = list(ast.walk(tree))
    imports = frozenset(name for node in nodes for name in imported(node))
    return Module(
        place=place.as_posix(),
        room=place.parts[0].removesuffix(".py"),
        names=imports | {dotted(node) for node in nodes if isinstance(node, ast.Attribute)},
        imports=imports,
        documented=not tree.body or ast.get_docstring(tree) is not None,
        types=tuple(name for node in tree.body for name in public_type(node)),
        docstrings=tuple(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)))),
        nested=tuple(node.lineno for node in nodes if isinstance(node, ast.IfExp) and branches(node)),
    )


def public_type(node: ast.stmt) -> Iterator[str]:
    """The name of a public class, or of a type alias: an assignment to a name in CamelCase."""
    match node:
        case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]) if name[0].isupper():
            if isinstance(node, ast.ClassDef) or not name.isupper():
                yield name


def branches(node: ast.IfExp) -> bool:
    """Whether a branch of a conditional expression is another."""
    return isinstance(node.body, ast.IfExp) or isinstance(node.orelse, ast.IfExp)


def imported(node: ast.AST) -> Iterator[str]:
    """The dotted names that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """The text of a chain of attributes; what it starts from is left out if that is not a name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def within(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def rooms(module: Module) -> set[str]:
    """The other rooms that a module imports; the package itself is the room __init__."""
    found = set()
    for name in module.imports:
        if within(name, "autopar"):
            room = name.split(".")[1] if "." in name else "__init__"
            found.add(room if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file() else "__init__")
    return found - {module.room}


def test_every_room_has_a_row_and_every_row_a_room() -> None:
    assert {module.room for module in modules()} == set(ROW)


def test_imports_are_absolute() -> None:
    assert [module.place for module in modules() if any(name.startswith(".") for name in module.imports)] == []


def test_a_room_imports_from_the_rows_above_its_own_only() -> None:
    """So that no two rooms import each other, not even through others."""
    wrong = [(m.place, room) for m in modules() for room in sorted(rooms(m)) if ROW[room] >= ROW[m.room]]
    assert wrong == []


def test_few_modules_stand_outside_of_folders() -> None:
    loose = [module.place for module in modules() if "/" not in module.place and not module.place.startswith("__")]
    assert len(loose) <= LOOSE, loose


@pytest.mark.parametrize("library", KNOWN_IN)
def test_a_library_is_known_in_few_places_only(library: str) -> None:
    assert [m.place for m in modules() if m.knows(library) and not m.place.startswith(KNOWN_IN[library])] == []


def test_the_solver_knows_arrays_only() -> None:
    """Neither tensors nor the IR: of the package it knows the errors."""
    solver = [module for module in modules() if module.room == "solver"]
    assert {room for module in solver for room in rooms(module)} <= {"errors"}
    assert [module.place for module in solver if module.knows("torch")] == []


def test_files_are_written_in_one_place() -> None:
    """So that each is written whole or not at all; the files of a pool of workers are theirs alone."""
    writing = [m.place for m in modules() if any(name.endswith((".write_text", ".write_bytes")) for name in m.names)]
    assert writing == ["files.py"]


def test_every_module_says_what_it_is() -> None:
    assert [module.place for module in modules() if not module.documented] == []


def test_a_docstring_stands_alone() -> None:
    """Without the one above it: not "The same of ..." or "Those that ..."."""
    found = [(m.place, text.splitlines()[0]) for m in modules() for text in m.docstrings if text.startswith(DEPENDENT)]
    assert found == []


def test_conditional_expressions_are_not_nested() -> None:
    assert [f"{module.place}:{line}" for module in modules() for line in module.nested] == []


def test_no_two_public_classes_or_type_aliases_share_a_name() -> None:
    places = defaultdict(list)
    for module in modules():
        for name in module.types:
            places[name].append(module.place)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_tests_of_every_room_are_in_one_part_of_make_test() -> None:
    names = "PROGRAMS|OPERATORS|PLANNING|USERS"
    parts = re.findall(rf"^(?:{names}) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(parts) == 4
    assert sorted(" ".join(parts).split()) == sorted({path.parent.name for path in Path(__file__).parent.glob("*/test_*.py")})


@pytest.mark.parametrize("name", ["passes", "cost_models", "solver"])
def test_the_root_shows_the_stages_as_links_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / name

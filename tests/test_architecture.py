"""The architecture's own laws: imports point one way, and each outside library is known in one place only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "autopar"
FILES = sorted(PACKAGE.rglob("*.py"))

# A module may import from its own row and from the rows above it.
# A room may import from the rows above its own, never from below; two rooms of one row know nothing of each other.
LAYERS = (
    ("errors",),
    ("ir",),
    ("operators",),
    ("capture", "runtime", "solver"),
    ("analysis",),
    ("search_space",),
    ("passes", "cost_models"),
    ("plan",),
    ("memory",),
    ("formulation",),
    ("planning",),
    ("codegen",),
    ("parallelize",),
    ("verify",),
    ("api",),
    ("explain",),
    ("profile",),
    ("__init__", "__main__"),
)

# An outside library, and the places (a start of the path inside autopar) that may know it.
KNOWN_IN = {
    "torch.fx": ("capture/", "codegen/", "api"),  # the api names the type that it returns
    "pulp": ("solver/integer_program",),
    "highspy": ("solver/integer_program", "solver/highs"),
    "torch.distributed": ("runtime/", "parallelize"),  # a mesh that the user made is told by its type
}


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part(path: Path) -> str:
    """The stage that a file belongs to: its folder or its own name."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    found = [row for row, names in enumerate(LAYERS) if name in names]
    assert found, f"autopar.{name} has no place in the layers; give it one in {Path(__file__).name}"
    return found[0]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, and every dotted name rooted in a module that it uses (torch.fx.Node)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path)}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def named(module: str, library: str) -> bool:
    return module == library or module.startswith(f"{library}.")


@pytest.mark.parametrize("path", FILES, ids=place)
def test_imports_point_one_way(path: Path) -> None:
    for module in imports(path):
        if named(module, "autopar") and module != "autopar":
            target = module.split(".")[1]
            if (PACKAGE / target).exists() or (PACKAGE / f"{target}.py").exists():
                assert layer(target) <= layer(part(path)), f"{place(path)} imports {module}, which stands above it"


@pytest.mark.parametrize("library", KNOWN_IN)
def test_a_library_is_known_in_one_place_only(library: str) -> None:
    users = {place(path) for path in FILES if any(named(module, library) for module in imports(path))}
    assert [user for user in sorted(users) if not user.startswith(KNOWN_IN[library])] == []


@pytest.mark.parametrize("name", ["passes", "cost_models", "solver"])
def test_the_root_shows_the_stages_as_links_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink()
    assert link.resolve() == PACKAGE / name


@pytest.mark.parametrize("path", FILES, ids=place)
def test_every_module_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{place(path)} has no docstring"

"""References in the documentation exist: pages, headings, files, modules, functions and fields."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links, spans

FOLDERS = {path.name for path in (ROOT / "autopar").iterdir() if path.is_dir() or path.suffix == ".py"}
FILE = re.compile(r"(?:autopar|tests|docs|benchmarks|examples|baselines)/[\w./*-]*|[A-Z]+\.md|Makefile|pyproject\.toml")
DOTTED = re.compile(r"(?P<path>[a-z_]\w*(?:\.\w+)+)(?:\(.*\))?")


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_to_a_heading_that_it_has(page: str) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(file.resolve().relative_to(ROOT).as_posix()), f"{page} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_every_file_and_name_in_code_font_exists(page: str) -> None:
    """`autopar/solver/solve.py` is a file; `solver.solve.solve` is a name in `autopar.solver.solve`."""
    missing = [span for span in spans(page) if not _exists(span)]
    assert missing == [], f"{page} names what does not exist: rename it there, too"


def _exists(span: str) -> bool:
    if FILE.fullmatch(span):
        return any(ROOT.glob(span.rstrip("/"))) if span else True
    dotted = DOTTED.fullmatch(span)
    if dotted is None:
        return True
    names = dotted["path"].split(".")
    if names[0] == "autopar":
        names = names[1:]
    elif names[0] not in FOLDERS - {"plan", "parallelize", "profile"} and f"{names[0]}.py" not in FOLDERS:
        return True  # a name of another library, or of the page's own example
    return _resolves(names)


def _resolves(names: list[str]) -> bool:
    """Whether a dotted path leads to a module, and from there through attributes, or fields of a dataclass, to its end."""
    found: object = importlib.import_module("autopar")
    for place, name in enumerate(names):
        fields = getattr(found, "__dataclass_fields__", {})
        if hasattr(found, name):
            found = getattr(found, name)
        elif name in fields:
            return place == len(names) - 1
        else:
            try:
                found = importlib.import_module(".".join(["autopar", *names[: place + 1]]))
            except ImportError:
                return False
    return True

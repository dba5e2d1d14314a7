"""How Sphinx builds the pages in this folder: `make docs`; warnings, a broken link among them, are errors.

The pages are written to be read in the repository too. So links may leave this folder: to a file of the root that a page here
includes, which is then what they lead to; to any other file, which is then a download; or to a folder, which is then mere text.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "autopar"
copyright = "the autopar authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "autopar"
exclude_patterns = ["_build"]

myst_heading_anchors = 3  # links to headings work as they do on GitHub
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_rtype = False

DOCS = Path(__file__).parent
INCLUDED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # files of the root that are pages here
LINK = re.compile(r"\[([^][]+)\]\(([^():\s#]+)(#[^()\s]*)?\)")


def relinked(text: str, folder: Path) -> str:
    """The text of a page in a folder with its links as they are to be from here."""

    def link(found: re.Match[str]) -> str:
        words, path, heading = found[1], (folder / found[2]).resolve(), found[3] or ""
        if path.is_dir():
            return words
        if path.is_relative_to(DOCS):
            return f"[{words}]({path.relative_to(DOCS)}{heading})"
        if path.parent == DOCS.parent and path.name in INCLUDED:
            return f"[{words}]({INCLUDED[path.name]}{heading})"
        return found[0]

    return LINK.sub(link, text)


def setup(app: Sphinx) -> None:
    """Read every page, and every file that a page includes, with its links made ready."""

    def read(app: Sphinx, page: str, source: list[str]) -> None:
        source[0] = relinked(source[0], DOCS)

    def include(app: Sphinx, path: Path, page: str, source: list[str]) -> None:
        source[0] = relinked(source[0], (app.srcdir / path).resolve().parent)

    app.connect("source-read", read)
    app.connect("include-read", include)

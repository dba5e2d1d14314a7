"""The pages of the documentation, taken apart: code blocks, links and headings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
GENERATED = ("docs/operators.md",)  # made and checked by tests/operators
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")))
    if path.relative_to(ROOT).as_posix() not in GENERATED
)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its language, its text, the line of its fence (from 1), and why it is not run, if it says so."""

    language: str
    text: str
    line: int
    not_run: str = ""

    @property
    def file(self) -> str:
        """The name of the file that the block is: "train.py" where its first line is `# train.py`; else empty."""
        found = re.match(r"# (\w+\.(?:py|toml))\n", self.text)
        return found[1] if found else ""


def tokens(page: str) -> list[Token]:
    """The page as markdown-it reads it, tables and the bodies of directives included."""
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found, reason = [], ""
    for token in tokens(page):
        if token.type == "html_block" and (match := NOT_RUN.match(token.content)):
            reason = match[1]
        elif token.type == "fence" and token.map:
            found.append(Block(language=token.info, text=token.content, line=token.map[0] + 1, not_run=reason))
            reason = ""
    return found


def links(page: str) -> Iterator[str]:
    """The targets of a page's links and images."""
    for token in tokens(page):
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield str(target)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    found = set()
    for opening, inline in itertools.pairwise(tokens(page)):
        if opening.type == "heading_open":
            words = "".join(child.content for child in inline.children or ())
            found.add(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    return found


def spans(page: str) -> Iterator[str]:
    """The inline code of a page."""
    for token in tokens(page):
        yield from (child.content for child in token.children or () if child.type == "code_inline")

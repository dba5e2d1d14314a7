"""The text of emitted code: short names with their imports, a comment above the lines of each module, lines that fit a screen.

from autopar.runtime.collectives import all_reduce__identity
import torch

def forward(self, x):
    # mlp.down
    ...

The printed text is the code that runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx
from torch.fx.graph import PythonCode

from autopar.errors import printable

OURS = "autopar.runtime."
STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""  # a literal of the source
MARK = re.compile(rf"{STRING}|[][(){{}},]")
WIDTH = 110  # of a line, where brackets allow to break it


class CodeGraph(fx.Graph):
    """A graph with readable code; `node.meta["section"]` is the comment above a node's line."""

    def __deepcopy__(self, memo: dict[int, object] | None = None) -> CodeGraph:
        copied = super().__deepcopy__(memo)
        copied.__class__ = CodeGraph  # fx returns a plain graph whatever the class of the copied one
        return copied  # type: ignore[return-value]

    def python_code(self, root_module: str, **options: Any) -> PythonCode:
        """fx's code with short names of our functions, imports, comments and wrapped lines."""
        code = super().python_code(root_module, **options)
        code.globals = {self._short(name, held): held for name, held in code.globals.items()}
        body = [*self._commented(self._renamed(code.src.strip("\n"), code.globals).split("\n"))]
        code.src = "\n".join([*_imports(code.globals, "\n".join(body)), "", "", *body]).rstrip() + "\n"
        return code

    def _short(self, name: str, held: object) -> str:
        """The short name of one of our functions, unless a node has it."""
        own = getattr(held, "__name__", name)
        return own if _ours(held) and all(node.name != own for node in self.nodes) else name

    def _renamed(self, source: str, known: Mapping[str, object]) -> str:
        """The source with fx's long names of our functions (module and name, joined by underscores) made short."""

        def short(match: re.Match[str]) -> str:
            return match[1] if match[1] in known else match[0]

        modules = "|".join(sorted({held.__module__.replace(".", "_") for held in known.values() if _ours(held)}))
        return re.sub(rf"{STRING}|\b(?:{modules})_(\w+)(?=\()", short, source) if modules else source

    def _commented(self, lines: list[str]) -> Iterator[str]:
        """The lines, wrapped, with each section's name before its first line."""
        sections = {node.name: node.meta.get("section") for node in self.nodes}
        current = None
        for line in lines:
            match = re.match(r"(\s+)(\w+)(?::[^=]*)? = ", line)
            section = sections.get(match[2]) if match else None
            if match and section and section != current:
                yield f"{match[1]}# {printable(section)}"
                current = section
            yield from (short for part in _split_deletion(line) for short in _wrapped(part))


def _ours(held: object) -> bool:
    return str(getattr(held, "__module__", "")).startswith(OURS)


def _split_deletion(line: str) -> list[str]:
    """Rewrite how fx frees values after their last use, `y = f(x);  x = None`, as `del x` on its own line."""
    match = re.fullmatch(r"(\s+)(.*);  ((?:\w+ = )+)None", line)
    if match is None:
        return [line]
    names = match[3].removesuffix(" = ").split(" = ")
    return [f"{match[1]}{match[2]}", f"{match[1]}del {', '.join(names)}"]


def _wrapped(line: str) -> Iterator[str]:
    """Wrap a long line between the items of its last bracket; several items may share a line."""
    indent = len(line) - len(line.lstrip())
    opened = _last_bracket(line) if len(line) > WIDTH else None
    if len(line) <= WIDTH or (opened is None and not line.lstrip().startswith("del ")):
        yield line
        return
    if opened is None:
        names = line.strip().removeprefix("del ")
        yield f"{' ' * indent}del ("
        yield from _filled(names, indent + 4)
        yield f"{' ' * indent})"
        return
    start, end = opened
    yield line[: start + 1]
    yield from _filled(line[start + 1 : end], indent + 4)
    yield f"{' ' * indent}{line[end:]}"


def _filled(text: str, indent: int) -> Iterator[str]:
    """Items separated by commas, as many on a line as fit; an item that does not fit alone is wrapped itself."""
    line = ""
    for item in _items(text):
        if line and indent + len(line) + len(item) + 2 > WIDTH:
            yield f"{' ' * indent}{line}"
            line = ""
        if indent + len(item) + 1 > WIDTH:
            if line:
                yield f"{' ' * indent}{line}"
                line = ""
            yield from _wrapped(f"{' ' * indent}{item},")
        else:
            line = f"{line} {item}," if line else f"{item},"
    if line:
        yield f"{' ' * indent}{line}"


def _marks(text: str) -> Iterator[tuple[int, str]]:
    """The brackets and commas of a piece of Python outside of string literals, with their positions."""
    return ((found.start(), found[0]) for found in MARK.finditer(text) if found[0][0] not in "'\"")


def _last_bracket(text: str) -> tuple[int, int] | None:
    """The start and end of the bracket that ends a line, ignoring a comma or colon behind it; None if there is none."""
    stack, last = [], None
    for place, character in _marks(text):
        if character in "([{":
            stack.append(place)
        elif character in ")]}":
            last = stack.pop(), place
    if last is None or text[last[1] + 1 :] not in ("", ",", ":"):
        return None
    subscript = text[last[0]] == "[" and re.search(r"[\w)\]]$", text[: last[0]])  # a comma would make a tuple of the index
    return None if subscript else last


def _items(text: str) -> list[str]:
    """The parts of a text between commas outside of brackets."""
    depth, cuts = 0, [-1]
    for place, character in _marks(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            cuts.append(place)
    parts = [text[a + 1 : b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [part for part in parts if part]


def _imports(known: Mapping[str, object], body: str) -> list[str]:
    """One import per module from which the body uses a name; fx itself provides more names than are used."""
    names: dict[str, list[str]] = defaultdict(list)
    used = set(re.findall(r"(?<![.\w])\w+", body))
    for name, held in known.items():
        if name in used and name != "torch":
            own = getattr(held, "__name__", name) if _ours(held) else name
            module = "math" if isinstance(held, float) else str(getattr(held, "__module__", ""))
            names[module].append(name if own == name else f"{own} as {name}")  # a node is called like the function
    lines = [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items()) if module]
    return [*(short for line in lines for short in _wrapped_import(line)), *(["import torch"] * ("torch" in used))]


def _wrapped_import(line: str) -> Iterator[str]:
    """An import in brackets if it is too long for a line."""
    head, _, names = line.partition(" import ")
    yield from [line] if len(line) <= WIDTH else _wrapped(f"{head} import ({names})")

"""The text of emitted code: short names with their imports, and a comment above the lines of each module of the original.

from autopar.runtime.collectives import all_reduce__identity
import torch

def forward(self, x):
    # mlp.down
    ...
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.graph import PythonCode

OURS = "autopar.runtime."


class CodeGraph(fx.Graph):
    """A graph whose code is written for people; `node.meta["section"]` is the comment above a node's line."""

    def __deepcopy__(self, memo: dict[int, object] | None = None) -> CodeGraph:
        copied = super().__deepcopy__(memo)
        copied.__class__ = CodeGraph  # fx makes a plain graph, whatever it copies
        return copied  # type: ignore[return-value]

    def python_code(self, root_module: str, **options: Any) -> PythonCode:
        """The code as fx writes it, with our functions under their own names, imports and comments."""
        code = super().python_code(root_module, **options)
        code.globals = {self._short(name, held): held for name, held in code.globals.items()}
        lines = [self._renamed(line, code.globals) for line in code.src.strip("\n").splitlines()]
        body = self._commented(lines)
        code.src = "\n".join([*_imports(code.globals, "\n".join(body)), "", "", *body]).rstrip() + "\n"
        return code

    def _short(self, name: str, held: object) -> str:
        """The own name of one of our functions, unless a node has it."""
        own = getattr(held, "__name__", name)
        return own if _ours(held) and all(node.name != own for node in self.nodes) else name

    def _renamed(self, line: str, known: Mapping[str, object]) -> str:
        """A line with the long names of our functions (module and name, joined by underscores) made short."""

        def short(match: re.Match[str]) -> str:
            return match[2] if match[2] in known else match[0]

        modules = "|".join(sorted({held.__module__.replace(".", "_") for held in known.values() if _ours(held)}))
        return re.sub(rf"\b({modules})_(\w+)(?=\()", short, line) if modules else line

    def _commented(self, lines: list[str]) -> list[str]:
        """The lines with each section's name before its first line."""
        sections = {node.name: node.meta.get("section") for node in self.nodes}
        result, current = [], None
        for line in lines:
            match = re.match(r"(\s+)(\w+)(?::[^=]*)? = ", line)
            section = sections.get(match[2]) if match else None
            if match and section and section != current:
                result.append(f"{match[1]}# {section}")
                current = section
            result.append(line)
        return result


def _ours(held: object) -> bool:
    return str(getattr(held, "__module__", "")).startswith(OURS)


def _imports(known: Mapping[str, object], body: str) -> list[str]:
    """One line per module from which the body uses a name; fx itself provides more names than are used."""
    names: dict[str, list[str]] = defaultdict(list)
    used = set(re.findall(r"(?<![.\w])\w+", body))
    for name, held in known.items():
        if name in used and name != "torch":
            own = getattr(held, "__name__", name) if _ours(held) else name
            module = "math" if isinstance(held, float) else str(getattr(held, "__module__", ""))
            names[module].append(name if own == name else f"{own} as {name}")  # a node is called like the function
    lines = [f"from {module} import {', '.join(sorted(found))}" for module, found in sorted(names.items()) if module]
    return lines + ["import torch"] * ("torch" in used)

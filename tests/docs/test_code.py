"""Code in the documentation runs, and prints what the page says it prints.

The Python blocks of a page run in order, in one namespace and an empty folder. A block that begins with `# name.py` is written
to that file instead, for the blocks and commands after it. Commands in `console` blocks run too. What an `output` block or the
lines after a command show is compared with what was printed; `...` stands for anything. Below `<!-- not run: why -->` a block
is only compiled. `pytest tests/docs --update-goldens` rewrites outputs, except those with `...`.
"""

from __future__ import annotations

import contextlib
import difflib
import doctest
import io
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autopar.allocate import main as allocate
from autopar.explain import main as explain
from tests.docs.pages import PAGES, ROOT, Block, blocks

COMMANDS = {"python -m autopar.explain ": explain, "python -m autopar.allocate ": allocate}
ANYTHING = "..."
WITH_CODE = [page for page in PAGES if any(block.language in ("python", "console") for block in blocks(page))]


@dataclass(slots=True)
class Page:
    """A page while it runs: its names, what was printed last, and the outputs that are to be written anew."""

    name: str
    names: dict[str, object] = field(default_factory=dict)
    printed: str = ""
    anew: list[tuple[str, str]] = field(default_factory=list)

    def run(self, block: Block) -> None:
        where = f"{self.name}:{block.line}"
        if block.language == "python":
            code = compile(block.text, where, "exec")
            if block.file:
                Path(block.file).write_text(block.text)
            elif not block.not_run:
                self.printed = printed(lambda: exec(code, self.names))
        elif block.language == "toml" and block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "console" and not block.not_run:
            self._commands(block, where)
        elif block.language == "output" and not block.not_run:
            self._compare(block.text, self.printed, where)

    def _commands(self, block: Block, where: str) -> None:
        for part in ("\n" + block.text).split("\n$ ")[1:]:
            command, _, expected = part.partition("\n")
            found = run(command.partition("  #")[0])
            if expected.strip():
                self._compare(expected, found, where)

    def _compare(self, expected: str, found: str, where: str) -> None:
        expected, found = (stripped(text) for text in (expected, found))
        if ANYTHING not in expected and expected != found:
            self.anew.append((expected, found))
        difference = "\n".join(difflib.unified_diff(expected.splitlines(), found.splitlines(), "page", "printed", lineterm=""))
        same = doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS)
        if not same and (expected, found) not in self.anew:
            raise AssertionError(f"{where} shows another output than is printed:\n{difference}")


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def printed(call: object) -> str:
    """What a call prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        call()  # type: ignore[operator]
    return out.getvalue()


def run(command: str) -> str:
    """What a command prints; those of autopar run in this process, which has imported torch already."""
    for start, main in COMMANDS.items():
        if command.startswith(start):
            return printed(lambda: main(shlex.split(command.removeprefix(start))))  # noqa: B023
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(shlex.split(command), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.usefixtures("registry")
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    page, before = Page(name), set(sys.modules)
    try:
        for block in blocks(name):
            page.run(block)
    finally:
        for module in set(sys.modules) - before:
            if (tmp_path / f"{module}.py").exists():
                del sys.modules[module]
    if page.anew and request.config.getoption("--update-goldens"):
        text = (ROOT / name).read_text()
        for expected, found in page.anew:
            assert text.count(expected) == 1, f"{name} does not show this once:\n{expected}"
            text = text.replace(expected, found)
        (ROOT / name).write_text(text)
        return
    shown = "\n".join(f"{expected}\nis now\n{found}" for expected, found in page.anew)
    assert not page.anew, f"{name} shows what is no longer printed; if it should: pytest --update-goldens\n{shown}"

"""Shell completion for bash, zsh and tcsh: a script that shtab generates from the commands' options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from autopar.explain.cli_arguments import UsageError

SHELLS = "bash", "zsh", "tcsh"
FILES = ".json", ".html", ".toml", "TARGET"  # what the name of an argument that is a file has


def script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The completion script of `autopar` for a shell; raises UsageError for an unsupported shell, or without shtab."""
    if shell not in SHELLS:
        raise UsageError(f"no completion for the shell {shell!r}", fix=f"autopar completion {' | '.join(SHELLS)}")
    try:
        import shtab
    except ImportError as error:
        raise UsageError("completion is written by shtab, which is not installed", fix='pip install "autopar[cli]"') from error
    root = argparse.ArgumentParser("autopar")
    known = root.add_subparsers()
    for name, parser in commands.items():
        for action in parser._actions:
            if any(mark in str(action.metavar) for mark in FILES):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        known.add_parser(name, parents=[parser], add_help=False, help=(parser.description or "").strip().partition("\n")[0])
    return str(shtab.complete(root, shell))


__all__ = ["SHELLS", "script"]

"""The exit code of a command, also on errors and if nobody reads its output."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import AutoparError
from autopar.explain.cli_arguments import UsageError

PACKAGE = Path(__file__).parents[1]


def exit_code(run: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error is printed and gives 2 if it is in the command line, else 1.

    The code is also 1 if standard output is full, or a closed pipe (`| head`), which is not reported. autopar's own warnings
    are printed without the line of its code.
    """
    try:
        with _warnings_of_users():
            code = run()
        if sys.stdout is not None:  # None where it was closed before
            sys.stdout.flush()
        return code
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes when it ends
        if error.errno == errno.ENOSPC:
            print(f"cannot write the output: {error.strerror}", file=sys.stderr)
        return 1


@contextmanager
def _warnings_of_users() -> Iterator[None]:
    """Inside, warnings from lines of autopar are shown as what they say: those lines are not the user's."""
    shown = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
        own = Path(filename).is_relative_to(PACKAGE)
        return f"warning: {message}\n" if own else shown(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = shown


__all__ = ["exit_code"]

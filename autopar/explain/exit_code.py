"""The exit code of a command, also on errors and if nobody reads its output."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from autopar.errors import AutoparError
from autopar.explain.cli_arguments import UsageError


def exit_code(run: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error is printed and gives 2 if it is in the command line, else 1.

    It is also 1 if standard output is full, or a closed pipe (`| head`), which is not reported.
    """
    try:
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


__all__ = ["exit_code"]

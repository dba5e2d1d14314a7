"""What is being done, on stderr while it is, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console


@contextmanager
def progress(first: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done; the function that is given changes it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(first) as status:
        yield status.update

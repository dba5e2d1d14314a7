"""Shows on stderr what is being done, if stderr is a terminal and the work takes longer than a second."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autopar.runtime.process_environment import ProcessEnvironment

LOG = logging.getLogger("autopar")
PATIENCE = 1.0  # seconds before anything is shown
NEXT = {  # planning phase -> what comes next
    "capture": "analysing the program",
    "analyse": "formulating the integer program",
    "formulate": "solving",
    "solve": "trying padding and micro-batches",
    "pad": "trying padding and micro-batches",
}


@contextmanager
def progress(first: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show a line that says what is being done and for how long; the yielded function changes it.

    Nothing is printed if stderr is not a terminal, on ranks other than 0, or within the first second.
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal or ProcessEnvironment.of(os.environ).rank:
        yield lambda text: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    line = Progress(*columns, console=console, transient=True)
    task = line.add_task(first, total=None)
    late = Timer(PATIENCE, line.start)
    late.daemon = True
    late.start()
    try:
        yield lambda text: line.update(task, description=text)
    finally:
        late.cancel()
        late.join()
        line.stop()


def phases(tell: Callable[[str], None]) -> Callable[[str], None]:
    """The callback for the end of a planning phase: it logs the phase, and the line shows the next one."""

    def ended(phase: str) -> None:
        LOG.info("planning: %s ended", phase)
        tell(NEXT.get(phase, phase))

    return ended


__all__ = ["phases", "progress"]

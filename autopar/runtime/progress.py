"""What is being done, on stderr while it is, if that is a terminal and it takes longer than a second."""

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
PATIENCE = 1.0  # seconds that may pass without a word
NEXT = {  # what follows a phase of planning
    "capture": "analysing the program",
    "analyse": "formulating the integer program",
    "formulate": "solving",
    "solve": "trying padding and micro-batches",
    "pad": "trying padding and micro-batches",
}


@contextmanager
def progress(first: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, and for how long; the function that is given changes it.

    Nothing is printed where stderr is not a terminal, by ranks other than 0, and within the first second.
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
    """What planning calls at the end of a phase: it is logged, and the line says what comes next."""

    def ended(phase: str) -> None:
        LOG.info("planning: %s ended", phase)
        tell(NEXT.get(phase, phase))

    return ended


__all__ = ["phases", "progress"]

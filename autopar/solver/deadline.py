"""When a search ends before its end: at a moment that the user sets, or at Ctrl-C. By default no clock decides a plan."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import AutoparError


@contextmanager
def interrupts(hear: Callable[[Callable[[], object]], object]) -> Iterator[Callable[[], object]]:
    """Make Ctrl-C call `hear` with its previous handler, which is also yielded.

    This works in the main thread only, and only if Python handles the signal.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signal.signal(signal.SIGINT, lambda number, frame: hear(partial(handler, number, frame)))
    try:
        yield partial(handler, signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, handler)


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was `pressed` while a search listened and a solution was `known`, with which the search then ends."""

    known: bool = False
    pressed: bool = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listen to Ctrl-C; it has its usual effect at once if no solution is known, or if it is pressed twice.

        It also has its usual effect if the known solution turns out not to be an answer, and the search ends in an error.
        """

        def note(usual: Callable[[], object]) -> None:
            if self.pressed or not self.known:
                usual()
            self.pressed = True

        with interrupts(note) as usual:
            try:
                yield
            except AutoparError:
                if self.pressed:
                    usual()
                raise


@dataclass(frozen=True, slots=True)
class Deadline:
    """A `moment` of a monotonic clock, `seconds` after it was set, or an interrupt; the default never comes.

    >>> NEVER.passed, Deadline.after(0).passed
    (False, True)
    """

    moment: float = math.inf
    seconds: float = math.inf
    interrupt: Interrupt | None = None

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def passed(self) -> bool:
        """Whether the moment has come, or Ctrl-C was pressed."""
        return self._pressed or (self.moment < math.inf and time.monotonic() >= self.moment)

    @property
    def text(self) -> str:
        """What ended the search, in words."""
        return "Ctrl-C" if self._pressed else f"the time_limit of {self.seconds:g} s"

    @property
    def _pressed(self) -> bool:
        return self.interrupt is not None and self.interrupt.pressed

    def only_interrupt(self) -> Deadline:
        """A deadline without a moment: only Ctrl-C ends the search."""
        return Deadline(interrupt=self.interrupt)

    def note_solution(self) -> None:
        """Record that a solution is known, with which Ctrl-C may end the search."""
        if self.interrupt is not None:
            self.interrupt.known = True

    def heard(self) -> AbstractContextManager[None]:
        """Listen to Ctrl-C: see `Interrupt.heard`."""
        return nullcontext() if self.interrupt is None else self.interrupt.heard()

    def earlier(self, share: float) -> Deadline:
        """An earlier deadline, when this share of the seconds is left."""
        return self if self.moment == math.inf else replace(self, moment=self.moment - share * self.seconds)


NEVER = Deadline()

"""When a search ends that the user limits in seconds: by default never, so that no clock decides which plan is chosen."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """A `moment` of a clock that only goes forward, `seconds` after it was set; the default never comes.

    >>> NEVER.passed, Deadline.after(0).passed
    (False, True)
    """

    moment: float = math.inf
    seconds: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def passed(self) -> bool:
        """Whether the moment has come."""
        return self.moment < math.inf and time.monotonic() >= self.moment

    def earlier(self, share: float) -> Deadline:
        """The moment at which only this share of the seconds is left."""
        return self if self.moment == math.inf else Deadline(self.moment - share * self.seconds, self.seconds)


NEVER = Deadline()

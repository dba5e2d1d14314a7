"""What the user says of values that a graph cannot know: which inputs are sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """`static` are the names of integer inputs that have the sample's values in every call."""

    static: Sequence[str] = ()


NOTHING = Assumptions()

__all__ = ["NOTHING", "Assumptions"]

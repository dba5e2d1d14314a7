"""Golden texts: printed or emitted text, kept in tests/goldens and compared letter by letter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GOLDENS = Path(__file__).parents[1] / "goldens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Compares texts with the kept ones; with `update` (pytest --update-goldens) the kept ones are written anew."""

    update: bool

    def check(self, name: str, text: str) -> None:
        path = GOLDENS / name
        if self.update:
            path.write_text(text)
        assert text == path.read_text(), f"{path.name} differs; if it should: pytest --update-goldens, and read the difference"

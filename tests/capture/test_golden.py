"""The text of a captured model, in normal form."""

from __future__ import annotations

from pathlib import Path

from autopar.capture import capture
from autopar.passes import normalise
from tests.capture.models import gpt2

GOLDEN = Path(__file__).parent.parent / "goldens" / "ir_gpt2.txt"


def test_the_program_of_gpt2_is_the_golden_one() -> None:
    model, sample = gpt2(layers=1)
    assert f"{normalise(capture(model, sample).program)}\n" == GOLDEN.read_text()

"""The text of a captured model, in normal form."""

from __future__ import annotations

from autopar.capture import capture
from autopar.passes import normalise
from tests.capture.models import gpt2
from tests.support.golden import Golden


def test_the_program_of_gpt2_is_the_golden_one(golden: Golden) -> None:
    model, sample = gpt2(layers=1)
    golden.check("ir_gpt2.txt", f"{normalise(capture(model, sample).program)}\n")

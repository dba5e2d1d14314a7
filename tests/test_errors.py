"""Errors go from rank to rank, by pickle, and say there what they say here."""

from __future__ import annotations

import pickle

import pytest

from autopar.errors import AutoparError, BudgetError, ConstraintError
from autopar.planning.pipeline_plan import SlowerStagesError
from autopar.runtime.workers import WorkerError
from autopar.solver.deadline import Deadline
from autopar.solver.highs import TimeLimitError


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("no plan fits", smallest="budget=12", filled="a\nb", fix="a larger budget"),
        ConstraintError("of a name with a line break\nin it"),
        TimeLimitError(Deadline.after(1.0), 2.0),
        SlowerStagesError(3.0),
        WorkerError("it failed", rank=2, at="there"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_was_sent_says_what_it_said(error: AutoparError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.what, found.details) == (type(error), str(error), error.what, error.details)
    assert found.__dict__.keys() == error.__dict__.keys()

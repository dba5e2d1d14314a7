"""Ops of one signature have one sharding: numbers that a signature leaves out affect nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.analysis.signatures import signature
from autopar.errors import RuleError
from autopar.ir.program import Op
from autopar.operators import RULES, fit
from autopar.operators.call import Call
from autopar.plan.options import Options
from autopar.verify.testing import random_plan
from autopar.verify.verification import verify
from tests.operators.examples import EXAMPLES, ex, t
from tests.support import table
from tests.support.threads import Threads

X = torch.linspace(-1.0, 1.0, 32).view(4, 8)
NUMBERS = (0, 0.0, 1, 2, -1, 0.5, 1e300, float("inf"), float("nan"))
SCALED = {
    target: [ex(t(4, 6), 2.0 if target.endswith("Scalar") else t(6))]
    for target in RULES
    if "other" in RULES[target].indifferent
}


def numbered(op: Op) -> Iterator[Op]:
    """The op with other numbers for what its row is indifferent to, or drops by."""
    row, call = RULES[op.target], Call.of(op)
    for name in (*row.indifferent, *filter(None, [row.rate])):
        if isinstance(call.arguments.get(name), int | float) or name == "other":
            for number in NUMBERS:
                args, kwargs = call.change({name: number})
                yield replace(op, args=args, kwargs=kwargs)


@pytest.mark.parametrize("target", sorted(target for target, row in RULES.items() if row.indifferent or row.rate))
def test_numbers_that_a_signature_leaves_out_decide_no_layout(target: str) -> None:
    for example in (*EXAMPLES.get(target, ()), *SCALED.get(target, ())):
        op, values, _ = example.build(target)
        known = dict[str, object]()
        for other in numbered(op):
            try:
                found = fit(other, values)
            except RuleError:  # as where a slice ends before it begins
                continue
            assert known.setdefault(signature(other, values), found) == found


class Offsets(nn.Module):
    """Adds 0 to what one layer returns, and 1 to what another does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second((self.first(x) + 0.0).relu()) + 1.0


def test_only_what_adds_0_computes_with_partial_values(threads: Threads) -> None:
    model, on = Offsets(), table.mesh((2,))
    for seed in range(12):
        report = verify(model, X, on, random_plan(model, X, on, seed), Options(), threads)
        assert report.ok, str(report)

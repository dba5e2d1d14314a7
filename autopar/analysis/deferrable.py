"""Products of activations with weights, whose gradients of weights a pipeline schedule may defer.

The half I of a backward B makes the gradient of the stage's received values; the half W later makes gradients that nothing
waits for:

    y = linear(x, w)       I: dx = dy w         W: dw = dy^T x, for which x and dy are kept from I to W

Gradients of weights in other operators (norms, embeddings, biases, convolutions) are made by I.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.analysis.weights import weights
from autopar.ir.program import Op, Program, Value, remembered
from autopar.operators import row_of
from autopar.operators.call import Call


@remembered
def deferrable(program: Program) -> Mapping[str, tuple[str, str]]:
    """The activation and the weight of each product of the two, by the name of the op, where both need a gradient."""
    known = weights(program)
    pairs = ((op.name, _factors(op, program.values)) for op in program.ops)
    return {
        name: (x, w)
        for name, (x, w) in ((name, pair) for name, pair in pairs if pair)
        if w in known and x not in known and program.values[x].requires_grad and program.values[w].requires_grad
    }


def _factors(op: Op, values: Mapping[str, Value]) -> tuple[str, str] | None:
    """The activation and the weight that the row names; `runtime.deferred_products` takes no other arguments."""
    row = row_of(op)
    if not row.defers or op.kwargs or not op.requires_grad:
        return None
    call = Call.of(op, values)
    x, w = (op.operands[position] for name in row.defers for position in call.positions(name))
    return x, w


__all__ = ["deferrable"]

"""An integer program in PuLP: for other solvers, for `.lp` files that a person can read, and for tests."""

from __future__ import annotations

import numpy as np
import pulp

from autopar.solver.integer_program import IntegerProgram


def to_pulp(program: IntegerProgram) -> pulp.LpProblem:
    """The integer program as PuLP's objects; variable `x3` is column 3."""
    found, block = pulp.LpProblem("autopar", pulp.LpMinimize), program.block()
    kinds = [pulp.LpInteger if integer else pulp.LpContinuous for integer in program.integers()]
    variables = [found.add_variable(f"x{i}", 0, None, kind) for i, kind in enumerate(kinds)]
    found += pulp.LpAffineExpression(zip(variables, block.cost.tolist(), strict=True))
    for row, (low, high) in enumerate(zip(block.lower, block.upper, strict=True)):
        here = slice(block.start[row], block.start[row + 1])
        pairs = zip(block.column[here].tolist(), block.value[here].tolist(), strict=True)
        total = pulp.LpAffineExpression([(variables[column], value) for column, value in pairs])
        if low == high:
            found += total == low
        else:
            found += (total >= low) if np.isfinite(low) else (total <= high)
    return found

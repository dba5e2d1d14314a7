"""The multiple-choice knapsack: one of several sizes for each taker, all of them together within a capacity.

    minimise    cost 1, among those cost 2, ...               cost k = sum_j,n costs[k][j][n] pick[j,n]
    (one)       sum_n pick[j,n] = 1                           every taker j
    (capacity)  sum_j,n sizes[j][n] pick[j,n] <= capacity
    (kept)      cost i <= its least                           every cost i before k

H. Kellerer, U. Pferschy, D. Pisinger, "Knapsack Problems", chapter 11, 2004. Costs are counted from each taker's least one and
in units of the largest of these differences, so that one tolerance serves all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver import highs
from autopar.solver.highs import Meaning, SolverError
from autopar.solver.matrix import Matrix
from autopar.solver.problem import Floats, Ints

UNIT = 1e3  # of the largest difference, where HiGHS's tolerances are absolute
TOLERANCE = 1e-9  # of rows and integers: HiGHS's own 1e-6 times a large difference would be more than small ones
EQUAL = 1e-9  # of the largest difference, by which costs may differ that count as equal: rounding of sums


def choose(sizes: Sequence[Ints], capacity: int, costs: Sequence[Sequence[Floats]]) -> tuple[int, ...] | None:
    """The index of each taker's size in the proven best choice; None if they do not fit into the capacity.

    Args:
        sizes: of each taker, in the unit of the capacity.
        capacity: of all together.
        costs: by importance; each has a number for every size of every taker.

    Raises SolverError if HiGHS fails.
    """
    matrix, columns = _program(sizes, capacity)
    if not sizes:
        return ()
    found: list[int] | None = None
    for cost in costs:
        regret = _scaled(cost)
        found = _solved(matrix, regret, columns)
        if found is None:
            return None
        best = float(sum(regret[own][place] for own, place in zip(columns, found, strict=True)))
        matrix.add_row(np.arange(matrix.columns), regret, -np.inf, best + EQUAL * UNIT)  # (kept)
    return None if found is None else tuple(found)


def _program(sizes: Sequence[Ints], capacity: int) -> tuple[Matrix, list[Ints]]:
    """(one) and (capacity), and the columns of each taker."""
    matrix = Matrix()
    columns = []
    for own in sizes:
        places = matrix.add_columns(np.zeros(len(own)), integer=True) + np.arange(len(own))
        matrix.add_row(places, np.ones(len(own)), 1.0, 1.0)
        columns.append(places)
    if columns:
        matrix.add_row(np.concatenate(columns), np.concatenate(sizes).astype(float), -np.inf, float(capacity))
    return matrix, columns


def _scaled(cost: Sequence[Floats]) -> Floats:
    """The cost of each size beyond its taker's cheapest one, scaled so that the largest is `UNIT`."""
    found = np.concatenate([own - own.min() for own in cost])
    return found * (UNIT / found.max()) if found.max() > 0 else found


def _solved(matrix: Matrix, cost: Floats, columns: Sequence[Ints]) -> list[int] | None:
    """The index of each taker's size; None if there is no solution."""
    solver = highs.load(matrix.block(cost))
    highs.require_integers(solver, np.arange(matrix.columns), 1.0)
    for gap in ("mip_rel_gap", "mip_abs_gap"):
        solver.setOptionValue(gap, 0.0)
    for kind in ("mip", "primal", "dual"):
        solver.setOptionValue(f"{kind}_feasibility_tolerance", TOLERANCE)
    meaning = highs.run(solver)
    if meaning is Meaning.INFEASIBLE:
        return None
    if meaning is not Meaning.SOLVED:
        raise SolverError(f"the knapsack was not solved: {meaning}")
    values = highs.values(solver)
    return [int(values[own].argmax()) for own in columns]


__all__ = ["choose"]

"""A dive abandons an infeasible step as soon as presolve detects it, and continues from its last basis."""

from __future__ import annotations

import highspy
import numpy as np
import pytest

from autopar.solver import highs
from autopar.solver.highs import Meaning
from autopar.solver.matrix import Matrix


def assignment(size: int) -> highspy.Highs:
    """Tasks assigned to as many machines, task i for |i - j| on machine j: solved, so that the program has a basis."""
    task, machine = np.divmod(np.arange(size * size), size)
    matrix = Matrix()
    matrix.add_columns(np.abs(task - machine).astype(float))
    for of in (task, machine):
        matrix.add_rows(of, np.arange(size * size), np.ones(size * size), size, 1.0, 1.0)
    solver = highs.load(matrix.block(np.concatenate(matrix.costs)))
    assert highs.run(solver) is Meaning.SOLVED
    return solver


@pytest.mark.parametrize("size", [3, 7])
def test_presolving_tells_a_step_without_a_solution_and_leaves_the_basis_of_the_last_one(size: int) -> None:
    solver = assignment(size)
    basis, best = solver.getBasis(), solver.getInfo().objective_function_value
    first = np.arange(size, dtype=np.int32)  # of the first task: on no machine at all
    solver.changeColsBounds(size, first, np.zeros(size), np.zeros(size))
    assert highs.plainly_infeasible(solver)
    solver.changeColsBounds(size, first, np.zeros(size), np.ones(size))
    assert not highs.plainly_infeasible(solver)
    assert solver.getBasis().col_status == basis.col_status
    assert highs.run(solver) is Meaning.SOLVED
    assert solver.getInfo().objective_function_value == best

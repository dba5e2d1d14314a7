"""Solutions by the narrower recompute policies, where the search over all that can be recomputed finds none that fits.

That search stays near a relaxation, in which parts of blocks are recomputed; within a budget that only whole blocks, or what is
cheap to recompute, fit into, it may find nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from autopar.analysis.recompute_policy import BLOCKS, SELECTIVE
from autopar.errors import ConstraintError
from autopar.formulation.budget_loop import BudgetLoop, smallest
from autopar.formulation.memory_model import MemoryModel
from autopar.ir.device import Bytes
from autopar.solver.problem import Solution
from autopar.solver.settings import SearchSettings

Pose = Callable[[str], MemoryModel]  # the problem of a policy; raises ConstraintError where it has no use
NARROWER = SELECTIVE, BLOCKS


def within_policies(limit: Bytes, pose: Pose, settings: SearchSettings) -> tuple[MemoryModel, Solution] | None:
    """The cheaper solution within a limit by a narrower policy, with its problem."""
    found = [(one, one_loop.within(limit)) for one in _posed(pose) for one_loop in [BudgetLoop(one.formulated, one, settings)]]
    fits = [(model, solution) for model, solution in found if solution is not None]
    return min(fits, key=lambda one: one[1].seconds, default=None)


def smallest_of_policies(
    memory_model: MemoryModel, pose: Pose, settings: SearchSettings
) -> tuple[MemoryModel, Solution] | None:
    """A solution of little memory, with its problem: the least of what is found by all policies and by each narrower one."""
    found = [
        (model, solution)
        for model in (memory_model, *_posed(pose))
        for solution in [smallest(model.formulated, model, settings=settings)]
        if solution is not None
    ]
    return min(found, key=lambda one: one[0].walk(one[1]).max(), default=None)


def _posed(pose: Pose) -> Iterator[MemoryModel]:
    for policy in NARROWER:
        with suppress(ConstraintError):
            yield pose(policy)


__all__ = ["NARROWER", "smallest_of_policies", "within_policies"]

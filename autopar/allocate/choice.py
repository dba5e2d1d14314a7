"""Chooses the number of devices of each job by the integer program of a goal, and explains why a job gets no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.allocate.goals import Goal, Prospect
from autopar.allocate.jobs import TrainingJob
from autopar.solver.knapsack import choose


class DeviceChoice:
    """The possible numbers of devices of each job, with their costs under a goal."""

    def __init__(self, jobs: Sequence[TrainingJob], expected: Sequence[Sequence[Prospect]], goal: Goal, capacity: int) -> None:
        self.jobs, self.expected, self.goal, self.capacity = jobs, expected, goal, capacity
        self.sizes = [np.array([one.devices for one in every]) for every in expected]
        table = [np.array([goal.costs(job, one) for one in every]).T for job, every in zip(jobs, expected, strict=True)]
        self.costs = [[own[kind] for own in table] for kind in range(len(table[0]) if table else 0)]

    def best(self) -> tuple[int, ...]:
        """The index of each job's number. Ties: fewest waiting, then fewest devices, then more for the first by name."""
        waiting, devices = [(own == 0) * 1.0 for own in self.sizes], [own * 1.0 for own in self.sizes]
        names = [(place + 1.0) * own for place, own in enumerate(self.sizes)]
        found = choose(self.sizes, self.capacity, [*self.costs, waiting, devices, names])
        assert found is not None, "all may wait"
        return found

    def value(self, picks: Sequence[int]) -> float:
        """The value of the goal for a choice."""
        return self.goal.value(self._total(picks, 0)) if self.jobs else 0.0

    def _total(self, picks: Sequence[int], kind: int) -> float:
        return float(sum(own[pick] for own, pick in zip(self.costs[kind], picks, strict=True)))

    def why(self, picks: Sequence[int], place: int) -> str:
        """Why a job gets no more devices: the best value of the goal if it had the next larger number."""
        job, every, pick = self.jobs[place], self.expected[place], picks[place]
        return f"{_move(job, every[pick])}; {self._more(picks, place)}"

    def _more(self, picks: Sequence[int], place: int) -> str:
        every, pick = self.expected[place], picks[place]
        if pick + 1 == len(every):
            return "it has no plan on more" if every[pick].devices < self.capacity else "it has them all"
        own = slice(pick + 1, pick + 2)
        sizes = [*self.sizes[:place], self.sizes[place][own], *self.sizes[place + 1 :]]
        costs = [[*kind[:place], kind[place][own], *kind[place + 1 :]] for kind in self.costs]
        found = choose(sizes, self.capacity, costs)
        assert found is not None, "the others may wait"
        other = (*found[:place], pick + 1, *found[place + 1 :])
        return f"on {every[pick + 1].devices} the goal is {self._compared(picks, other)}"

    def _compared(self, picks: Sequence[int], other: Sequence[int]) -> str:
        """The effect of another choice on the goal, by the first cost that differs."""
        for kind in range(len(self.costs)):
            here, there = self._total(picks, kind), self._total(other, kind)
            if abs(here - there) > 1e-6 * max(abs(here), abs(there)):
                said = "" if kind == 0 else " seconds of weighted completion"
                return f"{self.goal.value(there):.4g}, not {self.goal.value(here):.4g}{said}"
        return "the same"


def _move(job: TrainingJob, chosen: Prospect) -> str:
    """How a job's present devices change."""
    if not chosen.devices:
        return f"gives up {job.present}" if job.present else "waits"
    if job.present == chosen.devices:
        return "stays"
    loss = f", {job.migration:g} s of migration" if job.migration else ""
    return f"moves from {job.present}{loss}" if job.present else f"starts{loss}"


__all__ = ["DeviceChoice"]

"""The memory model: simulates a solution's memory, and makes the integer program's row for any moment of the step.

The integer program starts without memory rows. Each solution is simulated, and moments that exceed the budget become rows. The
right-hand side of a row is tightened by the excess that the simulation finds (`budget_loop.within`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from autopar.cost_models.optimizers import Optimizer
from autopar.formulation.formulate import PlanningProblem
from autopar.formulation.memory_rows import MemoryRows
from autopar.formulation.read_solution import assignment
from autopar.ir.device import Bytes
from autopar.ir.layout import D, H, State
from autopar.memory.liveness import Liveness
from autopar.memory.places import bytes_away
from autopar.plan.breakdown import Allocation
from autopar.search_space.assignment import Assignment
from autopar.solver.problem import Floats, Row, Solution

OF_CLASSES = ("stored", "gradient", "internal")  # kinds whose name is that of a class of ops or given tensors


class MemoryModel:
    """Liveness analysis and memory rows of one planning problem, each computed on demand."""

    def __init__(self, formulated: PlanningProblem, optimizer: Optimizer) -> None:
        self.formulated, self.optimizer = formulated, optimizer

    @functools.cached_property
    def liveness(self) -> Liveness:
        """The liveness analysis."""
        return Liveness(self.formulated.analysis, self.optimizer)

    @functools.cached_property
    def _rows(self) -> MemoryRows:
        return MemoryRows(self.formulated, self.liveness, self.optimizer)

    def walk(self, solution: Solution) -> Floats:
        """Bytes alive at every moment of the step."""
        return self.liveness.walk(assignment(self.formulated, solution))

    def held(self, chosen: Assignment, moment: int) -> list[Allocation]:
        """Allocations at a moment by kind and by value or op, largest first; their total is the walk's value there."""
        analysis = self.formulated.analysis
        of, found = analysis.classes.of, dict[tuple[str, str], list[int]]()
        edges = {member: values.example for values in self.formulated.edges for member in values.members}
        for life in self.liveness.alive(chosen, moment):
            if life.bytes:
                given = life.kind in OF_CLASSES or life.name in analysis.program.op
                name = of[life.name] if given else edges.get(life.name, life.name)
                found.setdefault((life.kind, name), []).append(life.bytes)
        named = [Allocation(kind=kind, name=name, count=len(sizes), bytes=sum(sizes)) for (kind, name), sizes in found.items()]
        return sorted(named, key=lambda held: -held.bytes)

    @property
    def limits(self) -> Mapping[State, Bytes]:
        """Bytes that the host (H) and the disk (D) may store for one device; empty if they store no weights."""
        analysis, device = self.formulated.analysis, self.formulated.prices.device
        capacity = {H: device.host_memory, D: device.disk.memory if device.disk else 0}
        return {there: capacity[there] for there in analysis.places}

    def away(self, chosen: Assignment) -> Mapping[State, Mapping[str, Bytes]]:
        """Bytes on the host and the disk by purpose."""
        return bytes_away(self.formulated.analysis, self.optimizer, chosen)

    def excess(self, solution: Solution) -> Mapping[State, Bytes]:
        """How much a solution exceeds the limits of the host and the disk, if it does."""
        if not self.limits:
            return {}
        found = self.away(assignment(self.formulated, solution))
        more = {there: sum(found[there].values()) - limit for there, limit in self.limits.items()}
        return {there: size for there, size in more.items() if size > 0}

    def away_row(self, there: State) -> Row:
        """The row `bytes on the host, or disk <= its memory` of the integer program; offloaded activations are in no row."""
        return self._rows.away_row(there, self.limits[there])

    def row(self, moment: int, limit: float, constant: float = 0.0) -> Row:
        """The row `bytes alive at the moment + constant <= limit` of the integer program."""
        return self._rows.row(moment, limit, constant)

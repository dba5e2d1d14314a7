"""Memory of a solution: the timeline as the judge, and the rows that bound the integer program at single moments.

The program starts without rows; each finished solution is walked, and the moment of its peak becomes a row if it exceeds the
budget. What the walk finds there beyond the row is asked for when the row is made again (`within`).
"""

from __future__ import annotations

from autopar.cost_models.optimizers import Optimizer
from autopar.formulation.formulate import PlanningProblem, assignment
from autopar.formulation.memory_rows import MemoryRows
from autopar.memory.liveness import Liveness
from autopar.plan.breakdown import Allocation
from autopar.search_space.assignment import Assignment
from autopar.solver.problem import Floats, Row, Solution

OF_CLASSES = ("stored", "gradient", "internal")  # kinds that are named by class of ops or given tensors


class MemoryModel:
    """The timeline of a formulated program, and its rows."""

    def __init__(self, formulated: PlanningProblem, optimizer: Optimizer) -> None:
        self.formulated = formulated
        self.liveness = Liveness(formulated.analysis, optimizer)
        self._rows = MemoryRows(formulated, self.liveness, optimizer)

    def walk(self, solution: Solution) -> Floats:
        """Bytes alive at every moment of the step."""
        return self.liveness.walk(assignment(self.formulated, solution))

    def held(self, chosen: Assignment, moment: int) -> list[Allocation]:
        """What takes memory at a moment, by kind and by value or op, the most first; together it is what the walk finds."""
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

    def row(self, moment: int, limit: float, constant: float = 0.0) -> Row:
        """The bytes alive at a moment, and `constant` more, as a row of the integer program."""
        return self._rows.row(moment, limit, constant)

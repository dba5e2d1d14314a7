"""Regions as prices: rows (excess) of the integer program, relaxed by Lagrange multipliers.

The excess of a region is at least weight * (link - busy) for every weight from 0 to 1, divided among its links. With fixed
weights that is a sum of prices again, so that the program has no long rows; its optimum is a bound for every weight, and with
the duals of the rows the same as with them. Weights are found by column generation (Dantzig and Wolfe, "Decomposition principle
for linear programs", Operations Research 8, 1960): the rows are kept in a small program of the candidates and arcs that earlier
weights used, whose duals are the next weights, until its price and the bound agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.core import Core, core
from autopar.solver.integer_program import IntegerProgram
from autopar.solver.overlap import Load
from autopar.solver.problem import Bools, Floats, Problem, Solution
from autopar.solver.reduced_cost_fixing import Window, selected
from autopar.solver.relaxation import Relaxation, picks_of
from autopar.solver.settings import SearchSettings

Weights = Sequence[Floats]  # by region, per link


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Weighed:
    """A problem at the prices of the best weights, whose solutions cost at least `bound` seconds, and what the relaxations
    used on the way to them."""

    problem: Problem
    weights: Weights
    bound: float
    picks: list[Bools]
    arcs: list[Bools]

    def around(self, problem: Problem, solution: Solution) -> Window:
        """The part of a problem that relaxations used, or a solution of it uses."""
        picks, arcs = [one.copy() for one in self.picks], [one.copy() for one in self.arcs]
        for o, pick in enumerate(solution.picks):
            picks[o][pick] = True
        for w, used in enumerate(solution.arcs):
            arcs[w][list(used)] = True
        return selected(problem, [np.flatnonzero(one) for one in picks], arcs)


def best_weights(problem: Problem, settings: SearchSettings, first: Core | None = None) -> Weighed:
    """Weights whose bound is within `weights_gap` of the best; after `weights_rounds` rounds the best found.

    Args:
        problem: with regions.
        settings: see `SearchSettings`.
        first: a core of the problem, relaxed without its regions, if there is one: what the first weights, of zero, lead to.
    """
    weights: Weights = [np.zeros(len(region.links)) for region in problem.regions]
    best, bound = weights, -np.inf
    picks = [np.zeros(len(choice.seconds), bool) for choice in problem.choices]
    arcs = [np.zeros(len(edge.seconds), bool) for edge in problem.edges]
    for _ in range(settings.weights_rounds):
        found, first = first or core(weighed(problem, weights), settings), None
        if found is None or found.relaxed.result is None:
            break
        if found.bound > bound:
            best, bound = weights, found.bound
        note(found.search.window, found.search.relaxation, found.relaxed.result.values, settings.integrality, picks, arcs)
        small = Relaxation(IntegerProgram(selected(problem, [np.flatnonzero(p) for p in picks], arcs).problem), settings)
        price = small.relax().bound
        if price <= (1 + settings.weights_gap) * bound:
            break
        weights = small.link_duals()
    return Weighed(problem=weighed(problem, best), weights=best, bound=bound, picks=picks, arcs=arcs)


def note(
    window: Window, relaxation: Relaxation, values: Floats, tolerance: float, picks: list[Bools], arcs: list[Bools]
) -> None:
    """Mark what a relaxation uses."""
    program = relaxation.program
    for o, (_, shares) in enumerate(picks_of(program, values)):
        picks[o][window.picks[o][shares > tolerance]] = True
    for w, (edge, use) in enumerate(zip(program.problem.edges[: len(arcs)], program.columns.use, strict=False)):
        arcs[w][window.arcs[w][values[use : use + len(edge.seconds)] > tolerance]] = True


def weighed(problem: Problem, weights: Weights) -> Problem:
    """The problem without regions, with loads on links and device weighed into its prices: no solution costs more than in
    `problem`.

    Args:
        problem: with regions; what they are busy with is part of its prices, which all regions together do not exceed.
        weights: of each region's links, at least 0; with its share in others a region has at most 1 in all (`totals`).
    """
    busy, links = totals(problem, weights)
    changed = LoadedPrices(problem)
    for region, share, sent in zip(problem.regions, busy, links, strict=True):
        changed.add(region.busy, -share)
        for load, weight in zip(region.links, sent, strict=True):
            changed.add(load, float(weight))
    return changed.problem()


def totals(problem: Problem, weights: Weights) -> tuple[list[float], list[Floats]]:
    """The weights of each region's own loads, with those that it has as a part of others: of busy, at most 1, and of links."""
    busy, links = [float(weight.sum()) for weight in weights], [weight.copy() for weight in weights]
    for place in reversed(range(len(problem.regions))):  # parts stand before the regions that hold them
        region = problem.regions[place]
        for part in region.parts:
            busy[part] += region.share * busy[place]
            links[part] += region.share * links[place]
    return busy, links


class LoadedPrices:
    """The prices of a problem, to which loads are added."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices = [choice.seconds.copy() for choice in problem.choices]
        self._reruns = [None if choice.recompute is None else choice.recompute.copy() for choice in problem.choices]
        self._arcs = [edge.seconds.copy() for edge in problem.edges]
        self._conditional = [[cost.seconds.copy() for cost in edge.conditional_costs] for edge in problem.edges]
        self._reconverts = [None if edge.recompute is None else edge.recompute.copy() for edge in problem.edges]
        self._charges = [charge.seconds for charge in problem.fixed_charges]

    def add(self, load: Load, weight: float) -> None:
        """Add the weighed seconds of a load."""
        for o, seconds in load.choices.items():
            self._choices[o] += weight * seconds
        for w, seconds in load.arcs.items():
            self._arcs[w] += weight * seconds
        for (w, place), seconds in load.conditional.items():
            self._conditional[w][place] += weight * seconds
        for found, loads in ((self._reruns, load.reruns), (self._reconverts, load.reconverts)):
            for place, seconds in loads.items():
                if (before := found[place]) is not None:
                    before += weight * seconds
        for t, charge in load.charges.items():
            self._charges[t] += weight * charge

    def problem(self) -> Problem:
        """The problem at these prices, without regions; fully weighed-away prices are exactly zero."""

        def positive(seconds: Floats) -> Floats:
            return np.maximum(seconds, 0.0)

        choices = tuple(
            replace(choice, seconds=positive(seconds), recompute=None if rerun is None else positive(rerun))
            for choice, seconds, rerun in zip(self._problem.choices, self._choices, self._reruns, strict=True)
        )
        edges = tuple(
            replace(
                edge, seconds=positive(seconds), recompute=None if again is None else positive(again),
                conditional_costs=tuple(
                    replace(cost, seconds=positive(due)) for cost, due in zip(edge.conditional_costs, dues, strict=True)
                ),
            )
            for edge, seconds, dues, again in zip(
                self._problem.edges, self._arcs, self._conditional, self._reconverts, strict=True
            )
        )  # fmt: skip
        charges = tuple(
            replace(charge, seconds=max(0.0, seconds))
            for charge, seconds in zip(self._problem.fixed_charges, self._charges, strict=True)
        )
        return Problem(choices=choices, edges=edges, fixed_charges=charges)


__all__ = ["LoadedPrices", "Weighed", "Weights", "best_weights", "totals", "weighed"]

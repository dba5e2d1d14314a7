"""Explains why an operator runs as it does: its candidates, and what each would cost with the rest of the plan unchanged.

marginal price = the candidate's own time + the cheapest conversions to and from the chosen layouts of its neighbours, with the
latency of messages that carry nothing else, and with what messages outlast computing by more, or less, than in the plan

Other operators keep their choice here; to see what a change costs when all of them may adapt, plan again
(`autopar.explain.whynot`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.explain.names import choices_of
from autopar.explain.phrases import runs, stored
from autopar.formulation.cost_breakdown import stored_words, words
from autopar.ir.device import Bytes, Seconds
from autopar.ir.layout import text
from autopar.operators.dim_labels import LabelSample, kind_of
from autopar.plan.text import Part, folded, grid, milliseconds, size_text
from autopar.planning.optimize import Optimized
from autopar.search_space.candidates import Candidate
from autopar.solver.overlap import excess, own_seconds
from autopar.solver.problem import (
    NOTHING,
    FixedCharge,
    Solution,
    activity_of,
    charge_share,
    route_price,
    trigger_share,
)
from autopar.solver.routes import tree

MOST = 8  # candidates shown, and operators if a name matches many


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One candidate: its own time, that of the conversions around it, and the peak memory of the plan with it, if known.

    `words` say what is split on each axis, `layout` is that of the first result (or of the stored tensor) in constraint
    notation.
    """

    words: tuple[str, ...]
    layout: str
    seconds: Seconds
    conversions: Seconds
    peak: Bytes | None
    chosen: bool

    @property
    def total(self) -> Seconds:
        """The marginal price."""
        return self.seconds + self.conversions


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The cheapest candidates of one choice, including the chosen one; seconds are totals over all `members`."""

    name: str
    kind: str
    members: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    candidates: int


def why(solved: Optimized, glob: str, most: int = MOST) -> list[Why]:
    """The candidates of every operator and tensor that a name matches; raises InputError if it matches nothing."""
    names = choices_of(solved.formulated.analysis, glob)
    return [why_choice(solved, name, most) for name in names]


def why_choice(solved: Optimized, name: str, most: int = MOST, *, peaks: bool = True) -> Why:
    """The candidates of one class of operators or tensors, by the name of that class; without peaks it skips the memory
    analysis.
    """
    formulated = solved.formulated
    program = formulated.program
    choice = formulated.names.index(name)
    found = formulated.candidates[choice]
    prices = _prices(solved, choice, most)
    picked = solved.solution.picks[choice]
    cheapest: dict[tuple[object, ...], int] = {}  # those that read alike differ in which operand is partial
    for pick in sorted(prices, key=lambda pick: (sum(prices[pick]), pick != picked)):
        cheapest.setdefault((_words(solved, name, found[pick]), found[pick].results[0], pick == picked), pick)
    shown = list(cheapest.values())[:most]
    if picked not in shown:
        shown[-1] = picked
    return Why(
        name=name,
        kind=kind_of(name) if name in program.op else "stored",
        members=formulated.analysis.classes.members[name],
        alternatives=tuple(
            Alternative(
                words=_words(solved, name, found[pick]),
                layout=text(found[pick].results[0], _shape(solved, name), formulated.mesh.sizes),
                seconds=prices[pick][0],
                conversions=prices[pick][1],
                peak=_peak(solved, choice, pick) if peaks else None,
                chosen=pick == picked,
            )
            for pick in shown
        ),
        candidates=len(found),
    )


def _shape(solved: Optimized, name: str) -> tuple[int, ...]:
    program = solved.formulated.program
    return program.op[name].results[0].shape if name in program.op else program.values[name].shape


def _words(solved: Optimized, name: str, candidate: Candidate) -> tuple[str, ...]:
    analysis = solved.formulated.analysis
    program = analysis.program
    if name in program.op:
        return words(program.op[name], analysis.fits[name], candidate, program, LabelSample.of(program))
    return stored_words(analysis, name, candidate.results[0])


def _prices(solved: Optimized, choice: int, most: int) -> dict[int, tuple[Seconds, Seconds]]:
    """Own seconds and conversion seconds of the candidates that can be among the cheapest, and of the chosen one.

    Candidates are tried in order of their own seconds, until these alone exceed the cheapest totals.
    """
    problem, solution = solved.formulated.problem, solved.solution
    own = problem.choices[choice].seconds
    picked = solution.picks[choice]
    around = _around(solved, choice)
    fixed_charges, waits = _alone(solved, around), _Waiting(solved, choice, around)
    prices: dict[int, tuple[Seconds, Seconds]] = {}
    for pick in sorted(range(len(own)), key=lambda pick: (pick != picked, own[pick])):
        totals = sorted(sum(price) for price in prices.values())
        if len(totals) >= most and own[pick] - waits.chosen > totals[most - 1]:
            break
        moved = _moved(solved, choice, pick)
        if moved is not None:
            seconds = sum(route_price(problem.edges[w], moved.picks, moved.arcs[w]) for w in around)
            seconds += sum(
                fixed_charge.seconds
                for fixed_charge in fixed_charges
                if charge_share(problem, fixed_charge, moved.picks, moved.arcs)
            )
            prices[pick] = float(own[pick]), seconds + waits.more(moved)
    return prices


class _Waiting:
    """How much messages outlast the computing that hides them, if one choice and the edges around it change."""

    def __init__(self, solved: Optimized, choice: int, around: Sequence[int]) -> None:
        self._problem, solution = solved.formulated.problem, solved.solution
        charges = self._problem.fixed_charges
        self._paid = [charge_share(self._problem, charge, solution.picks, solution.arcs) for charge in charges]
        self._touched = [t for t, charge in enumerate(charges) if any(one.edge in around for one in charge.triggers)]
        regions = self._problem.regions
        self._near = [region.mapped(lambda load: load.of({choice}, around, self._touched)) for region in regions]
        everything = activity_of(self._problem, solution.picks, solution.arcs, NOTHING, self._paid)
        self._whole, self._before = own_seconds(regions, everything), own_seconds(self._near, everything)
        self.chosen = excess(regions, self._whole)

    def more(self, moved: Solution) -> Seconds:
        """Additional seconds compared with the plan; negative if fewer."""
        paid = list(self._paid)
        for t in self._touched:
            paid[t] = charge_share(self._problem, self._problem.fixed_charges[t], moved.picks, moved.arcs)
        now = own_seconds(self._near, activity_of(self._problem, moved.picks, moved.arcs, NOTHING, paid))
        changed = [
            (busy + after - before, [one + x - y for one, x, y in zip(links, later, earlier, strict=True)])
            for (busy, links), (after, later), (before, earlier) in zip(self._whole, now, self._before, strict=True)
        ]
        return excess(self._problem.regions, changed) - self.chosen


def _around(solved: Optimized, choice: int) -> list[int]:
    """The edges into and out of a choice."""
    edges = enumerate(solved.formulated.problem.edges)
    return [w for w, edge in edges if choice in (edge.producer, *(consumer.choice for consumer in edge.consumers))]


def _alone(solved: Optimized, around: Sequence[int]) -> list[FixedCharge]:
    """The fixed charges caused by these edges alone, without those that another edge pays anyway."""
    problem, solution = solved.formulated.problem, solved.solution
    found = []
    for fixed_charge in problem.fixed_charges:
        theirs = [trigger for trigger in fixed_charge.triggers if trigger.edge in around]
        others = [trigger for trigger in fixed_charge.triggers if trigger.edge not in around]
        if theirs and not any(trigger_share(problem, trigger, solution.picks, solution.arcs) for trigger in others):
            found.append(fixed_charge)
    return found


def _moved(solved: Optimized, choice: int, pick: int) -> Solution | None:
    """The solution with another candidate and the cheapest routes to it; None if there is no route."""
    solution, edges = solved.solution, solved.formulated.problem.edges
    if pick == solution.picks[choice]:
        return solution
    picks, arcs = list(solution.picks), list(solution.arcs)
    picks[choice] = pick
    for w in _around(solved, choice):
        found = tree(edges[w], picks)
        if found is None:
            return None
        arcs[w] = found
    return replace(solution, picks=tuple(picks), arcs=tuple(arcs))


def _peak(solved: Optimized, choice: int, pick: int) -> Bytes:
    moved = _moved(solved, choice, pick)
    assert moved is not None, "only candidates that can be reached have a price"
    return round(float(solved.memory_model.walk(moved).max()))


def why_parts(solved: Optimized, found: Sequence[Why]) -> Iterator[Part]:
    """The printed answer."""
    for answer in found[:MOST]:
        yield from answer_parts(solved.formulated.mesh.axes, answer)
        yield ""
    if len(found) > MOST:
        yield f"and {len(found) - MOST} more: {', '.join(answer.name for answer in found[MOST:])}"
        yield ""
    yield "own time: forward and backward, or the optimizer step of a stored tensor; conversions: between it and its neighbours"
    yield "conversions count what computing does not hide of their messages, and what it hides no more of others"
    yield "the rest of the plan stays as chosen here; --why-not NAME=LAYOUT plans again, so that the rest may follow"


def answer_parts(axes: Sequence[str], answer: Why) -> Iterator[Part]:
    """The printed candidates of one choice."""
    count = f", {len(answer.members)} repeated blocks, times are totals" if len(answer.members) > 1 else ""
    yield f"{folded(answer.members)} ({answer.kind}{count}): {_shown(answer)}"
    known = all(entry.peak is not None for entry in answer.alternatives)
    times = ("total", "ms"), ("slower", "by"), ("own", "time")
    table = grid("", *times, "conversions", *["peak"] * known, "layout", "what it does", right=range(1, 5 + known))
    chosen = next(entry for entry in answer.alternatives if entry.chosen)
    for entry in answer.alternatives:
        said = stored(entry.words, axes) if answer.kind == "stored" else runs(entry.words, axes)
        total, *parts = map(milliseconds, (entry.total, entry.seconds, entry.conversions))
        more = "" if entry.chosen else f"{(entry.total - chosen.total) * 1e3:+.3f}"
        peak = [] if entry.peak is None else [size_text(entry.peak)]
        table.add_row("chosen" if entry.chosen else "", total, more, *parts, *peak, entry.layout, said)
    yield table


def _shown(answer: Why) -> str:
    if answer.candidates == 1:
        return "the only candidate"
    shown = len(answer.alternatives)
    return f"{answer.candidates} candidates" + (f", the {shown} cheapest" if shown < answer.candidates else "")

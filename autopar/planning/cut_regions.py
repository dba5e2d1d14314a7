"""Where a program is cut between its regions, by their costs on one device or in planned stages."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.analysis.fits import fit_of
from autopar.analysis.fusion import fused
from autopar.analysis.regions import regions
from autopar.analysis.signatures import signature
from autopar.analysis.summed_gradients import with_sums
from autopar.analysis.weights import weights
from autopar.errors import ConstraintError
from autopar.formulation.prices import Prices, op_seconds
from autopar.ir.device import Device, Link, Seconds
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program
from autopar.passes.stage_regions import fine_starts, made_again, of_one_stage, passing_bytes, stage_starts
from autopar.pipeline.clock import StageSeconds, clock_of
from autopar.pipeline.cut_moves import improved, paced
from autopar.pipeline.rank_balance import balanced
from autopar.pipeline.schedule import PipelineSchedule
from autopar.pipeline.stage_search import StagePartition, partition
from autopar.pipeline.stage_table import Cuts, StageArray, StageTable
from autopar.pipeline.weight_gradients import waits_filled
from autopar.planning.region_seconds import region_seconds
from autopar.search_space.candidates import INVARIANT, candidate

WORTH = 1e-2  # of a step, that cuts within blocks are to save
SMALL = 0.1  # of the seconds of a region: what is not cut off it
NODES, ACTIONS = 500, 200_000  # of the search for a cut by rough prices, and actions that the clock times for it
RECUT = 4  # times as many, by what planned stages take


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """New starts of stages, whose step takes `seconds`, against `before` for the known ones, by the same law."""

    starts: tuple[int, ...]
    seconds: Seconds
    before: Seconds


class CutRegions:
    """The regions of a program; `firsts` has the index of each one's first op, `again` the ops that every stage repeats for
    itself.
    """

    def __init__(self, program: Program, device: Device) -> None:
        self.program, self.again = program, made_again(program)
        self.firsts = stage_starts(program)
        self._whole = fused(program) if device.compiled else with_sums(program)  # whose ops are priced
        self._prices = Prices(mesh=Mesh(axes=("device",), sizes=(1,), device=device))
        self._balanced: dict[tuple[PipelineSchedule, int], tuple[int, ...]] = {}

    def module(self, start: int) -> str:
        """The module of the op at this index."""
        return self.program.ops[start].name.partition(":")[0]

    def starts(self, paths: Sequence[object]) -> tuple[int, ...]:
        """The first op, and the first ops of these modules. Raises ConstraintError if they do not exist, or are out of
        order.
        """
        found = [0, *(self._starting(path) for path in paths)]
        for (before, after), path in zip(itertools.pairwise(found), paths, strict=True):
            if after <= before:
                what = (
                    f"the stages of the pipeline are not in the order of the program: {path} does not come after the one before"
                )
                raise ConstraintError(
                    what, stages=", ".join(map(str, paths)), fix="module paths in the order in which they run"
                )
        return tuple(found)

    def _starting(self, path: object) -> int:
        """The first op of a module where a stage can begin. Raises ConstraintError for any other name."""
        if isinstance(path, str) and path and (found := self._place(path)):
            return found
        known = ", ".join(self._named())
        fix = "a module at which a stage can begin, as above" if known else "how many stages: regions begin in no module"
        raise ConstraintError(f"no stage of the pipeline can begin at {path!r}", known=known, fix=fix)

    def _place(self, path: str) -> int:
        """The op at which a stage that begins at a module starts, never between the reader and the writer of a buffer; 0 if
        none.
        """
        places = [place for place, op in enumerate(self.program.ops) if _within(op.name, path)]
        own = next((place for place in places if self.program.ops[place].name not in self.again), 0)
        region = next((place for place in places if place <= own and place in self.firsts), own)
        return 0 if region in self._joined else region

    @functools.cached_property
    def _joined(self) -> frozenset[int]:
        return of_one_stage(self.program)

    def _named(self) -> Iterator[str]:
        """The modules at which stages can begin, in program order; if several begin at the same op, the outermost."""
        parts = [op.name.partition(":")[0].split(".") for op in self.program.ops]
        paths = dict.fromkeys(".".join(own[: end + 1]) for own in parts for end in range(len(own)))
        found: dict[int, str] = {}
        for path in filter(None, paths):
            found.setdefault(self._place(path), path)
        yield from (path for place, path in sorted(found.items()) if place)

    def balanced(self, schedule: PipelineSchedule, more: int) -> tuple[int, ...]:
        """The starts for which the schedule, with so many more micro-batches, is fastest, at the regions' prices on one
        device.
        """
        if (schedule, more) not in self._balanced:
            self._balanced[schedule, more] = self._searched(schedule, more)
        return self._balanced[schedule, more]

    def shares(self, starts: tuple[int, ...]) -> list[float]:
        """The share of one device's seconds of each of the stages that begin at these ops."""
        before = [sum(both) for both in self._before]
        whole = before[len(self.program.ops)]
        return [(before[stop] - before[start]) / whole for start, stop in itertools.pairwise((*starts, len(self.program.ops)))]

    def messages(self, starts: tuple[int, ...], link: Link, devices: int) -> float:
        """The largest message before a stage, split over so many devices, relative to the stage's seconds."""
        passing = passing_bytes(self.program)
        before = [sum(self._before[place]) for place in (*starts, len(self.program.ops))]
        stages = [(stop - start) / devices for start, stop in itertools.pairwise(before)]
        sent = [link.send(passing[start] / devices) for start in starts[1:]]
        return max((2 * one / (stage or math.inf) for one, stage in zip(sent, stages[1:], strict=True)), default=0.0)

    def recut(self, schedule: PipelineSchedule, more: int, starts: Sequence[int], known: Sequence[StageSeconds]) -> Recut:
        """The starts for which the schedule is fastest, by the seconds of planned stages with other `starts`; also between any
        two matrix products of a region. Messages take the same time per byte as those of the plan.
        """
        places, passing = [*sorted({*self._fine(), *starts}), len(self.program.ops)], passing_bytes(self.program)
        bytes_ = np.array([passing[place] for place in places], dtype=np.float64)
        cuts = (*map(places.index, starts), len(places) - 1)
        rough = np.diff(np.array([self._before[place] for place in places]), axis=0).T
        taken = np.concatenate([np.zeros((4, 1)), region_seconds(rough, bytes_[:-1], cuts, known).cumsum(axis=1)], axis=1)
        unit = sum(one.activations for one in known[:-1]) / max(1, sum(passing[start] for start in starts[1:]))
        forward, backward_input, backward_weight, once = map(_between, taken)
        sent = unit * bytes_
        seconds = np.stack([
            forward, backward_input, backward_weight,
            np.broadcast_to(sent, forward.shape), np.broadcast_to(sent[:-1, None], forward.shape), once,
        ])  # fmt: skip
        work = (schedule.microbatches + more) * taken[:3].cumsum(axis=0)[2] + taken[3]
        found, table = self._best(schedule, more, places, seconds, work.tolist(), actions=RECUT * ACTIONS)
        tables, simulations = [table] * schedule.stages, _simulations(schedule, RECUT * ACTIONS)

        def timed(cuts: Cuts) -> tuple[Seconds, Cuts]:
            stages = [table.stage(*ends) for ends in itertools.pairwise(cuts)]
            return waits_filled(schedule, stages)[1] + more * paced(clock_of(schedule), stages)[0], cuts

        tried = [found.cuts]
        for order in dict.fromkeys((schedule, waits_filled(schedule, known)[0])):
            for start in (found.cuts, cuts):
                tried.append(improved(clock_of(order), tables, start, more=more, simulations=simulations)[1])
        best, chosen = min(map(timed, tried))
        return Recut(starts=tuple(places[cut] for cut in chosen[:-1]), seconds=best, before=timed(cuts)[0])

    def _fine(self) -> list[int]:
        """The places where stages may begin, except those that would cut off a small part of a region."""
        wide, found = sorted(self.firsts), list[int]()
        work = [sum(both) for both in self._before]
        for place in fine_starts(self.program):
            region = bisect_right(wide, place) - 1
            first, stop = wide[region], (*wide, len(self.program.ops))[region + 1]
            least = SMALL * (work[stop] - work[first])
            if place == first or min(work[place] - work[found[-1]], work[stop] - work[place]) >= least:
                found.append(place)
        return found

    def _searched(self, schedule: PipelineSchedule, more: int) -> tuple[int, ...]:
        """The best cuts; cuts within blocks only if they are worth it, since equal stages are planned once."""
        stop, ends = len(self.program.ops), {end + 1 for end in regions(self.program)}
        blocks = [first for first in self.firsts if not first or first in ends]
        within = self._roughly(schedule, more, [*self.firsts, stop])
        if schedule.stages <= len(blocks) < len(self.firsts):
            between = self._roughly(schedule, more, [*blocks, stop])
            within = within if within.seconds < (1 - WORTH) * between.seconds else between
        return within.cuts[:-1]

    def _roughly(self, schedule: PipelineSchedule, more: int, places: Sequence[int]) -> StagePartition:
        """The best of the cuts before these ops by one device's prices; if ranks have several stages, near those of equal work:
        moves would give more to the first ranks, which have most in flight.
        """
        before = [self._before[place] for place in places]
        forward, backward = (_between(np.array(sums)) for sums in zip(*before, strict=True))
        none = np.zeros_like(forward)
        seconds = np.stack([forward, backward / 2, backward / 2, none, none, none])
        several = schedule.stages > len(schedule.ranks)
        found, _ = self._best(
            schedule, more, places, seconds, [sum(both) for both in before], actions=0 if several else ACTIONS
        )
        return replace(found, cuts=tuple(places[cut] for cut in found.cuts))

    def _best(
        self,
        schedule: PipelineSchedule,
        more: int,
        places: Sequence[int],
        seconds: StageArray,
        work: Sequence[Seconds],
        *,
        actions: int,
    ) -> tuple[StagePartition, StageTable]:
        """The best of the cuts before these ops. With one stage per rank a stage should read a parameter, if possible, because
        optimizers require some. `seconds` are those of a `StageTable`, `work` the work before each op.
        """
        read = _between(np.array([self._parameters[place] for place in places]))
        search = functools.partial(
            partition,
            schedule,
            nodes=NODES,
            simulations=_simulations(schedule, actions),
            start=balanced(work, schedule),
            more=more,
        )
        ways = [read > 0] if schedule.stages == len(schedule.ranks) else []
        for fits in (*ways, np.ones_like(read, dtype=bool)):
            table = StageTable(seconds=seconds, fits=fits)
            if found := search([table] * schedule.stages):
                return found, table
        raise AssertionError("there are as many regions as stages, and every stage has a price")

    @functools.cached_property
    def _parameters(self) -> list[int]:
        """How many ops, not counting repeated ones, read a parameter or a view or cast of one, before each op and in total."""
        ops, known = self.program.ops, weights(self.program)
        reading = (op.name not in self.again and not known.isdisjoint(op.operands) for op in ops)
        return [0, *itertools.accumulate(reading)]

    @functools.cached_property
    def _before(self) -> list[tuple[Seconds, Seconds]]:
        """Forward and backward seconds of all ops before each one, and in total; equal ops are priced once."""
        program, priced, seconds = self._whole, dict[object, tuple[Seconds, Seconds]](), [(0.0, 0.0)]
        for op in program.ops:
            alike = signature(op, program.values), op.summed
            if alike not in priced:
                priced[alike] = self._priced(op)
            there, back = seconds[-1]
            seconds.append((there + priced[alike][0], back + priced[alike][1]))
        return seconds

    def _priced(self, op: Op) -> tuple[Seconds, Seconds]:
        """Forward and backward seconds of an op at whole shapes."""
        fitted, values = fit_of(self.program, op.name), self.program.values
        ((both,), (there,)) = op_seconds(op, fitted, [candidate(op, None, values, (INVARIANT,))], values, self._prices)
        return there, both - there


def _between(sums: StageArray) -> StageArray:
    """The difference of a prefix sum between each place but the last and each place."""
    return sums - sums[:-1, None]


def _simulations(schedule: PipelineSchedule, actions: int) -> int:
    """How many simulations of a step stay within the limit on actions."""
    return max(1, actions // sum(map(len, schedule.ranks)))


def _within(name: str, path: str) -> bool:
    module = name.partition(":")[0]
    return module == path or module.startswith(f"{path}.")


__all__ = ["CutRegions", "Recut"]

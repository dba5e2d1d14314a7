"""Step regions: the parts of a program that weight collectives overlap with, and between which weights are prefetched.

    embed        embed                        a region by itself
    h.0          ln attn add ln mlp add       members of one region: equal repeated blocks
    h.1          ln attn add ln mlp add
    ln_f head    ln_f head                    a region by itself

A region has the ops of a class of repeated blocks, or of a stretch between such blocks; a stretch ends at the first new block
after it has two matrix products. The members of a region run one after the other, in program order. The weights of a bucket are
gathered while the member before the one that uses them runs, so the messages of one region are spread over its neighbours:

    bucket of h.*   gathered during embed (h.0), h.* (the others)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.analysis.analysis import Analysis
from autopar.analysis.block_names import block_names
from autopar.analysis.weight_buckets import weight_buckets
from autopar.operators import row_of


@dataclass(frozen=True, eq=False, kw_only=True)
class StepRegions:
    """The regions of a program, numbered in the order of their first members.

    Attributes:
        analysis: facts about the program.
        names: a readable name for each region.
        sequence: the region of each member, in program order.
        member: the member in which each op runs.
    """

    analysis: Analysis
    names: tuple[str, ...]
    sequence: tuple[int, ...]
    member: Mapping[str, int]

    def of_op(self, name: str) -> int:
        """The region of an op."""
        return self.sequence[self.member[name]]

    def of_value(self, name: str) -> int | None:
        """The region in which a value is converted: that of its first reader, or of its producer if no op reads it."""
        readers, maker = self.analysis.readers[name], self.analysis.program.producer.get(name)
        op = readers[0] if readers else maker
        return None if op is None else self.of_op(op.name)

    def before(self, weight: str, *, moved: bool = True) -> int | None:
        """The region of the member before the one that first uses a weight's bucket; None before the first."""
        place = self._first_use[moved].get(weight, 0)
        return self.sequence[place - 1] if place else None

    def after(self, weight: str) -> int | None:
        """The region of the member after the one that first uses a weight's bucket; None after the last."""
        place = self._first_use[True].get(weight, len(self.sequence)) + 1
        return self.sequence[place] if place < len(self.sequence) else None

    @functools.cached_property
    def _first_use(self) -> Mapping[bool, Mapping[str, int]]:
        """By whether weights themselves are communicated: for each weight, the first member that uses its bucket."""
        found: dict[bool, dict[str, int]] = {}
        for moved in (False, True):
            buckets = weight_buckets(self.analysis.program, moved=moved)
            found[moved] = {name: min(map(self._used, names)) for names in buckets for name in names}
        return found

    def _used(self, weight: str) -> int:
        """The first member that computes with a weight: a cast runs when its result is used."""
        copies, members = self.analysis.copies, list[int]()
        for op in self.analysis.readers[weight]:
            made = [result.name for result in op.results if result.name in copies]
            members += [self._used(made[0]) if made else self.member[op.name]]
        return min(members, default=0)


def step_regions(analysis: Analysis) -> StepRegions:
    """The regions of a program."""
    of, program = analysis.classes.of, analysis.program
    block_of = block_names(program).of
    spread = {
        name for name, found in analysis.classes.members.items() if name in program.op and len(set(map(block_of, found))) > 1
    }
    sequence: list[int] = []
    member: dict[str, int] = {}
    regions: dict[str, int] = {}  # the first block of a class, or the first op of a stretch -> the region's number
    blocks: dict[str, int] = {}  # a repeated block -> its member
    stretch, products, last = -1, 0, ""
    for op in program.ops:
        block = block_of(op.name)
        if of[op.name] in spread:
            if block not in blocks:
                blocks[block] = len(sequence)
                sequence.append(regions.setdefault(block_of(of[op.name]), len(regions)))
            member[op.name], stretch = blocks[block], -1
            continue
        ends = block != last and products >= 2 and of[op.name] == op.name  # the steps of a loop stay together
        if stretch < 0 or ends:
            stretch, products = len(sequence), 0
            sequence.append(regions.setdefault(op.name, len(regions)))
        member[op.name], last = stretch, block
        products += row_of(op).contracts
    return StepRegions(analysis=analysis, names=tuple(regions), sequence=tuple(sequence), member=member)


__all__ = ["StepRegions", "step_regions"]

"""A pipeline schedule: the ordered actions of each rank, in the notation of torch.distributed.pipelining.

    0F0,0F1,0B0,0B1        rank 0: forwards of stage 0 on micro-batches 0 and 1, then their backwards
    1F0,1B0,1F1,1B1        rank 1

    F   forward
    B   backward
    I   the half of a backward that makes the gradient of the stage's input
    W   the half that makes the gradients of its parameters

A schedule with messages has, for micro-batch 3 of stage 1, 1RECV_F3 and 1SEND_F3 for activations, 1RECV_B3 and 1SEND_B3 for
gradients, and 1WAIT_F3 and 1WAIT_B3 where the rank waits for such a send to complete (torch has no name for these).
"""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from enum import StrEnum

from autopar.errors import ConstraintError


class ActionKind(StrEnum):
    """What an action does; `_ComputationType` in torch."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    WAIT_F = "WAIT_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_B = "WAIT_B"


COMPUTING = tuple(ActionKind)[:4]
_ACTION = re.compile(rf"(\d{{1,6}})({'|'.join(COMPUTING)})(\d{{1,6}})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of a stage on a micro-batch, both counted from 0.

    >>> print(Action(stage=2, kind=ActionKind.FORWARD, microbatch=5))
    2F5
    """

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """The actions of every rank of the pipeline's axis, in the order in which it runs them."""

    ranks: tuple[tuple[Action, ...], ...]

    @functools.cached_property
    def stages(self) -> int:
        """The number of stages; more than ranks where a rank has several (its chunks)."""
        return 1 + max((action.stage for actions in self.ranks for action in actions), default=-1)

    @functools.cached_property
    def microbatches(self) -> int:
        """The number of micro-batches of a step."""
        return 1 + max((action.microbatch for actions in self.ranks for action in actions), default=-1)

    @functools.cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that runs each stage."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    @functools.cached_property
    def deferred(self) -> bool:
        """Whether backwards are split into halves, with the second half, W, deferred."""
        return any(action.kind == ActionKind.BACKWARD_WEIGHT for actions in self.ranks for action in actions)

    def microbatches_of(self, stage: int, *kinds: ActionKind) -> list[int]:
        """The micro-batches of a stage's actions of these kinds, in order."""
        return [one.microbatch for one in self.ranks[self.rank_of[stage]] if one.stage == stage and one.kind in kinds]

    def in_flight(self, rank: int, *, deferred: bool = False) -> int:
        """The most micro-batches in flight at once on a rank, over all its stages: between their forward and their B or I.

        With `deferred`, until their B or W: this also counts micro-batches whose W is still to come.
        """
        end = ActionKind.BACKWARD_WEIGHT if deferred else ActionKind.BACKWARD_INPUT
        now = most = 0
        for action in self.ranks[rank]:
            if action.kind == ActionKind.FORWARD:
                now += 1
                most = max(most, now)
            elif action.kind in (ActionKind.BACKWARD, end):
                now -= 1
        return most

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, actions)) for actions in self.ranks)


def parse(text: str, *, source: str = "") -> PipelineSchedule:
    """Read a schedule without messages from CSV text: one line per rank, empty cells where it idles.

    Args:
        text: the CSV in torch's format; nothing in it is executed.
        source: the name of the file, for errors.

    Raises ConstraintError for a cell that is not an action; `dependencies.check` checks the rest.
    """
    try:
        rows = [row for row in csv.reader(text.splitlines()) if row]
    except csv.Error as error:
        raise ConstraintError(f"{source or 'the pipeline schedule'} is not CSV", error=error) from error
    cells = ([(cell.strip(), column) for column, cell in enumerate(row)] for row in rows)
    return PipelineSchedule(
        ranks=tuple(
            tuple(_action(cell, f"{source or 'the schedule'}, rank {rank}, cell {column}") for cell, column in row if cell)
            for rank, row in enumerate(cells)
        )
    )


def _action(cell: str, place: str) -> Action:
    found = _ACTION.fullmatch(cell)
    if found is None:
        raise ConstraintError(
            f"{cell[:20]!r} is not an action of a pipeline schedule",
            at=place,
            fix="stage, F, B, I or W, micro-batch, as in 0F3; messages are added by autopar",
        )
    stage, kind, microbatch = found.groups()
    return Action(stage=int(stage), kind=ActionKind(kind), microbatch=int(microbatch))


__all__ = ["COMPUTING", "Action", "ActionKind", "PipelineSchedule", "parse"]

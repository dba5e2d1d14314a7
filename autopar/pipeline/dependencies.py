"""Dependencies between the actions of a schedule, and whether all of them can run.

0F0 -> 1F0 -> 2F0 -> 2B0 -> 1B0 -> 0B0        B may be I, which is followed by a W of the same stage
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from autopar.errors import ConstraintError
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule

StageProduct = tuple[
    str, int, int
]  # an activation (F), the gradient of an input (B), those of parameters (W); stage, micro-batch
_MADE = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUT: "B",
    ActionKind.BACKWARD_WEIGHT: "W",
}


def made(action: Action) -> StageProduct:
    """An action's result, which others may need."""
    return _MADE[action.kind], action.stage, action.microbatch


def needed(action: Action, stages: int) -> StageProduct | None:
    """The direct dependency of an action; None for a forward of stage 0."""
    stage, k = action.stage, action.microbatch
    match action.kind:
        case ActionKind.FORWARD:
            return ("F", stage - 1, k) if stage else None
        case ActionKind.BACKWARD_WEIGHT:
            return "B", stage, k
        case _:
            return ("B", stage + 1, k) if stage < stages - 1 else ("F", stage, k)


def check(schedule: PipelineSchedule) -> None:
    """Raise ConstraintError unless each action occurs once, each stage is on one rank, and no rank waits forever.

    A step has for every stage and micro-batch one F, and either one B or one I and one W. The forwards of a stage are in the
    order of the micro-batches, in which outputs are joined; backwards are in any order.
    """
    for rank, actions in enumerate(schedule.ranks):
        if not actions:
            raise ConstraintError(f"rank {rank} of the pipeline schedule has no actions", fix="a line of actions per rank")
    if not schedule.ranks:
        raise ConstraintError("the pipeline schedule is empty", fix="a line of actions per rank")
    seen = Counter(action for actions in schedule.ranks for action in actions)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if schedule.rank_of[action.stage] != rank:
                both = f"on rank {rank} and on rank {schedule.rank_of[action.stage]}"
                raise ConstraintError(f"stage {action.stage} of the pipeline schedule runs {both}", at=action)
            if seen[action] > 1:
                raise ConstraintError(f"the pipeline schedule repeats {action}", at=f"rank {rank}")
    for missing in _missing(schedule, seen):
        raise ConstraintError(
            f"the pipeline schedule lacks {missing}",
            schedule=f"{schedule.stages} stages, {schedule.microbatches} micro-batches",
            fix="for every stage and micro-batch one F, and one B, or one I and one W",
        )
    for stage, rank in schedule.rank_of.items():
        places = schedule.microbatches_of(stage, ActionKind.FORWARD)
        if places != sorted(places):
            k = next(b for a, b in itertools.pairwise(places) if b < a)
            what = f"stage {stage} of the pipeline schedule runs micro-batch {k} after a later one"
            raise ConstraintError(what, at=f"rank {rank}", fix="forwards of a stage in the order of the micro-batches")
    runnable(schedule)


def _missing(schedule: PipelineSchedule, seen: Counter[Action]) -> Iterator[str]:
    """The actions that a step needs and the schedule lacks, and halves of a backward that it has beside the whole."""
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            has = {kind for kind in ActionKind if seen[Action(stage=stage, kind=kind, microbatch=k)]}
            halves = has & {ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT}
            if ActionKind.FORWARD not in has:
                yield f"{stage}F{k}"
            if ActionKind.BACKWARD in has and halves:
                yield f"either {stage}B{k} or {', '.join(f'{stage}{half}{k}' for half in sorted(halves))}: it has both"
            if ActionKind.BACKWARD not in has and len(halves) < 2:
                half = {ActionKind.BACKWARD_INPUT: "W", ActionKind.BACKWARD_WEIGHT: "I"}
                yield f"{stage}{half[halves.pop()] if halves else 'B'}{k}"


def runnable(schedule: PipelineSchedule) -> tuple[Action, ...]:
    """All actions in an order in which each follows what it needs, and those of a rank follow each other.

    Raises ConstraintError, with what each rank waits for, if there is none: the schedule would hang.
    """
    order: list[Action] = []
    done: set[StageProduct] = set()
    at = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                need = needed(actions[at[rank]], schedule.stages)
                if need is not None and need not in done:
                    break
                order.append(actions[at[rank]])
                done.add(made(order[-1]))
                at[rank] += 1
                moved = True
    if len(order) < sum(map(len, schedule.ranks)):
        stuck = [(rank, actions[at[rank]]) for rank, actions in enumerate(schedule.ranks) if at[rank] < len(actions)]
        raise hang([f"rank {rank} at {action}, for {_printed(needed(action, schedule.stages))}" for rank, action in stuck])
    return tuple(order)


def _printed(product: StageProduct | None) -> str:
    kind, stage, k = product or ("F", 0, 0)
    return f"{stage}{kind}{k}"


def hang(waiting: list[str]) -> ConstraintError:
    """The error for ranks that wait for each other."""
    return ConstraintError("the pipeline schedule hangs", waiting="\n".join(waiting), fix="put what is waited for first")


__all__ = ["StageProduct", "check", "hang", "made", "needed", "runnable"]

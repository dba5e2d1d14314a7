"""Random schedules that can run: any stages on any ranks, any order, backwards whole or in halves."""

from __future__ import annotations

import random

from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.dependencies import StageProduct, made, needed
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule


def any_schedule(draw: random.Random) -> PipelineSchedule:
    """Up to four ranks, three stages on each, and six micro-batches; run in an order drawn action by action."""
    ranks, m = draw.randint(1, 4), draw.randint(1, 6)
    stages = ranks * draw.randint(1, 3)
    rank_of = [*range(ranks), *(draw.randrange(ranks) for _ in range(stages - ranks))]
    draw.shuffle(rank_of)
    halves = draw.random() < 0.5
    kinds = "FIW" if halves else "FB"
    left = [Action(stage=s, kind=ActionKind(kind), microbatch=k) for s in range(stages) for k in range(m) for kind in kinds]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    done: set[StageProduct | None] = {None}
    while left:
        place = draw.randrange(len(left))
        while needed(left[place], stages) not in done:
            place -= 1  # below 0 again from the end
        action = left.pop(place)
        done.add(made(action))
        lists[rank_of[action.stage]].append(action)
    return PipelineSchedule(ranks=tuple(map(tuple, lists)))


def any_seconds(draw: random.Random, stages: int, *, messages: bool = True) -> list[StageSeconds]:
    """Unequal stages; messages shorter and longer than they."""
    longest = draw.choice((0.1, 3.0)) if messages else 0.0
    return [
        StageSeconds(
            forward=draw.uniform(0.5, 1.5),
            backward_input=draw.uniform(0.5, 2.0),
            backward_weight=draw.uniform(0.0, 2.0),
            activations=draw.uniform(0, longest),
            gradients=draw.uniform(0, longest),
            once=draw.choice((0.0, draw.uniform(0, 5))),
        )
        for _ in range(stages)
    ]

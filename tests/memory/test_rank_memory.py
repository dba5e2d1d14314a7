"""The memory of a pipeline rank, action by action, against a log of allocations: each is named, allocated and freed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest

from autopar.ir.device import Bytes
from autopar.memory.in_flight import StageMemory
from autopar.memory.rank_memory import HeldStage, rank_peaks
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.named_schedules import named
from autopar.pipeline.schedule import COMPUTING, Action, ActionKind, PipelineSchedule
from autopar.pipeline.transfers import with_messages

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)]
BATCH = {"tokens": 7}
OF_LISTS = ("stored", "gradients", "made_later", "stepped")


def scratch(sizes: Sequence[Bytes]) -> Bytes:
    return 3 * sum(sizes)


def drawn(place: int, seed: random.Random) -> HeldStage:
    """A stage of any sizes, with a weight of its own, one that all stages store, whose gradient W makes, and the tokens."""
    sizes = {field.name: seed.randrange(1, 100) for field in fields(StageMemory) if field.name not in OF_LISTS}
    own, lists = seed.randrange(1, 50), {"stored": 3, "gradients": 1, "stepped": 1}
    of_lists = {name: (times * own, 10 * times, 0) for name, times in lists.items()}
    memory = StageMemory(**sizes, **of_lists, made_later=(seed.random() < 0.5, True, False))  # type: ignore[arg-type]
    memory = replace(memory, stored=(*memory.stored[:2], BATCH["tokens"]), beside=min(memory.beside, memory.sent))
    return HeldStage(memory=memory, names=(f"w{place}", "tied", "tokens"))


def logged(schedule: PipelineSchedule, rank: int, stages: Sequence[HeldStage]) -> Bytes:
    """The peak of a rank by its allocations."""
    own = [stage for stage, place in schedule.rank_of.items() if place == rank]
    alive: dict[object, Bytes] = dict(BATCH)
    for stage in own:
        alive |= {("stored", name): size for name, size in zip(stages[stage].names, stages[stage].memory.stored, strict=True)}
        alive["gathered", stage] = stages[stage].memory.shared
    del alive["stored", "tokens"]
    peak = 0
    for action in schedule.ranks[rank]:
        s, k, memory, kind = action.stage, action.microbatch, stages[action.stage].memory, action.kind
        new = any(("gradient", name) not in alive for name in made(stages[s], kind))
        match kind:
            case ActionKind.RECV_F:
                alive["in", s, k] = memory.received
            case ActionKind.RECV_B:
                alive["back", s, k] = memory.back
            case ActionKind.WAIT_F:
                alive.pop(("out", s, k), None)
                alive.pop(("out of held", s, k), None)
            case ActionKind.WAIT_B:
                del alive["returned", s, k]
            case ActionKind.FORWARD:
                alive.pop(("in", s, k), None)
                alive["runs"] = memory.forward
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                alive.pop(("back", s, k), None)
                del alive["held", s, k]
                if ("out", s, k) in alive:  # the rest of a message that was part of what is held
                    alive["out of held", s, k] = memory.sent - memory.beside
                alive["runs"] = memory.halved if kind == ActionKind.BACKWARD_INPUT else memory.backward
                if new:
                    alive["runs"] = memory.first if kind == ActionKind.BACKWARD else memory.first_half
            case ActionKind.BACKWARD_WEIGHT:
                alive["runs"] = memory.weights
                alive |= {("gradient", name): size for name, size in made(stages[s], kind).items()}
        if kind not in COMPUTING:
            continue
        peak = max(peak, sum(alive.values()))
        del alive["runs"]
        leave(alive, action, own, stages)
    stepped = {name: size for s in own for name, size in zip(stages[s].names, stages[s].memory.stepped, strict=True)}
    assert not [name for name in alive if isinstance(name, tuple) and name[0] not in ("stored", "gradient", "gathered")]
    return max(peak, sum(alive.values()) + scratch([*stepped.values()]))


def made(stage: HeldStage, kind: ActionKind) -> dict[str, Bytes]:
    """The gradients that an action makes or adds to."""
    gradients = dict(zip(stage.names, stage.memory.gradients, strict=True))
    if kind == ActionKind.BACKWARD_INPUT:
        return {name: gradients[name] for name, late in zip(stage.names, stage.memory.made_later, strict=True) if not late}
    return gradients


def leave(alive: dict[object, Bytes], action: Action, own: Sequence[int], stages: Sequence[HeldStage]) -> None:
    """Allocate what an action that computes leaves on a rank with these stages of its own, and free what it alone needed."""
    s, k, memory, kind = action.stage, action.microbatch, stages[action.stage].memory, action.kind
    if kind == ActionKind.FORWARD:
        alive["held", s, k] = memory.held
        if s + 1 in own:
            alive["in", s + 1, k] = stages[s + 1].memory.received
        elif s + 1 < len(stages):
            alive["out", s, k] = memory.beside
        return
    alive.update({("gradient", name): size for name, size in made(stages[s], kind).items()})
    if kind == ActionKind.BACKWARD_WEIGHT:
        del alive["deferred", s, k]
        return
    if kind == ActionKind.BACKWARD_INPUT:
        alive["deferred", s, k] = memory.deferred
    if s - 1 in own:
        alive["back", s - 1, k] = stages[s - 1].memory.back
    elif s:
        alive["returned", s, k] = memory.returned


@pytest.mark.parametrize("name, chunks", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_peak_of_a_rank_is_that_of_its_allocations(name: str, chunks: int, ranks: int) -> None:
    seed = random.Random(f"{name} {chunks} {ranks}")
    for runs in (2, 4, 8):
        stages = [drawn(place, seed) for place in range(ranks * chunks)]
        seconds = [StageSeconds(forward=seed.random(), backward_input=seed.random(), gradients=0.1) for _ in stages]
        schedule = with_messages(named(name, ranks, runs, chunks=chunks), seconds)
        assert rank_peaks(schedule, stages, BATCH, scratch) == tuple(logged(schedule, r, stages) for r in range(ranks))

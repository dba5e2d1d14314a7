"""Memory of a pipeline rank during each of its actions: all its stages, their micro-batches in flight, messages.

    0F1   what the forward of stage 0 takes; what other micro-batches of the rank's stages hold between their forward and their
          backward; what has arrived for later actions, and what is sent and not awaited yet
    2B0   the same of a backward of stage 2; gradients of stage 0 are there from its own first backward on, those of weights
          in products from its first W on where backwards are in halves

Stages of one rank peak at different actions, so a rank holds less than the sum of their peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.device import Bytes
from autopar.memory.in_flight import StageMemory
from autopar.pipeline.schedule import COMPUTING, Action, ActionKind, PipelineSchedule

Scratch = Callable[[Sequence[Bytes]], Bytes]  # what the optimizer takes for itself, by the bytes of what it steps


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """The memory of a stage, and the names of what it stores, in that order."""

    memory: StageMemory
    names: tuple[str, ...]


def rank_peaks(
    schedule: PipelineSchedule, stages: Sequence[HeldStage], batch: Mapping[str, Bytes], scratch: Scratch
) -> tuple[Bytes, ...]:
    """The peak bytes of each rank in a step.

    Args:
        schedule: with messages.
        stages: all stages, in order.
        batch: the bytes of the inputs, which the caller holds on every rank.
        scratch: of the optimizer.
    """
    ranks = range(len(schedule.ranks))
    return tuple(max(_Rank(rank, schedule, stages, batch).alive(scratch)) for rank in ranks)


@dataclass(slots=True)
class _Now:
    """The micro-batches of a stage: between forward and backward, waiting for W, arrived and waiting, and those with messages
    under way: outputs, received gradients, sent gradients.
    """

    memory: StageMemory
    flying: set[int] = field(default_factory=set)
    deferred: int = 0
    arrived: int = 0
    sending: set[int] = field(default_factory=set)
    back: int = 0
    returning: int = 0

    @property
    def bytes(self) -> Bytes:
        """Their bytes while nothing of the stage runs."""
        of = self.memory
        sent = sum(of.beside if k in self.flying else of.sent for k in self.sending)
        held = len(self.flying) * of.held + self.deferred * of.deferred + self.arrived * of.received
        return held + sent + self.back * of.back + self.returning * of.returned


class _Rank:
    """A rank that runs its actions one after the other."""

    def __init__(self, rank: int, schedule: PipelineSchedule, stages: Sequence[HeldStage], batch: Mapping[str, Bytes]) -> None:
        self.actions, self.last = schedule.ranks[rank], schedule.stages - 1
        self.own = {stage: stages[stage] for stage, place in sorted(schedule.rank_of.items()) if place == rank}
        self.now = {stage: _Now(one.memory) for stage, one in self.own.items()}
        self.stored = dict(batch)  # once, however many of the stages read it
        self.gradients: dict[str, Bytes] = {}  # those that are there
        for one in self.own.values():
            self.stored |= dict(zip(one.names, one.memory.stored, strict=True))
        self.resident = sum(self.stored.values()) + sum(one.memory.shared for one in self.own.values())

    def alive(self, scratch: Scratch) -> Iterator[Bytes]:
        """The peak bytes during each action, and during the optimizer's step."""
        for action in self.actions:
            if action.kind in COMPUTING:
                self._begin(action)
                others = sum(now.bytes for now in self.now.values()) + sum(self.gradients.values())
                yield self.resident + others + self._running(action)
                self._end(action)
            else:
                self._message(action)
        stepped: dict[str, Bytes] = {}
        for stage in self.own:
            stepped |= zip(self.own[stage].names, self.own[stage].memory.stepped, strict=True)
            self.gradients |= self._made(stage, ActionKind.BACKWARD)
        yield self.resident + sum(self.gradients.values()) + scratch([size for size in stepped.values() if size])

    def _begin(self, action: Action) -> None:
        """Start an action: consume its received message; a backward takes over its micro-batch, and W allocates gradients."""
        now = self.now[action.stage]
        match action.kind:
            case ActionKind.FORWARD:
                now.arrived -= action.stage > 0
            case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                now.back -= action.stage < self.last
                now.flying.discard(action.microbatch)
            case ActionKind.BACKWARD_WEIGHT:
                self.gradients |= self._made(action.stage, action.kind)

    def _running(self, action: Action) -> Bytes:
        """The bytes of a running action, on top of everything else."""
        memory = self.own[action.stage].memory
        trained = self._made(action.stage, action.kind).keys() <= self.gradients.keys()
        match action.kind:
            case ActionKind.FORWARD:
                return memory.forward
            case ActionKind.BACKWARD:
                return memory.backward if trained else memory.first
            case ActionKind.BACKWARD_INPUT:
                return memory.halved if trained else memory.first_half
            case _:
                return memory.weights

    def _end(self, action: Action) -> None:
        """End an action: record what it leaves."""
        stage, k = action.stage, action.microbatch
        now = self.now[stage]
        if action.kind == ActionKind.FORWARD:
            now.flying.add(k)
            if stage + 1 in self.now:
                self.now[stage + 1].arrived += 1
            elif stage < self.last:
                now.sending.add(k)
            return
        self.gradients |= self._made(stage, action.kind)
        if action.kind == ActionKind.BACKWARD_WEIGHT:
            now.deferred -= 1
            return
        now.deferred += action.kind == ActionKind.BACKWARD_INPUT
        if stage - 1 in self.now:
            self.now[stage - 1].back += 1
        elif stage:
            now.returning += 1

    def _message(self, action: Action) -> None:
        """Post a receive, or free what was sent."""
        now = self.now[action.stage]
        match action.kind:
            case ActionKind.RECV_F:
                now.arrived += 1
            case ActionKind.RECV_B:
                now.back += 1
            case ActionKind.WAIT_F:
                now.sending.discard(action.microbatch)
            case ActionKind.WAIT_B:
                now.returning -= 1

    def _made(self, stage: int, kind: ActionKind) -> dict[str, Bytes]:
        """The gradients of a stage that exist when an action has ended: after I, without those that W makes."""
        one = self.own[stage]
        every = zip(one.names, one.memory.gradients, one.memory.made_later, strict=True)
        return {name: size for name, size, later in every if not (later and kind == ActionKind.BACKWARD_INPUT)}


__all__ = ["HeldStage", "rank_peaks"]

"""Adds messages to a schedule (where each rank sends, receives and waits), and proves that no rank waits forever.

    0F0,0F1,0B0,0B1      0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_F0,0WAIT_F1
    1F0,1B0,1F1,1B1  ->  1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_B0,1WAIT_B1

A send and its receive are one event in the clock's time, entered in the lists of both ranks, so every list is a subsequence of
one total order of events. Even ranks that block in every send and receive would therefore finish, in this order; all the more
do ranks that wait later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopar.pipeline.clock import Clock, StageSeconds, receiver, send
from autopar.pipeline.dependencies import hang
from autopar.pipeline.schedule import COMPUTING, Action, ActionKind, PipelineSchedule

RECEIVE = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
WAIT = {ActionKind.SEND_F: ActionKind.WAIT_F, ActionKind.SEND_B: ActionKind.WAIT_B}


def with_messages(schedule: PipelineSchedule, stages: Sequence[StageSeconds], *, unfinished: int = 2) -> PipelineSchedule:
    """The schedule with its sends, receives and waits, in the order in which the clock has them.

    Args:
        schedule: a schedule without messages.
        stages: seconds of each stage, which decide the order.
        unfinished: how many sends a rank may have in flight, whose buffers it holds; before another, it waits for the oldest.

    Raises ConstraintError for a schedule that hangs.
    """
    clock = Clock(schedule)
    timeline, rank_of = clock.run(stages), schedule.rank_of
    place = {row.action: n for n, row in enumerate(clock.rows)}
    events = []
    for one in (timed for computed in timeline.computed for timed in computed):
        events.append((one.start, place[one.action], 0, one.action))
        if rank_of.get(receiver(one.action, schedule.stages), rank := rank_of[one.action.stage]) != rank:
            events.append((one.stop, place[one.action], 1, send(one.action)))
    ranks = [_Writer(unfinished) for _ in schedule.ranks]
    for *_, action in sorted(events, key=lambda event: event[:3]):
        ranks[rank_of[action.stage]].put(action)
        if action.kind in RECEIVE:
            received = counterpart(action)
            ranks[rank_of[received.stage]].put(received)
    return PipelineSchedule(ranks=tuple(writer.finish() for writer in ranks))


def counterpart(sent: Action) -> Action:
    """The receive of a send: by the next stage for activations, by the previous one for gradients."""
    to = sent.stage + (1 if sent.kind == ActionKind.SEND_F else -1)
    return Action(stage=to, kind=RECEIVE[sent.kind], microbatch=sent.microbatch)


class _Writer:
    """Collects the actions of one rank; `pending` are the waits that its sends still need."""

    def __init__(self, unfinished: int) -> None:
        self.unfinished = unfinished
        self.actions: list[Action] = []
        self.pending: deque[Action] = deque()

    def put(self, action: Action) -> None:
        if action.kind in WAIT:
            if len(self.pending) == self.unfinished:
                self.actions.append(self.pending.popleft())
            self.pending.append(Action(stage=action.stage, kind=WAIT[action.kind], microbatch=action.microbatch))
        self.actions.append(action)

    def finish(self) -> tuple[Action, ...]:
        return (*self.actions, *self.pending)


def replay(schedule: PipelineSchedule) -> None:
    """Run a schedule with messages by the strictest rules of any communication library; raises ConstraintError if it hangs.

    Each rank has one queue of sends and receives, in the order in which it issues them. A message passes when its send and its
    receive are both at the head of their queues: a rendezvous, as in NCCL with one communicator for all ranks, and in gloo once
    its buffers are full. A computation waits for its receive, a wait for its send.
    """
    queues: list[deque[Action]] = [deque() for _ in schedule.ranks]
    passed: set[Action] = set()
    at, moved = [0] * len(schedule.ranks), True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions) and _ready(actions[at[rank]], schedule, passed):
                action = actions[at[rank]]
                if action.kind in COMPUTING:
                    passed.add(action)
                elif action.kind not in WAIT.values():
                    queues[rank].append(action)
                at[rank] += 1
                moved = True
            moved |= _pass(queues, rank, schedule, passed)
    if any(at[rank] < len(actions) for rank, actions in enumerate(schedule.ranks)) or any(queues):
        stuck = ((rank, actions[at[rank] : at[rank] + 1]) for rank, actions in enumerate(schedule.ranks))
        raise hang([f"rank {rank} at {', '.join(map(str, [*next_one, *queues[rank]]))}" for rank, next_one in stuck])


def _pass(queues: list[deque[Action]], rank: int, schedule: PipelineSchedule, passed: set[Action]) -> bool:
    """Pass the rank's messages that are at the head of both queues; whether there was any."""
    found = False
    while queues[rank] and queues[rank][0].kind in RECEIVE:
        received = counterpart(queues[rank][0])
        other = queues[schedule.rank_of[received.stage]]
        if not other or other[0] != received:
            break
        passed |= {queues[rank].popleft(), other.popleft()}
        found = True
    return found


def _ready(action: Action, schedule: PipelineSchedule, passed: set[Action]) -> bool:
    """Whether a rank can proceed past an action."""
    stage, k, rank_of = action.stage, action.microbatch, schedule.rank_of

    def has(stage: int, *kinds: ActionKind) -> bool:
        return any(Action(stage=stage, kind=kind, microbatch=k) in passed for kind in kinds)

    match action.kind:
        case ActionKind.WAIT_F:
            return has(stage, ActionKind.SEND_F)
        case ActionKind.WAIT_B:
            return has(stage, ActionKind.SEND_B)
        case ActionKind.SEND_F:
            return has(stage, ActionKind.FORWARD)
        case ActionKind.SEND_B:
            return has(stage, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        case ActionKind.FORWARD if stage:
            near = rank_of[stage - 1] == rank_of[stage]
            return has(stage - 1, ActionKind.FORWARD) if near else has(stage, ActionKind.RECV_F)
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT if stage < schedule.stages - 1:
            near = rank_of[stage + 1] == rank_of[stage]
            backward = ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT
            return has(stage + 1, *backward) if near else has(stage, ActionKind.RECV_B)
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
            return has(stage, ActionKind.FORWARD)
        case ActionKind.BACKWARD_WEIGHT:
            return has(stage, ActionKind.BACKWARD_INPUT)
    return True


__all__ = ["counterpart", "replay", "with_messages"]

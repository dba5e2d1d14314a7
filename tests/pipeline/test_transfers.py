"""Messages in a schedule: those of torch, in an order in which no rank waits forever."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from autopar.errors import ConstraintError
from autopar.pipeline.clock import StageSeconds
from autopar.pipeline.named_schedules import named
from autopar.pipeline.schedule import COMPUTING, Action, ActionKind, PipelineSchedule
from autopar.pipeline.transfers import replay, with_messages
from tests.pipeline.orders import any_schedule, any_seconds

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
EQUAL = StageSeconds(forward=1, backward_input=2, activations=0.1, gradients=0.1)
NAMES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


def written(text: str) -> PipelineSchedule:
    """A schedule with messages from its text."""
    rows = [[cell.strip() for cell in row.split(",")] for row in text.splitlines()]
    return PipelineSchedule(
        ranks=tuple(
            tuple(Action(stage=int(cell[0]), kind=ActionKind(cell[1:-1]), microbatch=int(cell[-1])) for cell in row)
            for row in rows
        )
    )


def test_the_messages_of_1f1b_on_two_ranks() -> None:
    found = with_messages(named("1f1b", 2, 2), [EQUAL] * 2)
    assert str(found).splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_F0,0WAIT_F1",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1WAIT_B0,1WAIT_B1",
    ]
    assert found == written(str(found))


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
@pytest.mark.parametrize("p, m", [(2, 4), (4, 8)])
def test_sends_and_receives_are_those_of_torch(name: str, chunks: int, p: int, m: int) -> None:
    """Torch also writes messages between stages of one rank, at the turn of the V, which its runtime does not send."""
    theirs = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
    schedule = with_messages(named(name, p, m, chunks=chunks), [EQUAL] * p * chunks)
    if chunks == 1:  # torch prints messages of schedules of several stages a rank only
        expected = [
            Counter(f"{r}{kind}{k}" for k in range(m) for kind, has in
                    [("SEND_F", r < p - 1), ("RECV_B", r < p - 1), ("SEND_B", r > 0), ("RECV_F", r > 0)] if has)
            for r in range(p)
        ]  # fmt: skip
    else:
        printed = get_schedule_ops(theirs[name], p, m, chunks, with_comms=True)
        expected = [Counter(str(a) for a in actions if a and a.computation_type.value in MESSAGES) for actions in printed]
    for rank, actions in enumerate(schedule.ranks):
        found = Counter(str(a) for a in actions if a.kind in MESSAGES)
        assert found == expected[rank], rank


@pytest.mark.parametrize("name, chunks", NAMES)
@pytest.mark.parametrize("unfinished", [1, 2])
def test_no_named_schedule_hangs(name: str, chunks: int, unfinished: int) -> None:
    for p, rounds in itertools.product((1, 2, 3, 4, 8), (1, 2, 3)):
        found = with_messages(named(name, p, p * rounds, chunks=chunks), [EQUAL] * p * chunks, unfinished=unfinished)
        replay(found)


def test_no_schedule_that_can_run_hangs_for_its_messages() -> None:
    """Any order, unequal stages and messages, one or two sends under way; every send is waited for."""
    draw = random.Random(3)
    for _ in range(300):
        schedule, unfinished = any_schedule(draw), draw.choice((1, 2))
        found = with_messages(schedule, any_seconds(draw, schedule.stages), unfinished=unfinished)
        replay(found)
        for before, after in zip(schedule.ranks, found.ranks, strict=True):
            assert tuple(action for action in after if action.kind in COMPUTING) == before
            open_sends = most = 0
            for action in after:
                open_sends += action.kind.startswith("SEND") - action.kind.startswith("WAIT")
                most = max(most, open_sends)
            assert open_sends == 0
            assert most <= unfinished


HANGING = {
    "both receive first": "0F0,0RECV_B0,0SEND_F0,0B0,0WAIT_F0\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_B0",
    "out of order": "0F0,0F1,0SEND_F0,0SEND_F1,0WAIT_F0,0WAIT_F1\n1RECV_F1,1RECV_F0,1F0,1F1",
    "nothing sent": "0F0\n1RECV_F0,1F0",
    "nothing received": "0F0,0SEND_F0,0WAIT_F0\n1F0",
    "waits before it sends": "0F0,0WAIT_F0,0SEND_F0\n1RECV_F0,1F0",
    "both send at once": "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_F1,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_B0,1RECV_F1,1F1",
}


@pytest.mark.parametrize("text", HANGING.values(), ids=HANGING)
def test_what_hangs_where_messages_meet_is_refused(text: str) -> None:
    with pytest.raises(ConstraintError, match="the pipeline schedule hangs"):
        replay(written(text))

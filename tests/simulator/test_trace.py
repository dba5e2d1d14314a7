"""The trace of a timeline: JSON that a viewer reads, whatever the names; no slices of a row overlap."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from autopar.simulator.timeline import Await, Computation, Instruction, Issue, Transfer, simulate
from autopar.simulator.trace import trace
from tests.simulator.test_timeline import betas, programs

HOSTILE = ['"', "\\", "\n", "\0", "</script>", "\ud800", "\u2028", "{}", "NaN", "[bold]", "\N{MATHEMATICAL FRAKTUR SMALL X}"]


@given(programs(), betas)
def test_slices_of_a_row_do_not_overlap_and_last_as_long_as_what_they_stand_for(
    program: list[Instruction], beta: float
) -> None:
    timeline = simulate(program, beta)
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    events = json.loads(trace(timeline))["traceEvents"]
    for event in events:
        if event["ph"] == "X":
            start = round(1000 * event["ts"])
            rows[event["tid"]].append((start, start + round(1000 * event["dur"])))
    for row in rows.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(row))
    said = sum(stop - start for start, stop in rows[0])
    spent = sum(one.seconds for one in (*timeline.computing, *timeline.waiting))
    assert abs(said - 1e9 * spent) <= 1 + len(rows[0])
    assert len(events) - sum(map(len, rows.values())) == 1 + 2 * (1 + len({sent.transfer.channel for sent in timeline.sent}))


@given(st.lists(st.sampled_from(HOSTILE), min_size=1).map("".join))
def test_any_name_survives(name: str) -> None:
    issue = Issue(transfer=Transfer(name=name, kind=name, channel=name, bytes=1, seconds=1.0))
    program = [issue, Computation(name=name, kind=name, seconds=0.25), Await(issue=issue)]
    text = trace(simulate(program, 0.5), name)
    assert text.isascii()
    events = json.loads(text, parse_constant=lambda constant: None)["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == [name, name, name]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {name}


def test_the_rows_are_named_and_a_message_says_what_it_exposes() -> None:
    issue = Issue(transfer=Transfer(name="w", kind="all_gather", channel="dp", bytes=64, seconds=3e-6))
    program = [issue, Computation(name="a", kind="forward", seconds=1e-6), Await(issue=issue)]
    events = json.loads(trace(simulate(program, 0.5), "GPT-2"))["traceEvents"]
    named = [(event["tid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert named == [(0, "computing"), (1, "messages over dp")]
    assert [event for event in events if event["ph"] == "X"] == [
        {"ph": "X", "pid": 0, "tid": 0, "name": "a", "cat": "forward", "ts": 0.0, "dur": 2.0},
        {"ph": "X", "pid": 0, "tid": 0, "name": "w", "cat": "wait", "ts": 2.0, "dur": 1.0},
        {
            "ph": "X", "pid": 0, "tid": 1, "name": "w", "cat": "all_gather", "ts": 0.0, "dur": 3.0,
            "args": {"bytes": 64, "issued us": 0.0, "exposed us": 1.0, "hidden us": 2.0},
        },
    ]  # fmt: skip

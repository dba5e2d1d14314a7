"""The simulation of one device: closed forms, and laws for any program of computations and messages."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.device import Seconds
from autopar.simulator.timeline import Await, Computation, Instruction, Issue, Timeline, Transfer, simulate

AXES = ("dp", "tp", "host")

seconds = st.floats(0, 4, allow_subnormal=False)
betas = st.floats(0, 1)


def work(seconds: Seconds) -> Computation:
    return Computation(name="op", kind="forward", seconds=seconds)


def message(seconds: Seconds, axis: str = "dp") -> Issue:
    return Issue(transfer=Transfer(name=f"{axis} message", kind="all_gather", channel=axis, bytes=8, seconds=seconds))


@st.composite
def programs(draw: st.DrawFn) -> list[Instruction]:
    """Any program: every message that it issues is awaited later, sooner or at the end."""
    program: list[Instruction] = []
    waiting: list[Issue] = []
    for _ in range(draw(st.integers(0, 12))):
        what = draw(st.sampled_from(["compute", "issue", "wait"]))
        if what == "compute":
            program.append(work(draw(seconds)))
        elif what == "issue":
            issue = message(draw(seconds), draw(st.sampled_from(AXES)))
            waiting.append(issue)
            program.append(issue)
        elif waiting:
            program.append(Await(issue=waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
    return program + [Await(issue=issue) for issue in waiting]


def loads(program: Sequence[Instruction]) -> dict[str, Seconds]:
    """What each stream has to do."""
    found: dict[str, Seconds] = defaultdict(float)
    for instruction in program:
        match instruction:
            case Computation():
                found["computing"] += instruction.seconds
            case Issue():
                found[instruction.transfer.channel] += instruction.transfer.seconds
    return found


def near(value: Seconds) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-9)


@given(seconds, seconds, betas)
def test_one_region_takes_what_the_rows_of_the_integer_program_say(compute: Seconds, comm: Seconds, beta: float) -> None:
    issue = message(comm)
    found = simulate([issue, work(compute), Await(issue=issue)], beta)
    assert found.seconds == near(max(compute + beta * comm, comm))


@given(seconds, st.lists(seconds, max_size=3), betas)
def test_a_region_with_messages_on_several_axes_does_too(compute: Seconds, comms: list[Seconds], beta: float) -> None:
    issues = [message(comm, axis) for comm, axis in zip(comms, AXES, strict=False)]
    found = simulate([*issues, work(compute), *(Await(issue=issue) for issue in issues)], beta)
    if beta * len(comms) <= 1:  # else the messages alone take more than the device has, and slow each other down
        assert found.seconds == near(max(compute + beta * sum(comms), *comms, 0.0))


@given(st.integers(1, 9), seconds, seconds, betas)
def test_a_chain_of_blocks_that_prefetches_one_ahead(blocks: int, compute: Seconds, gather: Seconds, beta: float) -> None:
    """The first gather is exposed, the last block has none beside it."""
    issues = [message(gather) for _ in range(blocks)]
    program: list[Instruction] = [issues[0]]
    for issue, following in itertools.zip_longest(issues, issues[1:]):
        program += [Await(issue=issue), *([following] if following else []), work(compute)]
    found = simulate(program, beta)
    assert found.seconds == near(gather + (blocks - 1) * max(compute + beta * gather, gather) + compute)


@given(seconds, seconds, seconds, betas)
def test_messages_that_share_an_axis_share_its_rate(compute: Seconds, one: Seconds, both: Seconds, beta: float) -> None:
    """The rows of the integer program: computing is slowed by both, and a link carries them one after the other."""
    alone, over = (
        Issue(transfer=Transfer(name=name, kind="all_gather", channel=name, axes=axes, bytes=8, seconds=takes))
        for name, axes, takes in (("dp", (0,), one), ("dp_tp", (0, 1), both))
    )
    found = simulate([alone, over, work(compute), Await(issue=alone), Await(issue=over)], beta)
    assert found.seconds == near(max(compute + beta * (one + both), one + both))
    apart = replace(over.transfer, channel="tp", axes=(1,))
    other = Issue(transfer=apart)
    beside = simulate([alone, other, Await(issue=alone), Await(issue=other)], beta).seconds
    assert beside == near(max(one, both) - min(one, both) + max(1, 2 * beta) * min(one, both))


@given(programs())
def test_a_step_takes_the_sum_where_nothing_is_gained_by_overlap(program: list[Instruction]) -> None:
    assert simulate(program, 1.0).seconds == near(sum(loads(program).values()))


@given(st.lists(st.tuples(seconds, seconds, st.sampled_from(AXES))), betas)
def test_a_step_takes_the_sum_where_every_message_is_awaited_at_once(
    blocks: list[tuple[Seconds, Seconds, str]], beta: float
) -> None:
    program: list[Instruction] = []
    for compute, comm, axis in blocks:
        issue = message(comm, axis)
        program += [issue, Await(issue=issue), work(compute)]
    found = simulate(program, beta)
    assert found.seconds == near(sum(loads(program).values()))
    assert sum(one.hidden for one in found.sent) == near(0.0)


@given(programs(), betas)
def test_a_step_lies_between_its_busiest_stream_and_the_sum(program: list[Instruction], beta: float) -> None:
    found, each = simulate(program, beta).seconds, loads(program).values()
    assert max(each, default=0.0) <= found * (1 + 1e-9) + 1e-9
    assert found <= sum(each) * (1 + 1e-9) + 1e-9


@given(programs(), betas, st.floats(0, 1))
def test_a_faster_link_never_makes_a_step_longer(program: list[Instruction], beta: float, factor: float) -> None:
    faster: dict[Issue, Issue] = {
        one: Issue(transfer=replace(one.transfer, seconds=one.transfer.seconds * factor))
        for one in program
        if isinstance(one, Issue) and one.transfer.channel == "dp"
    }

    def quick(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Await):
            return Await(issue=faster.get(instruction.issue, instruction.issue))
        return faster.get(instruction, instruction) if isinstance(instruction, Issue) else instruction

    assert simulate(map(quick, program), beta).seconds <= simulate(program, beta).seconds * (1 + 1e-9) + 1e-9


@given(programs(), betas)
def test_exposed_and_hidden_are_the_whole_message_and_waiting_is_what_is_exposed(
    program: list[Instruction], beta: float
) -> None:
    found = simulate(program, beta)
    for one in found.sent:
        assert one.exposed + one.hidden == near(one.seconds)
        assert -1e-9 <= one.exposed <= one.seconds + 1e-9
        assert one.issued <= one.start <= one.stop
        assert one.seconds >= one.transfer.seconds - 1e-9
    assert sum(one.exposed for one in found.sent) == near(found.exposed)
    assert found.work + found.slowdown + found.exposed == near(found.seconds)
    assert found.slowdown >= -1e-9


@given(programs(), betas)
def test_a_stream_does_one_thing_at_a_time_in_the_order_of_the_program(program: list[Instruction], beta: float) -> None:
    found = simulate(program, beta)
    streams: dict[str, list[tuple[Seconds, Seconds]]] = defaultdict(list)
    for one in sorted((*found.computing, *found.waiting), key=lambda one: (one.start, one.stop)):
        streams["computing"].append((one.start, one.stop))
    for sent in found.sent:
        streams[sent.transfer.channel].append((sent.start, sent.stop))
    for stream in streams.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(stream))


def test_nothing_takes_no_time() -> None:
    assert simulate([], 0.5) == Timeline(computing=(), waiting=(), sent=(), work=0)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan")])
def test_an_interference_that_is_no_share_of_a_device_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="between nothing and all of a device"):
        simulate([], beta)


def test_a_message_that_was_not_issued_cannot_be_awaited() -> None:
    with pytest.raises(ValueError, match="dp message is awaited before it is issued"):
        simulate([Await(issue=message(1.0))], 0.5)

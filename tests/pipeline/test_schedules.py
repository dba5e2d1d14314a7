"""Pipeline schedules: torch's own, action by action; printed schedules parse again; invalid ones are refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from torch.distributed.pipelining import _schedule_visualizer
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.errors import ConstraintError
from autopar.pipeline.dependencies import check
from autopar.pipeline.named_schedules import named
from autopar.pipeline.schedule import Action, ActionKind, PipelineSchedule, parse

TORCH = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3), "zb-v": (2,)}
MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16)


def of_torch(name: str, p: int, m: int, chunks: int) -> PipelineSchedule:
    """The schedule as torch has it.

    For the last rank of 1F1B torch 2.13 prints its forwards one too late (what it runs is right): 1 to m.
    """
    printed = _schedule_visualizer.get_schedule_ops(TORCH[name], p, m, chunks)
    ranks = []
    for rank, actions in enumerate(printed):
        found = [a for a in actions if a is not None and a.microbatch_index is not None]
        late = name == "1f1b" and rank == p - 1
        ranks.append(
            tuple(
                Action(
                    stage=a.stage_index,
                    kind=ActionKind(a.computation_type.value),
                    microbatch=(a.microbatch_index or 0) - (late and a.computation_type.value == "F"),
                )
                for a in found
            )
        )
    return PipelineSchedule(ranks=tuple(ranks))


@pytest.mark.parametrize("name", TORCH)
def test_a_schedule_is_that_of_torch(name: str) -> None:
    compared = 0
    for p, m, chunks in itertools.product(range(1, 9), MICROBATCHES, CHUNKS[name]):
        if name in ("gpipe", "1f1b") and m < p:
            continue  # torch refuses fewer micro-batches than ranks
        if name == "interleaved" and m % max(1, m // p):
            continue
        assert named(name, p, m, chunks=chunks) == of_torch(name, p, m, chunks), (p, m, chunks)
        compared += 1
    assert compared >= 40


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
def test_what_is_printed_is_read_by_autopar_and_by_torch(name: str, chunks: int, tmp_path: Path) -> None:
    made = named(name, 4, 8, chunks=chunks)
    check(made)
    assert parse(f"{made}\n") == made
    assert (made.stages, made.microbatches) == (4 * chunks, 8)
    for rank, line in zip(made.ranks, str(made).splitlines(), strict=True):
        theirs = [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        assert [str(action) for action in rank] == [str(action) for action in theirs]


def test_1f1b_ahead_runs_more_forwards_first_and_none_on_the_last_rank() -> None:
    assert str(named("1f1b", 3, 6, ahead=1)).splitlines() == [
        "0F0,0F1,0F2,0F3,0B0,0F4,0B1,0F5,0B2,0B3,0B4,0B5",
        "1F0,1F1,1F2,1B0,1F3,1B1,1F4,1B2,1F5,1B3,1B4,1B5",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4,2F5,2B5",
    ]
    for ahead in range(9):
        made = named("1f1b", 4, 32, ahead=ahead)
        check(made)
        assert [made.in_flight(rank) for rank in range(4)] == [4 - r + min(ahead, 3 - r) for r in range(4)]


def test_cells_where_a_rank_idles_are_empty() -> None:
    assert parse("0F0,,,0B0\n\n, 1F0 ,1B0\n") == parse("0F0,0B0\n1F0,1B0")


REFUSED = {
    "0F0,0X0": "'0X0' is not an action of a pipeline schedule",
    "0F0,0SEND_F0,0B0\n1F0,1B0": "'0SEND_F0' is not an action of a pipeline schedule",
    "": "the pipeline schedule is empty",
    "0F0,0B0\n,": "rank 1 of the pipeline schedule has no actions",
    "0F0,0B0\n1F0": "the pipeline schedule lacks 1B0",
    "0F0,0B0,0B1\n1F0,1B0,1F1,1B1": "the pipeline schedule lacks 0F1",
    "0F0,0I0": "the pipeline schedule lacks 0W0",
    "0F0,0W0": "the pipeline schedule lacks 0I0",
    "0F0,0B0\n2F0,2B0": "the pipeline schedule lacks 1F0",
    "0F0,0B0,0B0": "the pipeline schedule repeats 0B0",
    "0F0,0I0,0W0,0B0": "the pipeline schedule lacks either 0B0 or 0I0, 0W0: it has both",
    "0F0,1B0\n1F0,0B0": "stage 0 of the pipeline schedule runs on rank 0 and on rank 1",
    "0B0,0F0": "the pipeline schedule hangs",
    "0F0,0W0,0I0": "the pipeline schedule hangs",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1": "the pipeline schedule hangs",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(ConstraintError) as raised:
        check(parse(text))
    assert raised.value.what == REFUSED[text]


def test_errors_say_where_and_what_is_waited_for() -> None:
    with pytest.raises(ConstraintError) as raised:
        check(parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    assert raised.value.details["waiting"] == "rank 0 at 0B0, for 1B0\nrank 1 at 1F1, for 0F1"
    with pytest.raises(ConstraintError) as raised:
        parse("0F0,0B0\n1F0,oops", source="mine.csv")
    assert raised.value.details["at"] == "mine.csv, rank 1, cell 1"


@pytest.mark.parametrize(
    "name, ranks, microbatches, chunks, ahead",
    [
        ("2f2b", 4, 8, 1, 0),
        ("gpipe", 0, 8, 1, 0),
        ("gpipe", 4, 0, 1, 0),
        ("1f1b", 4, 8, 1, -1),
        ("1f1b", 4, 8, 2, 0),
        ("zb-v", 4, 8, 1, 0),
        ("zb-v", 4, 8, 2, 1),
        ("interleaved", 4, 8, 1, 0),
        ("interleaved", 4, 9, 2, 0),
    ],
)
def test_what_a_schedule_does_not_have_is_refused(name: str, ranks: int, microbatches: int, chunks: int, ahead: int) -> None:
    with pytest.raises(ConstraintError):
        named(name, ranks, microbatches, chunks=chunks, ahead=ahead)

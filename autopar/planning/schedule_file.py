"""Reads pipeline schedules from files in torch's CSV notation: as data, checked in full, never executed.

0F0,0F1,,0B0,0B1        rank 0; it idles in empty cells
,1F0,1B0,1F1,1B1        rank 1
"""

from __future__ import annotations

from autopar import files
from autopar.errors import ConstraintError
from autopar.pipeline.dependencies import check
from autopar.pipeline.schedule import PipelineSchedule, parse

SUFFIX = ".csv"
LARGEST = 2**21  # bytes of a file: 290,000 actions, as of 128 stages and 1,100 micro-batches; half of it takes 2.8 CPU s
FIX = "a line per rank of the pipeline, such as 0F0,0F1,0B0,0B1"


def is_file(schedule: str) -> bool:
    """Whether a requested schedule is a file rather than a name."""
    return schedule.endswith(SUFFIX)


def read_schedule(path: str) -> PipelineSchedule:
    """The schedule in a file.

    Raises ConstraintError if it is not such a file, or the schedule lacks or repeats an action, has a stage on two ranks, or
    would hang.
    """
    try:
        text = files.read(path, LARGEST)
    except (OSError, ValueError) as error:
        raise ConstraintError(f"cannot read the pipeline schedule {path}", error=error, fix=FIX) from error
    found = parse(text, source=path)
    check(found)
    return found


def fitting(path: str, ranks: int, stages: int | None, microbatches: int) -> PipelineSchedule:
    """The schedule in a file, which must have so many ranks, stages (None: any number) and micro-batches.

    Raises ConstraintError if it has others.
    """
    found = read_schedule(path)
    pairs = {
        "ranks": (len(found.ranks), ranks, "an axis of so many ranks, or a line of actions for each rank of this one"),
        "stages": (found.stages, found.stages if stages is None else stages, "stages= their number, or leave it out"),
        "micro-batches": (found.microbatches, microbatches, "microbatches= their number, or leave it out"),
    }
    for what, (has, asked, fix) in pairs.items():
        if has != asked:
            raise ConstraintError(f"the pipeline schedule {path} has {has} {what}, and {asked} are asked for", fix=fix)
    return found


__all__ = ["fitting", "is_file", "read_schedule"]

"""Checks options and a program for features that pipeline stages do not support, before the search."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ConstraintError
from autopar.ir.program import Program
from autopar.pipeline.named_schedules import CHUNKS, parts
from autopar.plan.options import AUTO, Options
from autopar.plan.stages import loss_of
from autopar.planning.plan_search import check_number
from autopar.planning.schedule_file import is_file


def check_options(options: Options) -> None:
    """Raise ConstraintError for options that a pipeline does not support."""
    _check_stages(options.stages)
    if not isinstance(options.schedule, str):
        what = f"schedule={options.schedule!r} is neither the name of a pipeline schedule nor a file"
        raise ConstraintError(what, fix=f"{AUTO!r}, {', '.join(map(repr, (*CHUNKS, 'interleaved')))}, or a file.csv")
    if options.schedule != AUTO and not is_file(options.schedule):
        parts(options.schedule)
    if options.microbatches != AUTO:
        check_number(options.microbatches)
    if options.pipeline != AUTO:
        return
    if options.stages != AUTO:
        what = f"stages={options.stages!r} are of the ranks of an axis, and pipeline={AUTO!r} chooses how many these are"
        raise ConstraintError(what, fix="pipeline= the name of the axis, or no stages=")
    for name, line in options.constraints.items():
        if line.partition(",")[0].strip() != "*":
            what = f"the constraint {name!r} names a layout on the outermost axis, which pipeline={AUTO!r} may cut"
            raise ConstraintError(what, layout=line, fix="* for that axis, or pipeline= the name of an axis")


def _check_stages(stages: object) -> None:
    """Raise ConstraintError for anything but a number of stages or a list of modules."""
    number = isinstance(stages, int) and not isinstance(stages, bool) and stages > 0
    if stages != AUTO and (isinstance(stages, str) or not (number or isinstance(stages, Sequence))):
        fix = f"{AUTO!r}, their number, or a list of the modules at which all but the first begin"
        raise ConstraintError(f"stages={stages!r} is not a number of stages", fix=fix)


def check_program(program: Program) -> None:
    """Raise ConstraintError for a program that cannot be cut into stages."""
    if any(value.requires_grad for value in program.inputs):
        raise ConstraintError("a pipeline computes no gradients of inputs", fix="a sample whose tensors require none")
    loss_of(program)


__all__ = ["check_options", "check_program"]

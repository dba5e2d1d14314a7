"""Checks command-line values that are wrong for every model and mesh, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.analysis.recompute_policy import check_policy
from autopar.cost_models import catalog
from autopar.explain.cli_arguments import errors_of_usage
from autopar.ir.mesh import AutoMesh, Mesh
from autopar.passes.precision import stored
from autopar.plan.budget import byte_count
from autopar.plan.keyword_options import options_of
from autopar.plan.options import AUTO, Options
from autopar.planning.mesh_shapes import check_axes
from autopar.planning.pipeline_checks import check_options
from autopar.planning.pipeline_stages import without_axis
from autopar.planning.plan_search import check_number, check_seconds
from autopar.planning.schedule_file import is_file, read_schedule
from autopar.search_space.schemes import check_strategy
from autopar.search_space.strategies import OTHER_NAMES


def options_of_values(values: Mapping[str, object]) -> Options:
    """The given options. Raises UsageError for an invalid value."""
    with errors_of_usage():
        options = Options(**options_of(values))  # type: ignore[arg-type]
        _check(options)
    return options


def check_names_axes(options: Options, mesh: Mesh | AutoMesh) -> None:
    """Raise UsageError for a pipeline over an axis that the mesh does not have."""
    with errors_of_usage():
        if isinstance(mesh, AutoMesh):
            check_axes(options)
        elif options.pipeline is not None and options.pipeline != AUTO:
            without_axis(mesh, options.pipeline)


def _check(options: Options) -> None:
    """Raise the error that planning would raise for this word or amount."""
    check_strategy(OTHER_NAMES.get(options.strategy, options.strategy))
    check_policy(options.recompute)
    stored(options.precision, options.reduce)
    _ = options.stepped
    if options.pipeline is not None:
        check_options(options)
        if is_file(options.schedule):
            read_schedule(options.schedule)
    if options.device is not None:
        catalog.device(options.device)
    if options.time_limit is not None:
        check_seconds(options.time_limit)
    if options.microbatches != AUTO:
        check_number(options.microbatches)
    if options.budget is not None:
        byte_count(options.budget, "a memory budget")
    if options.host_memory is not None:
        byte_count(options.host_memory, "an amount of the host's memory", per="node", least=0)
    if options.disk_memory is not None:
        byte_count(options.disk_memory, "an amount of the disk", per="node")


__all__ = ["check_names_axes", "options_of_values"]

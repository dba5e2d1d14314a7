"""Values of the command line that no model and no mesh makes right: they are refused before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.analysis.recompute_policy import check_policy
from autopar.cost_models import catalog
from autopar.errors import AutoparError
from autopar.explain.cli_arguments import UsageError
from autopar.passes.precision import stored
from autopar.plan.budget import byte_count
from autopar.plan.keyword_options import options_of
from autopar.plan.options import AUTO, Options
from autopar.planning.plan_search import check_number, check_seconds
from autopar.search_space.schemes import check_strategy
from autopar.search_space.strategies import OTHER_NAMES


def options_of_values(values: Mapping[str, object]) -> Options:
    """The options that were given. Raises UsageError for a value that an option does not have."""
    try:
        options = Options(**options_of(values))  # type: ignore[arg-type]
        _check(options)
    except AutoparError as error:
        raise UsageError(error.what, **error.details) from error
    return options


def _check(options: Options) -> None:
    """Raise the error of planning for a word or an amount that it would not take."""
    check_strategy(OTHER_NAMES.get(options.strategy, options.strategy))
    check_policy(options.recompute)
    stored(options.precision, options.reduce)
    _ = options.stepped
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


__all__ = ["options_of_values"]

"""Which gathered weights FSDP drops after use and gathers again for the backward: all but those that the backward begins with.

    embed        dropped, though the backward does not need it: nothing else travels with it
    h.0  h.1     dropped, and gathered again
    ln_f  head   kept: the backward needs them at once, and never later

Dropping weights that are gathered again at once would save memory only while the loss is computed. FSDP2 keeps the weights of
the root module in the same way (`reshard_after_forward=None`,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.analysis.analysis import Analysis, saves
from autopar.analysis.step_regions import step_regions
from autopar.analysis.weight_buckets import weight_buckets


def dropped_weights(analysis: Analysis) -> frozenset[str]:
    """The dropped weights, with their copies and views: all but those of buckets that the backward does not need after its
    first member. With several micro-batches in flight each would keep its own copy: then all are dropped.
    """
    if analysis.step.flights > 1:
        return analysis.weights
    regions = step_regions(analysis)
    last, kept = len(regions.sequence) - 1, set[str]()
    for names in weight_buckets(analysis.program, moved=True):
        group = [weight for name in names for weight in _derived(analysis, name)]
        saving = [regions.member[op] for weight in group for op in _saving(analysis, weight)]
        if set(saving) == {last} and all(_alone(analysis, weight) for weight in group):
            kept.update(group)
    return analysis.weights - kept


def _alone(analysis: Analysis, weight: str) -> bool:
    """Whether a weight, or the op that makes a copy or view of it, has a class of its own."""
    maker = analysis.program.producer.get(weight)
    return len(analysis.classes.members[analysis.classes.of[maker.name if maker else weight]]) == 1


def _derived(analysis: Analysis, weight: str) -> Iterator[str]:
    """A weight, its copies and its views."""
    yield weight
    for op in analysis.readers[weight]:
        for result in op.results:
            if result.name in analysis.weights:
                yield from _derived(analysis, result.name)


def _saving(analysis: Analysis, weight: str) -> Iterator[str]:
    """The ops that save a weight for their backward."""
    for op in analysis.readers[weight]:
        views = any(result.name in analysis.weights for result in op.results)
        places = [place for place, name in enumerate(op.operands) if name == weight]
        if not views and any(saves(analysis, analysis.classes.of[op.name], place) for place in places):
            yield op.name


__all__ = ["dropped_weights"]

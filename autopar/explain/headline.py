"""Summarises a plan in a sentence, and lists what wastes its devices.

16-fold batch over node, sequence and tensor parallel over gpu, weights ZeRO-3 over all 64
axis1 is idle: all its 4 devices do the same; try mesh (16,)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from autopar.plan.breakdown import ADDENDS, OWN_ROWS, REPEATED, WHOLE
from autopar.plan.plan import Plan
from autopar.plan.text import joined

BATCH, SEQUENCE, TENSOR, VOCABULARY, EXPERT, PARTIAL, SHARDS, SAME = (
    "batch", "sequence parallel", "tensor parallel", "vocabulary parallel", "expert parallel", "partial sums", "ZeRO shards",
    "replicated",
)  # fmt: skip
SCHEMES = BATCH, SEQUENCE, TENSOR, VOCABULARY, EXPERT
SCHEME_OF = {
    "batch": BATCH, "rows": BATCH, OWN_ROWS: BATCH, "sequence": SEQUENCE, "vocabulary": VOCABULARY, "classes": VOCABULARY,
    ADDENDS: PARTIAL, WHOLE: SAME, REPEATED: SAME,
}  # fmt: skip
GATHERED = {("S", "R"), ("S", "I")}  # what a weight is before and after an all-gather
WORTH = 0.05  # the share from which a scheme is named
ALL = 0.995  # the share from which an axis is called idle
WASTE = 0.1  # the share of computing that is repeated, or of a step that is idle, from which it is called waste
WAITING = 0.25  # of a step, by waiting for messages


def scheme_of(word: str) -> str:
    """The common name of the scheme that splits a dim; words are those of `plan.breakdown`.

    >>> scheme_of("batch"), scheme_of("out-features"), scheme_of("rows with 2 all-to-alls inside"), scheme_of("whole")
    ('batch', 'tensor parallel', 'expert parallel', 'replicated')
    """
    split, sent, messages = word.partition(" with ")
    if sent and "all-to-all" in messages and split == "rows":
        return EXPERT
    return SCHEME_OF.get(split, TENSOR)


def headline(plan: Plan) -> str:
    """What a plan does with the mesh, in users' terms."""
    parts = plan.stages or (plan,)
    found = [*_stages(plan), *_schemes(parts), *_sharded(parts, plan), *_kept(parts)]
    return ", ".join(found) if found else "nothing is split: every device does all of the work"


def _stages(plan: Plan) -> Iterator[str]:
    if plan.pipeline:
        yield f"{len(plan.stages)} pipeline stages over {plan.pipeline.axis} ({plan.pipeline.schedule})"
    if plan.microbatches > 1:
        yield f"{plan.microbatches} micro-batches"


def _schemes(parts: Sequence[Plan]) -> Iterator[str]:
    """The schemes of the axes: a scheme is named for an axis if it has part of its time."""
    axes, sizes = parts[0].axes, dict(zip(parts[0].axes, parts[0].sizes, strict=True))
    shares = scheme_shares(parts)
    over: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for scheme in SCHEMES:
        used = tuple(axis for axis in axes if shares[axis].get(scheme, 0.0) >= WORTH)
        if scheme == BATCH and used:
            yield f"{math.prod(sizes[axis] for axis in used)}-fold batch over {joined(used)}"
        elif used and not (scheme == VOCABULARY and all(shares[axis].get(TENSOR, 0.0) >= WORTH for axis in used)):
            over[used].append(scheme)
    for used, schemes in over.items():
        yield f"{joined(name.removesuffix(' parallel') for name in schemes)} parallel over {joined(used)}"


def scheme_shares(parts: Sequence[Plan]) -> Mapping[str, Mapping[str, float]]:
    """Axis -> scheme -> its share of the computing time of the ops named by a plan or its stages."""
    found: dict[str, Counter[str]] = {axis: Counter() for axis in parts[0].axes}
    total = 0.0
    for part in parts:
        for op, words in part.breakdown.runs.items():
            seconds = sum(part.breakdown.compute.get(op, ()))
            total += seconds
            for axis, word in zip(part.axes, words, strict=True):
                found[axis][scheme_of(word)] += seconds  # type: ignore[assignment]
    return {axis: {name: seconds / total for name, seconds in held.items() if total} for axis, held in found.items()}


def _sharded(parts: Sequence[Plan], plan: Plan) -> Iterator[str]:
    """The axes over which weights are sharded and gathered before use: those of most of the gathered weights."""
    gathered = [(gathered_axes(part, name), name, part) for part in parts for name in part.breakdown.stored if ":" not in name]
    axes = Counter(over for over, _, _ in gathered if over)
    if not axes:
        return
    over, count = axes.most_common(1)[0]
    stage = 1 if plan.once else 2
    if any(name in part.recompute for found, each, part in gathered if found == over for name in _copies(part, each)):
        stage = 3
    some = "" if 2 * count >= len(gathered) else "some "
    devices = math.prod(size for axis, size in zip(plan.axes, plan.sizes, strict=True) if axis in over)
    where = f"all {devices}" if devices == plan.mesh.size and len(over) > 1 else joined(over)
    yield f"{some}weights ZeRO-{stage} over {where}"


def gathered_axes(part: Plan, name: str) -> tuple[str, ...]:
    """The axes over which a parameter, or its copy in another dtype, is gathered before use."""
    found = set()
    for step in (step for each in _copies(part, name) for step in part.routes.get(each, ())):
        sides = [[entry.strip()[0] for entry in side.split(",")] for side in step.split("->")]
        found |= {axis for axis, change in zip(part.axes, zip(*sides, strict=True), strict=True) if change in GATHERED}
    return tuple(axis for axis in part.axes if axis in found)


def _copies(part: Plan, name: str) -> Iterable[str]:
    return (name, *(copy for copy, of in part.breakdown.copies.items() if of == name))


def _kept(parts: Sequence[Plan]) -> Iterator[str]:
    """What is done instead of keeping activations, not counting repeated casts of weights."""
    for part in parts:
        again = sum(seconds for name, seconds in part.breakdown.recompute.items() if name not in part.breakdown.copies)
        if again >= WORTH * part.breakdown.forward:
            yield "activations recomputed"
            break
    if any(part.breakdown.offload for part in parts):
        yield "activations offloaded to the host"


def waste(plan: Plan) -> list[str]:
    """Wasted device time, each with a remedy: axes that repeat work, waiting, pipeline bubbles."""
    parts = plan.stages or (plan,)
    idle = _idle(parts)
    found = [_without(plan, idle)] if idle else []
    found += [said for axis in parts[0].axes if (said := _repeated(parts, axis))]
    if plan.pipeline and plan.pipeline.timeline.bubble >= WASTE:
        bubble = plan.pipeline.timeline.bubble
        found.append(f"ranks of {plan.pipeline.axis} are idle for {bubble:.0%} of the step: more micro-batches fill it")
    exposed = 0.0 if plan.pipeline else plan.breakdown.simulated.exposed
    if plan.step_time and exposed / plan.step_time >= WAITING:
        found.append(f"devices wait for messages for {exposed / plan.step_time:.0%} of the step")
    return found


def _idle(parts: Sequence[Plan]) -> list[str]:
    """The axes along which all devices do and store the same."""
    shares, first = scheme_shares(parts), parts[0]
    same = [axis for axis in first.axes if shares[axis].get(SAME, 0.0) >= ALL and not _stored_split(parts, axis)]
    return [axis for axis in same if first.sizes[first.axes.index(axis)] > 1]


def _stored_split(parts: Sequence[Plan], axis: str) -> bool:
    """Whether an axis splits stored tensors."""
    place = parts[0].axes.index(axis)
    return any(words[place] != WHOLE for part in parts for words in part.breakdown.stored.values())


def _repeated(parts: Sequence[Plan], axis: str) -> str:
    """The remark on an axis along which devices repeat the same work; empty if that is little, or if the axis is idle."""
    share, first = scheme_shares(parts)[axis].get(SAME, 0.0), parts[0]
    size = first.sizes[first.axes.index(axis)]
    if share < WASTE or size == 1:
        return ""
    if share < ALL:
        return f"{share:.0%} of computing is the same on all {size} devices of {axis}"
    return f"{axis} saves memory only: all its {size} devices compute the same" if _stored_split(parts, axis) else ""


def _without(plan: Plan, idle: Collection[str]) -> str:
    """The remark on idle axes, with a mesh that would suffice."""
    devices = plan.mesh.devices  # an axis of memories is none of the user's
    sizes = dict(zip(devices.axes, devices.sizes, strict=True))
    left = {axis: size for axis, size in sizes.items() if axis not in idle}
    bare = all(axis.startswith("axis") for axis in left)
    mesh = f"mesh {tuple(left.values()) or (1,)}" if bare else f"mesh {','.join(f'{axis}={n}' for axis, n in left.items())}"
    are, its = ("is", "its") if len(idle) == 1 else ("are", "their")
    return f"{joined(idle)} {are} idle: all {its} {math.prod(sizes[axis] for axis in idle)} devices do the same; try {mesh}"


__all__ = ["gathered_axes", "headline", "scheme_of", "scheme_shares", "waste"]

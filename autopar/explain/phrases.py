"""The report's phrases: what an operator splits, how a parameter is stored and used, what takes memory.

("out-features", "batch") over (dp, tp)   ->   out-features split over dp, batch split over tp
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.ir.conversion import WAYS
from autopar.ir.mesh import MEMORY
from autopar.plan.breakdown import ADDENDS, HOSTED, ON_DISK, REPEATED, WHOLE, Allocation
from autopar.plan.plan import Plan
from autopar.plan.text import joined

# What is done to a parameter before it is used, by the change of its state; and to its gradient, by the collective.
USES = {
    ("S", "R"): "all-gathered",
    ("S", "I"): "all-gathered",
    ("S", "S"): "resharded by all-to-all",
    ("I", "S"): "sliced",
    ("R", "S"): "sliced",
    ("S", "P"): "padded",
    ("H", "I"): "fetched from the host",
    ("D", "I"): "read from the disk",
}
GRADIENTS = {
    "all_reduce": "all-reduced",
    "reduce_scatter": "reduce-scattered",
    "all_gather": "all-gathered",
    "all_to_all": "resharded by all-to-all",
    "stow": "copied to the host",
    "write": "written to the disk",
}
UNSPLIT = {
    WHOLE: "replicated over {}",
    REPEATED: "replicated over {} (gradient is partial)",
    ADDENDS: "partial over {}",
    HOSTED: "in the host's memory",
    ON_DISK: "on the disk",
}
HELD = {
    "stored": "stored",
    "gradient": "gradient of",
    "produced": "value",
    "converted": "resharded",
    "kept": "saved activation",
    "internal": "saved by",
    "waiting": "of other micro-batches,",
    "flowing": "gradient of",
    "transient": "workspace of",
    "recompute": "recomputed",
    "flight": "bucket in flight:",
}


def runs(words: Sequence[str], axes: Sequence[str]) -> str:
    """What an operator splits over which axes.

    >>> runs(("batch", "whole"), ("dp", "tp"))
    'batch split over dp, replicated over tp'
    >>> runs(("whole", "classes with 2 all-reduces inside"), ("dp", "tp"))
    'classes split over tp with 2 all-reduces inside, replicated over dp'
    """
    if all(word == WHOLE for word in words):
        return "replicated on every device"
    if axes[-1] == MEMORY:  # what runs is on the device
        words, axes = words[:-1], axes[:-1]
    return ", ".join(_grouped(words, axes))


def stored(words: Sequence[str], axes: Sequence[str]) -> str:
    """How a parameter is stored.

    >>> stored(("out-features", "whole"), ("dp", "tp"))
    'out-features split over dp'
    """
    split = [(word, axis) for word, axis in zip(words, axes, strict=True) if word != WHOLE]
    return ", ".join(_grouped(*zip(*split, strict=True))) if split else "replicated on every device"


def _grouped(words: Sequence[str], axes: Sequence[str]) -> Iterable[str]:
    """One phrase per word, the splits first."""
    for word in sorted(dict.fromkeys(words), key=lambda word: word in UNSPLIT):
        over = joined(axis for axis, other in zip(axes, words, strict=True) if other == word)
        split, apart, messages = word.partition(" with ")
        yield UNSPLIT[word].format(over) if word in UNSPLIT else f"{split} split over {over}{apart}{messages}"


def use(plan: Plan, name: str, backward: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """What happens to a parameter or its copies before use, then to their gradients.

    `backward` lists (kind, axis) of the collectives of each in the backward.
    """
    uses: dict[str, list[str]] = {}
    gradients: dict[str, list[str]] = {}
    names = (name, *(copy for copy, of in plan.breakdown.copies.items() if of == name))
    for used, step in ((each, step) for each in names for step in plan.routes.get(each, ())):
        sides = [[entry.strip() for entry in side.split(",")] for side in step.split("->")]
        differ = [axis for axis, (source, target) in enumerate(zip(*sides, strict=True)) if source != target]
        # Where axes share a dim, an entry may also differ by its place in the nest.
        for axis in [axis for axis in differ if sides[0][axis][0] != sides[1][axis][0]] or differ[:1]:
            change = sides[0][axis][0], sides[1][axis][0]
            if change in USES:
                uses.setdefault(USES[change], []).append(plan.axes[axis])
            gradient = WAYS[change][1]
            if (gradient, plan.axes[axis]) in backward.get(used, ()):
                gradients.setdefault(GRADIENTS[gradient], []).append(plan.axes[axis])

    def over(axes: list[str]) -> str:
        return "" if axes == [MEMORY] else f" over {joined(axis for axis in plan.axes if axis in axes)}"

    found = [f"{phrase}{over(axes)} before use" for phrase, axes in uses.items()]
    sums = [f"{phrase}{over(axes)}" for phrase, axes in gradients.items()]
    return found + ([f"gradient {joined(sums)}"] if sums else [])


def held(entry: Allocation) -> str:
    """What takes memory, with its count."""
    return f"{HELD.get(entry.kind, entry.kind)} {entry.name}" + (f", {entry.count} of these" if entry.count > 1 else "")

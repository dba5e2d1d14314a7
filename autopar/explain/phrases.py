"""Sentences for people: what an operator splits, how a parameter is stored and used, how long and how much.

("out-features", "batch") over (dp, tp)   ->   out-features split over dp, batch split over tp
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.ir.conversion import CONVERSIONS
from autopar.plan.breakdown import ADDENDS, REPEATED, WHOLE, Allocation, CostParameter
from autopar.plan.plan import Plan
from autopar.plan.text import size_text

# What is done to a parameter before it is used, by the change of its state; and to its gradient, by the collective.
USES = {
    ("S", "R"): "gathered", ("S", "I"): "gathered", ("S", "S"): "exchanged", ("I", "S"): "cut", ("R", "S"): "cut",
    ("S", "P"): "padded",
}  # fmt: skip
GRADIENTS = {
    "all_reduce": "all-reduced", "reduce_scatter": "reduce-scattered", "all_gather": "gathered", "all_to_all": "exchanged",
}  # fmt: skip
COLLECTIVE = {name: name.replace("_", "-") for name in GRADIENTS}
UNSPLIT = {
    WHOLE: "the same on {}",
    REPEATED: "the same on {} (its gradient in addends)",
    ADDENDS: "in addends over {}",
}  # fmt: skip
HELD = {
    "stored": "stored", "gradient": "gradient of", "produced": "value", "converted": "another layout of", "kept": "saved value",
    "internal": "saved inside", "flowing": "gradient of", "transient": "gradient on its way to",
    "recompute": "made again:", "flight": "on its way, with others:",
}  # fmt: skip


def runs(words: Sequence[str], axes: Sequence[str]) -> str:
    """What an operator splits over which axes.

    >>> runs(("batch", "whole"), ("dp", "tp"))
    'batch split over dp, the same on tp'
    >>> runs(("whole", "classes with 2 all-reduces inside"), ("dp", "tp"))
    'classes split over tp with 2 all-reduces inside, the same on dp'
    """
    if all(word == WHOLE for word in words):
        return "the same on every device"
    return ", ".join(_grouped(words, axes))


def stored(words: Sequence[str], axes: Sequence[str]) -> str:
    """How a parameter is stored.

    >>> stored(("out-features", "whole"), ("dp", "tp"))
    'out-features split over dp'
    """
    split = [(word, axis) for word, axis in zip(words, axes, strict=True) if word != WHOLE]
    return ", ".join(_grouped(*zip(*split, strict=True))) if split else "whole on every device"


def _grouped(words: Sequence[str], axes: Sequence[str]) -> Iterable[str]:
    """One phrase per word, the splits first."""
    for word in sorted(dict.fromkeys(words), key=lambda word: word in UNSPLIT):
        over = together(axis for axis, other in zip(axes, words, strict=True) if other == word)
        split, apart, messages = word.partition(" with ")
        yield UNSPLIT.get(word, f"{split} split over {{}}{apart}{messages}").format(over)


def together(names: Iterable[str]) -> str:
    """A list in words.

    >>> together(["dp", "tp"])
    'dp and tp'
    """
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def use(plan: Plan, name: str, backward: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """What is done to a parameter or its copies for use, then to their gradients.

    `backward` lists (kind, axis) of the collectives of each in the backward.
    """
    uses: dict[str, list[str]] = {}
    gradients: dict[str, list[str]] = {}
    names = (name, *(copy for copy, of in plan.breakdown.copies.items() if of == name))
    for used, step in ((each, step) for each in names for step in plan.routes.get(each, ())):
        sides = [[entry.strip() for entry in side.split(",")] for side in step.split("->")]
        axis = next(a for a, (s, t) in enumerate(zip(*sides, strict=True)) if s != t)
        change = sides[0][axis][0], sides[1][axis][0]
        if change in USES:
            uses.setdefault(USES[change], []).append(plan.axes[axis])
        gradient = CONVERSIONS[change][1]
        if (gradient, plan.axes[axis]) in backward.get(used, ()):
            gradients.setdefault(GRADIENTS[gradient], []).append(plan.axes[axis])

    def over(axes: list[str]) -> str:
        return together(axis for axis in plan.axes if axis in axes)

    found = [f"{phrase} over {over(axes)} for use" for phrase, axes in uses.items()]
    sums = [f"{phrase} over {over(axes)}" for phrase, axes in gradients.items()]
    return found + ([f"gradient {together(sums)}"] if sums else [])


def held(entry: Allocation) -> str:
    """What takes memory, in words."""
    return f"{HELD[entry.kind]} {entry.name}" + (f", {entry.count} of these" if entry.count > 1 else "")


def figure(found: CostParameter) -> str:
    """A figure with its unit, as a person writes it.

    >>> figure(Figure(of="device", name="memory bandwidth", value=3.35e12, unit="B/s", source="data sheet"))
    'memory bandwidth 3350 GB/s'
    """
    value = found.value
    number = {
        "B": lambda: size_text(value),
        "B/s": lambda: f"{value / 1e9:.4g} GB/s",
        "op/s": lambda: f"{value / 1e12:.4g} Tflop/s",
        "s": lambda: f"{value * 1e6:.3g} us",
        "": lambda: f"{value:g}",
    }[found.unit]()
    return f"{found.name} {number}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with their unit."""
    return f"{seconds * 1e3:.3f} ms"


def proof(gap: float) -> str:
    """How good a plan is known to be."""
    share = f"{gap:.2%}"
    return f"no plan is {'faster' if share == '0.00%' else f'more than {share} faster'} at these prices"

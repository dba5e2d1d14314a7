"""docs/operators.md: every operator of the table with what splits in its examples, and how much of Core ATen that covers.

python -m tests.operators.coverage                                      prints the page
python -m pytest tests/operators/test_coverage.py --update-goldens      writes it
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from autopar.ir.program import overload
from autopar.operators import RULES, fit
from autopar.operators.call import Call
from autopar.operators.registry import FAMILIES
from tests.operators.examples import calls

# Core ATen, less these: they return no tensor, or write into an operand, so that no rule can say anything of their results.
NOT_TENSORS = {
    "sym_size": "returns a number",
    "sym_stride": "returns a number",
    "sym_numel": "returns a number",
    "sym_storage_offset": "returns a number",
    "sym_is_contiguous": "returns a number",
    "_local_scalar_dense": "returns a number",
    "resize_": "writes into its operand",
    "atan2.out": "writes into its operand",
}

# Core ATen without a factor that splits.
REASONS = {
    "_embedding_bag": "beside the bags it returns bookkeeping that is the same whatever is split",
    "any": "true if any element is: no sum",
    "arange.start_step": "counts positions; a part would have to know its place",
    "as_strided": "reads memory as it lies, which is no matter of dims",
    "masked_scatter": "takes elements in their order",
    "nonzero": "the shape of the result depends on the data",
    "prod": "a product of all elements: no sum",
    "randperm": "a permutation of the whole",
    "scalar_tensor": "a scalar has no dims",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the examples of one operator show: its factors that split, those that never do, its linear groups by argument."""

    target: str
    rule: str  # the pattern, or what a function wrote for the first example
    fitted: str  # of the first example
    splits: tuple[str, ...]
    whole: tuple[str, ...]
    linear: tuple[str, ...]
    random: bool


@functools.cache
def entry(target: str) -> Entry:
    """The entry of an operator of the table."""
    splits: dict[str, None] = {}
    whole: dict[str, None] = {}
    linear: dict[str, None] = {}
    patterns: list[str] = []
    texts: list[str] = []
    random = False
    for op, values in calls(target):
        fitted = fit(op, values)
        assert fitted is not None
        for factor in fitted.factors:
            (whole if factor.whole else splits)["..." if factor.name.startswith("...") else factor.name] = None
        named = {p: name for name, p in Call.of(op, values).slots if p is not None}
        linear |= {" + ".join(dict.fromkeys(named[p] for p in sorted(group))): None for group in fitted.linear}
        patterns.append(fitted.text)
        texts.append(str(fitted))
        random = random or fitted.random
    return Entry(
        target=target,
        rule=patterns[0],
        fitted=texts[0],
        splits=tuple(splits),
        whole=tuple(name for name in whole if name not in splits and name != "_"),
        linear=tuple(linear),
        random=random,
    )


def core() -> list[str]:
    """The operators of Core ATen: all overloads that torch tags so."""
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    targets = (f"aten.{name if '.' in name else f'{name}.default'}" for name in names)
    return sorted(target for target in targets if torch.Tag.core in overload(target).tags)


def short(target: str) -> str:
    """aten.add.Tensor is add.Tensor, and aten.relu.default is relu."""
    return target.removeprefix("aten.").removesuffix(".default")


def reason(target: str, reasons: Mapping[str, str]) -> str:
    """The reason given for this overload or for its operator; empty if there is none."""
    return reasons.get(short(target)) or reasons.get(target.split(".")[1], "")


def tensor_operators() -> list[str]:
    """Core ATen without what returns no tensor or writes."""
    return [target for target in core() if not reason(target, NOT_TENSORS)]


def covered() -> list[str]:
    """The operators of Core ATen of which a factor splits in an example."""
    return [target for target in tensor_operators() if target in RULES and entry(target).splits]


def page() -> str:
    """The text of docs/operators.md."""
    return "\n".join([*_head(), *_core(), *_families()]) + "\n"


HEAD = """\
# Operators

{overloads} overloads of {names} ATen operators have a rule: which dims belong together, and may be split together. The rules
are tables in [autopar/operators](../autopar/operators). Everything here is checked by execution, with torch {version}:
`tests/operators/test_laws.py` splits the operands of each example in `tests/operators` along each factor, runs the operator
on the parts, joins, and compares values and gradients with the whole. An operator without a rule runs whole on every device.
This page is made from table and examples by `python -m tests.operators.coverage`.

How to read a rule: `... k, n k, +n -> ... n` names the dims of operands and results. A factor is split wherever its name
stands; one that the result lacks is summed over; `!` and `_` stay whole; `+` is added once; `(h d)` is one dim made of two
factors; `...` are any dims, counted from the right. `[n]` is a dim that a tensor may lack; `... @dim ...` are any dims of
which the argument `dim` names some; `g=groups` has the size that the argument `groups` tells. Where shapes and arguments
decide, a function writes the pattern: it is *by shapes*, and shown for the first example. *Linear* are the operands in which
the operator is linear, so that it may run on partial sums. The results of a *random* one are checked for their shapes only.
"""


def _head() -> Iterator[str]:
    names = {target.split(".")[1] for target in RULES}
    version = ".".join(torch.__version__.split(".")[:2])
    yield HEAD.format(overloads=len(RULES), names=len(names), version=version)


def _core() -> Iterator[str]:
    every, tensors, good = core(), tensor_operators(), covered()
    rest = [target for target in tensors if target not in good]
    yield "## Core ATen"
    yield ""
    yield f"torch tags {len(every)} overloads as core. {len(every) - len(tensors)} of them compute no new tensor. Of the other"
    yield f"{len(tensors)}, **{len(good)} split** along a factor; {len(rest)} do not:"
    yield ""
    rows = ((f"`{short(t)}`", "whole" if t in RULES else "no rule", reason(t, REASONS)) for t in rest)
    yield from _table(("operator", "", "why"), rows)
    yield ""
    yield "Left out:"
    yield ""
    gone = ((f"`{short(t)}`", reason(t, NOT_TENSORS)) for t in every if t not in tensors)
    yield from _table(("operator", "why"), gone)
    yield ""


def _families() -> Iterator[str]:
    for title, module in FAMILIES.items():
        yield f"## {title}"
        yield ""
        yield f"{(module.__doc__ or '').splitlines()[0]}"
        yield ""
        alike: dict[tuple[str, ...], list[str]] = {}
        for target in sorted(module.TABLE):
            alike.setdefault(_cells(entry(target)), []).append(f"`{short(target)}`")
        rows = ((" ".join(names), *cells) for cells, names in alike.items())
        yield from _table(("operators", "rule", "example", "splits", "whole", "linear"), rows)
        yield ""
    yield from _forms()


def _forms() -> Iterator[str]:
    yield "## Distributed forms"
    yield ""
    yield "Ways to split what a rule keeps whole, with messages inside: `tests/operators/test_forms.py` runs all ranks at once."
    yield ""
    known: dict[tuple[str, ...], dict[str, None]] = {}
    for target in sorted(RULES):
        for form in RULES[target].distributed:
            sends = (", ".join(sent.kind for sent in each) for each in (form.forward, form.backward))
            known.setdefault((f"`{form.name}`", " ".join(form.factors), *sends), {})[f"`{short(target)}`"] = None
    rows = ((name, " ".join(targets), *rest) for (name, *rest), targets in known.items())
    yield from _table(("form", "operators", "splits", "sends forward", "backward"), rows)
    yield ""


def _cells(found: Entry) -> tuple[str, ...]:
    """What the page says of an operator after its name."""
    shapes = "; by shapes" if RULES[found.target].shapes else ""
    rule = f"`{found.rule}`{shapes}{'; random' if found.random else ''}"
    return rule, f"`{found.fitted}`", ", ".join(found.splits) or "none", ", ".join(found.whole), "; ".join(found.linear)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join('---' for _ in head)}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    print(page(), end="")

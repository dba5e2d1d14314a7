"""Checks, by trying values, that a selection has no rows whenever a condition says so.

    counts = one_hot(chosen, 4).sum((0, 1))          on all tried values of `chosen`, counts[2] > 0 is False
    if counts[2] > 0:                                only where chosen == 2 is true nowhere
        i, k = where(chosen == 2)

Question and mask are traced back through integers and truth values to their sources, such as an input or the choice of a
router. These are filled with trial values: each number and each truth value in a single place, many of them, none at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.capture.equal_masks import pure
from autopar.capture.known_values import untraced
from autopar.ir.schema import parameters
from autopar.operators import rule_of
from autopar.operators.facts import Alias, OpKind

SAMPLES = 12
MOST = 4096  # different numbers that are tried
Values = dict[fx.Node, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Question:
    """A node whose truth value decides a branch, and its value if there are rows."""

    node: fx.Node
    some: bool


def question(node: fx.Node) -> Question | None:
    """The question that a node asks about counts of integers or truth values: its answer where they are not all 0.

    None if it is not such a question, or if it depends on anything else.
    """
    computed, counts = _integers([node], ends=_reduces)
    if not counts or not all(map(_reduces, counts)) or node.meta["val"].numel() != 1:
        return None

    def none() -> bool:
        values = {count: torch.zeros(count.meta["val"].shape, dtype=count.meta["val"].dtype) for count in counts}
        for one in computed:
            values[one] = _run(one, values)
        return bool(values[node])

    said = untraced(none)
    return None if said is None else Question(node, not said)


def implied(below: Sequence[tuple[Question, fx.Node]]) -> list[bool]:
    """For each question and mask, whether in all trials the mask is false everywhere when the question says "none"."""
    computed, given = _integers([node for question, mask in below for node in (question.node, mask)])
    if not below or any(_written(node) & {*computed, *given} for node in below[0][1].graph.nodes):
        return [False] * len(below)
    most = max((leaf for node in computed for leaf in pytree.tree_leaves(node.args) if type(leaf) is int), default=1)
    for high in (most + 1, most):  # the number of classes itself may be no valid class
        if (found := untraced(lambda high=high: _tried(below, computed, given, min(max(high, 2), MOST)))) is not None:  # type: ignore[misc]
            return found
    return [False] * len(below)


def possible(mask: fx.Node) -> int:
    """How many leading places of a 1-d mask may be true: not those of classes beyond the ones to choose from."""
    computed, given = _integers([mask])
    count, high = int(mask.meta["val"].shape[0]), _below(given[0]) if len(given) == 1 else None
    if high is None or high >= count:
        return count

    def seen() -> int:
        generator, most = torch.Generator().manual_seed(0), high
        for sample in range(SAMPLES):
            values = {given[0]: _drawn(given[0], sample, high, generator)}
            for node in computed:
                values[node] = _run(node, values)
            most = max(most, *(1 + place for place in values[mask].flatten().nonzero().flatten().tolist()))
        return most

    return untraced(seen) or count


def _tried(below: Sequence[tuple[Question, fx.Node]], computed: list[fx.Node], given: list[fx.Node], high: int) -> list[bool]:
    """The result of `implied`, trying numbers below `high` where no bound is known."""
    generator = torch.Generator().manual_seed(0)
    holds, seen = [True] * len(below), [False] * len(below)
    for sample in range(SAMPLES):
        values = {node: _drawn(node, sample, _below(node) or high, generator) for node in given}
        for node in computed:
            values[node] = _run(node, values)
        for at, (question, mask) in enumerate(below):
            some = bool(values[mask].any())
            holds[at] &= not some or bool(values[question.node].any()) == question.some
            seen[at] |= some
    return [one and tried for one, tried in zip(holds, seen, strict=True)]


def _integers(
    results: Sequence[fx.Node], ends: Callable[[fx.Node], bool] = lambda _: False
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes of integers and truth values that these depend on, in order: those computed from such nodes, and the sources.

    A node for which `ends` holds counts as a source.
    """
    computed, given, waiting = set[fx.Node](), set[fx.Node](), list(results)
    while waiting:
        node = waiting.pop()
        if node in computed or node in given:
            continue
        known = node.op == "call_function" and (node.target is operator.getitem or pure(node.target))
        if known and all(map(_integral, node.all_input_nodes)) and not ends(node):
            computed.add(node)
            waiting += node.all_input_nodes
        else:
            given.add(node)
    nodes = results[0].graph.nodes if results else ()
    return [node for node in nodes if node in computed], [node for node in nodes if node in given]


def _integral(node: fx.Node) -> bool:
    """Whether a node is a tensor of integers or truth values with a known size, or a list of such."""
    traced = node.meta.get("val")
    return bool(traced is not None) and all(
        isinstance(one, torch.Tensor)
        and not one.is_floating_point()
        and not one.is_complex()
        and all(isinstance(size, int) for size in one.shape)
        for one in (traced if isinstance(traced, (list, tuple)) else (traced,))
    )


def _run(node: fx.Node, values: Values) -> torch.Tensor:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    found: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return found


def _drawn(node: fx.Node, sample: int, high: int, generator: torch.Generator) -> torch.Tensor:
    """Trial values: one number everywhere, with others in one place each as long as there are places; or a few at random."""
    traced = node.meta["val"]
    high, count = 2 if traced.dtype is torch.bool else high, traced.numel()
    values = (torch.randperm(high, generator=generator) + sample) % high
    if sample % 3 < 2:
        flat = values[0].repeat(count)
        some = values[1 : 1 + max(1, count - 1)]
        flat[torch.randperm(count, generator=generator)[: len(some)]] = some[:count]
    else:
        few = values[: max(1, high // 2)]
        flat = few[torch.randint(len(few), (count,), generator=generator)]
    return flat.reshape(traced.shape).to(traced.dtype)


def _below(node: fx.Node) -> int | None:
    """The exclusive upper bound of integers that index a dim, as topk returns them; None for others."""
    source = node.args[0] if node.target is operator.getitem else node
    rule = rule_of(str(source.target)) if isinstance(source, fx.Node) else None
    if rule is None or rule.kind is not OpKind.PLACES or not isinstance(source, fx.Node):
        return None
    if source is not node and node.args[1] != len(source.meta["val"]) - 1:
        return None
    formals = parameters(str(source.target))
    given = dict(zip((one.name for one in formals), source.args, strict=False)) | source.kwargs
    dim = given.get("dim", next((one.default for one in formals if one.name == "dim"), None))
    traced = source.all_input_nodes[0].meta["val"]
    size = traced.shape[dim] if isinstance(dim, int) and traced.dim() else traced.numel()
    return size if isinstance(size, int) else None


def _reduces(node: fx.Node) -> bool:
    """Whether a node reduces a tensor to fewer numbers, other than by a view."""
    sizes = [one.meta["val"].numel() for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    traced = node.meta.get("val")
    return isinstance(traced, torch.Tensor) and bool(sizes) and traced.numel() < max(sizes) and not views(node)


def views(node: fx.Node) -> bool:
    """Whether a node has the values of its first operand, or some of them, unchanged."""
    rule = rule_of(str(node.target))
    return rule is not None and (rule.alias is not Alias.NEVER or rule.kind in (OpKind.SAME, OpKind.CAST))


def _written(node: fx.Node) -> set[fx.Node]:
    """The operands of a node that writes in place."""
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return set(node.all_input_nodes[:1]) if mutable else set()


def bounded(node: fx.Node | None) -> int | None:
    """The exclusive upper bound of a traced tensor's numbers, if they index a dim, however reshaped; else None."""
    while node is not None and views(node):
        node = node.all_input_nodes[0]
    return None if node is None else _below(node)


__all__ = ["Question", "bounded", "implied", "possible", "question", "views"]

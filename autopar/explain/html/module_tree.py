"""The model as a tree of modules, coloured by what each mesh axis splits; repeated blocks split alike are merged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.explain.headline import SHARDS, gathered_axes, scheme_of
from autopar.explain.html.parts import HtmlPart
from autopar.explain.phrases import runs, stored
from autopar.operators.dim_labels import kind_of
from autopar.plan.plan import Plan
from autopar.plan.text import alike, folded

OperatorAnswer = Callable[[str], tuple[HtmlPart, ...]]  # why an op runs, or a parameter is stored, as it is: its candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSplit:
    """What a mesh axis does to an op or a parameter: the dim that it splits, and the scheme that this is part of."""

    axis: str
    word: str
    scheme: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeItem:
    """An op of a module or one of its parameters: how it is split, on each axis and in a phrase, and why."""

    name: str
    splits: tuple[AxisSplit, ...]
    phrase: str
    why: tuple[HtmlPart, ...]


@dataclass(slots=True, kw_only=True)
class ModuleNode:
    """A module: its own ops and parameters, and the modules inside it by name."""

    items: list[TreeItem] = field(default_factory=list)
    inside: dict[str, ModuleNode] = field(default_factory=dict)

    def at(self, path: str) -> ModuleNode:
        """The module at a path below this one, created if needed."""
        node = self
        for part in filter(None, path.split(".")):
            node = node.inside.setdefault(part, ModuleNode())
        return node

    def joined(self) -> ModuleNode:
        """The tree with every module that only contains one other merged with it: "h.0-11"."""
        found = ModuleNode(items=self.items)
        for name, node in self.inside.items():
            node = node.joined()
            if not node.items and len(node.inside) == 1:
                ((inner, node),) = node.inside.items()
                name = f"{name}.{inner}"
            found.inside[name] = node
        return found


def module_tree(plan: Plan, why: OperatorAnswer) -> ModuleNode:
    """The tree of a plan, or of a stage of one; `why` answers for the name of an op or a parameter."""
    root = ModuleNode()
    for module, item in (*_ops(plan, why), *_parameters(plan, why)):
        node = root.at(module)
        if item not in node.items:
            node.items.append(item)
    return root.joined()


def _ops(plan: Plan, why: OperatorAnswer) -> Iterator[tuple[str, TreeItem]]:
    for names, words in alike(plan.breakdown.runs):
        phrase = runs(words, plan.axes)
        splits = _splits(plan, words)
        yield (
            folded(names).rpartition(":")[0],
            TreeItem(name=kind_of(names[0]), splits=splits, phrase=phrase, why=why(names[0])),
        )


def _parameters(plan: Plan, why: OperatorAnswer) -> Iterator[tuple[str, TreeItem]]:
    own: Mapping[str, tuple[str, ...]] = {name: words for name, words in plan.breakdown.stored.items() if ":" not in name}
    for names, words in alike(own):
        module, _, leaf = folded(names).rpartition(".")
        phrase, splits = f"stored {stored(words, plan.axes)}", _splits(plan, words, gathered_axes(plan, names[0]))
        yield module, TreeItem(name=leaf, splits=splits, phrase=phrase, why=why(names[0]))
    for name, other in plan.breakdown.tied.items():
        module, _, leaf = name.rpartition(".")
        yield module, TreeItem(name=leaf, splits=(), phrase=f"tied to {other}", why=())


def _splits(plan: Plan, words: Sequence[str], gathered: Collection[str] = ()) -> tuple[AxisSplit, ...]:
    """What the axes split; a parameter is sharded over those over which it is `gathered` before use."""
    schemes = [SHARDS if axis in gathered else scheme_of(word) for axis, word in zip(plan.axes, words, strict=True)]
    parts = zip(plan.axes, words, schemes, strict=True)
    return tuple(AxisSplit(axis=axis, word=word, scheme=scheme) for axis, word, scheme in parts)


__all__ = ["AxisSplit", "ModuleNode", "OperatorAnswer", "TreeItem", "module_tree"]

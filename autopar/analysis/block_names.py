"""Blocks by name: the repeated module that contains an op or a tensor.

    h.3.attn.out:linear#0      h.3                   a child of the list h
    block3.fc:linear#0         block3                a child of the attributes block1, block2, ...
    stages.1.0.fc.weight       stages.1.0            a child of a list within a list

Every component of a name that ends in digits is a child of a container: of a list, or of attributes with one stem. A container
*repeats* if two children have weights of equal names and shapes and two matrix products or more each, and one computes with
what comes from the other, as layers do and the experts of a layer do not. A block is a child of the innermost list that
repeats, or else of the outermost attributes that do. Where nothing around a name repeats, its block is the outermost child of a
list, or else of attributes two of which have two matrix products.
"""

from __future__ import annotations

import string
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.program import Program, remembered
from autopar.operators import row_of

PRODUCTS = 2
"""The fewest matrix products of a block: in a sequence of linear layers each is free to be either side of a column-row pair."""

BLOCK = 'a module of a list ("layers.0") or of numbered attributes ("block1", "block2"), with two matrix products or more'
"""What a block is, to a person whose model has none."""


@dataclass(frozen=True, slots=True)
class Child:
    """A module within a container: "h.3" in "h.", "block3" in "block"."""

    container: str
    name: str

    @property
    def in_list(self) -> bool:
        return self.container == "" or self.container.endswith(".")


ChildWeights = tuple[tuple[str, tuple[int, ...]], ...]
"""The names within a child, and the shapes, of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """The containers that repeat, and those of attributes two of which are large enough to be blocks."""

    repeating: frozenset[str]
    attributes: frozenset[str]

    def of(self, name: str) -> str:
        """The block of an op, or of a given tensor, by its name; empty if there is none."""
        if found := self.repeated(name):
            return found
        around = list(children(name))
        listed = (child.name for child in around if child.in_list)
        return next(listed, "") or next((child.name for child in around if child.container in self.attributes), "")

    def repeated(self, name: str) -> str:
        """The child, of a container that repeats, in which a name stands; empty if there is none."""
        around = [child for child in children(name) if child.container in self.repeating]
        listed = (child.name for child in reversed(around) if child.in_list)
        return next(listed, around[0].name if around else "")


def children(name: str) -> Iterator[Child]:
    """The children of containers around a name, outermost first."""
    before = ""
    for component in name.partition(":")[0].split("."):
        stem = component.rstrip(string.digits)
        if stem != component:
            yield Child(before + stem, before + component)
        before += f"{component}."


def without_numbers(name: str) -> str:
    """The containers around a name: "stages..blocks" of "stages.1.blocks3"."""
    return ".".join(component.rstrip(string.digits) for component in name.split("."))


def weights_of_children(program: Program) -> dict[str, dict[str, ChildWeights]]:
    """For each container the weights of its children, by the child's name."""
    found: dict[Child, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for parameter in program.parameters:
        for child in children(parameter.value.name):
            found[child].append((parameter.value.name.removeprefix(child.name), parameter.value.shape))
    kinds: dict[str, dict[str, ChildWeights]] = defaultdict(dict)
    for child, weights in found.items():
        kinds[child.container][child.name] = tuple(weights)
    return kinds


@remembered
def block_names(program: Program) -> BlockNames:
    """Which modules of a program are blocks."""
    products = Counter(child for op in program.ops if row_of(op).contracts for child in children(op.name))
    large = {child.name for child, count in products.items() if count >= PRODUCTS}
    counts = Counter(child.container for child in products if child.name in large and not child.in_list)
    places, repeating = _places(program), set[str]()
    for container, kinds in weights_of_children(program).items():
        alike: dict[ChildWeights, list[str]] = defaultdict(list)
        for child, kind in kinds.items():
            if child in large:
                alike[kind].append(child)
        twins = [found for found in alike.values() if len(found) > 1]
        if twins and _one_after_another(program, places[container], twins):
            repeating.add(container)
    attributes = frozenset(container for container, count in counts.items() if count > 1)
    return BlockNames(repeating=frozenset(repeating), attributes=attributes)


def _places(program: Program) -> dict[str, dict[int, str]]:
    """For each container the places of its ops, and the child in which each stands."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for place, op in enumerate(program.ops):
        for child in children(op.name):
            found[child.container][place] = child.name
    return found


def _one_after_another(program: Program, child: Mapping[int, str], twins: Iterable[Sequence[str]]) -> bool:
    """Whether a child computes with what comes from one of its twins; `child` has the places of a container's ops."""
    others = {name: frozenset(found) - {name} for found in twins for name in found}
    above: dict[str, frozenset[str]] = {}  # from which children a value comes
    for place in range(min(child), max(child) + 1):
        op, own = program.ops[place], child.get(place)
        reached = frozenset[str]().union(*(above.get(name, ()) for name in op.operands))
        if own and not reached.isdisjoint(others.get(own, ())):
            return True
        if own or reached:
            above |= dict.fromkeys((result.name for result in op.results), reached | ({own} if own else set()))
    return False


__all__ = ["BLOCK", "PRODUCTS", "block_names", "children", "weights_of_children", "without_numbers"]

"""The modules of a plan for other dynamic sizes, over the same parameters: keeps the most recently used."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from autopar.errors import InputError
from autopar.ir.dynamic_dims import Size, dim_sizes, numbers

if TYPE_CHECKING:
    from autopar.codegen.module import ParallelModule

MOST = 256  # modules that are kept: of each a graph and its code, no weights


class Variants(OrderedDict[tuple[int, ...], "ParallelModule"]):
    """Modules by the values of their dynamic sizes, least recently used first."""

    def at(
        self, found: tuple[int, ...], usable: Callable[[ParallelModule], bool], build: Callable[[], ParallelModule]
    ) -> ParallelModule:
        """The module for these values, built if there is no usable one."""
        if found not in self or not usable(self[found]):
            self[found] = build()
        self.move_to_end(found)
        if len(self) > MOST:
            self.popitem(last=False)
        return self[found]


def combinations(sizes: Sequence[Size], asked: Mapping[str, Sequence[int] | int]) -> Iterator[tuple[int, ...]]:
    """The values of all combinations of sizes, with others as in the sample; raises InputError for invalid ones."""
    if unknown := [name for name in asked if name not in {size.name for size in sizes}]:
        declared = ", ".join(size.name for size in sizes)
        raise InputError(
            f"{unknown[0]} is not a dynamic size of the plan", sizes=declared, fix='plan with dynamic={"batch": 0}'
        )
    for name, given in asked.items():
        if not all(isinstance(number, Integral) for number in _listed(given)):
            raise InputError(f"{name}={given!r} is not a size, nor sizes", fix=f"{name}=64, or {name}=(64, 128)")
    for found in itertools.product(*(_listed(asked.get(size.name, size.sample)) for size in sizes)):
        places = dim_sizes(sizes, found)
        width = 1 + max((dim for _, dim in places), default=0)
        shapes = {path: tuple(places.get((path, dim), 1) for dim in range(width)) for path, _ in places}
        yield numbers(sizes, shapes)


def _listed(asked: Sequence[int] | int) -> Sequence[int]:
    return [asked] if isinstance(asked, int | str) else asked


__all__ = ["MOST", "Variants", "combinations"]

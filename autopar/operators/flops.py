"""Floating-point operations of an op, as the matrix products that it consists of.

    op("m k, n k -> m n", flops=contraction)        2 x the sizes of all factors: 2 m n k

A product of `batch` pairs of matrices, m x k times k x n, takes one multiplication and one addition for each combination. The
backward runs one more product for each side that needs a gradient, of the same sizes with k in the place of the other side's: m
x n times n x k for the left one, k x m times m x n for the right one. An operator without `flops` takes one operation per
element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.operators.call import Call, Local


class ProductSizes(NamedTuple):
    """A product of `batch` pairs of matrices, m x k times k x n."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each combination."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product: its sizes, and the positions of the operands that each side is computed from."""

    sizes: ProductSizes | None  # None: another library's operator, of which only the operations are known
    left: frozenset[int]
    right: frozenset[int]
    again: bool = False  # whether the backward computes the product itself again, since its result is not saved
    causal: bool = False  # whether half of it is left out
    counted: int = 0  # operations, where there are no sizes

    @property
    def flops(self) -> int:
        """Its operations."""
        return self.sizes.flops // (1 + self.causal) if self.sizes else self.counted

    def backward(self, gradients: Iterable[int]) -> list[Product]:
        """The products of the backward where the operands at these positions need a gradient."""
        wanted, (batch, m, n, k) = frozenset(gradients), self.sizes or (0, 0, 0, 0)
        found = []
        if self.left & wanted:
            found.append(self._of(ProductSizes(batch, m, k, n)))
        if self.right & wanted:
            found.append(self._of(ProductSizes(batch, k, n, m)))
        return [self, *found] if self.again and found else found

    def _of(self, sizes: ProductSizes) -> Product:
        return replace(self, sizes=sizes if self.sizes else None)


Flops = Callable[[Call, Local], Sequence[Product]]


def contraction(call: Call, local: Local) -> list[Product]:
    """The products of what a rule multiplies, from left to right: the first two operands, the result with the third, ...

    A factor of both sides is summed away where nothing later reads it, else it counts products; a factor of one side is rows or
    columns, unless nothing later reads it. An operand that is added (`+` in the rule) is not multiplied.
    """
    fitted, sizes = local.fitted, local.sizes
    order = [position for position in range(len(fitted.operands)) if position not in fitted.added]
    factors = [{factor for dim in fitted.operands[position] for factor in dim} for position in order]
    kept = {factor for dims in fitted.results for dim in dims for factor in dim}
    products, left, made = [], factors[0], frozenset(order[:1])
    for place in range(1, len(order)):
        right, later = factors[place], kept.union(*factors[place + 1 :])
        both, rows, columns = left & right, (left - right) & later, (right - left) & later
        of = ProductSizes(
            *(math.prod(sizes[factor] for factor in over) for over in (both & later, rows, columns, both - later))
        )
        products.append(Product(sizes=of, left=made, right=frozenset({order[place]})))
        left, made = (left | right) & later, made | {order[place]}
    return products


def chain(call: Call, local: Local) -> list[Product]:
    """The products of a chain of matrices in the order that takes the fewest operations, which is torch's."""
    first, last = local.operands[0], local.operands[-1]
    sizes = [first[0] if len(first) == 2 else 1, *(shape[0] for shape in local.operands[1:]), last[-1] if len(last) == 2 else 1]
    best: dict[tuple[int, int], list[Product]] = {(i, i): [] for i in range(len(local.operands))}
    for length in range(1, len(local.operands)):
        for start in range(len(local.operands) - length):
            end = start + length
            best[start, end] = min(
                (
                    [
                        *best[start, cut],
                        *best[cut + 1, end],
                        Product(
                            sizes=ProductSizes(1, sizes[start], sizes[end + 1], sizes[cut + 1]),
                            left=frozenset(range(start, cut + 1)),
                            right=frozenset(range(cut + 1, end + 1)),
                        ),
                    ]
                    for cut in range(start, end)
                ),
                key=lambda products: sum(product.flops for product in products),
            )
    return best[0, len(local.operands) - 1]


def product(sizes: Callable[[Call, Local], ProductSizes], left: int, right: int) -> Flops:
    """One product of the operands at two positions, whose sizes a formula tells."""
    sides = frozenset({left}), frozenset({right})
    return lambda call, local: [Product(sizes=sizes(call, local), left=sides[0], right=sides[1])]


__all__ = ["Flops", "Product", "ProductSizes", "chain", "contraction", "product"]

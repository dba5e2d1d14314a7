"""Floating-point operations of an op, as the matrix products that it consists of.

    op("m k, n k -> m n", flops=contraction)        2 x the sizes of all factors: 2 m n k

A product takes one multiplication and one addition for each combination of its factors. The backward runs one more product of
the same size for each side that needs a gradient. An operator without `flops` takes one operation per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.operators.call import Call, Local


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product: its operations, and the positions of the operands that each side is computed from."""

    flops: int
    left: frozenset[int]
    right: frozenset[int]
    again: bool = False  # whether the backward computes the product itself again, since its result is not saved

    def backward(self, gradients: Iterable[int]) -> int:
        """Operations of the backward where the operands at these positions need a gradient."""
        wanted = frozenset(gradients)
        sides = bool(self.left & wanted) + bool(self.right & wanted)
        return self.flops * (sides + (self.again and sides > 0))


Flops = Callable[[Call, Local], Sequence[Product]]


def contraction(call: Call, local: Local) -> list[Product]:
    """The products of what a rule multiplies, from left to right: the first two operands, the result with the third, ...

    Each takes 2 x the sizes of its factors; a factor that nothing later reads is summed away. An operand that is added (`+` in
    the rule) is not multiplied.
    """
    fitted, sizes = local.fitted, local.sizes
    order = [position for position in range(len(fitted.operands)) if position not in fitted.added]
    factors = [{factor for dim in fitted.operands[position] for factor in dim} for position in order]
    kept = {factor for dims in fitted.results for dim in dims for factor in dim}
    products, left, made = [], factors[0], frozenset(order[:1])
    for place in range(1, len(order)):
        right, later = factors[place], kept.union(*factors[place + 1 :])
        over = (left & right) | ((left | right) & later)
        flops = 2 * math.prod(sizes[factor] for factor in over)
        products.append(Product(flops=flops, left=made, right=frozenset({order[place]})))
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
                            flops=2 * sizes[start] * sizes[cut + 1] * sizes[end + 1],
                            left=frozenset(range(start, cut + 1)),
                            right=frozenset(range(cut + 1, end + 1)),
                        ),
                    ]
                    for cut in range(start, end)
                ),
                key=lambda products: sum(product.flops for product in products),
            )
    return best[0, len(local.operands) - 1]


def product(flops: Callable[[Call, Local], int], left: int, right: int) -> Flops:
    """One product of the operands at two positions, whose operations a formula tells."""
    sides = frozenset({left}), frozenset({right})
    return lambda call, local: [Product(flops=flops(call, local), left=sides[0], right=sides[1])]


__all__ = ["Flops", "Product", "chain", "contraction", "product"]

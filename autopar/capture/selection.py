"""Selection by a mask: `x[mask]` has a number of rows that depends on values, so no graph has it.

torch.export represents their number by a symbol. In the program, a selection keeps all rows, in order, and reductions leave out
those that are not selected (`autopar.capture.selected_ops`):

    y = x[mask]                  y = where(mask, x, 1)                          x is (n, 8), and so is y
    z = relu(y)                  z = relu(y)
    l = mean(z)           ->     l = sum(where(mask, z, 0)) / (8 * sum(mask))

If the rows are combined with a known number of others, as in x[mask] + v, their number must be the same, and they are selected
by the indices of the first places where the mask is true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from autopar.capture import nodes
from autopar.capture.trace import varying
from autopar.ir.builder import Builder
from autopar.ir.layout import Shape
from autopar.ir.program import Ref

if TYPE_CHECKING:
    from autopar.capture.selected_places import Exit, Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows selected by a mask: `mask` is bool[rows], `whole` of this `shape` flattened with its dims in this `order`."""

    mask: Ref
    whole: Ref
    rows: int
    shape: Shape
    order: tuple[int, ...]
    empty: bool = False


Rows = Mapping[int, Selection]  # dims of a tensor that hold rows, with their selections


@dataclass(slots=True, kw_only=True)
class Selections:
    """The selections of a program, by the symbols that torch.export uses for their row counts."""

    builder: Builder
    empty: frozenset[sympy.Symbol] = frozenset()  # selections that are assumed to select nothing
    known: dict[sympy.Symbol, Selection] = field(default_factory=dict)
    joined: dict[sympy.Symbol, tuple[Selection | int, ...]] = field(default_factory=dict)  # the parts of concatenated rows
    held: dict[str, Rows] = field(default_factory=dict)  # of the program's values
    places: dict[str, tuple[Selection, int]] = field(default_factory=dict)  # values that are the indices of one dim of a mask
    columns: dict[str, tuple[Ref, ...]] = field(default_factory=dict)  # values that stack the indices of all dims: these
    entrances: dict[str, tuple[Ref, Places]] = field(default_factory=dict)  # rows that were read: from what, where
    masked: dict[str, Ref] = field(default_factory=dict)  # rows filled where not selected: the rows before
    exits: list[Exit] = field(default_factory=list)  # rows that were put back, in order

    def learn(self, symbol: sympy.Symbol, whole: Ref, mask: Ref, order: tuple[int, ...]) -> Selection:
        """Record and return the selection by a mask, given its flat form with its dims in this order."""
        shape = self.builder.values[whole.name].shape
        empty = symbol in self.empty
        found = Selection(mask=mask, whole=whole, rows=math.prod(shape), shape=shape, order=order, empty=empty)
        return self.known.setdefault(symbol, found)

    def unmasked(self, rows: Ref) -> Ref:
        """Rows as they were before those not selected were filled with a number."""
        while rows.name in self.masked:
            rows = self.masked[rows.name]
        return rows

    def follow(self, before: Ref, after: Ref) -> None:
        """Note that a value is a reshaped form of another."""
        if before.name in self.places:
            self.places[after.name] = self.places[before.name]

    def rows(self, node: fx.Node, value: object) -> Rows:
        """The dims of a traced tensor that hold rows; raises CaptureError for a dim that mixes them with anything else."""
        sizes = enumerate(value.shape if isinstance(value, torch.Tensor) else ())
        symbols = {dim: size.node.expr for dim, size in sizes if isinstance(size, torch.SymInt)}  # type: ignore[attr-defined]
        if any(symbol not in self.known for symbol in symbols.values()):
            raise varying(f"the shape of a result of {node.target}", nodes.source(node))
        return {dim: self.known[symbol] for dim, symbol in symbols.items()}

    def size(self, node: fx.Node) -> int:
        """The size that a node computes from numbers of rows, if all rows were selected."""
        return int(node.meta["val"].node.expr.subs({symbol: known.rows for symbol, known in self.known.items()}))

    def number(self, node: fx.Node) -> tuple[Selection, int, int]:
        """A node's number as `times * rows + more` of one selection; raises CaptureError for other formulas."""
        value = node.meta.get("val")
        formula = value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(0)
        symbol = next((symbol for symbol in formula.free_symbols if symbol in self.known), None)
        if symbol is None or len(formula.free_symbols) > 1 or not formula.is_polynomial() or sympy.degree(formula) != 1:
            raise varying("a number", nodes.source(node))
        times, more = sympy.Poly(formula, symbol).all_coeffs()
        return self.known[symbol], int(times), int(more)


def symbolic(node: fx.Node) -> bool:
    """Whether a node's result is a symbolic size, or a tensor with one."""
    traced = node.meta.get("val")
    return any(
        isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) and fixed(size) is None
        for one in (traced if isinstance(traced, (list, tuple)) else (traced,))
        for size in (one.shape if isinstance(one, torch.Tensor) else (one,))
    )


def fixed(size: object) -> int | None:
    """The number that a traced size is known to equal from how it was used; None for one that varies."""
    found = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(found) if isinstance(found, (int, sympy.Integer)) else None

"""How operators act on the rows of a selection (`autopar.capture.selection`), by their rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from autopar.capture import equal_values, nodes, traced_losses
from autopar.capture.joined_selections import filled, joined, scattered
from autopar.capture.selected_places import Exit, Places, SelectedPlaces, longest_first
from autopar.capture.selection import Rows, Selection, Selections, fixed, symbolic
from autopar.capture.trace import varying
from autopar.errors import CaptureError
from autopar.ir.builder import Keywords
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Ref, Static, Value, aten, refs, substitute
from autopar.ir.schema import packed, parameters
from autopar.ir.shape_inference import Kind
from autopar.operators import row_of, rule_of
from autopar.operators.facts import Mean, OpKind
from autopar.operators.registry import fit, scale
from autopar.operators.rule import OpSharding

_NONE, _MEAN = 0, 1  # torch.nn._reduction's numbers
Named = dict[str, Argument]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedOp:
    """A node of the traced graph that produces or uses rows of selections; `emit` appends ops in its place."""

    selections: Selections
    node: fx.Node
    emit: Callable[[str, tuple[Argument, ...], Keywords], tuple[Ref, ...]]

    def lower(self, args: tuple[Argument, ...], kwargs: Keywords) -> tuple[Ref, ...]:
        """The results of the node; raises CaptureError if it selects by anything but a mask, or mixes rows."""
        if (selected := self.selected(args)) is not None:
            return (selected,)
        if (found := self.located(args) or joined(self, args)) is not None:
            return found
        if nodes.selects(self.node) and not symbolic(self.node):
            raise self.mixing()
        if symbolic(self.node):
            tuple(self.traced())  # raises for unknown sizes
        target = nodes.returning(self.node) if nodes.mutates(self.node) else traced_losses.meant(self.node.target)
        formals = parameters(target)
        sized = [self.sized(raw, now) for raw, now in zip(self.node.args, args, strict=True)]
        given = dict(zip((formal.name for formal in formals), sized, strict=False)) | dict(kwargs)
        named = {formal.name: given.get(formal.name, formal.default) for formal in formals}
        if any(isinstance(named[f.name], Ref) and not f.tensor for f in formals):  # a number of rows where none can be
            raise self.mixing()
        if target == "aten.broadcast_tensors.default" and len({self.shape(ref) for ref in refs(sized[0])}) == 1:
            return tuple(refs(sized[0]))
        if not symbolic(self.node) and not any(ref.name in self.selections.held for ref in refs(tuple(named.values()))):
            return self.emit(target, *packed(target, named))  # it uses the number of rows, but no rows
        if aten(target) in ("index", "index_select") and (rows := self.taken(named)) is not None:
            return (rows,)
        if {"indices", "values"} <= named.keys() or ({"dim", "index", "source"} <= named.keys() and "reduce" not in named):
            return (self.put(target, named),)
        if target == "aten.masked_scatter.default" and not symbolic(self.node):
            return (self.put_back(named),)
        if (found := filled(self, target, named) or scattered(self, target, named)) is not None:
            return found
        if symbolic(self.node):
            return self.by_row(target, named)
        if target == "aten.ctc_loss.Tensor":
            return (self.aligned(target, named),)
        if "reduction" in {formal.name for formal in formals}:
            return (self.loss(target, named),)
        return (self.summed(target, named),)

    @property
    def places(self) -> SelectedPlaces:
        """The operations on indices of selections."""
        return SelectedPlaces(selections=self.selections, one=self.one)

    def number(self) -> Ref:
        """The number that the node computes from numbers of rows."""
        selection, times, more = self.selections.number(self.node)
        return self.one("aten.add.Tensor", self.one("aten.mul.Tensor", self.count(selection), times), more)

    def selected(self, args: tuple[Argument, ...]) -> Ref | None:
        """The rows that the node selects by a mask, or their indices; None if it selects nothing.

        If the number of rows is known, they are the first ones that the mask selects, in order.
        """
        match str(self.node.target), args:
            case "aten.index.Tensor", (Ref() as x, tuple() as index) if self.is_mask(*refs(index)):
                place = next(dim for dim, one in enumerate(index) if one is not None)
                (mask,) = refs(index)
            case "aten.masked_select.default", (Ref() as x, Ref() as mask):
                shape, place = tuple(torch.broadcast_shapes(self.shape(x), self.shape(mask))), 0  # type: ignore[no-untyped-call]
                x, mask = self.one("aten.expand.default", x, shape), self.one("aten.expand.default", mask, shape)
            case "aten.nonzero.default", (Ref() as mask,) if (
                self.is_mask(mask)
                and len(self.shape(mask)) == 1
                and (number := fixed(self.node.meta["val"].shape[0])) is not None
            ):
                return self.one("aten.unsqueeze.default", self.first(mask, number), 1)
            case _:
                return None
        if x.name in self.selections.held or mask.name in self.selections.held:
            raise self.mixing()
        before, taken, after = self.shape(x)[:place], self.shape(mask), self.shape(x)[place + len(self.shape(mask)) :]
        flat = self.one("aten.reshape.default", mask, (math.prod(taken),)) if len(taken) > 1 else mask
        if (number := fixed(self.node.meta["val"].shape[place])) is not None:
            rows = self.one("aten.reshape.default", x, (*before, math.prod(taken), *after))
            return self.one("aten.index_select.default", rows, place, self.first(flat, number))
        selection = self.selections.learn(self.symbol(place), mask, flat, tuple(range(len(taken))))
        dims = {dim: place + dim for dim in range(len(taken))}
        return self.ones(self.places.taken(x, Places(selection=selection, dims=dims, front=place)))  # type: ignore[return-value]

    def located(self, args: tuple[Argument, ...]) -> tuple[Ref, ...] | None:
        """The indices where a mask is true, as one tensor or one per dim; None if the node computes anything else."""
        match str(self.node.target), args:
            case "aten.where.default", (Ref() as mask,):
                traced = self.node.meta["val"][0]
            case "aten.nonzero.default", (Ref() as mask,):
                traced = self.node.meta["val"]
            case "aten.select.int", (Ref() as found, 1, int() as dim) if found.name in self.selections.columns:
                return (self.selections.columns[found.name][dim],)
            case _:
                return None
        shape = self.shape(mask)
        if mask.name in self.selections.held or not shape or fixed(traced.shape[0]) is not None:
            raise self.mixing()
        order = longest_first(shape)
        mask = mask if self.is_mask(mask) else self.one("aten.ne.Scalar", mask, 0)
        flat = self.places.permuted(mask, order)
        flat = self.one("aten.reshape.default", flat, (math.prod(shape),)) if len(shape) > 1 else flat
        selection = self.selections.learn(traced.shape[0].node.expr, mask, flat, order)
        columns = self.places.of_mask(selection)
        if str(self.node.target) == "aten.where.default":
            return columns
        stacked = self.one("aten.stack.default", columns, 1)
        self.selections.held[stacked.name] = {0: selection}
        self.selections.columns[stacked.name] = columns
        if len(columns) == 1:  # the same indices, reshaped
            self.selections.follow(columns[0], stacked)
        return (stacked,)

    def taken(self, named: Named) -> Ref | None:
        """Rows of a tensor without selections, at the indices of a selection; None for any other index."""
        x = named["self"]
        assert isinstance(x, Ref)
        places = self.places.index(x, self.places.parts(named))
        return None if places is None else self.ones(self.places.taken(x, places))  # type: ignore[return-value]

    def put(self, target: str, named: Named) -> Ref:
        """A tensor without rows, after a value for each row was written to, or added at, the indices of the selection.

        If several rows are written to one place, torch does not define which one wins.
        """
        x, rows, parts = named["self"], named.get("values", named.get("source")), self.places.parts(named)
        assert isinstance(x, Ref)
        assert isinstance(rows, Ref)
        held, adds = self.selections.held, bool(named.get("accumulate", aten(target) == "index_add"))
        if (places := self.places.index(x, parts)) is None:
            where = {selection for one in refs(parts) for dim, selection in held.get(one.name, {}).items() if dim == 0}
            if not adds or x.name in held or len(where) != 1 or where != set(held.get(rows.name, {}).values()):
                raise self.mixing()
            if where.pop().empty:
                return x
            changed = {name: substitute(argument, self.ones) for name, argument in named.items()}
            name = "values" if "values" in named else "source"
            return self.emit(target, *packed(target, changed | {name: self.zeros(rows)}))[0]
        if places.selection.empty:
            return x
        if not adds and (more := self.places.added(x, places, rows)) is not None:
            rows, adds = more, True
        shape = self.places.rows_shape(x, places)
        if held.get(rows.name, {}) not in ({}, {len(self.shape(rows)) - len(shape) + places.front: places.selection}):
            raise self.mixing()
        spread = self.one("aten.expand.default", rows, shape)
        held[spread.name] = {places.front: places.selection}
        found, times = self.places.back(self.zeros(spread), places, len(self.shape(x))), named.get("alpha", 1)
        if adds:
            result = self.one("aten.add.Tensor", x, found if times == 1 else self.one("aten.mul.Tensor", found, times))
        else:
            result = self.one("aten.where.self", self.places.mask(places, len(self.shape(x))), found, x)
        if self.shape(rows) == shape:
            self.selections.exits.append(Exit(result=result, into=x, rows=rows, places=places, adds=adds, times=times))
        return result

    def first(self, mask: Ref, number: int) -> Ref:
        """The indices of the first places where a flat mask is true."""
        order = self.emit("aten.sort.stable", (mask,), (("stable", True), ("descending", True)))[1]
        return self.one("aten.slice.Tensor", order, 0, 0, number)

    def by_row(self, target: str, named: Named) -> tuple[Ref, ...]:
        """An operator that treats every row alike.

        If another operand is differentiated (a weight, say), rows that are not selected are set to one before and after the
        operator: they then add nothing to its gradient, finite or not.
        """
        values, held = self.selections.builder.values, self.selections.held
        shared = any(values[ref.name].requires_grad for ref in refs(tuple(named.values())) if ref.name not in held)
        if shared:
            named = {name: substitute(argument, self.ones) for name, argument in named.items()}
        if symbolic(self.node) and self.single(named):
            found = [dict(rows) for rows in self.traced()]
        else:
            fitted, factors = self.fitted(target, named)
            found = [
                {d: factors[dim[0]] for d, dim in enumerate(dims) if len(dim) == 1 and dim[0] in factors}
                for dims in fitted.results
            ]
        if not all(found) or (symbolic(self.node) and found != list(self.traced())):
            raise self.mixing()
        results = self.emit(target, *packed(target, named))
        held.update((ref.name, rows) for ref, rows in zip(results, found, strict=True))
        if row_of(self.selections.builder.ops[-1]).kind in (OpKind.RESHAPE, OpKind.SAME):
            self.selections.follow(next(refs(tuple(named.values()))), results[0])
        return tuple(map(self.ones, results)) if shared else results  # type: ignore[arg-type]

    def single(self, named: Named) -> bool:
        """Whether an operand has rows of a selection from a single place, which no operator can mix with others."""
        held = [self.selections.held.get(ref.name, {}) for ref in refs(tuple(named.values()))]
        return any(selection.rows == 1 for rows in held for selection in rows.values())

    def summed(self, target: str, named: Named) -> Ref:
        """An operator that sums over rows, and is linear in an operand with rows: rows of zeros add nothing.

        If it takes a mean, the division by the number of all rows is corrected.
        """
        fitted, factors = self.fitted(target, named)
        operands = list(refs(tuple(named.values())))
        rows = [place for place, ref in enumerate(operands) if ref.name in self.selections.held]
        linear = [place for place in rows if frozenset({place}) in fitted.linear]
        if not factors.keys() <= set(fitted.summed) or not linear:
            raise self.mixing()
        zero = operands[linear[0]]

        def change(leaf: Ref | Static) -> Argument:
            return self.zeros(zero) if leaf == zero else self.ones(leaf)

        named = {name: substitute(argument, change) for name, argument in named.items()}
        (found,) = self.emit(target, *packed(target, named))
        if scale(self.selections.builder.ops[-1], fitted, [2] * len(fitted.factors)) == 1:
            return found
        times = math.prod(selection.rows for selection in factors.values())
        return self.divided(self.one("aten.mul.Tensor", found, times), list(factors.values()), [])

    def put_back(self, named: Named) -> Ref:
        """Rows that a mask selected and an operator changed, put back in place: `x.masked_scatter(mask, f(y[mask]))`."""
        x, mask, rows = named["self"], named["mask"], named["source"]
        assert isinstance(x, Ref)
        assert isinstance(mask, Ref)
        assert isinstance(rows, Ref)
        builder, held, shape = self.selections.builder, self.selections.held, self.shape(x)
        selection = held.get(rows.name, {}).get(0)
        if selection is None or len(held[rows.name]) > 1 or {x.name, mask.name} & held.keys():
            raise self.mixing()
        if not equal_values.broadcasts(builder, mask, selection.whole, shape):
            raise self.mixing()
        if selection.empty:
            return x
        dims = range(len(selection.shape))
        places = Places(selection=selection, dims=dict(zip(dims, dims, strict=True)), front=0)
        if len(selection.shape) > len(shape) or shape[: len(selection.shape)] != selection.shape:
            return self.one("aten.where.self", mask, self.one("aten.reshape.default", rows, shape), x)
        if (more := self.places.added(x, places, rows)) is not None:
            result = self.one("aten.add.Tensor", x, self.places.back(self.zeros(more), places, len(shape)))
        else:
            result = self.one("aten.where.self", mask, self.places.back(rows, places, len(shape)), x)
        self.selections.exits.append(
            Exit(result=result, into=x, rows=rows if more is None else more, places=places, adds=more is not None)
        )
        return result

    def aligned(self, target: str, named: Named) -> Ref:
        """CTC with concatenated targets, selected by a mask: those of each sequence are moved to the front of its row.

        The lengths must be the numbers of targets that the mask selects in each sequence.
        """
        scores, aim, lengths = named["log_probs"], named["targets"], named["target_lengths"]
        assert isinstance(scores, Ref)
        assert isinstance(aim, Ref)
        assert isinstance(lengths, Ref)
        selection, batch = self.selections.held.get(aim.name, {}).get(0), self.shape(scores)[1]
        if selection is None or not equal_values.counts(self.selections.builder, lengths, selection.mask, batch):
            raise self.mixing()
        shape = (batch, selection.rows // batch)
        mask = self.one("aten.reshape.default", selection.mask, shape)
        order = self.emit("aten.sort.stable", (mask,), (("stable", True), ("dim", 1), ("descending", True)))[1]
        front = self.one("aten.gather.default", self.one("aten.reshape.default", self.zeros(aim), shape), 1, order)
        return self.emit(target, *packed(target, named | {"targets": front}))[0]

    def loss(self, target: str, named: Named) -> Ref:
        """A reduced loss: computed with ignored targets, or as a sum of the individual losses over the selected rows."""
        scores, aim, rule = named["self"], named["target"], rule_of(target)
        assert isinstance(scores, Ref)
        assert isinstance(aim, Ref)
        held = self.selections.held
        classes = rule is not None and rule.mean is Mean.TARGETS
        if classes and not self.selections.builder.values[aim.name].dtype.is_floating_point:
            if list(held.get(scores.name, ())) != [0] or held.get(scores.name) != held.get(aim.name):
                raise self.mixing()
            ignored = named["ignore_index"]
            return self.emit(target, *packed(target, named | {"target": self.masked(aim, ignored)}))[0]
        if rule is None or not rule.mean:
            raise self.mixing()
        (each,) = self.by_row(target, named | {"reduction": _NONE})
        total = self.one("aten.sum.default", self.zeros(each))
        rows, shape = held[each.name], self.shape(each)
        others = [size for dim, size in enumerate(shape) if dim not in rows]
        return self.divided(total, list(rows.values()), others) if named["reduction"] == _MEAN else total

    def fitted(self, target: str, named: Named) -> tuple[OpSharding, dict[int, Selection]]:
        """An operator's factors for these arguments, and which of them are rows of selections."""
        builder, (args, kwargs) = self.selections.builder, packed(target, named)
        try:
            kinds = builder.infer(target, args, kwargs)
        except RuntimeError as error:  # with all rows, rather than those selected, shapes may not broadcast
            raise self.mixing() from error
        results = tuple(
            Value(name=str(place), shape=kind.shape, dtype=kind.dtype, requires_grad=kind.requires_grad)
            for place, kind in enumerate([kinds] if isinstance(kinds, Kind) else kinds)
        )
        op = Op(name="", target=target, args=args, kwargs=kwargs, results=results)
        fitted = fit(op, builder.values)
        places = [
            (fitted.operands[place][dim] if fitted else (), selection)
            for place, name in enumerate(op.operands)
            for dim, selection in self.selections.held.get(name, {}).items()
        ]
        found = {dim[0]: selection for dim, selection in places if len(dim) == 1}
        alone = fitted and all(len(dim) == 1 and found[dim[0]] is selection for dim, selection in places)
        if not fitted or not alone or any(fitted.factors[factor].whole for factor in found):
            raise self.mixing()
        return fitted, found

    def divided(self, total: Ref, selected: list[Selection], sizes: list[int]) -> Ref:
        """A sum divided by the number of rows and of other elements; 0/0 is NaN if nothing is selected, as in torch."""
        for selection in selected:
            total = self.one("aten.div.Tensor", total, self.count(selection))
        return self.one("aten.div.Tensor", total, math.prod(sizes)) if sizes else total

    def count(self, selection: Selection) -> Ref:
        """The number of rows that a mask selects."""
        return self.one("aten.sum.default", selection.mask)

    def zeros(self, ref: Ref) -> Ref:
        """A tensor with zeros in rows that are not selected."""
        return self.masked(ref, 0)

    def ones(self, leaf: Ref | Static) -> Argument:
        """A tensor with ones in rows that are not selected; zeros if it has integers, since a class 1 may not exist."""
        if not isinstance(leaf, Ref) or leaf.name not in self.selections.held:
            return leaf
        return self.masked(leaf, 1 if self.selections.builder.values[leaf.name].dtype.is_floating_point else 0)

    def masked(self, ref: Ref, number: Argument) -> Ref:
        """A tensor with this number in rows that are not selected."""
        before, found = ref, self.selections.held[ref.name]
        for dim, selection in found.items():
            shape = tuple(selection.rows if place == dim else 1 for place in range(len(self.shape(ref))))
            left_out = self.one("aten.reshape.default", self.one("aten.logical_not.default", selection.mask), shape)
            ref = self.one("aten.masked_fill.Scalar", ref, left_out, number)
        self.selections.held[ref.name] = found
        self.selections.masked[ref.name] = before
        return ref

    def sized(self, raw: object, now: Argument) -> Argument:
        """An argument; if it is a list of sizes, numbers of rows in it become those of all rows."""
        if not isinstance(raw, (list, tuple)) or not isinstance(now, tuple):
            return now
        sizes = [isinstance(one, fx.Node) and isinstance(one.meta.get("val"), torch.SymInt) for one in raw]
        return tuple(self.selections.size(one) if size else part for one, size, part in zip(raw, sizes, now, strict=True))

    def traced(self) -> Iterator[Rows]:
        """For every result, the dims with rows of selections."""
        found = self.node.meta["val"]
        yield from (self.selections.rows(self.node, one) for one in (found if isinstance(found, (list, tuple)) else [found]))

    def symbol(self, dim: int) -> sympy.Symbol:
        """The symbol for the number of rows that the node selects."""
        return self.node.meta["val"].shape[dim].node.expr

    def is_mask(self, *found: Ref) -> bool:
        """Whether this is a single boolean tensor."""
        return len(found) == 1 and self.selections.builder.values[found[0].name].dtype == torch.bool

    def shape(self, ref: Ref) -> Shape:
        """The shape of a value, counting all rows."""
        return self.selections.builder.values[ref.name].shape

    def one(self, target: str, *args: Argument, **kwargs: Argument) -> Ref:
        """The result of an operator that returns one tensor."""
        return self.emit(target, args, tuple(kwargs.items()))[0]

    def mixing(self) -> CaptureError:
        """The error for an operator that needs the number of rows, or combines rows in an unsupported way."""
        return varying(f"the shape of an operand of {traced_losses.meant(self.node.target)}", nodes.source(self.node))

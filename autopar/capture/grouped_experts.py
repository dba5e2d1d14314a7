"""Rewrites a loop over experts as grouped products: each token goes only to the experts that it chose.

In the program of a loop, every expert processes all tokens, and results for tokens that did not choose it are dropped
(`autopar.capture.selected_places`). If the experts of a loop differ only in their weights, tokens are sorted by expert, and the
products of all experts become one grouped product:

    for e in range(n):                            keys, order = sort(chosen.flatten())
        i, k = where(chosen == e)                 r = x[order // 2]
        y[i] += linear(x[i], w[e])         ->     r = grouped_mm(r, stack(w).mT, ends of the groups in keys)
                                                  y = y + sum(r[inverse of order].view(n, 2, d), 1)

Libraries write the same by hand (transformers' `grouped_mm`), and it has rules: it can be split over experts or over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.capture.equal_programs import live, numbers
from autopar.capture.expert_loops import Expert, loops
from autopar.capture.selected_places import Exit, Places
from autopar.capture.selection import Selections
from autopar.ir.builder import Rewriter
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Program, Ref, Value, aten
from autopar.operators import row_of
from autopar.operators.double_precision import DOUBLE, GROUPED, torchs
from autopar.operators.facts import OpKind


class Different(Exception):
    """The experts of a loop do not run the same operators."""


def grouped(program: Program, selections: Selections) -> Program:
    """A program in which loops over experts are grouped products, if a loop has all experts and they match; else unchanged."""
    found = list(loops(program, selections))
    if not found:
        return program
    rewriter, done = _Grouping(program, selections), {loop[-1].exit.result.name: loop for loop in found}
    for op in program.ops:
        rewriter.keep(op)
        for result in op.results:
            if result.name in done:
                rewriter.group(op, done[result.name])
    if not rewriter.changed:
        return program
    made = rewriter.finish()
    return replace(made, ops=tuple(live(made)))


class _Grouping(Rewriter):
    """Appends the grouped form of a loop behind it; dead code is removed at the end."""

    def __init__(self, old: Program, selections: Selections) -> None:
        super().__init__(old)
        self.selections, self.changed = selections, False
        self.numbers = numbers(old, old.ops, {})

    def group(self, op: Op, loop: list[Expert]) -> None:
        """Replace the result of a loop, which ends with this op, by its grouped form; leave it alone if its experts differ."""
        count, values, counts = len(self.ops), dict(self.values), self._count.copy()
        try:
            self.forward(op.results[0].name, _Group(self, op, loop).result())
            self.changed = True
        except Different:
            del self.ops[count:]
            self.values, self._count = values, counts


class _Group:
    """One loop as grouped products: its values cover all experts, with rows of tokens sorted by expert."""

    def __init__(self, rewriter: _Grouping, at: Op, loop: Sequence[Expert]) -> None:
        self.rewriter, self.at, self.loop = rewriter, at, sorted(loop, key=lambda expert: expert.number)
        self.chosen, self.dims = loop[0].chosen, loop[0].dims
        shape = rewriter.old.values[self.chosen.name].shape
        self.longer = len(shape) > len(self.dims)  # there are more rows than tokens
        self.picks = shape[-1] if len(shape) > 1 else 1
        self.tokens = math.prod(shape) // self.picks
        self.known: dict[tuple[str, ...], Ref] = {}  # stacked values of all experts, by their names
        if any(expert.dims != self.dims for expert in loop) or not self.equal([expert.chosen for expert in loop]):
            raise Different
        flat = self.one("aten.reshape.default", self.new(self.chosen), (self.tokens * self.picks,))
        self.keys, self.order = self.several("aten.sort.default", flat)
        self.token = self.one("aten.floor_divide.default", self.order, self.picks) if len(shape) > 1 else self.order
        wide = self.one("aten.to.dtype", self.keys, torch.float64)  # histc does not support integers on the CPU
        counts = self.one("aten.histc.default", wide, len(loop), 0, len(loop) - 1)
        self.ends = self.one("aten.cumsum.default", self.one("aten.to.dtype", counts, torch.int32), 0, dtype=torch.int32)

    def result(self) -> Ref:
        """The result of the loop."""
        exits = [expert.exit for expert in self.loop]
        into = min(self.loop, key=lambda expert: self.place(expert.exit)).exit.into
        adds = exits[0].adds
        wanted = ({self.dims[0]: 0} if adds else {dim: at for at, dim in enumerate(self.dims)}, 0, 1)
        if (self.longer and not adds) or any(
            one.adds != adds or (one.places.dims, one.places.front, one.times) != wanted for one in exits
        ):
            raise Different
        rows = self.rows([one.rows for one in exits])
        count = self.tokens * self.picks
        inverse = self.one("aten.empty_like.default", self.order)
        positions = self.one("aten.arange.default", count, device=torch.device("meta"))
        inverse = self.one("aten.index_put.default", inverse, (self.order,), positions)
        back = self.one("aten.index.Tensor", rows, (inverse,))
        if self.longer or len(self.dims) > 1:
            back = self.one("aten.view.default", back, (self.tokens, self.picks, *self.shape(back)[1:]))
            back = self.one("aten.sum.dim_IntList", back, (1,)) if adds else back
        return self.one("aten.add.Tensor", self.new(into), back) if adds else back

    def place(self, one: Exit) -> int:
        """The position of an exit in the loop."""
        return self.rewriter.selections.exits.index(one)

    def rows(self, experts: Sequence[Ref]) -> Ref:
        """The rows of the experts, given as one value for each, as a single value."""
        selections = self.rewriter.selections
        names = tuple(selections.unmasked(one).name for one in experts)
        if names in self.known:
            return self.known[names]
        if all(name in selections.entrances for name in names):
            self.known[names] = self.taken([selections.entrances[name] for name in names])
            return self.known[names]
        made = self.rewriter.old.producer
        ops = [made[name] for name in names if name in made and name not in selections.entrances]
        if len(ops) < len(names) or not any(name in selections.held for name in ops[0].operands):
            raise Different
        results = self.op(ops)
        for place, result in enumerate(results):
            self.known[tuple(op.results[place].name for op in ops)] = result
        if names not in self.known:
            raise Different
        return self.known[names]

    def taken(self, entrances: Sequence[tuple[Ref, Places]]) -> Ref:
        """The rows of a tensor for the tokens, sorted by expert."""
        (x, places), selections = entrances[0], [expert.exit.places.selection for expert in self.loop]
        alike = all((at.dims, at.front) == (places.dims, places.front) for _, at in entrances)
        if not alike or any(at.selection is not of for (_, at), of in zip(entrances, selections, strict=True)):
            raise Different
        if not self.equal([one for one, _ in entrances]):
            if places.dims != {self.dims[0]: 0}:
                raise Different
            return self.own_weight([one for one, _ in entrances])
        before, now = (None,) * places.front, self.new(x)
        if set(places.dims) == {self.dims[0]}:
            return self.one("aten.index.Tensor", now, (*before, self.token))
        if set(places.dims) != set(self.dims):
            raise Different
        others, shape = places.rows_last(len(self.shape(now))), self.shape(now)
        order = (*others[0], places.dims[self.dims[0]], places.dims[self.dims[1]], *others[2])
        if order != tuple(range(len(order))):
            now = self.one("aten.permute.default", now, order)
        flat = (*(shape[dim] for dim in others[0]), self.tokens * self.picks, *(shape[dim] for dim in others[2]))
        return self.one("aten.index.Tensor", self.one("aten.reshape.default", now, flat), (*before, self.order))

    def own_weight(self, weights: Sequence[Ref]) -> Ref:
        """Each expert's weights of its tokens, from a tensor for all experts (n, e), or for those that a token chose (n, k)."""
        made = [self.rewriter.old.producer.get(one.name) for one in weights]
        ops = [op for op in made if op is not None]
        if len(ops) < len(made):
            raise Different
        if all(
            (op.target, *op.args[1:]) == ("aten.select.int", 1, expert.number)
            for op, expert in zip(ops, self.loop, strict=True)
        ):
            if not self.equal([Ref(op.operands[0]) for op in ops]) or len(self.old(ops[0].operands[0]).shape) != 2:
                raise Different
            of_all = self.one("aten.index.Tensor", self.new(Ref(ops[0].operands[0])), (self.token,))
            return self.one("aten.squeeze.dim", self.own_column(of_all), 1)
        sums = all(op.target == "aten.sum.dim_IntList" and op.args[1:] in (((-1,),), ((1,),)) for op in ops)
        if not sums or not self.longer:  # unless there are more rows than tokens, one may choose an expert twice
            raise Different
        products = [self.rewriter.old.producer.get(op.operands[0]) for op in ops]
        pairs = [op.args for op in products if op is not None and op.target == "aten.mul.Tensor" and not op.kwargs]
        if len(pairs) < len(ops) or not all(isinstance(one, Ref) for pair in pairs for one in pair):
            raise Different
        for chosen, given in ((0, 1), (1, 0)):
            if all(self.chooses(pair[chosen], expert) for pair, expert in zip(pairs, self.loop, strict=True)):
                found = [one for pair in pairs if isinstance(one := pair[given], Ref)]
                if self.equal(found) and self.old(found[0].name).shape == (self.tokens, self.picks):
                    flat = self.one("aten.reshape.default", self.new(found[0]), (self.tokens * self.picks,))
                    return self.one("aten.index.Tensor", flat, (self.order,))
        raise Different

    def chooses(self, mask: Argument, expert: Expert) -> bool:
        """Whether a value is true exactly where an expert is chosen, like the loop's own masks."""
        op = self.rewriter.old.producer.get(mask.name) if isinstance(mask, Ref) else None
        while op is not None and row_of(op).kind in (OpKind.CAST, OpKind.SAME):
            op = self.rewriter.old.producer.get(op.operands[0])
        if op is None or op.target != "aten.eq.Scalar" or op.args[1] != expert.number:
            return False
        return self.equal([Ref(op.operands[0]), self.chosen])

    def own_column(self, rows: Ref) -> Ref:
        """From a tensor with one column per expert, the column (rows, 1) of each row's own expert."""
        if len(self.shape(rows)) != 2:
            raise Different
        return self.one("aten.gather.default", rows, 1, self.one("aten.unsqueeze.default", self.keys, 1))

    def column(self, ops: Sequence[Op]) -> Ref | None:
        """The operand's column if each expert takes its own, by x[:, e] or x[:, e : e + 1]; None otherwise."""
        if any(not isinstance(op.args[0], Ref) for op in ops):
            return None
        ends = [(op.target, *op.args[1:]) for op in ops]
        rows = [one for op in ops if isinstance(one := op.args[0], Ref)]
        if ends == [("aten.select.int", 1, expert.number) for expert in self.loop]:
            return self.one("aten.squeeze.dim", self.own_column(self.rows(rows)), 1)
        if ends == [("aten.slice.Tensor", 1, expert.number, expert.number + 1) for expert in self.loop]:
            return self.own_column(self.rows(rows))
        return None

    def old(self, name: str) -> Value:
        return self.rewriter.old.values[name]

    def op(self, ops: Sequence[Op]) -> tuple[Ref, ...]:
        """The results of an op that all experts run."""
        first = ops[0]
        if (column := self.column(ops)) is not None:
            return (column,)
        sizes = (size for one in first.args for size in (one if isinstance(one, tuple) else (one,)))
        if self.longer and any(type(size) is int and size == self.tokens for size in sizes):
            raise Different
        if any((op.target, len(op.args), [name for name, _ in op.kwargs]) != self.form(first) for op in ops):
            raise Different
        args = tuple(self.merged(arguments) for arguments in zip(*(op.args for op in ops), strict=True))
        kwargs = {name: self.merged([dict(op.kwargs)[name] for op in ops]) for name, _ in first.kwargs}
        if not any(isinstance(one, _Each) for one in (*args, *kwargs.values())):
            return self.several(first.target, *args, **kwargs)
        match aten(first.target), args:
            case "linear", (Ref() as x, _Each() as weight, *bias):
                matrices = self.one("aten.transpose.int", self.stack(weight), -2, -1)
                return (self.biased(self.product(x, matrices), *bias),)
            case (("matmul" | "mm"), (Ref() as x, _Each() as weight)):
                return (self.product(x, self.stack(weight)),)
            case (("add" | "mul" | "sub" | "div"), (Ref() as x, _Each() as other)) if not kwargs:
                return (self.one(first.target, x, self.of_tokens(other)),)
        raise Different

    def form(self, op: Op) -> tuple[str, int, list[str]]:
        return op.target, len(op.args), [name for name, _ in op.kwargs]

    def merged(self, arguments: Sequence[Argument]) -> Argument:
        """An argument of all experts, merged: rows, a shared value, a number, or a separate value for each expert."""
        if all(isinstance(one, tuple) for one in arguments):
            if len({len(one) for one in arguments}) > 1:  # type: ignore[arg-type]
                raise Different
            return tuple(map(self.merged, zip(*arguments, strict=True)))
        if all(isinstance(one, Ref) for one in arguments):
            found = [one for one in arguments if isinstance(one, Ref)]
            if all(one.name in self.rewriter.selections.held for one in found):
                return self.rows(found)
            if self.equal(found):
                return self.new(found[0])
            values = [self.rewriter.old.values[one.name] for one in found]
            if any((one.shape, one.dtype) != (values[0].shape, values[0].dtype) for one in values):
                raise Different
            return _Each(self.new(one) for one in found)
        if any(type(one) is not type(arguments[0]) or one != arguments[0] for one in arguments):
            raise Different
        return arguments[0]

    def equal(self, values: Sequence[Ref]) -> bool:
        """Whether these values are equal, by value numbering."""
        return len({self.rewriter.numbers[one.name] for one in values}) == 1

    def product(self, x: Ref, matrices: Ref) -> Ref:
        """Multiply each group of rows by the matrix of its expert."""
        operands = [self.rewriter.values[one.name] for one in (x, matrices)]
        if [len(one.shape) for one in operands] != [2, 3]:
            raise Different
        return self.one(torchs(DOUBLE[GROUPED], operands), x, matrices, self.ends)

    def biased(self, x: Ref, bias: Argument = None) -> Ref:
        """Rows plus a vector, either that of their expert or a shared one."""
        if bias is None:
            return x
        return self.one("aten.add.Tensor", x, self.of_tokens(bias) if isinstance(bias, _Each) else bias)

    def of_tokens(self, experts: _Each) -> Ref:
        """Each token's vector, from one vector per expert."""
        if len(self.shape(experts[0])) != 1:
            raise Different
        return self.one("aten.index_select.default", self.stack(experts), 0, self.keys)

    def stack(self, experts: _Each) -> Ref:
        """The values of the experts, stacked."""
        names = ("stack", *(one.name for one in experts))
        if names not in self.known:
            self.known[names] = self.one("aten.stack.default", tuple(experts), 0)
        return self.known[names]

    def shape(self, ref: Ref) -> Shape:
        return self.rewriter.values[ref.name].shape

    def new(self, old: Ref) -> Ref:
        found = self.rewriter.new(old)
        assert isinstance(found, Ref)
        return found

    def one(self, target: str, *args: Argument, **kwargs: Argument) -> Ref:
        """The only result of an op."""
        return self.several(target, *args, **kwargs)[0]

    def several(self, target: str, *args: Argument, **kwargs: Argument) -> tuple[Ref, ...]:
        """The results of an op, placed where the loop ended."""
        at = self.at
        return self.rewriter.emit(target, args, tuple(kwargs.items()), module=at.module, source=at.source)


class _Each(tuple[Ref, ...]):
    """Separate values for the experts, one each."""

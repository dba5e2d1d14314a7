"""A loop over experts as products of groups: each token goes to the experts that it chose, and to no other.

In the program of a loop every expert computes with all tokens, and what it makes of those that did not choose it is left out
(`autopar.capture.selected_places`). Where the experts of a loop do the same with weights of their own, tokens are sorted by
expert, and each product of all experts is one of groups of rows:

    for e in range(n):                            keys, order = sort(chosen.flatten())
        i, k = where(chosen == e)                 r = x[order // 2]
        y[i] += linear(x[i], w[e])         ->     r = grouped_mm(r, stack(w).mT, ends of the groups in keys)
                                                  y = y + sum(r[inverse of order].view(n, 2, d), 1)

That is what libraries write by hand (transformers' `grouped_mm`), and known to rules: it may split over experts or over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.capture.equal_programs import live, numbered
from autopar.capture.selected_places import Exit, Places
from autopar.capture.selection import Selections
from autopar.ir.builder import Rewriter
from autopar.ir.layout import Shape
from autopar.ir.program import Argument, Op, Program, Ref, aten
from autopar.ir.schema import bound
from autopar.operators import row_of
from autopar.operators.double_precision import DOUBLE
from autopar.operators.facts import OpKind
from autopar.operators.families.contraction import ALIGNED

GROUPED = "aten._grouped_mm.default"


@dataclass(frozen=True, slots=True)
class Expert:
    """An exit of rows, of the tokens (n) that have chosen (n, k) an expert: `dims` are those of the mask for n and k."""

    exit: Exit
    chosen: Ref
    number: int
    dims: tuple[int, int]


class Different(Exception):
    """The experts of a loop do not do the same."""


def grouped(program: Program, selections: Selections) -> Program:
    """A program in which loops over experts are groups, if all experts are in them and do the same; else as it is."""
    loops = list(_loops(program, selections))
    if not loops:
        return program
    rewriter, done = _Grouping(program, selections), {loop[-1].exit.result.name: loop for loop in loops}
    for op in program.ops:
        rewriter.keep(op)
        for result in op.results:
            if result.name in done:
                rewriter.group(op, done[result.name])
    if not rewriter.changed:
        return program
    found = rewriter.finish()
    return replace(found, ops=tuple(live(found)))


def _loops(program: Program, selections: Selections) -> Iterator[list[Expert]]:
    """The exits of rows that follow each other, one for every expert that tokens can choose."""
    chain: list[Expert] = []
    for one in selections.exits:
        expert = _expert(program, one)
        if not chain or expert is None or one.into != chain[-1].exit.result:
            chain = []
        chain += [expert] if expert is not None else []
        count = _classes(program, chain[0].chosen) if chain else None
        if count == len(chain) and {expert.number for expert in chain} == set(range(len(chain))):
            yield chain
            chain = []


def _expert(program: Program, one: Exit) -> Expert | None:
    """The expert whose rows an exit puts back; None where its mask is another than that of the tokens that chose one."""
    selection, made, values = one.places.selection, program.producer, program.values
    op = made.get(selection.mask.name)
    while op is not None and (row_of(op).kind in (OpKind.RESHAPE, OpKind.SAME) or aten(op.target) == "permute"):
        op = made.get(op.operands[0])  # as the selection flattened it
    if op is not None and op.target == "aten.ne.Scalar" and op.args[1] == 0:
        op = made.get(op.operands[0])
    while op is not None and row_of(op).kind is OpKind.RESHAPE:
        op = made.get(op.operands[0])
    dim, dims = 0, (0, 1)
    match (op.target, op.args) if op is not None else ("", ()):
        case (("aten.eq.Scalar" | "aten.eq.Tensor"), (Ref() as chosen, said)):
            pass
        case "aten.select.int", (Ref(name=hot), int() as dim, said):
            pass
        case "aten.index.Tensor", (Ref(name=hot), (said,)):
            pass
        case _:
            return None
    if op is not None and aten(op.target) != "eq":
        source, order = made.get(hot), [0, 1, 2]
        while source is not None and row_of(source).kind in (OpKind.SAME, OpKind.CAST):
            source = made.get(source.operands[0])
        if source is not None and source.target == "aten.permute.default" and isinstance(source.args[1], tuple):
            order = [at % len(source.args[1]) for at in source.args[1] if isinstance(at, int)]
            source = made.get(source.operands[0])
        if source is None or source.target != "aten.one_hot.default" or len(order) != 3 or order[dim] != 2:
            return None
        left = [at for at in order if at != 2]
        chosen, dims = Ref(source.operands[0]), (left.index(0), left.index(1))
    number = _said(made.get(said.name)) if isinstance(said, Ref) else said
    shape = values[chosen.name].shape
    if (
        not isinstance(number, int)
        or len(shape) != 2
        or tuple(selection.shape[dim] for dim in dims) != shape
        or selection.order != dims
    ):
        return None
    return Expert(one, chosen, number, dims)


def _said(op: Op | None) -> Argument:
    """The number that a tensor of one element is filled with."""
    fills = row_of(op).fills if op is not None else None
    if op is None or fills is None or math.prod(op.results[0].shape) != 1:
        return None
    return bound(op)[fills] if isinstance(fills, str) else fills


def _classes(program: Program, chosen: Ref) -> int | None:
    """Among how many experts tokens choose: the places of a dim."""
    op = program.producer.get(chosen.name)
    if op is None or row_of(op).kind is not OpKind.PLACES or op.results[-1].name != chosen.name:
        return None
    dim = bound(op)["dim"]
    return program.values[op.operands[0]].shape[dim] if isinstance(dim, int) else None


class _Grouping(Rewriter):
    """Appends the groups of a loop behind it; what nothing needs any more is left out at the end."""

    def __init__(self, old: Program, selections: Selections) -> None:
        super().__init__(old)
        self.selections, self.changed = selections, False
        self.numbers = numbered(old, old.ops, {})

    def group(self, op: Op, loop: list[Expert]) -> None:
        """The result of a loop, whose last op this is, by groups; as it was, if its experts differ."""
        count, values, counts = len(self.ops), dict(self.values), self._count.copy()
        try:
            self.forward(op.results[0].name, _Group(self, op, loop).result())
            self.changed = True
        except Different:
            del self.ops[count:]
            self.values, self._count = values, counts


class _Group:
    """One loop as groups: its values are of all experts, with the rows of the tokens in the order of their experts."""

    def __init__(self, rewriter: _Grouping, at: Op, loop: Sequence[Expert]) -> None:
        self.rewriter, self.at, self.loop = rewriter, at, sorted(loop, key=lambda expert: expert.number)
        self.chosen, self.dims = loop[0].chosen, loop[0].dims
        self.tokens, self.picks = rewriter.old.values[self.chosen.name].shape
        self.known: dict[tuple[str, ...], Ref] = {}  # values of all experts, by their names
        if any(expert.dims != self.dims for expert in loop) or not self.equal([expert.chosen for expert in loop]):
            raise Different
        flat = self.one("aten.reshape.default", self.new(self.chosen), (self.tokens * self.picks,))
        self.keys, self.order = self.several("aten.sort.default", flat)
        self.token = self.one("aten.floor_divide.default", self.order, self.picks)
        wide = self.one("aten.to.dtype", self.keys, torch.float64)  # histc counts no integers on a CPU
        counts = self.one("aten.histc.default", wide, len(loop), 0, len(loop) - 1)
        self.ends = self.one("aten.cumsum.default", self.one("aten.to.dtype", counts, torch.int32), 0, dtype=torch.int32)

    def result(self) -> Ref:
        """What the loop made."""
        exits = [expert.exit for expert in self.loop]
        into = min(self.loop, key=lambda expert: self.place(expert.exit)).exit.into
        adds = exits[0].adds
        wanted = ({self.dims[0]: 0} if adds else {self.dims[0]: 0, self.dims[1]: 1}, 0, 1)
        if any(one.adds != adds or (one.places.dims, one.places.front, one.times) != wanted for one in exits):
            raise Different
        rows = self.rows([one.rows for one in exits])
        count = self.tokens * self.picks
        inverse = self.one("aten.empty_like.default", self.order)
        positions = self.one("aten.arange.default", count, device=torch.device("meta"))
        inverse = self.one("aten.index_put.default", inverse, (self.order,), positions)
        back = self.one("aten.index.Tensor", rows, (inverse,))
        back = self.one("aten.view.default", back, (self.tokens, self.picks, *self.shape(back)[1:]))
        return self.one("aten.add.Tensor", self.new(into), self.one("aten.sum.dim_IntList", back, (1,))) if adds else back

    def place(self, one: Exit) -> int:
        """The place of an exit in the loop."""
        return self.rewriter.selections.exits.index(one)

    def rows(self, experts: Sequence[Ref]) -> Ref:
        """Rows of the experts, one value for each, as one."""
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
        """The rows of a tensor for the tokens in their order."""
        (x, places), selections = entrances[0], [expert.exit.places.selection for expert in self.loop]
        alike = all((at.dims, at.front) == (places.dims, places.front) for _, at in entrances)
        if (
            not alike
            or not self.equal([one for one, _ in entrances])
            or any(at.selection is not of for (_, at), of in zip(entrances, selections, strict=True))
        ):
            raise Different
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

    def op(self, ops: Sequence[Op]) -> tuple[Ref, ...]:
        """The results of an op that all experts have."""
        first = ops[0]
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
        """An argument of all experts as one: rows, what they share, a number, or a value that each has of its own."""
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
        """Whether values are computed alike of the same."""
        return len({self.rewriter.numbers[one.name] for one in values}) == 1

    def product(self, x: Ref, matrices: Ref) -> Ref:
        """Each group of rows times the matrix of its expert."""
        sizes, dtype = (*self.shape(x)[1:], *self.shape(matrices)[1:]), self.rewriter.values[x.name].dtype
        if len(self.shape(x)) != 2 or len(sizes) != 3:
            raise Different
        fits = dtype is torch.bfloat16 and not any(size % ALIGNED for size in sizes)  # what torch's own asks of operands
        return self.one(GROUPED if fits else DOUBLE[GROUPED], x, matrices, self.ends)

    def biased(self, x: Ref, bias: Argument = None) -> Ref:
        """Rows with a vector added, that of their expert or of all."""
        if bias is None:
            return x
        return self.one("aten.add.Tensor", x, self.of_tokens(bias) if isinstance(bias, _Each) else bias)

    def of_tokens(self, experts: _Each) -> Ref:
        """A vector of each expert, for each of its tokens."""
        if len(self.shape(experts[0])) != 1:
            raise Different
        return self.one("aten.index_select.default", self.stack(experts), 0, self.keys)

    def stack(self, experts: _Each) -> Ref:
        """Values of the experts in one."""
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
        """The result of an op with one."""
        return self.several(target, *args, **kwargs)[0]

    def several(self, target: str, *args: Argument, **kwargs: Argument) -> tuple[Ref, ...]:
        """The results of an op, at the place of the loop's last one."""
        at = self.at
        return self.rewriter.emit(target, args, tuple(kwargs.items()), module=at.module, source=at.source)


class _Each(tuple[Ref, ...]):
    """A value that every expert has of its own."""

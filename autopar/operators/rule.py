"""Rules: which dims of an operator's operands and results belong together, so that they may be split together.

A `Rule` is a row of the table: a line of text (see `autopar.operators.notation`), or a function where shapes and arguments
decide. A `OpSharding` is what it says about one op, with sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from autopar.ir.layout import State
from autopar.operators.facts import Alias, Autocast, Mean, Mixed, OpKind, Says
from autopar.operators.notation import parse

if TYPE_CHECKING:
    from autopar.ir.program import Argument
    from autopar.operators.call import Call, Local
    from autopar.operators.flops import Flops
    from autopar.operators.index_facts.call import FactRule
    from autopar.operators.own_order import OwnOrderRule
    from autopar.operators.padding import Padding

Dims = tuple[tuple[int, ...], ...]  # per dim of one tensor: its factors, outer to inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One factor of an op's dims; a `whole` factor may not be split."""

    name: str
    size: int
    whole: bool = False

    def __str__(self) -> str:
        return self.name if self.name == "_" or not self.whole else f"{self.name}!"


@dataclass(frozen=True, slots=True)
class InternalCollective:
    """One collective inside an op: its kind, and the elements of its larger buffer on one rank.

    `times(call, local, ranks)` is how often it is sent in one run of the op on so many ranks: a ring takes `ranks - 1` steps.
    Elements are of the first operand's dtype, or of float32 if that is narrower and they are `wide`: sums and statistics.
    """

    kind: str
    elements: Callable[[Call, Local], int]
    times: Callable[[Call, Local, int], int] = lambda call, local, ranks: 1
    wide: bool = True


def always(call: Call) -> bool:
    """In every use of an operator."""
    return True


def evenly(fitted: OpSharding, ranks: int) -> float:
    """A rank computes its part, as the local shapes have it."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelForm:
    """A form of an op that splits factors which are otherwise whole, on one axis: messages inside, or a rank's knowledge of its
    place, make up for it. Operands and results that have one of the factors are S there.
    """

    name: str  # of the function in `runtime.parallel_ops` that runs it
    factors: tuple[str, ...]  # their names in the rule's text
    nested: bool = False  # there are two, parts of one dim, of which a rank's chunk lies within one part of the outer
    whole: tuple[int, ...] = ()  # positions of operands that stay whole though they have one of the factors
    operands: str = "R"  # the state of operands without the factors: I if their gradient comes out complete
    results: str = "P"  # the state of results without them: I if they come out complete
    able: Callable[[Call], bool] = always  # whether the form serves this use
    work: Callable[[OpSharding, int], float] = evenly  # what the busiest of so many ranks computes, in ops of the local shapes
    in_place: bool = False  # whether its backward makes gradients without the workspace of the op's own
    forward: tuple[InternalCollective, ...] = ()
    backward: tuple[InternalCollective, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows:
    """How an op runs on a rank's rows in its own order (`autopar.operators.own_order`).

    The states of operands and results, with no stride; None for operands that are whole on each rank.
    """

    operands: tuple[State | None, ...]
    results: tuple[State, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSharding:
    """A rule fitted to one op: every dim of every tensor as a product of factors.

    Splitting factor f cuts every dim that has f (contiguously where f is the leftmost factor, else in blocks); operands
    that lack f are replicated, or partial where f is summed away and the operand is `added`; results that lack f are partial.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]  # in the order of Op.operands; a broadcast dim of size 1 has no factors
    results: tuple[Dims, ...]
    added: frozenset[int] = frozenset()  # operand positions that are added once
    linear: tuple[frozenset[int], ...] = ()  # groups of operand positions in which the op is jointly linear
    asks: tuple[tuple[str, int, int, int], ...] = ()  # ("operand"|"result", position, dim, factor): wants a blocked split
    random: bool = False  # draws random numbers
    whole_gradient: bool = False  # its backward takes no gradient that is partial
    distributed: tuple[ParallelForm, ...] = ()
    own: OwnRows | None = None  # where it is known from the program that it may run on own rows
    text: str = field(default="", compare=False, repr=False)  # the pattern that was laid over the shapes

    def factor(self, name: str) -> Factor:
        """The factor of a name."""
        return next(factor for factor in self.factors if factor.name == name)

    def factors_of(self, form: ParallelForm) -> tuple[int, ...]:
        """The indices of the factors that a distributed form splits, outer to inner."""
        return tuple(f for f, factor in enumerate(self.factors) if factor.name in form.factors)

    def parts(self, form: ParallelForm, ranks: int) -> dict[int, int]:
        """The number of parts into which so many ranks split each factor of a distributed form; empty if they cannot."""
        factors = self.factors_of(form)
        counts = [ranks] * len(factors)
        if form.nested:
            outer = self.factors[factors[0]].size
            counts = [outer, ranks // outer if ranks > outer and ranks % outer == 0 else 0]
        fitting = all(count and self.factors[f].size % count == 0 for f, count in zip(factors, counts, strict=True))
        return dict(zip(factors, counts, strict=True)) if fitting else {}

    def chunks(self, form: ParallelForm, ranks: int) -> dict[int, int]:
        """The factors along which a form cuts dims on so many ranks, and the stride within each."""
        parts = self.parts(form, ranks)
        return {f: self.factors[f].size // parts[f] for f in (*parts,)[1 if form.nested else 0 :]}

    @property
    def own_dims(self) -> tuple[tuple[int, ...], ...]:
        """The factors of every dim that is split for own rows."""
        states = (*self.own.operands, *self.own.results) if self.own else ()
        tensors = zip((*self.operands, *self.results), states, strict=True) if states else ()
        return tuple(dims[state.dim] for dims, state in tensors if state and state.kind == "S")

    def size(self, dim: tuple[int, ...]) -> int:
        """The size of a dim of these factors."""
        return math.prod(self.factors[f].size for f in dim)

    @property
    def summed(self) -> tuple[int, ...]:
        """The factors that appear in no result."""
        kept = {f for dims in self.results for dim in dims for f in dim}
        return tuple(f for f in range(len(self.factors)) if f not in kept)

    def __str__(self) -> str:
        operands = ", ".join(f"{'+' if i in self.added else ''}{self._text(d)}" for i, d in enumerate(self.operands))
        return f"{operands} -> {', '.join(map(self._text, self.results))}".lstrip()

    def _text(self, dims: Dims) -> str:
        def word(dim: tuple[int, ...]) -> str:
            words = " ".join(str(self.factors[f]) for f in dim) or "_"
            return f"({words})" if len(dim) > 1 else words

        return " ".join(map(word, dims)) or "()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table, with all facts about an operator; make it with `op`."""

    # How it splits.
    text: str = ""  # the pattern; empty where a function decides
    shapes: Callable[[Call], OpSharding | None] | None = None  # decides where a text cannot; None: this use has no rule
    linear: tuple[tuple[str, ...], ...] = ()  # groups of argument names in which the op is jointly linear
    local: Callable[[Call, Local], dict[str, Argument]] | None = None  # static arguments for local shapes, by name
    averages: Callable[[Call], bool] | None = None  # whether what is summed away is then divided by its global count
    whole_gradient: bool = False  # whether the backward of a sum of gradients is not the sum of their backwards
    when: tuple[tuple[str, Argument], ...] = ()  # static arguments that a call must have; other calls have no rule
    distributed: tuple[ParallelForm, ...] = ()  # other ways to split it
    own_order: OwnOrderRule | None = None  # whether it may run on a rank's own rows where something is known of its operands
    # What it costs.
    flops: Flops | None = None  # the products that it consists of; None: one operation per element
    picks: str = ""  # the argument of which it reads only the elements that its indices pick: the table of an embedding
    indifferent: tuple[str, ...] = ()  # arguments whose number decides neither layouts nor prices: which row, by how much
    timed: Callable[[Call], Mapping[str, tuple[int, ...]]] | None = None  # what integers are timed with, if not 0
    defers: tuple[str, ...] = ()  # the activation and the weight of a product, if the weight's gradient may be made later
    alone: bool = False  # torch.compile does not fuse it, though it goes over memory as those that it fuses
    hands_on: tuple[str, ...] = ()  # arguments whose gradient is the result's as it is, where the shapes are equal
    # What it does to memory and state.
    alias: Alias | Callable[[Call], Alias] = Alias.NEVER  # whether the results share the memory of the first operand
    writes: tuple[str, ...] = ()  # arguments that it writes in training, though its schema does not say so
    random: bool = False  # draws random numbers, where `training` is on and `rate` is not zero
    training: str = ""  # the argument that says whether it runs as in training
    rate: str = ""  # the argument that says how much is dropped
    # What rewrites need to know.
    kind: OpKind | None = None
    fills: float | str | None = None  # the number that stands everywhere, or the argument that says it
    mean: Mean | None = None  # what it divides by where it takes a mean
    padding: Padding | None = None  # what padding becomes; None: it cannot be padded
    autocast: Autocast | None = None
    mixed: Mixed | None = None
    index_fact: FactRule | None = None  # what is known of its values where something is known of its operands'
    # The words for a person.
    says: Says | None = None

    @property
    def contracts(self) -> bool:
        """Whether it consists of matrix products with operands that may be weights."""
        return self.flops is not None and self.kind is not OpKind.ATTENTION

    def is_random(self, call: Call) -> bool:
        """Whether this use draws random numbers, by the arguments that the row names."""
        on = not self.training or bool(call.arguments[self.training])
        return self.random and on and (not self.rate or call.arguments[self.rate] != 0)

    def fit(self, call: Call) -> OpSharding | None:
        """The factors of one op."""
        known = self.text or self.shapes
        if not known or any(call.arguments.get(name) != value for name, value in self.when):
            return None
        fitted = self.shapes(call) if self.shapes else call.fit(self.text)
        if fitted and self.is_random(call):
            fitted = replace(fitted, random=True)
        return replace(fitted, whole_gradient=True) if fitted and self.whole_gradient else fitted

    def __str__(self) -> str:
        return self.text or f"decided by {getattr(self.shapes, '__name__', 'a function')}"


def op(
    form: str | Callable[[Call], OpSharding | None],
    *,
    linear: str = "",
    local: Callable[[Call, Local], dict[str, Argument]] | None = None,
    averages: Callable[[Call], bool] | None = None,
    when: Mapping[str, Argument] | None = None,
    distributed: Sequence[ParallelForm] = (),
    own_order: OwnOrderRule | None = None,
    flops: Flops | None = None,
    picks: str = "",
    indifferent: str = "",
    timed: Callable[[Call], Mapping[str, tuple[int, ...]]] | None = None,
    defers: str = "",
    alone: bool = False,
    hands_on: str = "",
    alias: Alias | Callable[[Call], Alias] = Alias.NEVER,
    writes: str = "",
    random: bool = False,
    training: str = "",
    rate: str = "",
    kind: OpKind | None = None,
    fills: float | str | None = None,
    mean: Mean | None = None,
    padding: Padding | None = None,
    autocast: Autocast | None = None,
    mixed: Mixed | None = None,
    index_fact: FactRule | None = None,
    says: Says | None = None,
) -> Rule:
    """A row of the table: a pattern or a function that decides, `linear` groups of argument names, and facts (see `Rule`).

    >>> print(op("m k, n k, +n -> m n", linear="input bias, weight bias"))
    m k, n k, +n -> m n
    """
    text = str(parse(form)) if isinstance(form, str) else ""
    return Rule(
        text=text,
        shapes=None if isinstance(form, str) else form,
        linear=tuple(tuple(group.split()) for group in linear.split(",") if group.strip()),
        local=local,
        averages=averages,
        when=tuple((when or {}).items()),
        distributed=tuple(distributed),
        own_order=own_order,
        flops=flops,
        picks=picks,
        indifferent=tuple(indifferent.split()),
        timed=timed,
        defers=tuple(defers.split()),
        alone=alone,
        hands_on=tuple(hands_on.split()),
        alias=alias,
        writes=tuple(writes.split()),
        random=random,
        training=training,
        rate=rate,
        kind=kind,
        fills=fills,
        mean=mean,
        padding=padding,
        autocast=autocast,
        mixed=mixed,
        index_fact=index_fact,
        says=says,
    )


arithmetic = functools.partial(op, indifferent="other")
"""A row of an op whose operand `other` may be a number: any number has one layout and one price."""

"""Infers the factors of an operator's dims by running it on other sizes, as a step towards its rule.

x (4, 6), w (10, 6) -> (4, 10)   ->   a b, c b -> a c
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.errors import RuleError
from autopar.operators.checking.execution_check import check
from autopar.operators.checking.probe import Class, OperandDim, Probe
from autopar.operators.checking.sample_call import Example
from autopar.operators.checking.uneven_check import joins_unevenly
from autopar.operators.registry import fit
from autopar.operators.rule import Rule, always, op

DRAWS = 3  # random draws per check
ORDERS = 24  # the most orders of factors of merged dims to try
MERGED = 3  # the most classes to merge at once, before merging all of one size


@dataclass(frozen=True, slots=True)
class InferredWord:
    """A factor of a dim: the factor of a class, by its number, or a constant one, by the dim in which it occurs."""

    number: int
    constant: str = ""


InferredWords = tuple[InferredWord, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class InferredRule:
    """The classes of an operator's dims, the factors of every dim of operands and results, and the classes that split."""

    probe: Probe
    members: tuple[Class, ...]
    operands: Mapping[OperandDim, InferredWords]
    results: Mapping[OperandDim, InferredWords]
    able: frozenset[int] = frozenset()
    added: frozenset[int] = frozenset()  # operands that are added once
    averages: bool = False

    def size(self, number: int) -> int:
        """The size of the dims of a class."""
        return self.probe.size(min(self.members[number]))

    def __str__(self) -> str:
        names: dict[InferredWord, str] = {}

        def name(word: InferredWord) -> str:
            names.setdefault(word, string.ascii_letters[len(names)])
            return f"{names[word]}{'' if able(word) else '!'}"

        def able(word: InferredWord) -> bool:
            return word.number in self.able and not word.constant

        def dim(words: InferredWords) -> str:
            if not any(map(able, words)):  # a dim that stays whole needs neither name nor size
                return "_"
            return f"({' '.join(map(name, words))})" if len(words) > 1 else name(words[0])

        def term(known: Mapping[OperandDim, InferredWords], position: int, rank: int) -> str:
            return " ".join(dim(known.get((position, d), ())) for d in range(rank)) or "()"

        example = self.probe.example
        ranks = [tensor.ndim for tensor in example.tensors.values()]
        inside = [f"{'+' if i in self.added else ''}{term(self.operands, i, rank)}" for i, rank in enumerate(ranks)]
        outside = [term(self.results, i, result.ndim) for i, result in enumerate(example.results)]
        return f"{', '.join(inside)} -> {', '.join(outside)}"

    def rule(self, groups: Sequence[str] = (), text: str = "") -> Rule:
        """The form as a rule, linear in these groups of arguments; `text` may replace its pattern by a shorter one."""
        return op(text or str(self), linear=", ".join(groups), averages=always if self.averages else None)

    def holds(self, groups: Sequence[str] = ()) -> bool:
        """Whether the law holds on several draws, for equal and for unequal parts."""
        drawn = [self.probe.run() for _ in range(DRAWS)]
        return all(one is not None and obeys(one, self.rule(groups)) for one in drawn)

    def alone(self, number: int) -> InferredRule:
        """The form with only this class split."""
        return replace(self, able=frozenset({number}))

    def splits(self) -> InferredRule:
        """The form with every class that can be split alone, and the factors of merged dims in the right order."""
        form = self
        for number in range(len(self.members)):
            found = next((attempt for attempt in form.attempts(number) if attempt.alone(number).holds()), None)
            if found is not None:
                form = replace(found, able=form.able | {number})
        return form

    def attempts(self, number: int) -> Iterator[InferredRule]:
        """Forms that settle what is open about a class: the order of factors, sum or average, operands added once."""
        dims = [("operand", place, words) for place, words in self.operands.items()]
        dims += [("result", place, words) for place, words in self.results.items()]
        orders = itertools.product(*(self._orders(words, number) for _, _, words in dims))
        for order in itertools.islice(orders, ORDERS):
            found = [(side, place, words) for (side, place, _), words in zip(dims, order, strict=True)]
            operands = {place: words for side, place, words in found if side == "operand"}
            results = {place: words for side, place, words in found if side == "result"}
            form = replace(self, operands=operands, results=results)
            yield form
            if not any(InferredWord(number) in words for words in results.values()):
                yield replace(form, averages=True)
                lacking = [
                    i for i, tensor in enumerate(self.probe.example.tensors.values())
                    if tensor.dtype.is_floating_point and all(i != place[0] for place in self.members[number])
                ]  # fmt: skip
                for count in (1, 2):
                    for more in itertools.combinations(lacking, count):
                        yield replace(form, added=self.added | set(more))

    def _orders(self, words: InferredWords, number: int) -> list[InferredWords]:
        """The possible orders of a dim's factors; the order is known if one of them splits already."""
        open_ = InferredWord(number) in words and not any(word.number in self.able for word in words)
        return list(itertools.permutations(words)) if open_ else [words]

    def merged(self) -> InferredRule:
        """The form with classes of equal size merged where they split together but not alone."""
        given = [tuple(tensor.shape) for tensor in self.probe.example.tensors.values()]
        whole = [number for number in range(len(self.members)) if number not in self.able]
        sizes = {number: {given[i][d] for i, d in self.members[number]} for number in whole}
        counts = dict.fromkeys((*range(2, min(MERGED, len(whole)) + 1), len(whole)))
        for group in itertools.chain.from_iterable(itertools.combinations(whole, count) for count in counts if count > 1):
            if len(set.union(*(sizes[number] for number in group))) == 1:
                one = frozenset.union(*(self.members[number] for number in group))
                if _square(one):
                    continue
                probe = self.probe.resized(dict.fromkeys(one, self.size(group[0])))
                if probe.run() is not None:
                    kept = [members for number, members in enumerate(self.members) if number not in group]
                    form = surveyed(probe, [*kept, one]).splits()
                    if len(form.able) > len(self.able):
                        return form.merged()
        return self


def surveyed(probe: Probe, classes: Sequence[Class]) -> InferredRule:
    """Find each class in the results: every class gets a size of its own, which is then changed to see which dims follow."""
    probe = probe.spread(classes)
    base = probe.run()
    assert base is not None, "every size was tried"
    square = {number for number, one in enumerate(classes) if _square(one)}
    operands: dict[OperandDim, InferredWords] = {
        place: (InferredWord(number),) for number, one in enumerate(classes) for place in one if number not in square
    }
    growth = _growth(probe, classes, base)
    form = InferredRule(probe=probe, members=tuple(classes), operands=operands, results={})
    sizes = [form.size(number) for number in range(len(classes))]
    parts: dict[OperandDim, Fraction] = {}  # the size of a dim relative to the product of its classes
    units = [1] * len(classes)  # into how many pieces a class is divided, of which the results have one
    for place, numbers in growth.items():
        parts[place] = Fraction(base.results[place[0]].shape[place[1]], math.prod(sizes[n] for n in numbers))
        if len(numbers) == 1:
            units[numbers[0]] = math.lcm(units[numbers[0]], parts[place].denominator)
    for number, one in enumerate(classes):
        if units[number] > 1 and number not in square:
            operands |= {place: (InferredWord(number, f"in{place}"), InferredWord(number)) for place in one}
    results: dict[OperandDim, InferredWords] = {}
    for place, numbers in growth.items():
        rest = parts[place] * math.prod(units[n] for n in numbers)
        twice = any(other[0] == place[0] and other != place and set(n) & set(numbers) for other, n in growth.items())
        if rest.denominator == 1 and not twice and square.isdisjoint(numbers):
            constant = (InferredWord(numbers[0], f"out{place}"),) if rest > 1 else ()
            results[place] = (*constant, *map(InferredWord, numbers))
    full = replace(form, operands=operands, results=results)
    return full if _fits(full, base) else replace(form, results={p: w for p, w in results.items() if parts[p] == 1 == len(w)})


def _square(one: Class) -> bool:
    """Whether a class has two dims of one tensor: a square matrix, which no factor can describe."""
    return len({position for position, _ in one}) < len(one)


def _growth(probe: Probe, classes: Sequence[Class], base: Example) -> dict[OperandDim, list[int]]:
    """The classes to which each dim of a result is proportional; dims that depend on a class in another way are left out."""
    growth: dict[OperandDim, list[int]] = {}
    crooked: set[OperandDim] = set()
    shapes = [tuple(result.shape) for result in base.results]
    for number, one in enumerate(classes):
        size, taken = probe.size(min(one)), {probe.size(place) for place in probe.places()}
        for _ in range(2):
            other = probe.other(one, taken)
            grown = probe.run(dict.fromkeys(one, other)) if other else None
            if other is None or grown is None:
                break
            taken.add(other)
            now = [tuple(result.shape) for result in grown.results]
            if list(map(len, now)) != list(map(len, shapes)):
                continue
            for place in ((r, d) for r, shape in enumerate(shapes) for d in range(len(shape))):
                before, after = shapes[place[0]][place[1]], now[place[0]][place[1]]
                if before != after and number not in growth.setdefault(place, []):
                    growth[place].append(number)
                if after * size != before * other and before != after:
                    crooked.add(place)
    return {place: numbers for place, numbers in sorted(growth.items()) if numbers and place not in crooked}


def _fits(form: InferredRule, example: Example) -> bool:
    able = frozenset(range(len(form.members)))
    try:
        return fit(example.op, example.values, rule=replace(form, able=able).rule()) is not None
    except RuleError:
        return False


def obeys(example: Example, made: Rule) -> bool:
    """Whether a rule holds for a call, for equal and for unequal parts."""
    try:
        fitted = fit(example.op, example.values, rule=made)
        check(example.op, example.values, example.tensors, rule=made)
        return fitted is not None and joins_unevenly(example, fitted, averages=made.averages is not None)
    except RuleError:
        return False


__all__ = ["InferredRule", "InferredWord", "obeys", "surveyed"]

"""The notation of rules: text -> Pattern -> text.

    pattern := [operand ("," operand)*] "->" result ("," result)*
    operand := ["+"] dims       + : added once, an addend where a factor that it lacks is summed away
    dims    := dim* | "()"      outermost first; () is a scalar
    dim     := word | "(" word word+ ")" | "..." ["!"] | "_"
    word    := name ["!"]       ! : the factor may not be split

A dim in parentheses is a product of factors, outer to inner. `...` stands for any number of dims, aligned at the right between
tensors and broadcast; `_` is a dim of its own that stays whole. A dim of size 1 has no factors at all: it broadcasts.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field

from autopar.errors import RuleError

TOKEN = re.compile(r"->|\.\.\.|[A-Za-z][A-Za-z0-9]*|[_+!(),]")
ANY, ALONE = "...", "_"


@dataclass(frozen=True, slots=True)
class Word:
    """A factor as written: its name, and whether an exclamation mark keeps it whole."""

    name: str
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.name}{'!' if self.whole and self.name != ALONE else ''}"


Dim = tuple[Word, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The dims of one tensor."""

    dims: tuple[Dim, ...]
    added: bool = False

    def __str__(self) -> str:
        words = [str(dim[0]) if len(dim) == 1 else f"({' '.join(map(str, dim))})" for dim in self.dims]
        return f"{'+' if self.added else ''}{' '.join(words) or '()'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A parsed rule; prints as it was written."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}".lstrip()


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """The pattern that a text denotes. Raises RuleError with the place in the text that cannot be read.

    >>> print(parse("m k,n k, +n->m n"))
    m k, n k, +n -> m n
    """
    reader = _Reader(text=text, tokens=_tokens(text))
    operands = () if reader.peek() == "->" else reader.terms(stop="->", may_add=True)
    reader.expect("->")
    return Pattern(operands=operands, results=reader.terms(stop="", may_add=False))


def _tokens(text: str) -> list[tuple[str, int]]:
    tokens, place = [], 0
    while place < len(text):
        if text[place].isspace():
            place += 1
            continue
        match = TOKEN.match(text, place)
        if match is None:
            raise _unreadable(text, place, f"{text[place]!r} means nothing here")
        tokens.append((match[0], place))
        place = match.end()
    return [*tokens, ("", len(text))]


def _unreadable(text: str, place: int, why: str) -> RuleError:
    return RuleError(
        f"cannot read the rule {text!r}: {why}",
        at=f"{text[:place]}<here>{text[place:]}",
        fix='write it like "... k, n k, +n -> ... n": names, "!" whole, "+" added once, "(a b)" one dim, "..." any dims',
    )


@dataclass(slots=True, kw_only=True)
class _Reader:
    text: str
    tokens: list[tuple[str, int]]
    next: int = 0
    seen: set[str] = field(default_factory=set)  # names in the present term

    def peek(self) -> str:
        return self.tokens[self.next][0]

    def take(self) -> str:
        self.next += 1
        return self.tokens[self.next - 1][0]

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise self.error(f"{token!r} is missing")
        self.take()

    def error(self, why: str) -> RuleError:
        return _unreadable(self.text, self.tokens[self.next][1], why)

    def terms(self, *, stop: str, may_add: bool) -> tuple[Term, ...]:
        terms = [self.term(may_add=may_add)]
        while self.peek() == ",":
            self.take()
            terms.append(self.term(may_add=may_add))
        if self.peek() != stop:
            raise self.error(f"{self.peek()!r} cannot follow a term" if self.peek() else "'->' is missing")
        return tuple(terms)

    def term(self, *, may_add: bool) -> Term:
        self.seen.clear()
        added = self.peek() == "+"
        if added:
            if not may_add:
                raise self.error("only an operand can be added")
            self.take()
        dims = []
        while self.peek() not in (",", "->", ""):
            dims.append(self.dim())
        if not dims:
            raise self.error("a term is empty: a scalar is written ()")
        return Term(dims=tuple(d for d in dims if d), added=added)

    def dim(self) -> Dim:
        if self.peek() != "(":
            return (self.word(within=False),)
        self.take()
        words = []
        while self.peek() != ")":
            words.append(self.word(within=True))
        self.take()
        return tuple(words)

    def word(self, *, within: bool) -> Word:
        name = self.peek()
        if not (name[:1].isalpha() or name in (ANY, ALONE)):
            raise self.error(f"{name!r} is no name of a factor" if name else "the text ends too early")
        if within and name in (ANY, ALONE):
            raise self.error(f"{name!r} cannot be part of a dim")
        if name in self.seen:
            raise self.error(f"{name!r} appears twice in one tensor")
        self.take()
        if name == ALONE:
            return Word(ALONE, whole=True)
        self.seen.add(name)
        whole = self.peek() == "!"
        if whole:
            self.take()
        return Word(name, whole)

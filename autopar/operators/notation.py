"""The notation of rules: text -> Pattern -> text.

    pattern := [operand ("," operand)*] "->" result ("," result)*
    operand := ["+"] dims                   + : added once, an addend where a factor that it lacks is summed away
    dims    := dim* | "()"                  outermost first; () is a scalar
    dim     := word | "(" word word+ ")" | "[" word "]" | any | named | "_" | "_..." | "[_]" | "[...]"
    word    := name ["=" argument] ["!"]    ! : the factor may not be split
    any     := "..." ["!"]
    named   := [name | "_"] "@" argument ["!"]

A dim in parentheses is a product of factors, outer to inner. `_` is a dim of its own that stays whole, `_...` any number of
them. A dim of size 1 has no factors at all: it broadcasts.

`...` stands for any number of dims, aligned at the right between tensors and broadcast.

`[n]` is a dim that a tensor may lack; where several may be lacking, the leftmost are. A result lacks what all operands lack
that have it in brackets. `[...]` are the dims of `...` in a result that may be a scalar: a loss, perhaps reduced.

`g=groups` is a factor whose size a static argument tells: an integer, or the product of a list.

`@dim` are the dims that the static argument `dim` lists: an integer or a list; negative numbers count from the right; all
dims, if the list is None or empty. They stand somewhere among the dims of `...`: `... @dim ...` are all dims of a tensor,
some of them named. `n@dim` calls the factor n, `_@dim` is a dim of its own that stays whole. The argument counts the dims of
the largest tensor that has an `@`; each factor without a name is called by its place there: d0, d1. In a tensor without `@`,
`...` are the dims that no argument names; and so are `... ...`, with `_` for the named ones if the op keeps these (keepdim).

    "... n@dim! ... -> ... n@dim! ..."          softmax: all of n is normalised together
    "... @dim ... -> ... ..."                   sum over dims, which may be split
    "... _@dim ..., [i] -> ... i@dim ..."       index_select
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import RuleError

NAME, ARGUMENT = "[A-Za-z][A-Za-z0-9]*", "[A-Za-z_][A-Za-z0-9_]*"
TOKEN = re.compile(rf"->|_?\.\.\.|(?:{NAME}|_)?@{ARGUMENT}|{NAME}(?:={ARGUMENT})?|[_+!()\[\],]")
ANY, ALONE, ALL_ALONE = "...", "_", "_..."


@dataclass(frozen=True, slots=True)
class Word:
    """A factor as written: its name, whether an exclamation mark keeps it whole, and the arguments that place or size it."""

    name: str  # empty where the place gives it one
    whole: bool = False
    at: str = ""  # the static argument that lists the dims
    size: str = ""  # the static argument that tells the size

    def __str__(self) -> str:
        mark = "!" if self.whole and self.name not in (ALONE, ALL_ALONE) else ""
        return f"{self.name}{'@' if self.at else '='}{self.at or self.size}{mark}" if self.at or self.size else self.name + mark


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim as written, or the `...` that stand for any number of them."""

    words: tuple[Word, ...]
    optional: bool = False  # a tensor may lack it

    @property
    def open(self) -> bool:
        """Whether it is one of any number of dims."""
        return self.words[0].name in (ANY, ALL_ALONE) or bool(self.words[0].at)

    def __str__(self) -> str:
        text = " ".join(map(str, self.words))
        if self.optional:
            return f"[{text}]"
        return text if len(self.words) == 1 else f"({text})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternTerm:
    """The dims of one tensor."""

    dims: tuple[Dim, ...]
    added: bool = False

    @property
    def named(self) -> tuple[Word, ...]:
        """The words that an argument places."""
        return tuple(dim.words[0] for dim in self.dims if dim.words[0].at)

    def __str__(self) -> str:
        return f"{'+' if self.added else ''}{' '.join(map(str, self.dims)) or '()'}"


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """A parsed rule; prints as it was written. It is fitted to many calls: what they all ask is found once."""

    operands: tuple[PatternTerm, ...]
    results: tuple[PatternTerm, ...]

    @functools.cached_property
    def words(self) -> tuple[Word, ...]:
        """All words of all tensors."""
        return tuple(word for term in (*self.operands, *self.results) for dim in term.dims for word in dim.words)

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """The static arguments that it reads."""
        return tuple(dict.fromkeys(word.at or word.size for word in self.words if word.at or word.size))

    @functools.cached_property
    def lacks(self) -> bool:
        """Whether a tensor may lack a dim."""
        return any(dim.optional and not dim.open for term in (*self.operands, *self.results) for dim in term.dims)

    @functools.cached_property
    def text(self) -> str:
        """The pattern as text."""
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}".lstrip()

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Pattern:
    """The pattern that a text denotes. Raises RuleError with the place in the text that cannot be read.

    >>> print(parse("m k,n k, +n->m n"))
    m k, n k, +n -> m n
    """
    reader = _Reader(text=text, tokens=_tokens(text))
    operands = () if reader.peek() == "->" else reader.terms(stop="->", may_add=True)
    reader.expect("->")
    results = reader.terms(stop="", may_add=False)
    if reader.kept is not None and not any(term.named for term in (*operands, *results)):
        raise _unreadable(text, reader.kept, "'...' appears twice in one tensor, and no argument names a dim between")
    return Pattern(operands=operands, results=results)


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
        fix='write it like "... k, n k, +n -> ... n": names, "!" whole, "+" added once, "(a b)" one dim, "[a]" a dim that '
        'may be lacking, "..." any dims, "... @dim ..." any dims, of which the argument dim names some',
    )


@dataclass(slots=True, kw_only=True)
class _Reader:
    text: str
    tokens: list[tuple[str, int]]
    next: int = 0
    seen: set[str] = field(default_factory=set)  # names in the present term
    kept: int | None = None  # where `... ...` stands

    def peek(self) -> str:
        return self.tokens[self.next][0]

    def take(self) -> str:
        self.next += 1
        return self.tokens[self.next - 1][0]

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise self.error(f"{token!r} is missing")
        self.take()

    def error(self, why: str, token: int | None = None) -> RuleError:
        return _unreadable(self.text, self.tokens[self.next if token is None else token][1], why)

    def terms(self, *, stop: str, may_add: bool) -> tuple[PatternTerm, ...]:
        terms = [self.term(may_add=may_add)]
        while self.peek() == ",":
            self.take()
            terms.append(self.term(may_add=may_add))
        if self.peek() != stop:
            raise self.error(f"{self.peek()!r} cannot follow a term" if self.peek() else "'->' is missing")
        return tuple(terms)

    def term(self, *, may_add: bool) -> PatternTerm:
        self.seen.clear()
        added = self.peek() == "+"
        if added:
            if not may_add:
                raise self.error("only an operand can be added")
            self.take()
        dims, places = [], []
        while self.peek() not in (",", "->", ""):
            places.append(self.next)
            dims.append(self.dim())
        if not dims:
            raise self.error("a term is empty: a scalar is written ()")
        self.check(dims, places)
        return PatternTerm(dims=tuple(dim for dim in dims if dim.words), added=added)

    def check(self, dims: Sequence[Dim], places: Sequence[int]) -> None:
        """Dims of any number stand together: `...`, `_...`, `... ...`, or `...` on both sides of every named one."""
        open_ = [i for i, dim in enumerate(dims) if dim.words and dim.open]
        words = [dims[i].words[0] for i in open_]
        twice = len(words) == 2 and not any(word.at for word in words)
        for here, (i, word) in enumerate(zip(open_, words, strict=True)):
            together = here == 0 or i == open_[here - 1] + 1
            if word.at and not (together and here % 2 and open_[here + 1 : here + 2] == [i + 1]):
                raise self.error(f"'{word}' stands among the dims of '...': write ... {word} ...", places[i])
            if not word.at and here and not (together and (here % 2 == 0 or twice) and word == words[0] and word.name == ANY):
                raise self.error(f"'{word}' cannot follow '{words[0]}' in one tensor", places[i])
        if twice:
            self.kept = self.tokens[places[open_[1]]][1]

    def dim(self) -> Dim:
        if self.peek() not in ("(", "["):
            return Dim((self.word(within=False),))
        close = ")" if self.take() == "(" else "]"
        words: list[Word] = []
        while self.peek() != close:
            if close == "]" and words:
                raise self.error("']' is missing")
            words.append(self.word(within=close == ")" or self.peek() not in (ANY, ALONE)))
        if close == "]" and not words:
            raise self.error("'[]' names no dim")
        self.take()
        return Dim(tuple(words), optional=close == "]")

    def word(self, *, within: bool) -> Word:
        token = self.peek()
        name, at, argument = token.partition("@")
        if not at:
            name, _, argument = token.partition("=")
        if not (name[:1].isalpha() or name in (ANY, ALONE, ALL_ALONE) or at):
            raise self.error(f"{token!r} is not the name of a factor" if token else "the text ends too early")
        if within and (name in (ANY, ALONE, ALL_ALONE) or at):
            raise self.error(f"{token!r} cannot be part of a dim")
        if name in self.seen:
            raise self.error(f"{name!r} appears twice in one tensor")
        self.take()
        if name not in (ANY, ALONE, ""):
            self.seen.add(name)
        whole = name in (ALONE, ALL_ALONE)
        if not whole and self.peek() == "!":
            self.take()
            whole = True
        return Word(name, whole, at=argument if at else "", size="" if at else argument)

"""Finding an operator's rule by running it.

    discover_rule(torch.ops.mylib.scaled_linear, (x, weight, bias))
    ->  autopar.register_rule("mylib::scaled_linear", "... a, b a, +b -> ... b", linear="x bias, weight bias")

1. Dims are resized, alone and with others of their size, until the operator runs: those that must change together are a class.
2. Every class gets a size of its own. The dims of the results that grow with it, alone or in a product, have its factor.
3. Each class is split alone, in equal parts and unequal ones; results are joined where they have it, and added where they do
   not. What does not give the whole, in values and in gradients, stays whole. Two classes that cannot be split may be one.
4. Every group of arguments is given addends; a number that would be added again belongs to the group.
5. All together is checked by the law, and tried with one more leading dim: if it holds there too, the leading dims are `...`.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.errors import RuleError
from autopar.ir.program import Argument, overload, qualified
from autopar.operators.call import Call
from autopar.operators.checking.inferred_rule import InferredRule, InferredWord, obeys, surveyed
from autopar.operators.checking.probe import Probe
from autopar.operators.checking.sample_call import Arguments, Example
from autopar.operators.registry import fit

SCALES = (1.0, 30.0, 0.03)  # what bends only far from zero is not linear either
STACKED = 4  # size of the leading dim that is tried
NUMBERS = ("float", "number", "Optional[float]", "Optional[number]")  # types of arguments that say how much
ELSEWHERE = ("Tensor", "ScalarType", "Layout", "Device", "MemoryFormat", "Generator")  # types of others


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """A rule found by execution; prints as the line that registers it."""

    operator: str
    rule: str
    linear: str = ""
    averages: bool = False
    when: tuple[tuple[str, Argument], ...] = ()
    factors: tuple[str, ...] = ()  # that may be split

    @property
    def line(self) -> str:
        """The call that registers it."""
        given = {"linear": _quoted(self.linear) if self.linear else "", "averages": "True" if self.averages else ""}
        given["when"] = repr(dict(self.when)).replace("'", '"') if self.when else ""
        more = [f"{name}={value}" for name, value in given.items() if value]
        return f"autopar.register_rule({', '.join([*map(_quoted, (self.operator, self.rule)), *more])})"

    def __str__(self) -> str:
        if self.factors:
            return self.line
        if self.linear:
            return f"# no dim of {self.operator} can be split, but it passes addends on\n{self.line}"
        return f"# no dim of {self.operator} can be split, and it is not linear: every device runs all of it"


def _quoted(text: str) -> str:
    return f'"{text}"'


def discover_rule(op: object, arguments: Arguments) -> Discovered:
    """Find an operator's sharding rule by running it on parts of small random operands.

    `op` is an overload, "mylib::op", or what `torch.library.custom_op` returned; `arguments` are those of one call, in order
    or by name. The operator must refuse operands whose shapes do not match. The rule is checked for values and, if there is a
    derivative, for gradients; `when` holds the static arguments of the call, since with others the rule may differ. Nothing is
    registered: read the line, and paste it.

    Raises RuleError if the operator does not run on the arguments, draws random numbers, or writes into an argument.

    >>> print(discover_rule("aten::mm", (torch.randn(8, 8), torch.randn(8, 8))))
    autopar.register_rule("aten::mm", "a b, b c -> a c", linear="self, mat2")
    """
    probe = Probe.of(Example.of(op, arguments))
    form = surveyed(probe, probe.classes()).splits().merged()
    form, groups = proved(form, linear(form))
    text = next((text for text, full in shortened(form) if _with_one_more_dim(form, groups, text, full)), str(form))
    call = Call.of(probe.example.op)
    drawn = form.probe.run()
    fitted = fit(drawn.op, drawn.values, rule=form.rule(text=text)) if drawn else None
    return Discovered(
        operator=qualified(probe.example.op.target),
        rule=text,
        linear=", ".join(groups),
        averages=form.averages,
        when=tuple((name, call.arguments[name]) for name in _fixed(call)),
        factors=tuple(factor.name for factor in fitted.factors if not factor.whole) if fitted else (),
    )


def _fixed(call: Call) -> Iterator[str]:
    """The arguments for whose given values only the rule is known to hold: those that are neither tensors nor amounts."""
    for formal in overload(call.op.target)._schema.arguments:
        kind = str(formal.real_type)
        if kind not in NUMBERS and not any(word in kind for word in ELSEWHERE):
            yield formal.name


def proved(form: InferredRule, groups: Sequence[str]) -> tuple[InferredRule, list[str]]:
    """The classes and groups that hold together; what does not hold with the others is dropped, the last first."""
    kept = list(groups)
    while not form.holds(kept) and (kept or form.able):
        if kept:
            kept.pop()
        else:
            form = replace(form, able=form.able - {max(form.able)})
    return form, kept


def linear(form: InferredRule) -> list[str]:
    """The least groups of arguments in which the operator is jointly linear, with the numbers that would be added again."""
    example = form.probe.example
    if not all(_continuous(result) for result in example.results):
        return []
    call, tensors = Call.of(example.op), list(example.tensors.values())
    given = dict.fromkeys(name for name, place in call.slots if place is not None)
    names = [name for name in given if all(_continuous(tensors[place]) for place in call.positions(name))]
    numbers = [
        a.name for a in overload(example.op.target)._schema.arguments
        if str(a.type) in NUMBERS and isinstance(call.arguments[a.name], (int, float))
    ]  # fmt: skip
    found: list[tuple[str, ...]] = []
    for group in _subsets(names, len(names)):
        if group and not any(set(known) <= set(group) for known in found):
            choices = (zeros for zeros in _subsets(numbers, 1) if not zeros or _reads_all(form, call, zeros))
            zeros = next((zeros for zeros in choices if _adds(form, call, group, zeros, numbers)), None)
            if zeros is not None:
                found.append((*group, *zeros))
    return [" ".join(group) for group in found]


def _subsets(names: Sequence[str], most: int) -> Iterator[tuple[str, ...]]:
    """The smaller ones first."""
    return itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(most + 1))


def _continuous(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _adds(form: InferredRule, call: Call, group: tuple[str, ...], zeros: tuple[str, ...], numbers: Sequence[str]) -> bool:
    """Whether the operator is linear in some arguments when some numbers are 0, whatever the other numbers are."""
    made = replace(form, able=frozenset()).rule([" ".join(group)])
    others: list[dict[str, Argument]] = [{name: _another(call.arguments[name])} for name in numbers if name not in zeros]
    for change in ({}, *others):
        for scale in SCALES:
            drawn = form.probe.run(scale=scale, arguments=call.change({**dict.fromkeys(zeros, 0.0), **change}))
            if drawn is None and change:
                break  # it does not take that number
            if drawn is None or not obeys(drawn, made):
                return False
    return True


def _reads_all(form: InferredRule, call: Call, zeros: tuple[str, ...]) -> bool:
    """Whether the results depend on every floating operand when some numbers are 0: a zero factor would prove nothing."""
    arguments = call.change(dict.fromkeys(zeros, 0.0))
    before, after = (form.probe.run(arguments=arguments) for _ in range(2))
    if before is None or after is None:
        return False
    tensors, others = list(before.tensors.values()), list(after.tensors.values())
    for place, tensor in enumerate(tensors):
        if _continuous(tensor):
            changed = before.on([*tensors[:place], others[place], *tensors[place + 1 :]], arguments)
            if all(map(torch.equal, before.results, changed.results)):
                return False
    return True


def _another(number: Argument) -> Argument:
    match number:
        case float():
            return number + 0.625
        case int():
            return number + 1
        case _:
            return number


def shortened(form: InferredRule) -> Iterator[tuple[str, list[int]]]:
    """The text of a form with its leading dims written as `...`, as many as can be, then fewer; the operands with all of it."""
    leading = _leading(form)
    inside, outside = (side.strip().split(", ") for side in str(form).split("->"))
    for count in range(len(leading), 0, -1):
        starts = [_start(form, position, leading[:count]) for position in range(len(inside))]
        if None not in starts:
            terms = [_dotted(term, skipped or 0) for term, skipped in zip(inside, starts, strict=True)]
            text = f"{', '.join(terms)} -> {', '.join(_dotted(term, count) for term in outside)}"
            yield _renamed(text), [position for position, start in enumerate(starts) if start == count]


def _renamed(text: str) -> str:
    """The factors called a, b, ... in the order in which they stand."""
    names = list(dict.fromkeys(re.findall(r"[A-Za-z]", text)))
    return re.sub(r"[A-Za-z]", lambda match: string.ascii_letters[names.index(match[0])], text)


def _leading(form: InferredRule) -> list[int]:
    """The classes that stand first, and alone in their dim, in every result."""
    results = form.probe.example.results
    found: list[int] = []
    for d in range(min((result.ndim for result in results), default=0)):
        here = {form.results.get((r, d), ()) for r in range(len(results))}
        words = here.pop()
        if here or len(words) != 1 or words[0].constant or words[0].number not in form.able:
            break
        found.append(words[0].number)
    return found


def _start(form: InferredRule, position: int, leading: Sequence[int]) -> int | None:
    """How many of the leading dims an operand has at its start, counted from the right; None if it has them elsewhere."""
    shape = form.probe.shapes()[position]
    held = [form.operands.get((position, d), ()) for d in range(len(shape))]
    for count in range(min(len(leading), len(shape)), -1, -1):
        last = leading[len(leading) - count :]
        if all(held[d] == (InferredWord(number),) or shape[d] == 1 for d, number in enumerate(last)):
            elsewhere = any(word.number in leading for words in held[count:] for word in words)
            return None if elsewhere else count
    return None


def _dotted(term: str, skipped: int) -> str:
    """A term with its first dims written as `...`."""
    sign, dims = ("+", term[1:]) if term.startswith("+") else ("", term)
    return f"{sign}{' '.join(['...', *dims.split(' ')[skipped:]])}" if skipped else term


def _with_one_more_dim(form: InferredRule, groups: Sequence[str], text: str, full: Sequence[int]) -> bool:
    """Whether a text with `...` holds for the call, and with a dim more in front of the operands that have all of `...`."""
    draws = [one for one in (form.probe.run() for _ in range(STACKED)) if one is not None]
    made = form.rule(groups, text)
    if not draws or not obeys(draws[0], made):
        return False
    stacks = zip(*(one.tensors.values() for one in draws), strict=True)
    try:
        return obeys(draws[0].on([torch.stack(held) if i in full else held[0] for i, held in enumerate(stacks)]), made)
    except RuleError:
        return False


__all__ = ["Discovered", "discover_rule"]

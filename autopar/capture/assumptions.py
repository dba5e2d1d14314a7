"""The user's assumptions on values that a graph cannot know: inputs that are sizes, and answers to conditions in forward.

    if x.abs().max() > 100:            plan(..., assume={"model.py:12": False})
        x = x.clamp(-100, 100)
    return x                    ->     return x, x.abs().max() > 100         the latter is compared in every call

The value behind each answer becomes an output of the program, hidden from the user.
"""

from __future__ import annotations

import ast
import functools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch

from autopar import files
from autopar.capture import source_location
from autopar.capture.assertions import asked, evaluated, holds, outcome, parsed, span
from autopar.errors import CaptureError, ConstraintError, InputError

Answer = bool | int
ASSUMED = "assumed "  # prefix of the path of an output that is compared
MOST_ASKED = 1000  # how often one line may ask while a step is traced
_CONDITIONS = ast.If | ast.While | ast.IfExp | ast.Assert


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Facts that hold in every call: `static` names integer inputs that always have the sample's values, and `assume` maps
    "file.py:12" to the answer to what that line asks: True or False for a condition, or an integer.

    `buffers` has values of buffers of a model on the meta device; with `inference` nothing has a gradient.
    """

    static: Sequence[str] = ()
    assume: Mapping[str, Answer] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    inference: bool = False


NOTHING = Assumptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """An assumed answer, the line that asked, and the path of the output with the actual value of each call."""

    path: str
    at: str
    answer: Answer

    def check(self, found: torch.Tensor) -> None:
        """Raise InputError if the value in a call differs from the answer."""
        if (here := found.item()) != self.answer:
            line = self.path.removeprefix(ASSUMED).partition("#")[0]
            raise InputError(
                f"{line} is assumed to be {self.answer} in every call, and is {here} in this one",
                at=self.at,
                fix="plan without the assumption (torch.where, say); or for each answer, and call the module that fits",
            )


class Answers:
    """The answers given during one tracing, and the tensors that they were given for."""

    def __init__(self, lines: Mapping[str, Answer]) -> None:
        if not isinstance(lines, Mapping):
            raise ConstraintError(f"assume is a {type(lines).__name__}", fix='a dict line -> answer: {"model.py:12": False}')
        for line, answer in lines.items():
            if not re.fullmatch(r".+:\d+", str(line)) or not isinstance(answer, (bool, int)) or abs(answer) >= files.LARGEST:
                fix = 'a line as errors have it, and what it asks: assume={"model.py:12": False}'
                said = answer if not isinstance(answer, int) or abs(answer) < files.LARGEST else "too large"
                raise ConstraintError(f"assume={{{line!r}: {said!r}}} is no line with True, False or an integer", fix=fix)
        self.lines = lines
        self.places: dict[str, set[str]] = defaultdict(set)  # where each line has asked
        self.counts: Counter[str] = Counter()
        self.asked: list[tuple[str, Answer, torch.Tensor]] = []

    def answer(self, func: Callable[..., object], tensor: object, asker: FrameType) -> object:
        """The assumed answer to a function that reads a number from a tensor; None if nothing is assumed there."""
        if not self.lines or not isinstance(tensor, torch.Tensor):
            return None
        at = source_location.of_frame(asker)
        place = at.rpartition(" in ")[0]
        line = next((line for line in self.lines if f"/{place}".endswith(f"/{line.removeprefix('/')}")), None)
        if line is None:
            return None
        self.places[line].add(place)
        self._count(line, at)
        if len(self.places[line]) > 1:
            raise CaptureError(f"assume names {line}, which several files have", lines=", ".join(sorted(self.places[line])))
        answer = self.lines[line]
        condition, said = _condition(tensor, answer, asker) if isinstance(answer, bool) else (tensor, answer)
        if isinstance(answer, bool) and func is not torch.Tensor.__bool__ and tensor.dtype is not torch.bool:
            fix = "assume the integer; or compare tensors: `if x.max() > 0`, without item() or int()"
            raise CaptureError(f"{line} asks for a number, and is assumed to be {answer}", at=at, fix=fix)
        self.asked.append((at, answer, condition.detach().reshape(())))
        if func is torch.Tensor.__bool__:
            return bool(said)
        return float(said) if func is torch.Tensor.__float__ else said

    def _count(self, line: str, at: str) -> None:
        """Raise CaptureError for a line that keeps asking: a `while` whose condition is assumed to hold."""
        self.counts[line] += 1
        if self.counts[line] > MOST_ASKED:
            what = f"{line} asks more than {MOST_ASKED} times, and is assumed to be {self.lines[line]} each time"
            raise CaptureError(
                what, at=at, fix="assume False of a loop that does not run; or a loop of a fixed number of steps"
            )

    def taken(self) -> tuple[list[torch.Tensor], tuple[Assumed, ...]]:
        """The tensors that were asked about, and the answers that were given."""
        found, counts = [], dict[str, int]()
        for at, answer, _ in self.asked:
            short = ASSUMED + at.rpartition(" in ")[0].rpartition("/")[2]
            counts[short] = counts.get(short, -1) + 1
            found.append(Assumed(path=f"{short}#{counts[short]}" if counts[short] else short, at=at, answer=answer))
        return [tensor for *_, tensor in self.asked], tuple(found)

    def tell_unused(self) -> None:
        """Warn of assumed lines that asked for nothing."""
        if unused := [line for line in self.lines if line not in self.places]:
            what = "forward asks for no value there that a graph does not know"
            warnings.warn(f"assume names {', '.join(unused)}, but {what}", stacklevel=6)


def _condition(tensor: torch.Tensor, answer: bool, asker: FrameType) -> tuple[torch.Tensor, bool]:
    """The whole condition that a frame evaluates a part of, as a tensor, and the answer for this part that makes the whole true
    or false as assumed."""
    at = asked(asker.f_code, asker.f_lasti)
    test = next((one.test for one in _conditions(asker.f_code.co_filename) if at and holds(one.test, at)), None)
    if test is None or at is None or (said := outcome(test, answer, at)) is None:
        return tensor.bool(), answer
    whole = evaluated(test, asker) if span(test) != at else tensor
    return (whole.bool() if isinstance(whole, torch.Tensor) else tensor.bool()), said


@functools.lru_cache(maxsize=64)
def _conditions(file: str) -> tuple[_CONDITIONS, ...]:
    """The conditions in a file, the innermost first."""
    return tuple(reversed([node for node in ast.walk(parsed(file)) if isinstance(node, _CONDITIONS)]))


__all__ = ["ASSUMED", "NOTHING", "Answers", "Assumed", "Assumptions"]

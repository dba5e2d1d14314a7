"""Random modules as source text: what is drawn is what runs, and what a failure prints.

A graph grows line by line; each line is an expression of a table over values that exist. Shapes are those of the same
expressions on the meta device, so the table says when an operator may be called and nothing of what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import nn

from tests.fuzz.trial import BATCH, Sample

WIDTHS = (4, 6, 2, 8, 12, 3, 1, 5)  # of dims, the likelier the earlier
LARGEST = 2000  # elements of a value
LIBRARIES = {"torch": torch, "nn": nn, "F": F}


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A module and its sample: members of `__init__`, inputs by name, lines of `forward`, and what it returns."""

    members: tuple[str, ...]
    inputs: tuple[tuple[str, str], ...]
    lines: tuple[str, ...]
    returned: str

    def source(self) -> str:
        """The class `Model`, and the function `sample` of the batch's size."""
        names = ", ".join(name for name, _ in self.inputs)
        batch = ", ".join(f'"{name}": {text}' for name, text in self.inputs)
        return "\n".join(
            [
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self.members),
                "",
                f"    def forward(self, {names}):",
                *(f"        {line}" for line in self.lines),
                f"        return {self.returned}",
                "",
                "",
                "def sample(batch):",
                f"    return {{{batch}}}",
            ]
        )

    def build(self) -> tuple[Callable[[], nn.Module], Sample]:
        """The class and the function of the source."""
        made: dict[str, object] = dict(LIBRARIES)
        exec(compile(self.source(), "<graph>", "exec"), made)
        return made["Model"], made["sample"]  # type: ignore[return-value]


@dataclass(slots=True)
class Growing:
    """A graph while it is drawn: `values` holds every value by name as a tensor on meta."""

    draw: DrawFn
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    own: SimpleNamespace = field(default_factory=SimpleNamespace)  # the members, on meta

    def pick(self, *options: object) -> object:
        return self.draw(st.sampled_from(options))

    def chance(self, one_in: int) -> bool:
        """Seldom true; false is simpler."""
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def evaluate(self, text: str) -> torch.Tensor | tuple[torch.Tensor, ...]:
        with torch.device("meta"):
            return eval(text, {**LIBRARIES, **self.values, "self": self.own, "batch": BATCH})

    def input(self, text: str) -> str:
        """A new input of the module."""
        name = f"x{len(self.inputs)}"
        self.inputs.append((name, text))
        self.values[name] = self.evaluate(text)
        return name

    def member(self, text: str) -> str:
        """A new member of the module, or one that is there already: a shared one."""
        there = [line.split(" = ")[0] for line in self.members if line.endswith(f" = {text}")]
        if there and self.chance(2):
            return there[0]
        name = f"m{len(self.members)}"
        self.members.append(f"self.{name} = {text}")
        setattr(self.own, name, self.evaluate(text))
        return f"self.{name}"

    def buffer(self, shape: tuple[int, ...]) -> str:
        name = f"b{len(self.members)}"
        self.members.append(f'self.register_buffer("{name}", torch.randn({shape}))')
        setattr(self.own, name, torch.empty(shape, device="meta"))
        return f"self.{name}"

    def line(self, text: str) -> None:
        """A line of forward that names the result of an expression, or its results."""
        result = self.evaluate(text)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        names = [f"v{len(self.values) + place}" for place in range(len(results))]
        self.lines.append(f"{', '.join(names)}{',' if not isinstance(result, torch.Tensor) else ''} = {text}")
        self.values |= dict(zip(names, results, strict=True))

    def floats(self, fits: Callable[[torch.Tensor], bool] = lambda x: True) -> list[str]:
        """The floating-point values that fit, the newest first."""
        return [n for n, x in reversed(self.values.items()) if x.is_floating_point() and fits(x)]

    def layers(self, fits: Callable[[torch.Tensor], bool]) -> list[str]:
        """The linear layers whose weights fit."""
        linear = [line.split(" = ")[0] for line in self.members if " = nn.Linear(" in line]
        return [name for name in linear if fits(getattr(self.own, name.removeprefix("self.")).weight)]

    def draw_int(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def draw_start(self, x: torch.Tensor) -> int:
        """From which dim on something has the dims of a tensor."""
        return self.draw(st.integers(0, max(0, x.ndim - 1)))

    def size(self) -> int:
        return int(self.pick(*WIDTHS))  # type: ignore[call-overload]

    def dim(self, x: torch.Tensor, least: int = 0) -> int:
        """A dim of a tensor that is at least so long, counted from either end."""
        dims = [dim for dim in range(x.ndim) if x.shape[dim] >= least]
        return int(self.pick(*dims, *(dim - x.ndim for dim in dims)))  # type: ignore[call-overload]


@st.composite
def graphs(draw: DrawFn, most: int = 12) -> Graph:
    """A graph of up to so many operators, with one or several outputs."""
    from tests.fuzz.operators import losses, operator

    growing = Growing(draw)
    rank = draw(st.integers(2, 4))
    growing.input(f"torch.randn(batch, {', '.join(str(growing.size()) for _ in range(rank - 1))})")
    if growing.chance(3):
        name, text = growing.inputs[0]
        growing.inputs[0] = name, text + ".requires_grad_()"
    turn = draw(st.integers(0, 9999))
    for place in range(1, 1 + draw(st.integers(1, most))):
        x = growing.pick(*growing.floats()[:4])
        tensor = growing.values[str(x)]
        text = operator(growing, tensor, place * turn)(growing, str(x), tensor)
        if text and _small(growing, text):
            growing.line(text)
    ends = [*losses(growing), *_others(growing)]
    returned = ", ".join(f'"{name}": {end}' for name, end in ends)
    return Graph(
        members=tuple(growing.members),
        inputs=tuple(growing.inputs),
        lines=tuple(growing.lines),
        returned=f"{{{returned}}}",
    )


def _small(growing: Growing, text: str) -> bool:
    result = growing.evaluate(text)
    return all(0 < x.numel() <= LARGEST for x in ([result] if isinstance(result, torch.Tensor) else result))


def _others(growing: Growing) -> Iterator[tuple[str, str]]:
    """Outputs beside the losses."""
    for place, name in enumerate(growing.floats()[:3]):
        if growing.chance(3):
            yield f"out{place}", name

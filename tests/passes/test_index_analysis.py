"""Facts hold: at every coordinate a value is what its fact says."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from autopar.capture import capture
from autopar.ir.program import Program
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, All, AtLeast, Fact, Select, Some
from autopar.passes.index_analysis import facts
from autopar.passes.simplify import simplify
from tests.capture import interpreter
from tests.capture.models import MODELS
from tests.passes.programs import program


def at(fact: Fact, place: tuple[int, ...]) -> bool | int | float:
    """What a fact says of one coordinate."""
    match fact:
        case Affine(scale, base):
            return base + sum(s * i for s, i in zip(scale, place, strict=True))
        case AtLeast(number):
            return at(number, place) >= 0
        case All(parts):
            return all(at(part, place) for part in parts)
        case Some(parts):
            return any(at(part, place) for part in parts)
        case Select(when, yes, no):
            return yes if at(when, place) else no
        case _:
            return fact


def assert_facts(found: Program, tensors: dict[str, torch.Tensor]) -> dict[str, Fact]:
    """Compare every fact with the value itself; returns the facts."""
    known = facts(found)
    values = interpreter.every(found, tensors)
    for name, fact in known.items():
        tensor = values[name]
        for place in itertools.product(*map(range, tensor.shape)):
            said = torch.tensor(at(fact, place), dtype=tensor.dtype)
            assert torch.equal(tensor[place], said), f"{name}{list(place)} is {tensor[place]}, but {fact}"
    return known


Q, K = 5, 7
BODIES = [
    lambda x: torch.arange(3, 20, 4)[None, :, None].expand(2, 5, 3).transpose(0, 2)[1:, ::2],
    lambda x: torch.ones(Q, K, dtype=torch.bool).tril(1) & torch.ones(Q, K, dtype=torch.bool).triu(-2),
    lambda x: torch.full((Q, K), float("-inf")).triu(1),
    lambda x: torch.zeros(Q, K).masked_fill(torch.arange(K) > torch.arange(Q)[:, None], -1e9),
    lambda x: (1.0 - (torch.arange(K) <= torch.arange(Q)[:, None]).float()) * -3e38,
    lambda x: ~(torch.arange(K)[None] - torch.arange(Q)[:, None] < 3) | (torch.arange(Q)[:, None] == 2),
    lambda x: torch.where(torch.arange(K) != 3, torch.arange(K) >= 2, torch.arange(K) < 1),
    lambda x: torch.diff(torch.arange(K)[None], prepend=torch.arange(K)[None, :1] - 1).ne(1).cumsum(-1),
    lambda x: torch.diff(torch.arange(0, 3 * K, 3)[:, None].expand(K, 2), dim=0),
    lambda x: torch.ones(3, K, dtype=torch.long).cumsum(1)[torch.arange(2)[:, None], torch.arange(1, 4)],
    lambda x: torch.arange(K).reshape(1, K, 1).select(2, 0).permute(1, 0).flip(0),
    lambda x: -torch.arange(K) * 2 + 3 - torch.arange(K).add(1, alpha=1),
    lambda x: (torch.arange(K) % 2 == 0) & torch.zeros(K, dtype=torch.bool),
    lambda x: torch.arange(300).to(torch.uint8) + 1,
    lambda x: torch.full((3,), 0.5).bool() * torch.full((3,), 0.0).bool(),
    lambda x: torch.full((3,), 2.7).long() + torch.eye(3).t()[:, 0],
]


@pytest.mark.parametrize("body", BODIES)
def test_facts_of_masks_hold(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = simplify(program(lambda x: body(x) + x, torch.zeros(())))
    assert assert_facts(found, {"tensors.0": torch.zeros(())})


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "t5"])
def test_facts_of_models_hold(name: str) -> None:
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    captured = capture(model, sample)
    inputs = captured.signature.bind((), sample)
    named = {value.name: tensor for value, tensor in zip(captured.program.inputs, inputs, strict=True)}
    simple = simplify(captured.program)
    assert assert_facts(simple, interpreter.held(simple, model) | named)


@st.composite
def numbers(draw: st.DrawFn, rank: int) -> Affine:
    return Affine(tuple(draw(st.integers(-3, 3)) for _ in range(rank)), draw(st.integers(-5, 5)))


@hypothesis.settings(max_examples=100)
@hypothesis.given(st.data())
def test_formulas_mean_what_they_are_made_of(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    one, other = data.draw(numbers(len(shape))), data.draw(numbers(len(shape)))
    a, b = affine.at_least_zero(one, shape), affine.at_least_zero(other, shape)
    for place in itertools.product(*map(range, shape)):
        left, right = at(one, place) >= 0, at(other, place) >= 0
        assert at(a, place) == left
        assert at(affine.negated(a, shape), place) == (not left)
        assert at(affine.both([a, b]), place) == (left and right)
        assert at(affine.either([a, affine.negated(b, shape)]), place) == (left or not right)
        assert at(affine.negated(affine.both([a, b]), shape), place) == (not (left and right))

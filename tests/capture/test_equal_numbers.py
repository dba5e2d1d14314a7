"""Captured programs compute what their modules compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.ir.program import Program
from autopar.passes import normalise
from autopar.passes.no_dropout import without_dropout
from autopar.passes.to_float64 import promote
from tests.capture import interpreter
from tests.capture.models import MODELS


def as_captured(program: Program) -> Program:
    return program


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rewrite", [as_captured, normalise], ids=["captured", "normalised"])
@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_the_outputs_and_gradients_of_its_module(name: str, rewrite: type[Program]) -> None:
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    captured = capture(model, sample)
    program = rewrite(captured.program)
    found = interpreter.outputs(program, model, captured.signature.bind((), sample))
    rebuilt = captured.signature.rebuild(found)
    gradients = torch.autograd.grad(rebuilt["loss"], list(model.parameters()), allow_unused=True)

    expected = model(**sample)
    model.zero_grad()
    expected["loss"].backward()
    for path in (output.path for output in program.outputs):
        torch.testing.assert_close(rebuilt[path], expected[path], atol=1e-6, rtol=1e-5)
    for (path, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        assert (gradient is None) == (parameter.grad is None), path
        if gradient is not None:
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4, msg=path)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_promoted_program_computes_in_double_and_agrees_with_the_single_one(name: str) -> None:
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    captured = capture(model, sample)
    program = normalise(captured.program)
    inputs = captured.signature.bind((), sample)
    single = interpreter.outputs(program, model, inputs)
    double = interpreter.outputs(promote(without_dropout(program)), model.double(), inputs)
    for a, b in zip(single, double, strict=True):
        assert b.dtype is torch.float64
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode, padded", [("sum", None), ("mean", None), ("max", None), ("sum", 1), ("mean", -9)])
def test_a_bag_of_embeddings_is_its_rows(mode: str, padded: int | None) -> None:
    torch.manual_seed(0)
    places = torch.randint(10, (4, 5))
    places[0, 2:], places[1] = 1, 1  # some are padding, or all of them
    program = interpreter.check(nn.EmbeddingBag(10, 6, mode=mode, padding_idx=padded), places).program
    assert not [op for op in program.ops if "embedding_bag" in op.target]


def test_a_bag_may_have_weights() -> None:
    interpreter.check(nn.EmbeddingBag(10, 6, mode="sum"), torch.randint(10, (4, 5)), None, torch.rand(4, 5))


def test_bags_of_any_length_stay_as_they_are() -> None:
    program = capture(nn.EmbeddingBag(10, 6), (torch.randint(10, (7,)), torch.tensor([0, 3, 3]))).program
    assert [op.target for op in program.ops] == ["aten.embedding_bag.padding_idx"]

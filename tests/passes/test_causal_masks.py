"""`causal` recognises what masks do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autopar.capture import capture
from autopar.ir.program import Program
from autopar.ir.schema import bound
from autopar.passes import normalise
from tests.capture import interpreter
from tests.capture.models import MODELS
from tests.passes.programs import program, targets

N = 8


def attend(mask: Callable[[], torch.Tensor]) -> Program:
    """Attention of 8 queries under a mask, in normal form."""
    q = torch.ones(2, 3, N, 4)
    return normalise(program(lambda q: F.scaled_dot_product_attention(q, q * 2, q * 3, attn_mask=mask()), q))


def said(program: Program) -> list[tuple[bool, bool]]:
    """For every attention: is there a mask, and is it said to be causal?"""
    attentions = [bound(op) for op in program.ops if "scaled_dot_product_attention" in op.target]
    return [(named["attn_mask"] is not None, bool(named["is_causal"])) for named in attentions]


CAUSAL = [
    lambda: torch.ones(N, N, dtype=torch.bool).tril(),
    lambda: torch.arange(N) <= torch.arange(N)[:, None],
    lambda: ~torch.triu(torch.ones(N, N, dtype=torch.bool), 1),
    lambda: (torch.arange(N)[:, None] - torch.arange(N) >= 0)[None, None].expand(2, 1, N, N),
    lambda: torch.full((N, N), float("-inf")).triu(1),
    lambda: torch.zeros(N, N).masked_fill(torch.arange(N) > torch.arange(N)[:, None], torch.finfo(torch.float32).min),
    lambda: (1.0 - torch.ones(N, N).tril()) * torch.finfo(torch.float32).min,
    lambda: torch.where(torch.ones(N, N).tril() > 0, 0.0, float("-inf")),
    lambda: (torch.arange(N) <= torch.arange(N)[:, None]) & (torch.arange(N) > torch.arange(N)[:, None] - N),
]


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_causal_mask_is_said_and_not_computed(mask: Callable[[], torch.Tensor]) -> None:
    found = attend(mask)
    assert said(found) == [(False, True)]
    assert targets(found) == ["mul.Tensor", "mul.Tensor", "scaled_dot_product_attention.default"]


OPEN = [
    lambda: torch.ones(N, N, dtype=torch.bool),
    lambda: torch.zeros(1, 1, N, N),
    lambda: torch.arange(N)[:, None] - torch.arange(N) > -N,
    lambda: torch.zeros(N, N).masked_fill(torch.arange(N) < 0, float("-inf")),
]


@pytest.mark.parametrize("mask", OPEN)
def test_a_mask_that_lets_everything_pass_is_dropped(mask: Callable[[], torch.Tensor]) -> None:
    found = attend(mask)
    assert said(found) == [(False, False)]
    assert targets(found) == ["mul.Tensor", "mul.Tensor", "scaled_dot_product_attention.default"]


OTHER = [
    lambda: torch.ones(N, N, dtype=torch.bool).tril(1),
    lambda: torch.ones(N, N, dtype=torch.bool).triu(),
    lambda: torch.ones(N, N, dtype=torch.bool).tril() & (torch.arange(N) > torch.arange(N)[:, None] - 3),
    lambda: torch.full((N, N), -1.0).triu(1),
    lambda: torch.full((N, N), 3.0),
    lambda: torch.arange(N) <= torch.arange(0, 2 * N, 2)[:, None],
]


@pytest.mark.parametrize("mask", OTHER)
def test_a_mask_that_is_neither_causal_nor_open_stays(mask: Callable[[], torch.Tensor]) -> None:
    assert said(attend(mask)) == [(True, False)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, masked", [("gpt2", False), ("llama", False), ("opt", False), ("vit", False), ("bert", True)])
def test_masks_of_models_vanish_unless_they_are_given(name: str, masked: bool) -> None:
    model, sample = MODELS[name]()
    found = said(normalise(capture(model, sample).program))
    assert found == [(masked, name in ("gpt2", "llama", "opt"))] * 2
    without = {key: tensor for key, tensor in sample.items() if key != "attention_mask"}
    assert said(normalise(capture(model, without).program)) == [(False, name in ("gpt2", "llama", "opt"))] * 2


def test_the_position_bias_of_t5_stays_and_its_open_masks_go() -> None:
    model, sample = MODELS["t5"]()
    found = normalise(capture(model, sample).program)
    assert said(found) == [(True, False), (True, False), (True, False), (False, False), (True, False), (False, False)]
    for op in found.ops:
        if op.target == "aten.where.ScalarOther":
            assert op.module.startswith("decoder")  # the encoder's mask is open: its bias is all there is


def test_a_given_mask_of_padding_is_a_reshape_of_the_input() -> None:
    model, sample = MODELS["bert"]()
    found = normalise(capture(model, sample).program)
    assert "aten.index.Tensor" not in [op.target for op in found.ops]


@pytest.mark.parametrize("mask", [*CAUSAL, *OPEN, *OTHER])
def test_attention_gives_the_same_numbers(mask: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 3, N, 4)
    found = attend(mask)
    (got,) = interpreter.run(found, {"tensors.0": q})
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q * 2, q * 3, attn_mask=mask()), atol=1e-6, rtol=1e-5)

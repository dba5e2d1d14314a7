"""Bytes that plans price, against the bytes that torch's dispatcher sees in a step of the user's own module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from torch import nn

from autopar.analysis.summed_gradients import with_sums
from autopar.cost_models.catalog import DEVICES
from autopar.cost_models.compute import Pricer, pricer
from autopar.ir.program import Program
from autopar.planning.planner import read_program
from tests.support.dispatched import Dispatched, tensors

ROWS, LENGTH, WORDS = 4, 96, 512
# Products and fused attention, which other laws price, and what moves nothing.
OTHERS = ("mm.", "attention", "empty", "view", "detach", "local_scalar", "dropout")
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def moved(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object], found: object) -> int:
    """Bytes of the tensors that an operator reads and writes."""
    if any(part in str(func) for part in OTHERS):
        return 0
    shape_alone = "nll_loss_backward" in str(func)
    given = {id(one): one for one in tensors((args[shape_alone:], kwargs))}
    return sum(map(size, (*given.values(), *tensors(found))))


def size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements, each of which a broadcast may repeat."""
    own = (length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(own) * tensor.element_size()


def llama() -> Built:
    """Rotary positions, norms and gates written out: most of its bytes are in pointwise operators."""
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(2, WORDS, (ROWS, LENGTH))
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def gpt2() -> Built:
    """Layer norms and GELU written out; sums of biases' gradients are part of products, and a thirtieth of what is seen."""
    config = transformers.GPT2Config(
        n_layer=3, n_embd=128, n_head=4, vocab_size=WORDS, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(2, WORDS, (ROWS, LENGTH))
    return model, {"input_ids": tokens, "labels": tokens}


def pricers(program: Program) -> Iterator[tuple[Pricer, list[tuple[int, ...]], list[tuple[int, ...]]]]:
    """The price of every op on one device, with the shapes of its operands and results."""
    for op in with_sums(program).ops:
        shapes = [program.values[name].shape for name in op.operands], [result.shape for result in op.results]
        yield pricer(op, program.values, DEVICES["h100"]), *shapes


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_step_moves_what_torch_dispatches(build: Callable[[], Built]) -> None:
    torch.manual_seed(0)
    model, batch = build()
    model.train()
    with Dispatched(moved) as seen:
        model(**batch).loss.backward()
    priced = 0
    for price, operands, results in pricers(read_program(model, batch).program):
        priced += sum(price.sums(operands))
        if price.operations is None:
            priced += price.forward(operands, results).bytes + price.gradient(operands, results).bytes
    assert priced == pytest.approx(seen.bytes, rel=0.05)


def test_gradients_of_a_value_are_added_once_for_each_use_but_one() -> None:
    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.exp()
            return (y.sin() + y.cos() + y * y).sum()

    program = read_program(Uses(), torch.randn(8, 16, requires_grad=True)).program
    added = [size for price, operands, _ in pricers(program) for size in price.sums(operands)]
    assert added == [3 * 8 * 16 * 4] * 3, "of four uses"

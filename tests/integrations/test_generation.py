"""`generate` over a parallel module gives the tokens of the whole model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import InputError
from autopar.integrations.generation import Generator
from autopar.runtime.workers import WorkerPool

SIZES = LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=40
)
WAYS = {"greedy": {}, "beams": {"num_beams": 2}, "sampled": {"do_sample": True, "top_k": 5}}


def generated(_: None) -> dict[str, tuple[list[list[int]], list[list[int]]]]:
    """The tokens of the parallel module and of the whole model, in several ways, by a module that was planned for training."""
    torch.manual_seed(0)
    model, words = LlamaForCausalLM(SIZES), torch.randint(40, (4, 12))
    batch = {"input_ids": words, "labels": words}
    parallel = autopar.parallelize(model, batch, (2,), device="h100", strategy="fsdp", inputs="sharded")
    found = {}
    for name, options in WAYS.items():
        tokens = []
        for generator in (Generator(parallel, model), model.eval()):
            torch.manual_seed(1)
            given = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 41, "pad_token_id": 41, **options}
            tokens.append(generator.generate(words[:2, :5], **given).tolist())
        found[name] = tokens[0], tokens[1]
    assert parallel.training
    with pytest.raises(InputError, match="2 sequences of 13 tokens, but the module was planned for 4 of 12"):
        Generator(parallel, model).generate(words[:2, :10], max_new_tokens=6, eos_token_id=41, pad_token_id=41)
    return found


def test_a_parallel_module_generates_what_the_whole_model_does(pool: WorkerPool) -> None:
    for found in pool.run(f"{__name__}:generated", ranks=2):
        for ours, whole in found.values():  # type: ignore[attr-defined]
            assert ours == whole
            assert len(ours[0]) == 11

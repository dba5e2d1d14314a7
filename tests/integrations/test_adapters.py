"""Adapters of peft that are switched off after a model was made parallel."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import InputError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}


def adapted() -> peft.PeftModel:
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), adapters)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_model_without_its_adapters_is_a_program_of_its_own_and_the_other_one_is_refused() -> None:
    alone, model = adapted(), adapted()
    tokens = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": tokens, "labels": tokens}
    parallel = autopar.parallelize(model, batch, (1,), device="cpu")
    with model.disable_adapter(), alone.disable_adapter():
        with pytest.raises(InputError, match="_disable_adapters was set after the model was captured"):
            parallel(**batch)
        reference = autopar.parallelize(model, batch, (1,), device="cpu", over=parallel)
        plain = alone(**batch).loss
        torch.testing.assert_close(reference(**batch)["loss"], plain)
    torch.testing.assert_close(parallel(**batch)["loss"], alone(**batch).loss)
    assert (alone(**batch).loss - plain).abs() > 1e-4
    with pytest.raises(InputError, match="over= the first"):
        reference(**batch)

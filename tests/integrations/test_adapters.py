"""peft adapters that are disabled after a model was made parallel."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import InputError
from autopar.integrations.transformers import save_pretrained

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


LANGUAGE = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
PROMPTS = {
    "prompt tuning": peft.PromptTuningConfig(**LANGUAGE),
    "prefix tuning": peft.PrefixTuningConfig(**LANGUAGE),
    "p-tuning": peft.PromptEncoderConfig(**LANGUAGE, encoder_hidden_size=16),
}


def prompted(kind: str) -> peft.PeftModel:
    torch.manual_seed(0)
    return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), PROMPTS[kind])


def trained(model: nn.Module) -> nn.Module:
    """A step with a batch of tokens."""
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    model(input_ids=tokens, labels=tokens)["loss"].backward()
    optimizer.step()
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*left out. past_key_values:UserWarning")
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_prompts_that_are_saved_are_the_trained_ones(kind: str, tmp_path: Path) -> None:
    """As those of peft's own model, trained alone; the model that was parallelized keeps what it has."""
    alone, model = prompted(kind), prompted(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    save_pretrained(trained(autopar.parallelize(model, {"input_ids": tokens, "labels": tokens}, (1,))), model, tmp_path / "own")
    trained(alone).save_pretrained(tmp_path / "alone")
    own, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "alone"))
    torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    first = load_file_of(prompted(kind), tmp_path / "first")
    assert not torch.allclose(own["prompt_embeddings"], first["prompt_embeddings"], atol=1e-5)


def load_file_of(model: peft.PeftModel, folder: Path) -> dict[str, torch.Tensor]:
    """What peft writes of a model."""
    model.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")

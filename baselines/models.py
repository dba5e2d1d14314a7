"""The models whose plans' costs are watched: realistic sizes, bfloat16, built on meta by `python -m autopar.explain`."""

from __future__ import annotations

import torch
import transformers
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2() -> Built:
    """GPT-2, 124 million parameters, 16 rows of 1024 tokens."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SPECIAL))
    model.loss_type = "ForCausalLM"  # transformers warns that it cannot tell this from the name of the class
    return model.bfloat16(), words(16, 1024)


def llama() -> Built:
    """Llama with the widths of its 8B, 8 of the 32 layers, 16 rows of 4096 tokens."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        **SPECIAL,
    )
    return transformers.LlamaForCausalLM(config).bfloat16(), words(16, 4096)


def bert() -> Built:
    """BERT large, 340 million parameters, 32 padded rows of 512 tokens."""
    config = transformers.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return transformers.BertForMaskedLM(config).bfloat16(), words(32, 512, masked=True)


def t5() -> Built:
    """T5 base, 220 million parameters, 32 rows of 512 tokens on both sides."""
    config = transformers.T5Config(  # type: ignore[call-arg]
        d_model=768,
        d_ff=3072,
        d_kv=64,
        num_layers=12,
        num_decoder_layers=12,
        num_heads=12,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config).bfloat16(), words(32, 512)


def vit() -> Built:
    """ViT large, 300 million parameters, 64 images of 224 by 224."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1024
    )
    images = torch.empty(64, 3, 224, 224, dtype=torch.bfloat16)
    return transformers.ViTForImageClassification(config).bfloat16(), {"pixel_values": images, "labels": torch.zeros(64).long()}


def opt() -> Built:
    """OPT, 1.3 billion parameters, 16 padded rows of 2048 tokens."""
    config = transformers.OPTConfig(
        hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048, **SPECIAL
    )
    return transformers.OPTForCausalLM(config).bfloat16(), words(16, 2048, masked=True)


def words(rows: int, length: int, *, masked: bool = False) -> dict[str, torch.Tensor]:
    """A batch for a language model."""
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens} | ({"attention_mask": torch.ones_like(tokens)} if masked else {})

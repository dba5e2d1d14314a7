"""Seven small models with a sample each; no dropout unless asked for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn

Sample = dict[str, torch.Tensor]
Built = tuple[nn.Module, Sample]


def _tokens(**more: torch.Tensor) -> Sample:
    ids = torch.randint(0, 64, (4, 16))
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(4, 16) < 0.3, -100)} | more


def _certain(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The config with every dropout 0."""
    for name, value in config.to_dict().items():
        if ("drop" in name or "pdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def gpt2(layers: int = 2) -> Built:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(_certain(config)), _tokens()


def llama() -> Built:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=8, num_key_value_heads=4, vocab_size=64
    )
    return transformers.LlamaForCausalLM(_certain(config)), _tokens()


def bert() -> Built:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(_certain(config)), _tokens(attention_mask=torch.ones(4, 16, dtype=torch.long))


def opt() -> Built:
    config = transformers.OPTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        ffn_dim=64,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
    )
    return transformers.OPTForCausalLM(_certain(config)), _tokens()


def t5() -> Built:
    config = transformers.T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=32,
        d_ff=64,
        num_heads=4,
        d_kv=8,
        vocab_size=64,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(_certain(config)), _tokens()


def vit() -> Built:
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=8,
    )
    sample = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 8, (4,))}
    return transformers.ViTForImageClassification(_certain(config)), sample


class Cnn(nn.Module):
    """Convolutions with batch norm, pooling, a head, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.body(images).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def cnn() -> Built:
    return Cnn(), {"images": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 5, (4,))}


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "opt": opt,
    "t5": t5,
    "vit": vit,
    "cnn": cnn,
}

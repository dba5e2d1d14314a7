"""The models that the compiler must get right, small and as their libraries build them: train mode, default dropout.

Batch 8, sequence 16. Widths, heads and vocabulary are divided by 8, so that every mesh of eight devices can split them; Llama's
four heads for keys and values are not. The language models ignore targets (-100) in uneven shares, and all targets of the last
two rows: a whole shard of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from autopar.capture import Captured
from autopar.plan.options import Options
from autopar.planning.planner import read_program

Sample = dict[str, torch.Tensor]
Built = tuple[nn.Module, Sample]

BATCH, LENGTH, VOCABULARY = 8, 16, 64
IGNORED = (0.0, 0.5, 0.1, 0.9, 0.3, 0.0, 1.0, 1.0)  # the share of the targets in each row
LENGTHS = (16, 9, 16, 12, 3, 16, 7, 16)  # of the rows where there is a mask
BLOCKS: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 64}
WORDS: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}


def targets(tokens: torch.Tensor) -> torch.Tensor:
    """The tokens as targets, some of them ignored."""
    return tokens.masked_fill(torch.rand(tokens.shape) < torch.tensor(IGNORED)[:, None], -100)


def mask() -> torch.Tensor:
    """An attention mask of rows that are padded at their ends."""
    return (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()


def words(**more: torch.Tensor) -> Sample:
    """A batch for a language model."""
    tokens = torch.randint(2, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": targets(tokens)} | more


def images(size: int, labels: int) -> Sample:
    """A batch for a model of images."""
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, labels, (BATCH,))}


def gpt2() -> Built:
    """Learned positions, fused query, key and value, tied head."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=8, vocab_size=VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers warns that it cannot tell this from the name of the class
    return model, words()


def llama() -> Built:
    """Rotary positions, RMS norm, gated units, grouped queries."""
    config = transformers.LlamaConfig(**BLOCKS, **WORDS, num_key_value_heads=4, bos_token_id=0, eos_token_id=0)
    return transformers.LlamaForCausalLM(config), words()


def bert() -> Built:
    """Not causal, padded; its pooled output is not used."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**BLOCKS, **WORDS)), words(attention_mask=mask())


def opt() -> Built:
    """Causal and padded; positions are counted along the mask."""
    config = transformers.OPTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        ffn_dim=64,
        num_attention_heads=8,
        **WORDS,
        word_embed_proj_dim=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return transformers.OPTForCausalLM(config), words(attention_mask=mask())


def t5() -> Built:
    """Encoder and decoder, relative positions, an embedding used three times."""
    config = transformers.T5Config(  # type: ignore[call-arg]
        num_layers=2,
        num_decoder_layers=2,
        d_model=32,
        d_ff=64,
        num_heads=8,
        d_kv=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config), words()


def vit() -> Built:
    """Patches, a class token, a head over eight labels."""
    config = transformers.ViTConfig(**BLOCKS, image_size=32, patch_size=8, num_labels=8)  # type: ignore[call-arg]
    return transformers.ViTForImageClassification(config), images(32, 8)


class Cnn(nn.Module):
    """Strided, grouped and padded convolutions, pooling, dropout, a head and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2, groups=2),
            nn.GELU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 8))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(pixel_values))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def cnn() -> Built:
    """Convolutions without batch norm."""
    return Cnn(), images(16, 8)


MODELS: dict[str, Callable[[], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "opt": opt,
    "t5": t5,
    "vit": vit,
    "cnn": cnn,
}


@functools.cache
def captured(name: str, precision: str | None = None) -> Captured:
    """The program of a model, captured once in a process."""
    return read_program(*make(name), Options(precision=precision))


def make(name: str) -> Built:
    """A model by name, with its sample; the same every time."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    return model.train(), sample

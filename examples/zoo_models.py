"""The architectures of the zoo: small, with random weights, in train mode, and with their loss.

Most are built from the configurations of Hugging Face's transformers, nothing is downloaded; five are in plain torch.
Batches, heads, widths and vocabularies are multiples of 8. The first six are those of the tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from examples.science_models import Evoformer, Palm
from tests.support.models import BATCH, BLOCKS, LENGTHS, VOCABULARY, WORDS, bert, gpt2, images, llama, mask, opt, t5, vit, words

Built = tuple[nn.Module, dict[str, Any]]
LABELS = 8
GROUPED: dict[str, Any] = {"num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 0}


def mistral() -> Built:
    """A Llama whose attention sees a window of four tokens."""
    config = transformers.MistralConfig(**BLOCKS, **WORDS, **GROUPED, sliding_window=4)
    return transformers.MistralForCausalLM(config), words()


def qwen3() -> Built:
    """Queries and keys normalised per head, heads of a width of their own."""
    config = transformers.Qwen3Config(**BLOCKS, **WORDS, **GROUPED, head_dim=8)
    return transformers.Qwen3ForCausalLM(config), words()


def mixtral() -> Built:
    """Four experts, two for each token, and a loss that balances them; one operator takes all tokens, sorted by expert."""
    config = transformers.MixtralConfig(
        **BLOCKS,
        **WORDS,
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    model, sample = transformers.MixtralForCausalLM(config), words()
    return model, sample


def mixtral_batched() -> Built:
    """The same, every token with copies of its experts' weights."""
    model, sample = mixtral()
    model.set_experts_implementation("batched_mm")
    return model, sample


def roberta() -> Built:
    """A BERT whose positions are counted along the tokens that are no padding."""
    config = transformers.RobertaConfig(**BLOCKS, **WORDS, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    return transformers.RobertaForMaskedLM(config), words(attention_mask=mask())


def whisper() -> Built:
    """Convolutions over a spectrogram, an encoder, a decoder that writes words."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=32,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    sample = {"input_features": torch.randn(BATCH, 16, 32), "labels": words()["labels"]}
    return transformers.WhisperForConditionalGeneration(config), sample


def mamba2() -> Built:
    """No attention: states that decay along the words, chunk by chunk, and short convolutions."""
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.Mamba2ForCausalLM(config), words()


def deepseek() -> Built:
    """Keys and values out of a narrow latent, experts chosen by group, and one that all tokens share."""
    config = transformers.DeepseekV3Config(
        **BLOCKS,
        **WORDS,
        num_key_value_heads=8,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        n_shared_experts=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.DeepseekV3ForCausalLM(config), words()


def clip() -> Built:
    """Images beside texts: every pair of the batch is compared."""
    config = transformers.CLIPConfig(
        text_config={**BLOCKS, **WORDS, "projection_dim": 16, "bos_token_id": 0, "eos_token_id": 63, "pad_token_id": 1},
        vision_config={**BLOCKS, "image_size": 32, "patch_size": 8, "projection_dim": 16},
        projection_dim=16,
    )
    tokens = words()["input_ids"].clamp(max=VOCABULARY - 2)
    tokens[torch.arange(BATCH), torch.tensor(LENGTHS) - 1] = VOCABULARY - 1  # the end of each text
    sample = {"input_ids": tokens, "attention_mask": mask(), "pixel_values": images(32, LABELS)["pixel_values"]}
    return transformers.CLIPModel(config), sample | {"return_loss": True}


def resnet() -> Built:
    """Convolutions and batch norms, two stages of bottlenecks."""
    config = transformers.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 64],
        depths=[1, 2],
        num_labels=LABELS,
        layer_type="bottleneck",
    )
    return transformers.ResNetForImageClassification(config), images(32, LABELS)


def _twice(inside: int, outside: int) -> nn.Sequential:
    """Two convolutions, each with its batch norm."""
    layers: list[nn.Module] = []
    for channels in (inside, outside):
        layers += [nn.Conv2d(channels, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down and up again, with a short cut at every size; a label for every pixel."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first, self.pool = _twice(3, widths[0]), nn.MaxPool2d(2)
        self.down = nn.ModuleList(_twice(above, below) for above, below in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in reversed(pairs))
        self.join = nn.ModuleList(_twice(2 * above, above) for above, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], LABELS, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, passed = self.first(pixel_values), []
        for down in self.down:
            passed.append(x)
            x = down(self.pool(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([passed.pop(), up(x)], dim=1))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def unet() -> Built:
    """Skip connections, transposed convolutions, batch norms."""
    return UNet(), images(16, LABELS) | {"labels": torch.randint(LABELS, (BATCH, 16, 16))}


class Recommender(nn.Module):
    """A bag of choices for each of three features, products of every two of them, and a dense layer on top."""

    def __init__(self, rows: int = 64, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode=mode) for mode in ("sum", "mean", "max"))
        self.dense = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, width))
        self.top = nn.Sequential(nn.Linear(width + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: torch.Tensor, choices: torch.Tensor, clicked: torch.Tensor) -> dict[str, torch.Tensor]:
        dense = self.dense(numbers)
        features = torch.stack([dense, *(bag(choices[:, i]) for i, bag in enumerate(self.bags))], dim=1)
        row, column = torch.tril_indices(4, 4, -1, device=dense.device)
        pairs = (features @ features.mT)[:, row, column]
        logits = self.top(torch.cat([dense, pairs], dim=1)).squeeze(1)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, clicked), "logits": logits}


def recommender() -> Built:
    """Tables of which few rows are read."""
    choices = torch.randint(64, (BATCH, 3, 5))
    return Recommender(), {"numbers": torch.randn(BATCH, 8), "choices": choices, "clicked": torch.rand(BATCH).round()}


class LanguageModel(nn.Module):
    """Two layers of an LSTM over words, the next word predicted."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cells = nn.LSTM(width, 2 * width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.cells(self.embedding(input_ids))[0])
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def lstm() -> Built:
    """Recurrent cells."""
    return LanguageModel(), words()


def evoformer() -> Built:
    """AlphaFold's blocks: attention along rows, then along columns, triangles of pairs."""
    sequences, residues = torch.randint(Evoformer.KINDS, (2, 4, 8, 8))
    distances = torch.randint(Evoformer.BINS, (4, 8, 8))
    return Evoformer(), {"sequences": sequences, "residues": residues, "distances": distances}


def palm() -> Built:
    """Attention beside the feed-forward layer, one head of keys and values."""
    return Palm(VOCABULARY), words()


MODELS: dict[str, Callable[[], Built]] = {
    one.__name__: one
    for one in (
        gpt2,
        llama,
        mistral,
        qwen3,
        opt,
        bert,
        roberta,
        t5,
        vit,
        clip,
        whisper,
        mixtral,
        mixtral_batched,
        deepseek,
        mamba2,
        resnet,
        unet,
        lstm,
        recommender,
        evoformer,
        palm,
    )
}


def make(name: str) -> Built:
    """A model by name, with its sample; the same every time."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    return model.train(), sample

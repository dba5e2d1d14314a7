"""The models that the benchmarks of a step run: a step takes some tenths of a second on one core, and what is sent shows in it.

Four layers of width 256, float32, no dropout (ranks of a hand-written plan would draw differently), the same weights and batch
wherever they are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers.utils import ModelOutput

Batch = dict[str, torch.Tensor]
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 4, 256, 8, 128, 2048
ROWS, IMAGES = 8, 16  # rows of text, or images, of the global batch


def _text() -> Batch:
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def gpt2() -> tuple[nn.Module, Batch]:
    """Fused query, key and value, learned positions, tied head: 3.8 million weights."""
    config = transformers.GPT2Config(
        n_layer=LAYERS,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers warns that it cannot tell this from the name of the class
    return model, _text()


def llama() -> tuple[nn.Module, Batch]:
    """Rotary positions, RMS norm, gated units, grouped queries: 4.2 million weights."""
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _text()


def vit() -> tuple[nn.Module, Batch]:
    """64 patches and a class token: 3.3 million weights."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=64,
        patch_size=8,
        num_labels=16,
    )
    batch = {"pixel_values": torch.randn(IMAGES, 3, 64, 64), "labels": torch.randint(16, (IMAGES,))}
    return transformers.ViTForImageClassification(config), batch


def bert() -> tuple[nn.Module, Batch]:
    """Not causal, padded rows, an untied head of its own shape, an output (the pooled one) that nothing uses."""
    config = transformers.BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1))).long()
    return transformers.BertForMaskedLM(config), _text() | {"attention_mask": mask}


def vocabulary() -> tuple[nn.Module, Batch]:
    """Many words and few tokens: 8.4 of 10 million weights are embedding and head, which data parallelism sends whole."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=HEADS, vocab_size=16 * VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(16 * VOCABULARY, (4, 32))
    return model, {"input_ids": tokens, "labels": tokens}


@dataclass
class _Outputs(ModelOutput):  # type: ignore[misc]
    loss: torch.Tensor | None = None


class _Recommender(nn.Module):
    """Tables of embeddings, their pairwise products, and a network: as in DLRM (https://arxiv.org/abs/1906.00091)."""

    def __init__(self, tables: int = 8, rows: int = 20_000, width: int = 64, dense: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) ** 2, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> _Outputs:
        found = [self.bottom(dense), *(table(ids[:, n]) for n, table in enumerate(self.tables))]
        stacked = torch.stack(found, 1)
        scores = self.top((stacked @ stacked.transpose(1, 2)).flatten(1)).squeeze(1)
        return _Outputs(loss=nn.functional.binary_cross_entropy_with_logits(scores, labels))


def recommender() -> tuple[nn.Module, Batch]:
    """Ten million weights in tables, 40 thousand elsewhere."""
    samples = 512
    batch = {"dense": torch.randn(samples, 16), "ids": torch.randint(20_000, (samples, 8))}
    return _Recommender(), batch | {"labels": torch.randint(2, (samples,)).float()}


class _Mixed(nn.Module):
    """Layers of widths that differ 32-fold: some have more weights than activations, some fewer."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(one, other), nn.GELU()) for one, other in pairs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> _Outputs:
        for layer in self.layers:
            x = layer(x)
        return _Outputs(loss=nn.functional.mse_loss(x, labels))


def mixed() -> tuple[nn.Module, Batch]:
    """A network that narrows twice: 10 million weights, 512 samples."""
    return _Mixed(1024, 4096, 128, 2048, 64, 1024, 1024), {"x": torch.randn(512, 1024), "labels": torch.randn(512, 1024)}


def t5() -> tuple[nn.Module, Batch]:
    """Encoder and decoder, the one with four times the tokens of the other."""
    config = transformers.T5Config(
        vocab_size=8 * VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH, num_layers=2, num_heads=HEADS,
        dropout_rate=0.0, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    words, targets = (torch.randint(1, 8 * VOCABULARY, (4, length)) for length in (LENGTH, LENGTH // 4))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": words, "labels": targets}


def mixtral() -> tuple[nn.Module, Batch]:
    """Eight experts, two for each token."""
    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, num_local_experts=8, num_experts_per_tok=2, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    return transformers.MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"gpt2": gpt2, "llama": llama, "vit": vit}  # with a plan by hand
WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "vocabulary": vocabulary,
    "recommender": recommender,
    "mixed": mixed,
    "t5": t5,
    "mixtral": mixtral,
}
EVERY = MODELS | {"bert": bert} | WORKLOADS


def make(name: str) -> tuple[nn.Module, Batch]:
    """A model by name and its global batch; the same every time."""
    torch.manual_seed(0)
    model, batch = EVERY[name]()
    return model.train(), batch


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks of a model: what its outermost lists hold."""
    if isinstance(model, nn.ModuleList):
        return list(model)
    return [block for child in model.children() for block in blocks(child)]

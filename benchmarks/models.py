"""The models that the benchmarks of a step run: a step takes some tenths of a second on one core, and what is sent shows in it.

Four layers of width 256, float32, no dropout (ranks of a hand-written plan would draw differently), the same weights and batch
wherever they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transformers
from torch import nn

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


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"gpt2": gpt2, "llama": llama, "vit": vit}  # with a plan by hand
EVERY = MODELS | {"bert": bert}


def make(name: str) -> tuple[nn.Module, Batch]:
    """A model by name and its global batch; the same every time."""
    torch.manual_seed(0)
    model, batch = EVERY[name]()
    return model.train(), batch


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The repeated blocks of a model."""
    return next(list(module) for module in model.modules() if isinstance(module, nn.ModuleList))

"""Small models of every architecture of transformers, from its own tables: configurations made narrow, and inputs to match.

    kinds()                     every model type of the library's table of models
    built("qwen2_moe")          the first combination of head, size and inputs under which the user's own module runs

Nothing is downloaded; weights are random. A configuration is the library's default, made small by `SIZES`: first by values of
our own, then with all widths divided by one number, which keeps what the widths are to each other, then with fewer layers alone.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH, LENGTH, WORDS = 4, 16, 128
TEXT_IDS = range(8, 96)  # words drawn; special ones are below and above
LARGEST = 40_000_000  # parameters that a trial may have

HEADS = (  # tables of the library, the first that has a type wins: those with a loss first
    "IMAGE_TEXT_TO_TEXT SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ CAUSAL_LM MASKED_LM IMAGE_CLASSIFICATION UNIVERSAL_SEGMENTATION "
    "SEMANTIC_SEGMENTATION OBJECT_DETECTION ZERO_SHOT_OBJECT_DETECTION DEPTH_ESTIMATION VIDEO_CLASSIFICATION CTC RNNT TDT "
    "AUDIO_CLASSIFICATION TIME_SERIES_PREDICTION SEQUENCE_CLASSIFICATION MASK_GENERATION VISUAL_QUESTION_ANSWERING "
    "TEXT_TO_WAVEFORM TEXT_TO_SPECTROGRAM PRETRAINING"
).split()

KINDS = {  # what a table's models are, where nothing below says more
    "image": "IMAGE_CLASSIFICATION DEPTH_ESTIMATION VIDEO_CLASSIFICATION MASKED_IMAGE_MODELING BACKBONE IMAGE_TO_IMAGE",
    "detection, segmentation": "UNIVERSAL_SEGMENTATION SEMANTIC_SEGMENTATION OBJECT_DETECTION ZERO_SHOT_OBJECT_DETECTION "
    "MASK_GENERATION INSTANCE_SEGMENTATION KEYPOINT_DETECTION KEYPOINT_MATCHING POSE_ESTIMATION",
    "audio": "SPEECH_SEQ_2_SEQ CTC RNNT TDT AUDIO_CLASSIFICATION TEXT_TO_WAVEFORM TEXT_TO_SPECTROGRAM AUDIO_XVECTOR",
    "time series": "TIME_SERIES_PREDICTION TIME_SERIES_REGRESSION TIME_SERIES_CLASSIFICATION",
    "multimodal": "IMAGE_TEXT_TO_TEXT VISUAL_QUESTION_ANSWERING ZERO_SHOT_IMAGE_CLASSIFICATION",
    "text, encoder and decoder": "SEQ_TO_SEQ_CAUSAL_LM",
    "text, decoder": "CAUSAL_LM",
    "text, encoder": "MASKED_LM SEQUENCE_CLASSIFICATION",
}
OTHERS = {
    "protein": "esm esmc evolla",
    "reinforcement learning": "decision_transformer pi0",
    "time series": "autoformer informer time_series_transformer timesfm timesfm2_5 patchtst patchtsmixer",
}
MODALITIES = {
    "image": re.compile(r"^(image_size|patch_size|num_channels)$"),
    "audio": re.compile(r"^(num_mel_bins|sampling_rate|sample_rate|hop_length|conv_kernel|audio_channels)$"),
}
STATE = re.compile(r"mamba|ssm|state_size|linear_(attn|num|key)|rwkv|xlstm|lru|conv_L|chunkwise|delta")
EXPERTS = re.compile(r"^(num|n|moe_num)_?(local_|routed_)?_?experts$")


def kinds() -> list[str]:
    """Every model type that has a model, in the library's order."""
    return list(modeling_auto.MODEL_MAPPING_NAMES)


def tables(kind: str) -> Iterator[tuple[str, str]]:
    """The tables with a head for a type, and the head's class."""
    for table in (*HEADS, ""):
        names = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES" if table else "MODEL_MAPPING_NAMES")
        found = names.get(kind, ())
        for name in (found,) if isinstance(found, str) else found[:1]:
            yield table, name


def family(kind: str) -> str:
    """What kind of model a type is: by a table of its own, by what its configuration has, by its heads."""
    for name, types in OTHERS.items():
        if kind in types.split():
            return name
    of = [table for table, _ in tables(kind)]
    config = CONFIG_MAPPING[kind]()
    parts = {part.removesuffix("_config") for part in config.sub_configs}
    names = list(_names(config))
    if parts & {"text", "language", "llm", "thinker", "qformer"} and parts & {"vision", "audio", "speech", "encoder", "vq"}:
        return "multimodal"
    if any(STATE.search(name) for name, _ in names):
        return "state-space, linear attention"
    if any(EXPERTS.match(name) and isinstance(number, int) and number > 1 for name, number in names):
        return "mixture of experts"
    found = next((name for name, of_kind in KINDS.items() if set(of) & set(of_kind.split())), None)
    return found or next(
        (name for name, one in MODALITIES.items() if any(map(one.search, (n for n, _ in names)))), "text, encoder"
    )


def _names(config: Any) -> Iterator[tuple[str, object]]:
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from _names(value)
        else:
            yield name, value


# -- configurations

LAYERS = re.compile(r"(^|_)(n|num)?_?((hidden|encoder|decoder|stage|hybrid)_)?(layers?|blocks|depth)$")
WIDTH = re.compile(
    r"(hidden_(size|dim|channels)|d_model|n_embd|(embed(ding)?|proj|proj(ection|ector)|emb)_(dim|size)|embed_dims?|(inter|ffn|mlp|ff|linear|"
    r"filter|d_ff|feedforward|feed_forward)\w*_?(size|dim|units|embed_dim)?|head_dim|_dim$|^dim|_rank|channels|width|hidden_sizes|"
    r"decoder_hidden_size|d_kv|d_inner|out_features_dim|num_filters|lora|embedding_size|output_size|_channel$|planes|"
    r"mrope_section|units|bottleneck|stem|^d_)"
)
EXACT: dict[str, int] = {  # by our own values: what is larger becomes this
    "vocab_size": WORDS, "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "n_heads": 4, "num_heads": 4, "head_dim": 16, "d_kv": 16,
    "moe_intermediate_size": 32, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "num_experts_per_token": 2, "top_k_experts": 2, "moe_k": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "qk_head_dim": 32, "projection_dim": 64, "embed_dim": 64, "mlp_dim": 128, "embedding_size": 64, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8, "chunk_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "shared_expert_intermediate_size": 64, "index_topk": 8, "index_head_dim": 32,
    "index_n_heads": 4, "n_group": 2, "topk_group": 1, "out_hidden_size": 64, "encoder_hidden_size": 64, "global_head_dim": 16,
    "word_embed_proj_dim": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": WORDS, "ffn_hidden_size": 128,
    "decoder_hidden_size": 64, "text_hidden_size": 64, "output_dim": 64, "rotary_dim": 16, "num_mel_bins": 16, "n_inner": 128, "inner_dim": 128,
    "state_size": 16, "lru_width": 64, "ff_dim": 128, "n_ctx": 128, "n_positions": 128, "block_size": 64, "first_k_dense_replace": 1,
    "encoder_hidden_dim": 64, "hidden_dim": 64, "num_query_tokens": 8, "num_queries": 10, "vision_hidden_size": 64, "depth": 2,
    "emb_dim": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "swa_v_head_dim": 16, "codebook_size": 64, "n_layer": 2,
    "num_image_tokens": 4, "image_seq_length": 4, "shared_intermediate_size": 64, "projector_hidden_size": 64, "feature_size": 16,
}  # fmt: skip
CAPPED = {  # under every size
    "vocab_size": WORDS, "max_position_embeddings": 128, "n_positions": 128, "max_source_positions": 64, "max_target_positions": 64,
    "sliding_window": 8, "mamba_chunk_size": 8, "chunk_size": 8, "num_queries": 10, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "max_length": 64, "window_size_text": 8, "vocab_size_per_layer_input": WORDS, "input_vocab_size": WORDS,
    "output_vocab_size": WORDS, "num_denoising": 10, "decoder_vocab_size": WORDS, "text_vocab_size": WORDS,
}  # fmt: skip
DEFAULTS = {"pad_token_id": 0, "decoder_start_token_id": 0, "vocab_size": WORDS}  # where the library has None
SIZES = ("small", "sixteenth", "quarter", "layers")
DRAWN = re.compile(r"layer_?drop|^mask_(time|feature)_prob$")  # what a branch or numpy's generator would draw
_PICTURES = re.compile(r"(^|_)image_size$|^img_size$|^input_size$|^pretrain_image_size$")
INDICES = re.compile(r"layer_(ids|indices|idx)$|_at_layer$")  # which layers are of another kind
_SPECIAL = re.compile(r"(token_id|token_index|token_ids|_token|_idx|_index|_id)$")


@dataclass(slots=True)
class Shrinking:
    """A configuration made smaller; `ids` are the special words beyond the vocabulary, renamed."""

    size: str
    sections: bool  # whether positions are in sections: those that the library has where none are given are of its own widths
    ids: dict[int, int] = field(default_factory=dict)

    def config(self, kind: str, changes: dict[str, Any]) -> Any:
        """The configuration of a type, with changes to its parts."""
        given = CONFIG_MAPPING[kind]()
        found = self.smaller(given.to_dict(), changes)
        config = type(given).from_dict(found)
        if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 0
        return config

    def smaller(self, given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        """The dictionary of a configuration, and those in it, made smaller."""
        layers = {name: value for name, value in given.items() if LAYERS.search(name) and isinstance(value, int) and value > 2}
        kept = _layers(given, layers)
        found = {}
        for name, value in given.items():
            if name in changes and not (isinstance(changes[name], dict) and isinstance(value, dict)):
                found[name] = changes[name]
            elif layers and name in ("out_features", "out_indices", "stage_names"):  # of the stages that there were
                if name == "out_indices" and value and not given.get("out_features"):
                    found[name] = [1, 2][: len(value)]
            elif isinstance(value, dict) and value and all(str(one).isdigit() for one in value):  # by the number of a layer
                places = next((places for count, places in kept.items() if count > max(map(int, value))), [])
                found[name] = {new: value[old] for new, old in enumerate(places) if old in value}
            elif value is None and name in DEFAULTS:
                found[name] = DEFAULTS[name]
            elif isinstance(changes.get(name), dict) and "model_type" in changes[name]:
                found[name] = changes[name]
            elif isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
                found[name] = self.smaller(value, {**changes, **changes.get(name, {})})
            elif name in layers and not isinstance(value, bool):
                found[name] = len(kept[value])
            elif isinstance(value, (list, tuple)) and len(value) in kept and len(value) > 4:
                found[name] = [self.value(name, value[at], given) for at in kept[len(value)]]
            else:
                found[name] = self.value(name, value, given)
        return found

    def value(self, name: str, value: Any, given: dict[str, Any]) -> Any:
        """One entry."""
        if isinstance(value, dict):
            if (
                name == "rope_parameters"
                and self.size == "small"
                and self.sections
                and "rope_type" in value
                and "mrope_section" not in value
            ):
                value = {**value, "mrope_section": [4, 2, 2]}
            return {one: self.value(str(one), held, given) for one, held in value.items()}
        if isinstance(value, float):
            return 0.0 if DRAWN.search(name) else value
        if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
            if INDICES.search(name):
                return [1]
            if _SPECIAL.search(name):
                return [self.word(one) for one in value]
            return self.several(name, list(value))
        return self.number(name, value, given) if type(value) is int else value

    def several(self, name: str, value: list[int]) -> list[int]:
        """A list of numbers: widths or depths of stages."""
        if "depth" in name or LAYERS.search(name):
            return [min(one, 1 + (at == 0)) for at, one in enumerate(value)]
        if _PICTURES.search(name):
            return [64 for _ in value]
        if name == "mrope_section" and self.size == "small":
            return [one * 16 // (2 * sum(value)) for one in value[:-1]] + [
                8 - sum(one * 16 // (2 * sum(value)) for one in value[:-1])
            ]
        return [self.divided(one) for one in value] if WIDTH.search(name) else value

    def number(self, name: str, value: int, given: dict[str, Any]) -> int:
        """A number."""
        if _PICTURES.search(name) and value > 32:
            patch = given.get("patch_size")
            return 4 * patch if isinstance(patch, int) and patch > 7 else 64
        if name == "window_size" and "num_channels" in given:
            return min(value, 2)
        if name in CAPPED:
            return min(value, CAPPED[name])
        if _SPECIAL.search(name):
            return self.word(value)
        if self.size == "small":
            if name == "embed_dim" and isinstance(given.get("num_heads", given.get("num_attention_heads")), (list, tuple)):
                return value // 2
            if name == "num_key_value_heads" and value == given.get("num_attention_heads"):
                return min(value, 4)
            return min(value, EXACT[name]) if name in EXACT else value
        return self.divided(value) if WIDTH.search(name) else value

    def divided(self, value: int) -> int:
        by = {"sixteenth": 16, "quarter": 4}.get(self.size, 1)
        while by > 1 and (value % by or value // by < 4):
            by //= 2
        return value // by

    def word(self, value: int) -> int:
        """A special word that the small vocabulary has, another one for another."""
        return value if value < 8 else self.ids.setdefault(value, WORDS - 1 - len(self.ids) % 24)


def _layers(given: dict[str, Any], layers: dict[str, int]) -> dict[int, list[int]]:
    """By a number of layers: the layers that are kept, of each kind the first, and two at least."""
    found = {}
    for count in set(layers.values()):
        per_layer = [value for value in given.values() if isinstance(value, (list, tuple)) and len(value) == count]
        kinds = list(zip(*per_layer, strict=True)) if per_layer else []
        first = sorted({str(kind): at for at, kind in reversed(list(enumerate(kinds)))}.values())[:4]
        found[count] = sorted({*first, *range(max(0, 2 - len(first)), 2)} if len(first) < 2 else set(first))
        if len(found[count]) < 2:
            found[count] = [0, 1]
    return found


# -- inputs

_RESNET = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "layer_type": "basic",
    "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {  # by type: what its configuration needs besides
    name: {"backbone_config": _RESNET, "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False}
    for name in "detr conditional_detr dab-detr deformable_detr table-transformer".split()
} | {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "chameleon": {"vocabulary_map": {"<image>": 8}},
    **dict.fromkeys(["mask2former", "oneformer"], {"feature_size": 64, "mask_feature_size": 64}),
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    **dict.fromkeys(
        "autoformer informer time_series_transformer".split(),
        {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2, 3], "num_time_features": 1, "feature_size": 6},
    ),
}
LEFT_OUT = {"past_key_values", "inputs_embeds", "cache_params", "use_cache", "return_dict", "output_attentions", "labels"}
MODAL = (
    "input_ids pixel_values input_features input_values bbox states actions rewards returns_to_go timesteps "
    "past_values past_time_features past_observed_mask future_values future_time_features"
).split()
CLASSES = re.compile(r"For(Sequence|Image|Audio|Video)Classification|ForAudioFrame")


SERIES = "past_values past_time_features past_observed_mask future_values future_time_features".split()
PLAYED = {"states": "state_dim", "actions": "act_dim", "rewards": "", "returns_to_go": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model in train mode, its sample, and how it came about."""

    module: nn.Module
    sample: dict[str, Any]
    head: str
    size: str


class NotBuilt(Exception):
    """No combination runs; says the first error of each size."""


def built(kind: str) -> Built:
    """The first combination of head, size and inputs that runs as the user would run it; raises NotBuilt."""
    said: dict[str, None] = {}
    for _, head in tables(kind):
        for size in SIZES:
            try:
                module = model(kind, head, size)
            except Exception as error:
                said[f"{head} {size}: {_said(error)}"] = None
                continue
            for names in wanted(module):
                for sample in samples(module, names):
                    try:
                        return Built(module=module, sample=run(module, sample), head=head, size=size)
                    except Exception as error:
                        said[f"{head} {size} {'+'.join(sample)}: {_said(error)}"] = None
    raise NotBuilt("\n".join(said))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def model(kind: str, head: str, size: str) -> nn.Module:
    """A head of a type at a size, with random weights."""
    made = getattr(transformers, head)
    sections = "mrope_section" in inspect.getsource(inspect.getmodule(made))
    config = Shrinking(size, sections).config(kind, CHANGES.get(kind, {}))
    with torch.device("meta"):
        count = sum(one.numel() for one in made(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    module: nn.Module = made(config).float().train()
    return module


def wanted(module: nn.Module) -> Iterator[list[str]]:
    """The arguments that a call may need: all kinds of input with labels, then fewer."""
    arguments = inspect.signature(module.forward).parameters
    required = [
        name
        for name, one in arguments.items()
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    modal = [name for name in MODAL if name in arguments and not (name == "pixel_values" and "image_grid_thw" in arguments)]
    labels = [["labels"], []] if "labels" in arguments else [[]]
    seen = []
    main = getattr(module, "main_input_name", "")
    for chosen in (modal, [main], ["input_ids"], ["pixel_values"], []):
        for label in labels:
            names = [n for n in dict.fromkeys([*required, *chosen, *label]) if n in arguments]
            if "decoder_input_ids" in arguments and not label:
                names.append("decoder_input_ids")
            if names not in seen:
                seen.append(names)
                yield names


def samples(module: nn.Module, names: list[str]) -> Iterator[dict[str, Any]]:
    """Samples with these arguments, each of which may have several forms."""
    config = module.config
    forms = [
        list(itertools.islice(tensors(name, module, config), 4)) for name in names if name not in LEFT_OUT or name == "labels"
    ]
    if all(forms):
        for chosen in itertools.islice(itertools.product(*forms), 12):
            yield dict(zip(names, chosen, strict=True))


def number(config: Any, *names: str, otherwise: int) -> int:
    """The smallest number of one of these names in a configuration or its parts."""
    found = [value for name, value in _names(config) if name in names and type(value) is int and value > 0]
    return min(found, default=otherwise)


def pictures(config: Any) -> tuple[int, int]:
    """The sides of an image."""
    for name, value in _names(config):
        if _PICTURES.search(name) and value:
            return (value, value) if isinstance(value, int) else tuple(value)[:2]
    return 64, 64


def tensors(name: str, module: nn.Module, config: Any) -> Iterator[torch.Tensor]:
    """Forms of an argument, by its name."""
    torch.manual_seed(1)
    head = type(module).__name__
    high, wide = pictures(config)
    channels = number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    vocabulary = number(config, "vocab_size", "input_vocab_size", otherwise=WORDS)
    words = torch.randint(TEXT_IDS.start, min(TEXT_IDS.stop, vocabulary), (BATCH, LENGTH))
    mels = number(
        config, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "n_mels", "mel_bins", otherwise=80
    )
    if name == "labels" and CLASSES.search(head):
        yield torch.randint(getattr(config, "num_labels", 2), (BATCH,))
    elif name == "labels" and ("Segmentation" in head or "Depth" in head):
        yield (
            torch.randint(getattr(config, "num_labels", 2), (BATCH, high, wide))
            if "Seg" in head
            else torch.rand(BATCH, high, wide)
        )
    elif name == "pixel_values":
        frames = number(config, "num_frames", otherwise=2)
        yield torch.randn(BATCH, channels, high, wide)
        yield torch.randn(BATCH, frames, channels, high, wide)
    elif name == "input_values":
        yield torch.randn(BATCH, 3200)
        yield torch.randn(BATCH, 1, 3200)
        yield torch.randn(BATCH, number(config, "max_length", otherwise=64), mels)
    elif name == "input_features":
        length = 2 * number(config, "max_source_positions", otherwise=32)
        yield torch.randn(BATCH, mels, length)
        yield torch.randn(BATCH, length, mels)
    elif name in SERIES:
        past, future = getattr(config, "context_length", LENGTH), getattr(config, "prediction_length", None) or 8
        past += max(getattr(config, "lags_sequence", None) or [0])
        width = getattr(config, "num_input_channels", 0)
        length = past if name.startswith("past") else future
        if "features" in name:
            yield torch.randn(BATCH, length, getattr(config, "num_time_features", 1))
        else:
            shape = (BATCH, length, *([width] if width else []))
            yield torch.ones(shape) if "mask" in name else torch.randn(shape)
    elif name in PLAYED:
        yield torch.randn(BATCH, LENGTH, number(config, PLAYED[name], otherwise=1))
    elif name == "timesteps":
        yield torch.arange(LENGTH).expand(BATCH, LENGTH).clone()
    elif name == "bbox":
        low = torch.randint(0, 50, (BATCH, LENGTH, 2))
        yield torch.cat([low, low + torch.randint(1, 50, (BATCH, LENGTH, 2))], dim=-1)
    elif name in ("attention_mask", "input_features_mask", "padding_mask"):
        yield torch.ones(BATCH, LENGTH, dtype=torch.long)
    elif name == "pixel_mask":
        yield torch.ones(BATCH, high, wide, dtype=torch.long)
    elif name.endswith("ids") or name == "labels":
        yield torch.zeros_like(words) if "type" in name else words
        if name == "labels":
            yield torch.randint(2, (BATCH,))


_COUNTS = re.compile(r"tokens?:? ?(\d+).*?features?:? ?(?:torch\.Size\()?\[?(\d+)")


def run(module: nn.Module, sample: dict[str, Any]) -> dict[str, Any]:
    """Run a module as the user would, forward and backward; where the text lacks places for images, they are put into it."""
    for _ in range(3):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = module(**sample)
            break
        except Exception as error:
            if (mended := placed(module.config, sample, str(error))) is None:
                raise
            sample = mended
    outputs = [
        one
        for one in torch.utils._pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
        if isinstance(one, torch.Tensor)
    ]
    if not outputs or not any(one.requires_grad for one in outputs):
        raise ValueError("nothing to differentiate")
    if not all(one.isfinite().all() for one in outputs if one.is_floating_point() and not one.ndim):
        raise ValueError("the loss is not finite")
    torch.stack([one.real.double().sum() for one in outputs if one.requires_grad]).sum().backward()
    module.zero_grad()
    return sample


def placed(config: Any, sample: dict[str, Any], said: str) -> dict[str, Any] | None:
    """The sample with as many places for images, videos or sounds in its text as an error asks for."""
    found = _COUNTS.search(said)
    if not found or "input_ids" not in sample:
        return None
    have, need = map(int, found.groups())
    kind = next((one for one in ("image", "video", "audio") if one in said.lower()), "image")
    token = next(
        (
            getattr(config, f"{kind}_{end}")
            for end in ("token_id", "token_index")
            if getattr(config, f"{kind}_{end}", None) is not None
        ),
        None,
    )
    if token is None or (have and have != need):
        return None
    need = need // config.get_text_config().hidden_size if have else need  # elements were counted, not tokens
    each = math.ceil(need / BATCH)
    given = sample["input_ids"]
    words = torch.cat([given[:, :2], torch.full((BATCH, each), token), given[:, -LENGTH + 2 :]], dim=1)
    return {name: words if name in ("input_ids", "labels") else value for name, value in sample.items()}

"""Configurations of transformers made small: the library's defaults, with fewer layers and narrower.

    Shrinking("small", False).config("qwen2_moe")         by values of our own, where the library's are larger
    Shrinking("quarter", False).config("qwen2_moe")       all widths by one number, which keeps what they are to each other

Of layers of several kinds the first of each is kept, with what is listed for it. Rates of layer drop and of masks in time are
0: a graph has no draws that decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.hub_changes import CHANGES

WORDS = 128

LAYERS = re.compile(r"(^|_)(n|num)?_?((hidden|encoder|decoder|stage|hybrid)_)?(layers?|blocks|depth)$")
WIDTH = re.compile(
    r"(hidden_(size|dim|channels)|d_model|n_embd|(embed(ding)?|proj|proj(ection|ector)|emb)_(dim|size)|embed_dims?|(inter|ffn|mlp|ff|linear|"
    r"filter|d_ff|feedforward|feed_forward)\w*_?(size|dim|units|embed_dim)?|head_dim|_dim$|^dim|_rank|channels|width|hidden_sizes|"
    r"decoder_hidden_size|d_kv|d_inner|out_features_dim|num_filters|lora|embedding_size|output_size|_channel$|planes|"
    r"mrope_section|units|bottleneck|stem|^d_)"
)


def _sizes(named: dict[int, str]) -> dict[str, int]:
    return {name: size for size, names in named.items() for name in names.split()}


EXACT = _sizes(
    {  # by our own values: what is larger becomes this
        WORDS: "vocab_size intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim mlp_dim "
        "vocab_size_per_layer_input ffn_hidden_size n_inner inner_dim ff_dim n_ctx n_positions",
        64: "hidden_size d_model n_embd dim projection_dim embed_dim embedding_size shared_expert_intermediate_size "
        "out_hidden_size encoder_hidden_size word_embed_proj_dim decoder_hidden_size text_hidden_size output_dim "
        "lru_width block_size encoder_hidden_dim hidden_dim vision_hidden_size emb_dim codebook_size "
        "upsample_groups shared_intermediate_size projector_hidden_size",
        32: "moe_intermediate_size qk_head_dim index_head_dim",
        16: "head_dim d_kv kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_head "
        "mamba_d_state linear_key_head_dim linear_value_head_dim global_head_dim hidden_size_per_layer_input "
        "rotary_dim num_mel_bins state_size swa_head_dim swa_v_head_dim feature_size",
        10: "num_queries",
        8: "mamba_n_heads mamba_chunk_size chunk_size index_topk num_query_tokens",
        4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads index_n_heads "
        "swa_num_attention_heads num_image_tokens image_seq_length",
        2: "num_key_value_heads num_experts_per_tok moe_topk num_experts_per_token top_k_experts moe_k "
        "linear_num_key_heads n_group depth swa_num_key_value_heads n_layer",
        1: "topk_group first_k_dense_replace",
    }
)
CAPPED = _sizes(
    {  # under every size
        WORDS: "vocab_size max_position_embeddings n_positions vocab_size_per_layer_input input_vocab_size "
        "output_vocab_size decoder_vocab_size text_vocab_size",
        64: "max_source_positions max_target_positions context_length max_length",
        10: "num_queries num_denoising",
        8: "sliding_window mamba_chunk_size chunk_size window_size_text",
        4: "num_experts num_local_experts n_routed_experts moe_num_experts",
        2: "num_experts_per_tok",
    }
)
DEFAULTS = {"pad_token_id": 0, "decoder_start_token_id": 0, "vocab_size": WORDS}  # where the library has None
SIZES = ("small", "sixteenth", "quarter", "layers")
DRAWN = re.compile(r"layer_?drop|^mask_(time|feature)_prob$")  # what a branch or numpy's generator would draw
PICTURES = re.compile(r"(^|_)image_size$|^img_size$|^input_size$|^pretrain_image_size$")
INDICES = re.compile(r"layer_(ids|indices|idx)$|_at_layer$|_indexes$")  # which layers are of another kind
_SPECIAL = re.compile(r"(token_id|token_index|token_ids|(?<!_per)_token|_idx|_index|_id)$")
_PARTS = re.compile(r"(?<!per_layer)_config$|^(backbone|num_hidden_layers)$")  # of which a type changes single entries


@dataclass(slots=True)
class Shrinking:
    """A configuration made smaller; `ids` are the special words beyond the vocabulary, renamed."""

    size: str
    sections: bool  # whether positions are in sections: those that the library has where none are given are of its own widths
    ids: dict[int, int] = field(default_factory=dict)

    def config(self, kind: str) -> Any:
        """The configuration of a type."""
        given = CONFIG_MAPPING[kind]()
        changes = CHANGES.get(kind, {})
        found = self.smaller(given.to_dict(), changes) | changes.get("more", {})
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
            if name in changes and not (_PARTS.search(name) and isinstance(changes[name], dict) and isinstance(value, dict)):
                found[name] = changes[name]
            elif layers and name in ("out_features", "out_indices", "stage_names"):  # of the stages that there were
                if name == "out_indices" and value and not given.get("out_features"):
                    found[name] = [1, 2][: len(value)]
            elif name == "id2label":
                found[name] = value
            elif isinstance(value, dict) and value and all(str(one).isdigit() for one in value):  # by the number of a layer
                places = next((places for count, places in kept.items() if count > max(map(int, value))), [])
                found[name] = {new: value[old] for new, old in enumerate(places) if old in value}
            elif value is None and name in DEFAULTS:
                found[name] = DEFAULTS[name]
            elif isinstance(changes.get(name), dict) and changes[name].keys() & {"model_type", "rope_type"}:
                found[name] = changes[name]
            elif isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
                own = changes.get(name, {})
                missing = {one: more for one, more in own.items() if one not in value}
                found[name] = self.smaller(value, {**changes, **own}) | missing
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
            if name == "rope_parameters" and self.size == "small":
                value = self.by_sections(value, given)
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

    def by_sections(self, rope: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """How positions are rotated, with the sections of a head of 16."""
        half = int(8 * (rope.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1))
        if sections := rope.get("mrope_section"):
            first = [one * half // sum(sections) for one in sections[:-1]]
            return {**rope, "mrope_section": [*first, half - sum(first)]}
        if self.sections and "rope_type" in rope:
            return {**rope, "mrope_section": [half // 2, half // 4, half - half // 2 - half // 4]}
        return rope

    def several(self, name: str, value: list[int]) -> list[int]:
        """A list of numbers: widths or depths of stages."""
        if "depth" in name or LAYERS.search(name):
            return [min(one, 1 + (at == 0)) for at, one in enumerate(value)]
        if PICTURES.search(name):
            return [64 for _ in value]
        if name == "mrope_section" and self.size == "small":  # it is small already
            return value
        return [self.divided(one) for one in value] if WIDTH.search(name) else value

    def number(self, name: str, value: int, given: dict[str, Any]) -> int:
        """A number."""
        if PICTURES.search(name) and value > 32:
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

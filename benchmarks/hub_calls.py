"""How the types of transformers are called whose inputs do not follow from the names of their arguments.

CALLS["kosmos-2"].sample(config)      a call of the model of a small configuration, as its processor would make it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.hub_configs import PICTURES
from benchmarks.hub_families import named

BATCH, LENGTH = 4, 16
TEXT_IDS = range(8, 96)  # words drawn; special ones are below and above
GRIDS = re.compile(
    r"grid_(thw|hw)s?$|^spatial_shapes$|^image_sizes$|^merge_sizes$|^target_sizes$|^mm_token_type_ids$"
)  # arguments whose values decide
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a type is called, where that is its own."""

    sample: Callable[[Any], Sample] | None = None  # of a configuration
    head: str = ""  # a class
    part: str = ""  # of the configuration: the class's own


def number(config: Any, *names: str, otherwise: int, least: int = 0) -> int:
    """The smallest number of one of these names in a configuration or its parts, above `least`."""
    found = [value for name, value in named(config) if name in names and type(value) is int and value > least]
    return min(found, default=otherwise)


def pictures(config: Any) -> tuple[int, int]:
    """The sides of an image."""
    for name, value in named(config):
        if PICTURES.search(name) and value:
            return (value, value) if isinstance(value, int) else tuple(value)[:2]
    return 64, 64


def image(config: Any, *several: int) -> torch.Tensor:
    """Images, or so many for each entry."""
    channels = number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    return torch.randn(BATCH, *several, channels, *pictures(config))


def patches(config: Any) -> Iterator[torch.Tensor]:
    """The patches of as many images of 4 x 4 as there are entries, one after the other: flat, as small images, in a row."""
    vision = getattr(config, "vision_config", None) or config
    size, frames = getattr(vision, "patch_size", 14), getattr(vision, "temporal_patch_size", 1)
    channels = number(vision, "num_channels", "in_channels", "in_chans", otherwise=3)
    yield torch.randn(BATCH * 16, channels * frames * size**2)
    small = torch.randn(BATCH * 16, channels, size, size)
    yield from (small, small[None])


def words(*shape: int) -> torch.Tensor:
    """A text of ordinary words."""
    return torch.randint(TEXT_IDS.start, TEXT_IDS.stop, shape or (BATCH, LENGTH))


def text(token: int, places: int) -> Sample:
    """A text with places for something else, and its own next words as labels."""
    found = torch.cat([words(BATCH, 2), torch.full((BATCH, places), token), words(BATCH, LENGTH - 2)], dim=1)
    return {"input_ids": found, "labels": found}


def on_grids(config: Any, arguments: Collection[str]) -> Iterator[Sample]:
    """A text, in each entry of which is an image of 4 x 4 patches."""
    given = text(token := config.image_token_id, 16 // getattr(config.vision_config, "spatial_merge_size", 1) ** 2)
    given["mm_token_type_ids"] = (given["input_ids"] == token).long()
    for pixels in patches(config):
        sample = {**given, "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}
        yield {name: value for name, value in sample.items() if name in arguments}


def _kosmos(config: Any) -> Sample:
    given = text(8, config.latent_query_num)
    mask = torch.zeros_like(given["input_ids"])
    mask[:, 2 : 2 + config.latent_query_num] = 1
    return {"pixel_values": image(config), **given, "image_embeds_position_mask": mask}


def _points(config: Any) -> Sample:
    points = torch.rand(BATCH, 1, 2, 2) * pictures(config)[0]
    return {"pixel_values": image(config), "input_points": points, "input_labels": torch.ones(BATCH, 1, 2, dtype=torch.long)}


def _queries(config: Any) -> Sample:
    return {"pixel_values": image(config), **text(config.image_token_index, config.num_query_tokens)}


def _lxmert(config: Any) -> Sample:
    regions = {"visual_feats": torch.randn(BATCH, 8, config.visual_feat_dim), "visual_pos": torch.rand(BATCH, 8, 4)}
    answers = {"matched_label": torch.randint(2, (BATCH,)), "ans": torch.randint(config.num_qa_labels, (BATCH,))}
    return {"input_ids": (ids := words()), "labels": ids, **regions, **answers}


def _patches(config: Any) -> Sample:
    vision = getattr(config, "vision_config", None) or config
    return {
        "pixel_values": torch.randn(BATCH, vision.num_patches, 3 * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, vision.num_patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, vision.num_patches // 4]] * BATCH),
    }


def _video(config: Any) -> Sample:
    """A clip for each entry."""
    return {"pixel_values_videos": image(config, config.num_frames), "labels": torch.randint(config.num_labels, (BATCH,))}


def _of_grids(config: Any) -> Sample:
    """Images of 4 x 4 patches, each of which has the frames of a pair."""
    return {
        "pixel_values": torch.randn(BATCH * 16, 3 * config.patch_temporal * config.patch_size**2),
        "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


def _features(config: Any, length: int = 64, times: int = 1) -> Sample:
    """The features of sounds of one length, and that all of them are there."""
    features = torch.randn(BATCH, number(config, "num_mel_bins", otherwise=80) * times, length)
    return {"input_features": features, "input_features_mask": torch.ones(BATCH, length, dtype=torch.long)}


def _positions(config: Any) -> Sample:
    """Images of 6 x 6 patches, with the places of these."""
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), dim=-1).flatten(0, 1)
    return {
        "pixel_values": torch.randn(BATCH, 36, 3 * config.patch_size**2),
        "pixel_position_ids": places.expand(BATCH, 36, 2).contiguous(),
    }


def _strips(config: Any) -> Sample:
    """Images of 4 x 4 patches, all patches side by side."""
    size = config.patch_size
    return {"pixel_values": torch.randn(1, 3, size, size * 16 * BATCH), "target_sizes": torch.tensor([[4, 4]] * BATCH)}


def _robot(config: Any) -> Sample:
    ids = text(config.vlm_config.image_token_index, 16)["input_ids"]
    moves = torch.randn(2, BATCH, config.chunk_size, config.max_action_dim)
    return {
        "state": torch.randn(BATCH, config.max_state_dim),
        "noise": moves[0],
        "timestep": torch.rand(BATCH),
        "input_ids": ids,
        "pixel_values": image(config.vlm_config, 1),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "attention_mask": torch.ones_like(ids),
        "actions": moves[1],
    }


def _heard_and_seen() -> Sample:
    return {"input_values": torch.randn(BATCH, 1, 4 * 1920), "pixel_values_videos": torch.randn(BATCH, 4, 3, 64, 64)}


def _codec(config: Any) -> Sample:
    """A wave of 16 frames of 320 samples, and the features of these frames."""
    features = torch.randn(BATCH, LENGTH, config.semantic_model_config.feature_projection_input_dim)
    return {"input_values": torch.randn(BATCH, 1, 320 * LENGTH), "input_features": features}


def _spoken(config: Any) -> Sample:
    """A text each sign of which lasts two frames."""
    return {
        "input_ids": words() % config.vocab_size,
        "duration_labels": torch.full((BATCH, LENGTH), 2),
        "spectrogram_labels": torch.randn(BATCH, 2 * LENGTH, config.num_mel_bins),
        "pitch_labels": torch.randn(BATCH, LENGTH, 1),
        "energy_labels": torch.randn(BATCH, LENGTH, 1),
    }


CALLS = {
    "blip-2": Call(sample=_queries),
    "instructblip": Call(sample=lambda config: {**_queries(config), "qformer_input_ids": words()}),
    "instructblipvideo": Call(
        sample=lambda config: {
            "pixel_values": image(config, 4),
            "qformer_input_ids": words(),
            **text(config.video_token_index, 4 * config.num_query_tokens),
        }
    ),
    "kosmos-2": Call(sample=_kosmos),
    "idefics": Call(
        sample=lambda config: {
            "input_ids": (ids := words()),
            "labels": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": image(config, 1),
            "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
        }
    ),
    "bark": Call(head="BarkSemanticModel", part="semantic_config", sample=lambda config: {"input_ids": words()}),
    "lxmert": Call(sample=_lxmert),
    "musicgen": Call(
        head="MusicgenForConditionalGeneration",
        sample=lambda config: {"input_ids": words(), "decoder_input_ids": words(BATCH * config.decoder.num_codebooks, LENGTH)},
    ),
    "siglip2": Call(head="Siglip2Model", sample=lambda config: {"input_ids": words(), **_patches(config)}),
    "siglip2_vision_model": Call(sample=_patches),
    "vjepa2": Call(
        sample=lambda config: {
            "pixel_values_videos": torch.randn(BATCH, config.frames_per_clip, 3, config.crop_size, config.crop_size),
            "labels": torch.randint(config.num_labels, (BATCH,)),
        }
    ),
    "seggpt": Call(
        sample=lambda config: {
            name: torch.randn(BATCH, 3, *(pictures(config)[1],) * 2)
            for name in ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
        }
    ),
    "clap": Call(
        sample=lambda config: {
            "input_ids": words(),
            "input_features": torch.randn(BATCH, 1, 512, config.audio_config.num_mel_bins),
        }
    ),
    "wav2vec2-bert": Call(
        head="Wav2Vec2BertForCTC",
        sample=lambda config: {
            "input_features": torch.randn(BATCH, 2 * LENGTH, config.feature_projection_input_dim),
            "labels": words(BATCH, 8) % 32,
        },
    ),
    "dia": Call(sample=lambda config: {"input_ids": words(), "decoder_input_ids": words(BATCH, LENGTH, 9)}),
    "janus": Call(
        sample=lambda config: {
            **text(config.image_token_id, config.vision_config.num_image_tokens),
            "pixel_values": image(config),
        }
    ),
    "mask2former": Call(head="Mask2FormerModel"),
    "oneformer": Call(
        head="OneFormerModel",
        sample=lambda config: {"pixel_values": image(config), "task_inputs": words(BATCH, config.task_seq_len)},
    ),
    "sam": Call(sample=_points),
    "sam2": Call(sample=_points),
    "sam_hq": Call(sample=_points),
    "lw_detr": Call(head="LwDetrModel"),
    "blip_2_qformer": Call(
        sample=lambda config: {
            "query_embeds": torch.randn(BATCH, 8, config.hidden_size),
            "encoder_hidden_states": torch.randn(BATCH, LENGTH, config.encoder_hidden_size),
        }
    ),
    "pi0": Call(sample=_robot),
    "fun_asr_nano_encoder": Call(
        sample=lambda config: {
            "input_features": torch.randn(BATCH, LENGTH, config.num_mel_bins * config.num_stacked_frames),
            "input_features_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        }
    ),
    "audioflamingo3_encoder": Call(sample=lambda config: _features(config, 2 * config.max_source_positions)),
    "qwen3_asr_encoder": Call(sample=lambda config: _features(config, 4 * config.n_window)),
    "gemma4_vision": Call(sample=_positions),
    "gemma4_audio": Call(
        sample=lambda config: {
            "input_features": torch.randn(BATCH, 64, 128),
            "attention_mask": torch.ones(BATCH, 64, dtype=torch.bool),
        }
    ),
    "gemma3n_audio": Call(
        sample=lambda config: {
            "audio_mel": torch.randn(BATCH, 64, config.input_feat_size),
            "audio_mel_mask": torch.zeros(BATCH, 64, dtype=torch.bool),
        }
    ),
    "muse_glimmer_vision": Call(sample=_of_grids),
    "muse_spark_vision": Call(sample=_of_grids),
    "minicpm_ocr_vision": Call(sample=_strips),
    "minicpmv4_7_vision": Call(sample=_strips),
    "kyutai_speech_to_text": Call(
        sample=lambda config: {"input_ids": (ids := words(BATCH, LENGTH, config.num_codebooks + 1)), "labels": ids[..., 0]}
    ),
    "voxtral_realtime": Call(
        sample=lambda config: {
            "input_ids": (ids := words()),
            "labels": ids,
            "input_features": torch.randn(BATCH, config.audio_config.num_mel_bins, LENGTH * config.audio_length_per_tok),
        }
    ),
    "tvp": Call(
        head="TvpForVideoGrounding",
        sample=lambda config: {
            "input_ids": words(1, LENGTH),  # more than one, the library itself refuses
            "pixel_values": torch.randn(1, config.num_frames, 3, 64, 64),
            "labels": torch.rand(3, 1),
        },
    ),
    "videoprism_vision_model": Call(head="VideoPrismForVideoClassification", sample=_video),
    "videoprism": Call(
        sample=lambda config: {
            "pixel_values_videos": image(config.vision_config, config.vision_config.num_frames),
            "input_ids": words(),
        }
    ),
    "xcodec": Call(sample=lambda config: {"input_values": torch.randn(BATCH, 1, 3200)}),
    "mimi_decoder": Call(sample=lambda config: {"latents": torch.randn(BATCH, config.hidden_size, LENGTH)}),
    "pocket_tts_audio_tokenizer_decoder": Call(
        sample=lambda config: {"latents": torch.randn(BATCH, config.hidden_size, LENGTH)}
    ),
    "vibevoice_acoustic_tokenizer_encoder": Call(sample=lambda config: {"hidden_states": torch.randn(BATCH, 1, 320)}),
    "vibevoice_acoustic_tokenizer_decoder": Call(
        sample=lambda config: {"hidden_states": torch.randn(BATCH, config.hidden_size, LENGTH)}
    ),
    "nemotron3_5_transcribe_word_timestamp": Call(
        sample=lambda config: {"inputs_embeds": torch.randn(BATCH, LENGTH, config.hidden_size)}
    ),
    "muse_glimmer_assistant": Call(
        sample=lambda config: {
            "noise_embeds": torch.randn(BATCH, config.block_size, config.hidden_size),
            "context_hidden_states": torch.randn(BATCH, LENGTH, 4 * config.hidden_size),
            "attention_mask": torch.ones(BATCH, LENGTH + config.block_size, dtype=torch.long),
        }
    ),
    "video_llama_3_vision": Call(
        sample=lambda config: {
            "pixel_values": torch.randn(BATCH * 16, 3 * config.patch_size**2),
            "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
            "merge_sizes": torch.tensor([1] * BATCH),
        }
    ),
    "inkling2_vision": Call(
        sample=lambda config: {
            "pixel_values": torch.randn(BATCH * 16, 2 * config.patch_size, 2 * config.patch_size, 3),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        }
    ),
    "edgetam": Call(sample=_points),
    "pe_video_encoder": Call(sample=lambda config: {"pixel_values_videos": torch.randn(BATCH, 4, 3, 64, 64)}),
    "muse_spark_audio": Call(sample=lambda config: {"input_values": torch.randn(BATCH, 1920 * 4)}),
    "pp_ocrv5_mobile_rec": Call(sample=lambda config: {"pixel_values": torch.randn(BATCH, 3, 96, 160)}),
    "depth_pro": Call(sample=lambda config: {"pixel_values": torch.randn(BATCH, 3, 128, 128)}),
    "edgetam_video": Call(head="EdgeTamModel", sample=_points),
    "emu3": Call(head="Emu3ForCausalLM", part="text_config"),
    "pe_audio_video_encoder": Call(sample=lambda config: _heard_and_seen()),
    "pe_video": Call(sample=lambda config: {"input_ids": words(), "pixel_values_videos": torch.randn(BATCH, 4, 3, 64, 64)}),
    "pe_audio_video": Call(sample=lambda config: {"input_ids": words(), **_heard_and_seen()}),
    "granite4_vision": Call(
        sample=lambda config: {
            **text(config.image_token_index, 10),
            "pixel_values": image(config, 2),
            "image_sizes": torch.tensor([list(pictures(config))] * BATCH),
        }
    ),
    "omdet-turbo": Call(
        sample=lambda config: {
            "pixel_values": image(config),
            "classes_input_ids": words(2 * BATCH, 8),
            "classes_attention_mask": torch.ones(2 * BATCH, 8, dtype=torch.long),
            "tasks_input_ids": words(BATCH, 8),
            "tasks_attention_mask": torch.ones(BATCH, 8, dtype=torch.long),
            "classes_structure": torch.tensor([2] * BATCH),
        }
    ),
    "xcodec2": Call(sample=_codec),
    "neucodec": Call(sample=_codec),
    "fastspeech2_conformer": Call(sample=_spoken),
    "fastspeech2_conformer_with_hifigan": Call(head="FastSpeech2ConformerModel", part="model_config", sample=_spoken),
    "molmo2": Call(
        sample=lambda config: {"input_ids": (ids := words()), "labels": ids, "mm_token_type_ids": torch.zeros_like(ids)}
    ),
    "sam3_tracker_video": Call(head="Sam3TrackerModel", sample=_points),
    "sam3_video": Call(head="Sam3TrackerModel", part="tracker_config", sample=_points),
    "higgs_audio_v2_tokenizer": Call(sample=lambda config: {"input_values": torch.randn(BATCH, 1, 9600)}),
}

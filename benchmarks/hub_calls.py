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
GRIDS = re.compile(r"grid_(thw|hw)s?$|^spatial_shapes$|^image_sizes$|^mm_token_type_ids$")  # arguments whose values decide
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
    vision = getattr(config, "vision_config", config)
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
    vision = getattr(config, "vision_config", config)
    return {
        "pixel_values": torch.randn(BATCH, vision.num_patches, 3 * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, vision.num_patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, vision.num_patches // 4]] * BATCH),
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
}

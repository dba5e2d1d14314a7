"""What kind of model a type of transformers is: by its configuration, and by the library's tables of heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

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
    names = list(named(config))
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


def named(config: Any) -> Iterator[tuple[str, object]]:
    """The entries of a configuration and of its parts."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            yield from named(value)
        else:
            yield name, value

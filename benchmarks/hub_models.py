"""Small models of every architecture of transformers, from its own tables, and inputs to match.

    built("qwen2_moe")          the first combination of head, size and inputs under which the user's own module runs

Nothing is downloaded; weights are random; configurations are those of `benchmarks.hub_configs`.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.hub_calls import BATCH, CALLS, GRIDS, LENGTH, TEXT_IDS, Call, number, on_grids, patches, pictures
from benchmarks.hub_configs import SIZES, WORDS, Shrinking
from benchmarks.hub_families import tables
from benchmarks.trials import NotBuilt

LARGEST = 40_000_000  # parameters that a trial may have

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


def built(kind: str) -> Built:
    """The first combination of head, size and inputs that runs as the user would run it; raises NotBuilt."""
    said: dict[str, None] = {}
    own = CALLS.get(kind, Call())
    for head in [own.head] if own.head else dict.fromkeys(head for _, head in tables(kind)):
        for size in SIZES:
            try:
                module = model(kind, head, size, own.part)
            except Exception as error:
                said[f"{head} {size}: {_said(error)}"] = None
                continue
            for sample in calls(module, own):
                try:
                    return Built(module=module, sample=run(module, sample), head=head, size=size)
                except Exception as error:
                    said[f"{head} {size} {'+'.join(sample)}: {_said(error)}"] = None
    raise NotBuilt("\n".join(said))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def model(kind: str, head: str, size: str, part: str = "") -> nn.Module:
    """A head of a type at a size, or one of a part of its configuration, with random weights."""
    made = getattr(transformers, head)
    sections = "mrope_section" in inspect.getsource(inspect.getmodule(made))
    config = Shrinking(size, sections).config(kind)
    config = getattr(config, part) if part else config
    with torch.device("meta"):
        count = sum(one.numel() for one in made(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    module: nn.Module = made(config).float().train()
    return module


def calls(module: nn.Module, own: Call) -> Iterator[dict[str, Any]]:
    """Samples to try: those that the type needs, or all combinations of arguments by their names."""
    if own.sample:
        torch.manual_seed(1)
        yield own.sample(module.config)
    else:
        arguments = inspect.signature(module.forward).parameters
        if "image_grid_thw" in arguments and hasattr(module.config, "image_token_id"):
            yield from on_grids(module.config, arguments)
        yield from itertools.chain(*(samples(module, names) for names in wanted(module)))


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


def tensors(name: str, module: nn.Module, config: Any) -> Iterator[torch.Tensor]:
    """Forms of an argument, by its name."""
    torch.manual_seed(1)
    head = type(module).__name__
    high, wide = pictures(config)
    channels = number(config, "num_channels", "in_channels", "in_chans", otherwise=3)
    vocabulary = number(config, "vocab_size", "input_vocab_size", otherwise=WORDS, least=TEXT_IDS.start)
    words = torch.randint(TEXT_IDS.start, min(TEXT_IDS.stop, vocabulary), (BATCH, LENGTH))
    mels = number(
        config, "num_mel_bins", "feature_size", "input_dim", "input_feat_per_channel", "n_mels", "mel_bins", otherwise=80
    )
    if name == "labels" and CLASSES.search(head):
        yield torch.randint(max(1, getattr(config, "num_labels", 2)), (BATCH,))
    elif name == "labels" and ("Segmentation" in head or "Depth" in head):
        yield (
            torch.randint(getattr(config, "num_labels", 2), (BATCH, high, wide))
            if "Seg" in head
            else torch.rand(BATCH, high, wide)
        )
    elif name == "grid_thw":
        yield torch.tensor([[1, 4, 4]] * BATCH)
    elif name in ("pixel_values", "hidden_states") and any(map(GRIDS.search, inspect.signature(module.forward).parameters)):
        yield from patches(config)
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

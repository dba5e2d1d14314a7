"""Hugging Face's `generate` over parallel modules, so that no device needs to hold all weights.

    generator = parallel_generator(model, prompts, mesh, length=128)
    generator.generate(prompts, max_new_tokens=20)

The key-value cache is stored in buffers of the prefill and decode modules, laid out by the plan. A `Generator` over a module
planned for something else has no cache: every new token is a forward of the planned length. Needs the package transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from autopar.api import parallelize
from autopar.codegen import ParallelModule
from autopar.errors import InputError
from autopar.integrations.generation_call import PlannedCall, generating_model
from autopar.integrations.generation_plan import (
    GenerationPlan,
    cached_model,
    generation_options,
    plan_generation,
    samples_of,
)
from autopar.planning.planner import connected_mesh
from autopar.runtime.rank_consistency import from_rank_0
from autopar.runtime.world import connect


class Generating(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Presents a parallel module to the library as a model that generates."""

    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True  # it has none of its own

    def __init__(self, parallel: ParallelModule, model: nn.Module) -> None:
        config: Any = copy.deepcopy(model.config)
        config._experts_implementation = "eager"  # the experts are in the parallel module: there are none here to switch
        super().__init__(config)
        self.parallel, self.generation_config = parallel, model.generation_config

    @property
    def device(self) -> torch.device:
        """Where prompts are."""
        return self.parallel.autopar.context.device

    def _config(self, options: Mapping[str, Any]) -> GenerationConfig:
        """The generation config for these options; raises InputError if the prompts are not tokens."""
        if options.get("inputs_embeds") is not None:
            raise InputError("prompts are tokens: a planned call reads no embeddings", fix="give input_ids alone")
        config = copy.deepcopy(options.get("generation_config") or self.generation_config)
        assert isinstance(config, GenerationConfig)
        config.update(**options)
        return config


class Unread(nn.Module):
    """Presents an encoder to the library that returns its input; each forward encodes it again."""

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **kwargs: object
    ) -> BaseModelOutput:
        """Return the encoder's input tokens."""
        return BaseModelOutput(last_hidden_state=inputs_embeds if input_ids is None else input_ids)


class Generator(Generating):
    """A language model, with or without an encoder, that generates by forwards of a parallel module.

    Every rank calls `generate` with the same prompts, and the same seed if it samples. Prompts may be padded as for the whole
    model: on the left, unless an encoder reads them. Each new token takes one forward of the planned batch, or several if
    prompts and beams exceed it; sequences may not grow beyond the planned length.

    Args:
        parallel: what `autopar.parallelize` returned, planned with `input_ids`, perhaps with `attention_mask`, `position_ids`
            and `labels`; for an encoder and a decoder with `labels` or `decoder_input_ids`, perhaps with their masks.
        model: the model that was passed to it, for its configuration and the inputs that it prepares for a forward.

    Raises:
        InputError: the module was planned with other arguments, or the model's `generate` is not the library's.
    """

    def __init__(self, parallel: ParallelModule, model: nn.Module) -> None:
        inner = generating_model(model)
        super().__init__(parallel, inner)
        self.call = PlannedCall.of(parallel.autopar.signature, inner)
        self.prepare_inputs_for_generation = inner.prepare_inputs_for_generation
        self.forward = update_wrapper(partial(self._logits), inner.forward)  # by its parameters the library knows what to give

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """A stand-in for the encoder, whose input is passed on to each forward."""
        return Unread()

    def _logits(self, input_ids: torch.Tensor | None = None, past_key_values: object = None, **given: Any) -> Seq2SeqLMOutput:
        """The logits of tokens, as returned by the model's own forward; raises InputError for unplanned arguments."""
        if past_key_values is not None:
            raise InputError("a Generator has no cache", fix="leave use_cache out; parallel_generator has one")
        tensors, places = self.call.tensors(input_ids, **given)
        calls = len(tensors["input_ids"]) // self.call.specs["input_ids"].shape[0]
        rows = zip(*(tensor.to(self.device).chunk(calls) for tensor in tensors.values()), strict=True)
        logits = torch.cat([self._called(dict(zip(tensors, call, strict=True))) for call in rows])[: len(places)]
        columns = places.to(logits.device)[..., None].expand(-1, -1, logits.shape[-1])
        return Seq2SeqLMOutput(logits=logits.gather(1, columns))

    def _called(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits of one planned call, whole."""
        parts = self.parallel.shard(tensors)
        assert isinstance(parts, Mapping), "as it was given"
        logits: torch.Tensor = self.parallel.gather(self.parallel(**parts).get("logits"))
        return logits

    @torch.no_grad()
    def generate(self, *args: object, **options: object) -> object:
        """The library's `generate`, in evaluation mode and without a cache; raises InputError for an assistant."""
        config = self._config(options)
        _unassisted(config, options)
        mode = self.parallel.training
        try:
            self.parallel.eval()
            return super().generate(*args, **{"use_cache": False, **options})
        finally:
            self.parallel.train(mode)


class SeenPositions(Cache):  # type: ignore[misc]
    """Tells the library how many positions of the cache, which is in the modules' buffers, are written."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of positions that are written."""
        return self.seen

    def changed(self, *args: object, **kwargs: object) -> None:
        """Refuse to reorder or drop cached sequences."""
        raise InputError(
            "a planned cache only grows: sequences cannot be reordered or cut", fix="a Generator, which has no cache"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = changed


class CachedGenerator(Generating):
    """A Hugging Face model that generates by two parallel modules, which share their weights and a key-value cache.

    Every rank calls `generate` with the same prompts, and with the same seed where it draws. `parallel_generator` makes it.

    Args:
        prefill: the module for a prompt.
        decode: the module for one token, over the tensors of `prefill`.
        model: the model, for its configuration.
        plan: the plan of both.
    """

    def __init__(self, prefill: ParallelModule, decode: ParallelModule, model: nn.Module, plan: GenerationPlan) -> None:
        super().__init__(prefill, model)
        self.prefill, self.decode, self.plan = prefill, decode, plan
        self.source: torch.Tensor | None = None  # what an encoder is about to read

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: SeenPositions | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        encoder_outputs: object = None,
        **unused: object,
    ) -> CausalLMOutputWithPast:
        """The logits after the last of these tokens, which follow the cached ones.

        Raises InputError for more sequences or positions than were planned.
        """
        cache, tokens = past_key_values, input_ids if decoder_input_ids is None else decoder_input_ids
        if not isinstance(cache, SeenPositions) or tokens is None:
            raise InputError("a planned cache serves one generate() call", fix="leave past_key_values and use_cache out")
        rows, number = tokens.shape
        if rows > self.plan.batch or cache.seen + number > self.plan.length:
            raise InputError(
                f"{rows} sequences of {cache.seen + number} tokens, but {self.plan.batch} of {self.plan.length} were planned",
                fix="fewer prompts or new tokens, or plan with more prompts or a larger length",
            )
        while number:
            used, logits = self._next(tokens[:, -number:], cache.seen, attention_mask, position_ids)
            number, cache.seen = number - used, cache.seen + used
        return CausalLMOutputWithPast(logits=logits[:rows], past_key_values=cache)

    def _next(
        self, tokens: torch.Tensor, seen: int, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> tuple[int, torch.Tensor]:
        """Store as many of these tokens as a module takes; returns their number, and the logits after the last of them."""
        (rows, number), encodes = tokens.shape, bool(self.config.is_encoder_decoder)
        whole = not encodes and number > 1 and seen + self.plan.prompt <= self.plan.length
        module = self.prefill if whole or self.source is not None else self.decode
        shapes = module.autopar.signature.shapes
        width = shapes["tokens"][1]
        used = min(number, width)
        given = {
            "tokens": _padded(tokens[:, :used], shapes["tokens"], 0),
            "position": torch.tensor(seen, device=tokens.device),
            "last": torch.tensor([used - 1], device=tokens.device),
            "mask": _padded(tokens.new_ones(rows, 0) if mask is None else mask, shapes["mask"], 1),
        }
        if "positions" in shapes:
            own = torch.arange(seen, seen + used, device=tokens.device).expand(rows, used)
            own = own if positions is None else positions[:, -number:][:, :used]
            given["positions"] = _padded(own, shapes["positions"], 0)
        if self.source is not None:
            given["source"], self.source = _padded(self.source, shapes["source"], 0), None
        return used, module.gather(module(**given))

    @torch.no_grad()
    def generate(
        self, inputs: torch.Tensor | None = None, *, input_ids: torch.Tensor | None = None, **options: object
    ) -> object:
        """The library's `generate`, using the planned cache.

        Args:
            inputs: prompts, `[sequences, tokens]`, no more than planned; an encoder's input may not be longer than planned
                either.
            input_ids: the same, under a tokenizer's name for it.
            **options: those of the library's `generate`.

        Raises:
            InputError: there are no prompts, or the call asks for more than planned, or for beams, guidance, an assistant, or
                no cache or another one.
        """
        inputs = input_ids if inputs is None else inputs
        if inputs is None:
            raise InputError("there are no prompts", given=", ".join(options) or "nothing", fix="give input_ids")
        config = self._config(options)
        if options.get("use_cache", True) is not True or "past_key_values" in options or config.cache_implementation:
            fix = "leave use_cache, past_key_values and cache_implementation out, in the generation_config too"
            raise InputError("the cache is planned, and always used", fix=fix)
        if config.guidance_scale not in (None, 1):
            raise InputError("guidance is not supported with a planned cache", fix="a Generator, which has no cache")
        mode = _unassisted(config, options)
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            fix = "num_beams=1 and no penalty_alpha, or a Generator, which has no cache"
            raise InputError(f"{mode.replace('_', ' ')} is not supported with a planned cache", fix=fix)
        if "decoder_input_ids" in options and not self.config.is_encoder_decoder:
            raise InputError("the model has no encoder, so that its prompts are input_ids", fix="leave decoder_input_ids out")
        if config.output_hidden_states or config.output_attentions:
            raise InputError(
                "hidden states and attentions were not planned", fix="leave output_hidden_states and output_attentions out"
            )
        if self.config.is_encoder_decoder:
            copies = config.num_return_sequences or 1  # beside each other, as the library orders them
            rows, width = copies * inputs.shape[0], inputs.shape[1]
            if rows > self.plan.batch or width > self.plan.prompt:
                raise InputError(
                    f"the encoder reads {rows} sequences of {width}, but {self.plan.batch} of {self.plan.prompt} were planned",
                    fix="fewer or shorter ones, or plan with a larger sample",
                )
            self.source = inputs.repeat_interleave(copies, dim=0)
            mask = options.setdefault("attention_mask", torch.ones_like(inputs))
            assert isinstance(mask, torch.Tensor)
            hidden = torch.zeros(len(inputs), width, 1, device=inputs.device)
            options = {
                **options,
                "attention_mask": nn.functional.pad(mask, (0, self.plan.prompt - width)),
                "encoder_outputs": BaseModelOutput(last_hidden_state=hidden),
            }
        return super().generate(inputs, **{**options, "past_key_values": SeenPositions()})


def parallel_generator(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    mesh: object,
    *,
    length: int,
    plan: GenerationPlan | None = None,
    **options: object,
) -> CachedGenerator:
    """Build this rank's part of a model that generates: `generate` returns the tokens of the whole model.

    Run it under torchrun with one process per device of the mesh; rank 0 plans, and its weights are used on all ranks.

    Args:
        model, prompts, mesh, length, options: as for `plan_generation`.
        plan: the result of `plan_generation` for them; by default rank 0 makes one.

    Raises:
        AutoparError: what `plan_generation` and `autopar.parallelize` raise.
    """
    asked = generation_options(options)
    if plan is None:
        context = connect(connected_mesh(mesh, asked).bare)
        line = from_rank_0(lambda: plan_generation(model, prompts, mesh, length=length, **options).to_json(), context)
        plan = GenerationPlan.from_json(line)
    plan.check(prompts, length)
    cached = cached_model(model, prompts, length)
    first, following = samples_of(cached, prompts)
    prefill = parallelize(cached, first, mesh, plan=plan.prefill)
    decode = parallelize(cached, following, mesh, plan=plan.decode, over=prefill)
    assert isinstance(prefill, ParallelModule)
    assert isinstance(decode, ParallelModule)
    return CachedGenerator(prefill, decode, model, plan)


def _unassisted(config: GenerationConfig, options: Mapping[str, object]) -> GenerationMode:
    """The generation mode; raises InputError for assisted (speculative) generation."""
    mode = config.get_generation_mode(options.get("assistant_model"))
    if mode == GenerationMode.ASSISTED_GENERATION:
        raise InputError(
            "assisted generation removes tokens from the cache, which a planned cache and a Generator cannot",
            fix="leave assistant_model, prompt_lookup_num_tokens and assistant_early_exit out",
        )
    return mode


def _padded(tensor: torch.Tensor, shape: tuple[int, ...], filled: int) -> torch.Tensor:
    """A matrix padded to a shape, with rows below and columns to the right."""
    rows, columns = (size - have for size, have in zip(shape, tensor.shape, strict=True))
    return nn.functional.pad(tensor, (0, columns, 0, rows), value=filled)


__all__ = ["CachedGenerator", "Generator", "parallel_generator", "plan_generation"]

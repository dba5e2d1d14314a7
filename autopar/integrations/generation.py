"""Hugging Face's `generate` over a parallel module, whose weights no device needs to hold whole.

    Generator(parallel, model).generate(words, max_new_tokens=20)

There is no key-value cache: every new token is a forward of the planned length. Where the model fits one device,
`save_pretrained` and `from_pretrained` generate faster. Needs the package transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from autopar.codegen import ParallelModule
from autopar.errors import InputError


class Generator(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal language model that generates by the forwards of a parallel module.

    Every rank calls `generate` with the same prompts, and with the same seed where it draws. Prompts are padded on the right up
    to the planned batch and length, which later positions cannot change; sequences may not grow beyond it, nor be padded on
    the left.

    Args:
        parallel: what `autopar.parallelize` returned, planned with `input_ids`, perhaps with `labels`, and nothing else.
        model: the model that was passed to it, for its configuration.

    Raises:
        InputError: the module was planned with other arguments.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True  # it has none of its own

    def __init__(self, parallel: ParallelModule, model: nn.Module) -> None:
        shapes = parallel.autopar.signature.shapes
        if not {"input_ids"} <= shapes.keys() <= {"input_ids", "labels"}:
            raise InputError(
                "the parallel module cannot generate: it needs other arguments than input_ids and labels",
                planned=", ".join(shapes),
                fix="parallelize with a sample of input_ids alone",
            )
        super().__init__(copy.deepcopy(model.config))
        self.parallel, self.generation_config = parallel, model.generation_config
        self.batch, self.length = shapes["input_ids"]

    @property
    def device(self) -> torch.device:
        """Where prompts are."""
        return self.parallel.autopar.context.device

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **unused: object) -> CausalLMOutput:
        """The logits of these prompts; raises InputError for more or longer ones than planned, or padded ones."""
        rows, length = input_ids.shape
        if rows > self.batch or length > self.length:
            raise InputError(
                f"{rows} sequences of {length} tokens, but the module was planned for {self.batch} of {self.length}",
                fix="fewer prompts, beams or new tokens, or plan with a larger sample",
            )
        if attention_mask is not None and not bool(attention_mask.all()):
            raise InputError("the prompts are padded", fix="prompts of one length")
        padded = nn.functional.pad(input_ids, (0, self.length - length, 0, self.batch - rows))
        names = self.parallel.autopar.signature.shapes
        given = self.parallel.shard(dict.fromkeys(names, padded))
        assert isinstance(given, Mapping), "as it was given"
        logits = self.parallel(**given)["logits"]
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return CausalLMOutput(logits=whole[:rows, :length])

    @torch.no_grad()
    def generate(self, *args: object, **options: object) -> object:
        """The library's `generate`, in evaluation mode and without a cache."""
        mode = self.parallel.training
        try:
            self.parallel.eval()
            return super().generate(*args, **{"use_cache": False, **options})
        finally:
            self.parallel.train(mode)


__all__ = ["Generator"]

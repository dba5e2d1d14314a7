"""Wraps a Hugging Face model so that its key-value cache is in buffers, which a program writes and a plan lays out.

The cache is the library's `StaticCache`, with a fixed number of positions: a call computes with all of them, and a mask hides
those not written yet. The position of a call is an input, so one program serves every position.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache, StaticCache, StaticLayer
from transformers.modeling_outputs import BaseModelOutput

from autopar.capture.meta_copy import skeleton
from autopar.errors import InputError


class CachedLayer(nn.Module):
    """Keys and values of an attention layer, `[batch, heads, positions, features]`, as buffers outside of the state dict."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        for name, like in (("keys", keys), ("values", values)):
            self.register_buffer(name, torch.zeros(like.shape, dtype=like.dtype, device=device), persistent=False)


class CachedModel(nn.Module):
    """A causal language model, or an encoder-decoder model, with its cache.

    Args:
        model: the model, in evaluation mode.
        batch: the number of sequences.
        length: the number of positions of the cache.
        source: the length of the encoder's input; 0 for a model without encoder.

    Raises:
        InputError: its cache does not hold keys and values for all positions.
    """

    def __init__(self, model: PreTrainedModel, batch: int, length: int, source: int = 0) -> None:
        super().__init__()
        self.model, self.batch, self.length, self.masked = model, batch, length, source or length
        taken = inspect.signature(model.forward).parameters
        self.own_positions, self.own_slice = "position_ids" in taken, "logits_to_keep" in taken
        found = _probed(model, batch, length, source)
        device = next(model.parameters()).device
        self.cache, self.cross = (
            nn.ModuleList(CachedLayer(layer.keys, layer.values, device) for layer in cache.layers) for cache in found
        )

    def sample(self, tokens: int, *, source: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Sample arguments of a call with so many tokens; with `source` the encoder runs and fills its cache."""
        found = {"tokens": torch.zeros(self.batch, tokens, dtype=torch.int64), "position": torch.tensor(0)}
        found |= {"last": torch.tensor([tokens - 1]), "mask": torch.ones(self.batch, self.masked, dtype=torch.int64)}
        if self.own_positions and not self.cross:
            found["positions"] = found["tokens"].clone()
        return found if source is None else {**found, "source": source}

    def forward(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits `[batch, 1, vocabulary]` after one of these tokens; stores their keys and values from a position on.

        Args:
            tokens: `[batch, number]`.
            position: that of the first token in the cache; a scalar.
            last: the index of the last token, `[1]`; tokens behind it are written too, and overwritten by the next call.
            mask: `[batch, positions]`, 0 for padding, of the cache or of the encoder's input.
            positions: `[batch, number]`, the tokens' positions, not counting padding.
            source: the encoder's input, `[batch, source]`; without it the cache keeps the previous one.
        """
        if self.cross:
            given = {"decoder_input_ids": tokens, "past_key_values": self._both(position, source)}
            given |= {"input_ids": source} if source is not None else {"encoder_outputs": self._nothing(mask)}
        else:
            given = {"input_ids": tokens, "past_key_values": lent(self._blank(), self.cache, position)}
            given |= {"position_ids": positions} if self.own_positions else {}
            given |= {"logits_to_keep": last} if self.own_slice else {}
        logits: torch.Tensor = self.model(attention_mask=mask, use_cache=True, **given).logits
        return logits if self.own_slice else logits.index_select(1, last)

    def _blank(self) -> StaticCache:
        """The library's cache, without memory."""
        return StaticCache(config=self.model.config, max_cache_len=self.length)

    def _both(self, position: torch.Tensor, source: torch.Tensor | None) -> EncoderDecoderCache:
        """The caches of a decoder: for itself, and for the encoder's results, which is written if there is a source."""
        cross = self._blank()  # the library asks it for its length, which must not be a tensor then
        both = EncoderDecoderCache(lent(self._blank(), self.cache, position), cross)
        both.is_updated = dict.fromkeys(both.is_updated, source is None)
        lent(cross, self.cross, torch.zeros_like(position))
        return both

    def _nothing(self, mask: torch.Tensor) -> BaseModelOutput:
        """A placeholder for the encoder's results, all needed parts of which are in the cache."""
        shape = *mask.shape, self.model.config.hidden_size
        return BaseModelOutput(last_hidden_state=torch.zeros(shape, dtype=self.model.dtype, device=mask.device))


def lent(cache: StaticCache, layers: nn.ModuleList, position: torch.Tensor) -> StaticCache:
    """A library cache over these buffers that writes from a position on."""
    for layer, own in zip(cache.layers, layers, strict=True):
        assert isinstance(own, CachedLayer)
        layer.keys, layer.values, layer.is_initialized = own.keys, own.values, True
        layer.dtype, layer.device, layer.cumulative_length = own.keys.dtype, own.keys.device, position + 0
    return cache


def _probed(model: PreTrainedModel, batch: int, length: int, source: int) -> tuple[StaticCache, StaticCache]:
    """The caches of a model, for itself and its encoder's results, as made by a forward on the meta device."""
    own, cross = (StaticCache(config=model.config, max_cache_len=size) for size in (length, max(source, 1)))
    if other := [type(layer).__name__ for cache in (own, cross) for layer in cache.layers if type(layer) is not StaticLayer]:
        raise InputError(
            f"the cache of {type(model).__name__} has a {other[0]}, which is not planned",
            fix="a model whose attention sees all positions; or generate without a cache: Generator",
        )
    width, copied = model.get_input_embeddings().weight.shape[1], skeleton(model).module
    with torch.device("meta"), torch.no_grad():
        one = torch.zeros(batch, 1, width, dtype=model.dtype)  # embedded: words the library would look at
        given: dict[str, object] = {"inputs_embeds": one, "past_key_values": own}
        if source:
            read = BaseModelOutput(last_hidden_state=one.expand(batch, source, width))
            given = {"decoder_inputs_embeds": one, "past_key_values": EncoderDecoderCache(own, cross), "encoder_outputs": read}
        try:
            copied(use_cache=True, **given)
        except (RuntimeError, NotImplementedError) as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise InputError(
                f"{type(model).__name__} decides by values while it fills a cache, which a plan cannot: {first}",
                fix='experts_implementation="batched_mm" in the config, for experts; or generate without a cache: Generator',
            ) from error
    if not source:
        cross.layers = []
    return own, cross


__all__ = ["CachedModel"]

"""A Hugging Face model with its cache of keys and values as buffers, which a program writes and a plan lays out.

The cache is the library's `StaticCache`, of a fixed number of positions: a call computes with all of them, and a mask hides
those that are not written yet. Where a call begins is an input, so that one program serves every position.
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
    """The keys and values of one attention, `[batch, heads, positions, features]`, as buffers outside of the state dict."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, device: torch.device) -> None:
        super().__init__()
        for name, like in (("keys", keys), ("values", values)):
            self.register_buffer(name, torch.zeros(like.shape, dtype=like.dtype, device=device), persistent=False)


class CachedModel(nn.Module):
    """A causal language model, or one of an encoder and a decoder, with its cache.

    Args:
        model: the model, in evaluation mode.
        batch: the number of sequences.
        length: the number of positions of the cache.
        source: the length of what the encoder reads; 0 for a model without encoder.

    Raises:
        InputError: its cache is not one of keys and values at all positions.
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
        """The arguments of a call with so many tokens; with `source` the encoder reads, and the cache of it is filled."""
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
        """Logits `[batch, 1, vocabulary]` after one of these tokens, whose keys and values are stored from a position on.

        Args:
            tokens: `[batch, number]`.
            position: of the first of them in the cache; a scalar.
            last: which of them is the last, `[1]`; others behind it are written, and overwritten by the next call.
            mask: `[batch, positions]`, 0 for what is padding: of the cache, or of what the encoder reads.
            positions: `[batch, number]`, of the tokens, not counting padding.
            source: what the encoder reads, `[batch, source]`; without it the cache has what it read before.
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
        """The caches of a decoder: its own, and that of what the encoder read, to be written if there is a source."""
        cross = self._blank()  # the library asks it for its length, which must not be a tensor then
        both = EncoderDecoderCache(lent(self._blank(), self.cache, position), cross)
        both.is_updated = dict.fromkeys(both.is_updated, source is None)
        lent(cross, self.cross, torch.zeros_like(position))
        return both

    def _nothing(self, mask: torch.Tensor) -> BaseModelOutput:
        """What stands for the encoder's results where the cache has all that is read of them."""
        shape = *mask.shape, self.model.config.hidden_size
        return BaseModelOutput(last_hidden_state=torch.zeros(shape, dtype=self.model.dtype, device=mask.device))


def lent(cache: StaticCache, layers: nn.ModuleList, position: torch.Tensor) -> StaticCache:
    """A cache of the library over these buffers, which it writes from a position on."""
    for layer, own in zip(cache.layers, layers, strict=True):
        assert isinstance(own, CachedLayer)
        layer.keys, layer.values, layer.is_initialized = own.keys, own.values, True
        layer.dtype, layer.device, layer.cumulative_length = own.keys.dtype, own.keys.device, position + 0
    return cache


def _probed(model: PreTrainedModel, batch: int, length: int, source: int) -> tuple[StaticCache, StaticCache]:
    """The caches of a model, and of what its encoder read, as a forward on the meta device makes them."""
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
                f"{type(model).__name__} looks at numbers where it fills a cache, which a plan has not: {first}",
                fix='experts_implementation="grouped_mm" for experts; or generate without a cache: Generator',
            ) from error
    if not source:
        cross.layers = []
    return own, cross


__all__ = ["CachedModel"]

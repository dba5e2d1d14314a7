"""Converts one forward of the library's `generate` to a planned call, and locates the logits of its tokens in the result.

    a causal model                                        an encoder, and a decoder that reads labels shifted to the right

    tokens        input_ids          attention_mask       tokens         labels
    . . a b c     a b c 0 0 0 0 0    1 1 1 0 0 0 0 0      > x y          x y > -      > is the first token of every sequence,
    d e f g h     d e f g h 0 0 0    1 1 1 1 1 0 0 0      > z w          z w > -      - no label

A decoder does not see what is to its right. If the library counts the positions of a padded prompt from its first token, that
token moves to the first column, from which a planned call counts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from autopar.capture.signature import Signature, TensorSpec
from autopar.errors import InputError

CAUSAL = ("input_ids", "attention_mask", "position_ids", "labels")
SOURCE, TARGET = ("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask", "labels")
# Options of a forward that change nothing where all logits are returned and no cache is.
WITHOUT_EFFECT = {"use_cache", "return_dict", "logits_to_keep", "is_first_iteration"}


def generating_model(model: nn.Module) -> PreTrainedModel:
    """The library's model inside of a possible adapter; raises InputError if its `generate` is not the library's."""
    found = next((inner for inner in model.modules() if isinstance(inner, PreTrainedModel)), model)
    if getattr(type(found), "generate", None) is not GenerationMixin.generate:
        raise InputError(f"{type(found).__name__} has no generate, or one of its own", fix="a language model of transformers")
    return found


def check_rotary_length(model: PreTrainedModel, length: int) -> None:
    """Raise InputError for a length at which rotary frequencies switch to those for long sequences: a planned call has one
    length for all, whereas the library recomputes the cache when a sequence passes it.
    """
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [one for one in given.values() if isinstance(one, Mapping)] or [given]:  # by the type of a layer, or one
        most = config.max_position_embeddings if rope.get("rope_type") == "dynamic" else length
        if rope.get("rope_type") == "longrope":
            most = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        if length > most:
            raise InputError(
                f"{type(model).__name__} computes other positions in sequences of more than {most} tokens",
                planned=f"sequences of up to {length} tokens",
                fix=f"plan for {most} tokens at most",
            )


def labels_shifted(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """The decoder inputs for labels; raises InputError if the library does not define them."""
    if (shifted := getattr(model, "prepare_decoder_input_ids_from_labels", None)) is not None:
        return shifted  # type: ignore[no-any-return]
    if (shift := getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)) is None:
        raise InputError(
            f"the decoder inputs that {type(model).__name__} makes from labels are not known", fix="plan with decoder_input_ids"
        )
    return lambda labels: shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """The tensors of a planned call of a decoder, or of an `encoder` and a decoder, which may read labels `shifted`.

    Without positions from the library they are the columns, or count the tokens other than `padding`, starting behind it.
    """

    specs: Mapping[str, TensorSpec]
    encoder: bool
    shifted: Callable[[torch.Tensor], torch.Tensor] | None
    padding: int | None

    @staticmethod
    def of(signature: Signature, model: PreTrainedModel) -> PlannedCall:
        """The call of a module with this signature; raises InputError if `generate` cannot provide one of its arguments."""
        specs, encoder = {one.path: one for one in signature.tensors}, bool(model.config.is_encoder_decoder)
        groups = (SOURCE, TARGET) if encoder else (CAUSAL,)
        shapes = [{specs[name].shape for name in group if name in specs} for group in groups]
        known = (
            "input_ids" in specs
            and "logits" in signature.returned.paths
            and specs.keys() <= {name for group in groups for name in group}
        )
        known &= not encoder or not specs.keys().isdisjoint(("decoder_input_ids", "labels"))
        if not known or any(len(found) != 1 or len(next(iter(found))) != 2 for found in shapes):
            raise InputError(
                "the parallel module cannot generate: it takes more than tokens, or returns no logits",
                planned=", ".join(f"{name}{list(one.shape)}" for name, one in specs.items()),
                fix=f"parallelize with a sample of {' and '.join(', '.join(group) for group in groups)}, or some of them",
            )
        if not encoder and "position_ids" not in specs and _counts_from_padding(model):
            raise InputError(
                f"{type(model).__name__} uses other positions in generate() than by default",
                fix="plan with position_ids",
            )
        check_rotary_length(model, max(spec.shape[1] for spec in specs.values()))
        reads_labels = encoder and "decoder_input_ids" not in specs
        padding = model.config.pad_token_id if _counts_from_padding(model) else None
        shifted = labels_shifted(model) if reads_labels else None
        return PlannedCall(specs=specs, encoder=encoder, shifted=shifted, padding=padding)

    def tensors(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        **others: object,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The tensors of one or more calls for the library's inputs of a model, and the column of the logits of every token.

        The encoder's input is expected as its output. Raises InputError for unplanned arguments.
        """
        used = [name for name, value in others.items() if not (name in WITHOUT_EFFECT or value is None or value is False)]
        if used:
            raise InputError(f"generating takes {', '.join(used)}", planned=", ".join(self.specs), fix="leave it out")
        found: dict[str, torch.Tensor] = {}
        if self.encoder:
            if encoder_outputs is None:
                raise InputError("a decoder was called without an encoder's output", fix="leave guidance_scale out")
            source = encoder_outputs.last_hidden_state
            self._check_source(source)
            found |= self._read("", source, attention_mask)
            prefix, tokens, mask = "decoder_", decoder_input_ids, decoder_attention_mask
        else:
            prefix, tokens, mask = "", input_ids, attention_mask
        assert tokens is not None
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if position_ids is not None and "position_ids" not in self.specs:
            tokens, mask, places = _from_the_first_column(tokens, mask, position_ids)
        found |= self._read(prefix, tokens, mask)
        found["position_ids"] = self._positions(tokens) if position_ids is None else position_ids.expand_as(tokens)
        found["labels"] = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)  # where the first is taken from the last: mBART
        padded = {name: _padded(name, found[name], spec) for name, spec in self.specs.items()}
        if self.shifted is not None and not self.shifted(padded["labels"])[: len(tokens), : tokens.shape[1]].equal(tokens):
            raise InputError("no labels, shifted, give these decoder tokens", fix="plan with decoder_input_ids")
        return padded, places

    def _positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """The positions of a call without any, such as the library's guidance makes without a prompt."""
        if self.padding is None:
            return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        seen = (tokens != self.padding).to(tokens.dtype)
        return seen.cumsum(1) * seen + self.padding

    def _read(self, prefix: str, tokens: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The arguments for these tokens; raises InputError if some are masked and the plan takes no mask."""
        name = f"{prefix}attention_mask"
        if mask is not None and name not in self.specs and not bool(mask.all()):
            raise InputError(f"the prompts are padded, but the module was planned without {name}", fix=f"plan with {name}")
        return {f"{prefix}input_ids": tokens, name: torch.ones_like(tokens) if mask is None else mask}

    def _check_source(self, source: torch.Tensor) -> None:
        """Raise InputError if the input is not tokens, or if an encoder would see padding because the plan takes no mask."""
        if source.is_floating_point():
            raise InputError("an encoder reads embeddings, or has read before", fix="give input_ids alone")
        width = self.specs["input_ids"].shape[1]
        if "attention_mask" not in self.specs and source.shape[1] < width:
            raise InputError(
                f"the encoder reads {source.shape[1]} tokens, but the module was planned for {width}, without attention_mask",
                fix=f"prompts of {width} tokens, or plan with attention_mask",
            )


def _counts_from_padding(model: nn.Module) -> bool:
    """Whether default positions start behind the index of the padding token, as in RoBERTa."""
    return any("create_position_ids_from_input_ids" in dir(type(module)) for module in model.modules())


def _from_the_first_column(
    tokens: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Sequences without their masked left part, their mask, and the column of every token.

    Raises InputError if positions do not count from the first visible token, or anything else is masked.
    """
    rows, width = tokens.shape
    columns = torch.arange(width, device=tokens.device).expand(rows, width)
    hidden = torch.zeros_like(columns) if mask is None else (mask == 0)
    starts = hidden.sum(1, keepdim=True)
    order = (columns + starts) % width
    seen = columns < width - starts
    counted = positions.expand(rows, width).gather(1, order)
    if bool(hidden.gather(1, order)[seen].any()) or not counted[seen].equal(columns[seen]):
        raise InputError(
            "the prompts are padded on the right, or their positions are not counted from their first token",
            fix='padding_side="left" of the tokenizer, or plan with position_ids',
        )
    return tokens.gather(1, order), None, (columns - starts) % width


def _padded(name: str, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A matrix padded to whole calls: with unlabelled columns to the right, and visible rows below."""
    (rows, width), (batch, length) = tensor.shape, spec.shape
    if width > length:
        raise InputError(
            f"{name}: {rows} sequences of {width} tokens, but the module was planned for {batch} of {length}",
            fix="shorter prompts, fewer new tokens, or plan with a larger sample",
        )
    wide = nn.functional.pad(tensor, (0, length - width), value=-100 if name == "labels" else 0)
    return nn.functional.pad(wide, (0, 0, 0, -rows % batch), value=1).to(spec.dtype)

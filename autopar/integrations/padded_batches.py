"""Batches of tokens of one length on every rank, which load different samples and pad them to the longest of their own.

    rank 0   a b c          a b c . . 0      . up to the longest of all ranks, on the side of the tokenizer
    rank 1   d e f g h      d e f g h 0      0 up to the planned length, or to a multiple that the plan divides, on the right

The first are what a process that loads the whole batch would have. The others nothing sees: a mask hides them, and they have no
labels. Where batches are padded on the left there are none: padding there comes before all that its mask lets it see, so that
what a model makes of it, and trains on, depends on the whole length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture.signature import Signature
from autopar.codegen import ParallelModule


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLengths:
    """How long the longest batch of all ranks is, by input, and whether one of them is padded on the left."""

    longest: Mapping[str, int]
    left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPadding:
    """How the batches of a planned call are padded: the value that pads an input, by name, and the side.

    Nothing is padded where the plan takes no attention mask: a call then says in what ranks differ.
    """

    signature: Signature
    values: Mapping[str, int]
    left: bool

    @classmethod
    def of(
        cls, signature: Signature, collator: object, tokenizer: object, labels: Sequence[str], *, word: int = 0
    ) -> BatchPadding:
        """How a data collator of transformers pads.

        Args:
            signature: the planned call.
            collator: has perhaps a tokenizer of its own, and `label_pad_token_id`.
            tokenizer: what pads where the collator has none; perhaps nothing at all.
            labels: the inputs that are labels.
            word: what pads tokens where no tokenizer says it.
        """
        pads = getattr(collator, "tokenizer", tokenizer)
        left = getattr(pads, "padding_side", "right") == "left"
        if (own := getattr(pads, "pad_token_id", None)) is not None:
            word = own
        values = {"input_ids": word, "attention_mask": 0, "token_type_ids": getattr(pads, "pad_token_type_id", 0)}
        values |= dict.fromkeys(labels, getattr(collator, "label_pad_token_id", -100))
        if not left:  # on the left, a collator puts the first word of the decoder before the padding
            values |= {"decoder_input_ids": word, "decoder_attention_mask": 0}
        return cls(signature=signature, values=values, left=left)

    @classmethod
    def of_loader(cls, parallel: ParallelModule, collator: object) -> BatchPadding | None:
        """How a loader's collator pads, if it is one of transformers that does."""
        if not hasattr(collator, "tokenizer"):
            return None
        signature = parallel.autopar.signature
        return cls.of(signature, collator, None, [path for path in signature.shapes if "label" in path])

    @property
    def names(self) -> list[str]:
        """The inputs that are padded: matrices of tokens."""
        shapes = self.signature.shapes
        return [
            name for name, shape in shapes.items() if name in self.values and len(shape) == 2 and "attention_mask" in shapes
        ]

    def lengths(self, batch: Mapping[str, object], parallel: ParallelModule | None = None) -> BatchLengths:
        """The lengths of the batches of all ranks that load other samples for a parallel module; all ranks call it."""
        given = self._given(batch)
        mask = given.get("attention_mask")
        told: list[int] = [self.left or (mask is not None and bool((mask[:, 0] == 0).any()))]
        told += [given[name].shape[1] if name in given else 0 for name in self.names]
        found = torch.tensor(told, dtype=torch.int64)
        if parallel is not None and parallel.data_world > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=parallel.autopar.context.control)
        left, *lengths = found.tolist()
        return BatchLengths(longest=dict(zip(self.names, lengths, strict=True)), left=bool(left))

    def padded(self, batch: Mapping[str, object], lengths: BatchLengths) -> dict[str, object]:
        """The batch as long as the longest of all ranks, and as long as planned where that is fixed.

        What is longer than planned stays so.
        """
        return {**batch, **{name: self._padded(name, tensor, lengths) for name, tensor in self._given(batch).items()}}

    def on_all_ranks(self, batch: Mapping[str, object], parallel: ParallelModule) -> dict[str, object]:
        """The batch as `padded` beside those of all ranks that load other samples for a parallel module."""
        return self.padded(batch, self.lengths(batch, parallel))

    def _given(self, batch: Mapping[str, object]) -> dict[str, torch.Tensor]:
        return {name: tensor for name in self.names if isinstance(tensor := batch.get(name), torch.Tensor) and tensor.ndim == 2}

    def _padded(self, name: str, tensor: torch.Tensor, lengths: BatchLengths) -> torch.Tensor:
        left, longest = lengths.left, lengths.longest
        length = longest[name] if left else max(self._planned(name, longest), longest[name])
        missing = length - tensor.shape[1]
        return nn.functional.pad(tensor, (missing, 0) if left else (0, missing), value=self.values[name])

    def _planned(self, name: str, longest: Mapping[str, int]) -> int:
        """The length that a call takes of an input, if ranks have these: the planned one, or the next that the plan allows."""
        size = next((one for one in self.signature.sizes if (name, 1) in one.places), None)
        if size is None:
            return self.signature.shapes[name][1]
        wanted = max(size.least, *(longest.get(path, 0) for path, dim in size.places if dim == 1))
        return -(-wanted // size.multiple) * size.multiple

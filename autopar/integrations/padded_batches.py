"""Pads token batches to one length on all ranks, which load different samples and pad them to their own longest one.

    rank 0   a b c          a b c . . 0      . up to the longest of all ranks, on the side of the tokenizer
    rank 1   d e f g h      d e f g h 0      0 up to the planned length, or to a multiple that the plan divides, on the right

The first kind is what a process that loads the whole batch would have. The second kind has no effect: it is masked and has no
labels. It is not added to batches padded on the left: padding there precedes everything that its mask lets it see, so that the
model's result for it, which is trained on, depends on the whole length.
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
    """The length of the longest batch of all ranks, by input, and whether one of them is padded on the left."""

    longest: Mapping[str, int]
    left: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPadding:
    """How the batches of a planned call are padded: the padding value of each input, by name, and the side.

    Nothing is padded if the plan takes no attention mask: a call then reports how ranks differ.
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
            collator: may have its own tokenizer, and `label_pad_token_id`.
            tokenizer: the tokenizer to use if the collator has none; may be None.
            labels: the names of inputs that are labels.
            word: the padding token if no tokenizer defines it.
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
        """How a loader's collator pads, if it is a transformers collator that does."""
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
        """The lengths of the batches on all ranks that load different samples for a parallel module; all ranks call it."""
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
        """Pad the batch to the longest of all ranks, and to the planned length if that is fixed.

        Longer ones are left as they are.
        """
        return {**batch, **{name: self._padded(name, tensor, lengths) for name, tensor in self._given(batch).items()}}

    def on_all_ranks(self, batch: Mapping[str, object], parallel: ParallelModule) -> dict[str, object]:
        """The batch `padded` to match all ranks that load different samples for a parallel module."""
        return self.padded(batch, self.lengths(batch, parallel))

    def _given(self, batch: Mapping[str, object]) -> dict[str, torch.Tensor]:
        return {name: tensor for name in self.names if isinstance(tensor := batch.get(name), torch.Tensor) and tensor.ndim == 2}

    def _padded(self, name: str, tensor: torch.Tensor, lengths: BatchLengths) -> torch.Tensor:
        left, longest = lengths.left, lengths.longest
        length = longest[name] if left else max(self._planned(name, longest), longest[name])
        missing = length - tensor.shape[1]
        return nn.functional.pad(tensor, (missing, 0) if left else (0, missing), value=self.values[name])

    def _planned(self, name: str, longest: Mapping[str, int]) -> int:
        """The length of an input in a call, given those on all ranks: the planned one, or the next that the plan allows."""
        size = next((one for one in self.signature.sizes if (name, 1) in one.places), None)
        if size is None:
            return self.signature.shapes[name][1]
        wanted = max(size.least, *(longest.get(path, 0) for path, dim in size.places if dim == 1))
        return -(-wanted // size.multiple) * size.multiple

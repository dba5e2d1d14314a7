"""The data loaders of a Trainer of Hugging Face over a parallel module: a seed and the number of the epoch fix the order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import LengthGroupedSampler

from autopar.runtime.input_parts import BatchSampler, InputParts


class LengthGrouped(BatchSampler):
    """Batches of samples of about one length, in the library's order for the number of the epoch and a seed."""

    def __init__(self, parts: InputParts, dataset: Sized, lengths: Sequence[int], *, together: int, seed: int) -> None:
        """`together` samples, those of a step, are grouped."""
        super().__init__(parts, dataset, shuffle=True, seed=seed)
        self.lengths, self.together = lengths, together

    def order(self) -> Sequence[int]:
        """The samples in the order of this epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return [*LengthGroupedSampler(self.together, lengths=self.lengths, generator=generator)]


class EpochLoader(DataLoader[object]):
    """A DataLoader that tells its batch sampler of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from now on."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


class EvaluationLoader(EpochLoader, DataLoaderStateMixin):  # type: ignore[misc]
    """One that tells accelerate which batch is the last, by which `batch_eval_metrics` computes what it reports."""

    def __iter__(self) -> Iterator[object]:  # type: ignore[override]
        self.gradient_state = GradientState()
        self.begin()
        try:
            batches, end = super().__iter__(), object()
            batch = next(batches, end)
            while batch is not end:
                following = next(batches, end)
                self.end_of_dataloader = following is end
                yield batch
                batch = following
        finally:
            self.end()


__all__ = ["EpochLoader", "EvaluationLoader", "LengthGrouped"]

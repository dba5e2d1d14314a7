"""A table of all possible stages made of contiguous regions of a program."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.pipeline.clock import StageSeconds

Cuts = tuple[int, ...]  # the first region of each stage, then the number of regions
StageArray = npt.NDArray[np.float64]  # one number per stage: for some stages, or for all, by first region and stop
FIELDS = [field.name for field in dataclasses.fields(StageSeconds)]


class StageTable(NamedTuple):
    """Every stage that can be made of contiguous regions.

    `seconds` has the fields of `StageSeconds` in their order, each a matrix indexed by the stage's first region and its end,
    exclusive: `[6, regions, regions + 1]`. A stage of more regions never takes less. `fits` says which ranges may be a stage.
    """

    seconds: StageArray
    fits: npt.NDArray[np.bool_]

    def stage(self, start: int, stop: int) -> StageSeconds:
        """The stage of the regions from `start` to `stop`, exclusive."""
        return StageSeconds(**dict(zip(FIELDS, self.seconds[:, start, stop].tolist(), strict=True)))


__all__ = ["Cuts", "StageArray", "StageTable"]

"""A table of all possible stages made of contiguous regions of a program."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.pipeline.clock import StageSeconds

Cuts = tuple[int, ...]  # the regions with which stages begin, and the number of regions
StageArray = npt.NDArray[np.float64]  # of one number for some stages, or for all, by first region and stop
FIELDS = [field.name for field in dataclasses.fields(StageSeconds)]


class StageTable(NamedTuple):
    """Every stage that may be made of contiguous regions.

    `seconds` has the fields of `StageSeconds` in their order, each a matrix by the first region and the one where the stage
    stops, exclusive: `[6, regions, regions + 1]`, no less of more regions. `fits` says which may be a stage.
    """

    seconds: StageArray
    fits: npt.NDArray[np.bool_]

    def stage(self, start: int, stop: int) -> StageSeconds:
        """The stage of the regions from one to another, exclusive."""
        return StageSeconds(**dict(zip(FIELDS, self.seconds[:, start, stop].tolist(), strict=True)))


__all__ = ["Cuts", "StageArray", "StageTable"]

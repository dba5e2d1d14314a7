"""The random generators of a process that a training script draws from on the host: torch's, NumPy's and Python's own.

A parallel model has a random state of its own (`autopar.runtime.random`). What these decide is what the ranks must do alike:
the order of samples, augmentation. Their states are therefore rank 0's on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from autopar.errors import CheckpointError

HostState = dict[str, Any]  # by name of the library; of tensors and numbers only, as a checkpoint holds it


def host_state() -> HostState:
    """The present state of the three."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy = [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate()}


def set_host_state(state: Mapping[str, Any]) -> None:
    """Go on from a state of a checkpoint. Raises CheckpointError for one that the libraries do not take."""
    try:
        name, keys, *rest = state["numpy"]
        torch.set_rng_state(state["torch"])
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        random.setstate(state["python"])
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        fix = "remove that checkpoint: the training goes on from the one before"
        raise CheckpointError("the random state in the checkpoint is damaged", error=error, fix=fix) from error


__all__ = ["HostState", "host_state", "set_host_state"]

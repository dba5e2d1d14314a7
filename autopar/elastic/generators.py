"""The host's random generators in a training script: those of torch, NumPy and Python.

A parallel model has a random state of its own (`autopar.runtime.random`). These generators decide what must be equal on all
ranks: the order of samples, augmentation. So every rank uses the states of rank 0.
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
    """The current state of the three generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numpy = [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    return {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate()}


def set_host_state(state: Mapping[str, Any]) -> None:
    """Restore a state from a checkpoint. Raises CheckpointError if the libraries do not accept it."""
    try:
        name, keys, *rest = state["numpy"]
        torch.set_rng_state(state["torch"])
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        random.setstate(state["python"])
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        fix = "remove that checkpoint: the training goes on from the one before"
        raise CheckpointError("the random state in the checkpoint is damaged", error=error, fix=fix) from error


__all__ = ["HostState", "host_state", "set_host_state"]

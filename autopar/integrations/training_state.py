"""What a run has in parts, saved and loaded: weights, the optimizer's state, and the random state; on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from autopar.codegen import ParallelModule


def save_training_state(parallel: ParallelModule, optimizers: Sequence[torch.optim.Optimizer], folder: str | Path) -> None:
    """Write this rank's parts; every rank calls it."""
    weights, steps = get_state_dict(parallel, list(optimizers))
    states = {"model": weights, "optimizer": steps, "random": parallel.autopar.rng_state}
    writer = FileSystemWriter(folder, overwrite=True)  # of a state that was saved there before
    state_dict_saver.save(states, storage_writer=writer)


def load_training_state(parallel: ParallelModule, optimizers: Sequence[torch.optim.Optimizer], folder: str | Path) -> None:
    """Read this rank's parts of what perhaps another number of ranks wrote; every rank calls it."""
    weights, steps = get_state_dict(parallel, list(optimizers))
    states = {"model": weights, "optimizer": steps, "random": parallel.autopar.rng_state}
    state_dict_loader.load(states, checkpoint_id=str(folder))
    set_state_dict(parallel, list(optimizers), model_state_dict=weights, optim_state_dict=steps)


def load_weights(parallel: ParallelModule, folder: str | Path) -> None:
    """Read this rank's parts of the weights alone; every rank calls it."""
    state_dict_loader.load({"model": parallel.state_dict()}, checkpoint_id=str(folder))


__all__ = ["load_training_state", "load_weights", "save_training_state"]

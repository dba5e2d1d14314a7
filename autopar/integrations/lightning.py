"""Lightning: a strategy for modules that build a parallel module in `configure_model`.

    class Training(lightning.LightningModule):
        def configure_model(self):                       # called once the processes run, and again by a later fit or test
            if self.net is None:
                self.net = autopar.parallelize(Model(), batch, mesh, inputs="sharded")

        def training_step(self, batch):
            return self.net(*self.net.shard(batch, samples=True))

    lightning.Trainer(accelerator="cpu", devices=2, strategy=AutoparStrategy())

Loaders get the library's DistributedSampler, which shuffles, with one share per distinct part of the samples: fewer than ranks
if some compute with the same ones. Batches are padded across ranks if a transformers collator pads them. Checkpoints are
folders of parts. Needs the package lightning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from autopar.codegen import ParallelModule
from autopar.codegen.pipeline_module import PipelineModule
from autopar.errors import InputError
from autopar.integrations.padded_batches import BatchPadding
from autopar.integrations.training_state import drop_state, name_groups, state_of, unsaved, unstepped
from autopar.runtime.checkpoint_files import CheckpointReader, load_checkpoint
from autopar.runtime.gradient_norm import norm_of, number_of

STATES = "autopar"  # the entry of a checkpoint that has the random states


class AutoparStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """The library's ModelParallelStrategy for parallel modules, with their shares of the samples and their random states.

    Args:
        options: those of `ModelParallelStrategy`; its data and tensor parallel sizes are ignored.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self._padding: BatchPadding | None = None

    @property
    def parallel(self) -> dict[str, ParallelModule]:
        """The parallel modules of the Lightning module, by name; raises InputError if there is none."""
        found = {name: held for name, held in self.lightning_module.named_modules() if isinstance(held, ParallelModule)}
        if not found:
            raise InputError(
                f"{type(self.lightning_module).__name__} has no parallel module",
                fix="make it in configure_model: self.net = autopar.parallelize(model, batch, mesh)",
            )
        return found

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which samples a rank loads; raises InputError if parallel modules disagree."""
        shares = {(held.data_world, held.data_rank) for held in self.parallel.values()}
        if len(shares) > 1:
            raise InputError("the parallel modules take different shares of the samples", fix='inputs="whole" for all of them')
        ((world, rank),) = shares
        return {"num_replicas": world, "rank": rank}

    @property
    def pipeline(self) -> PipelineModule | None:
        """The parallel module if it has pipeline stages; raises InputError if there are others."""
        stages = [held for held in self.parallel.values() if isinstance(held, PipelineModule)]
        if stages and len(self.parallel) > 1:
            raise InputError("a module in pipeline stages must be the only parallel module", fix="leave pipeline= out")
        return stages[0] if stages else None

    def setup(self, trainer: Trainer) -> None:
        """Build the parallel modules and optimizers; with pipeline stages gradients are clipped over all of them.

        Clears what was noted about the previous model: a strategy may serve several `fit`s in turn.
        """
        self._padding = None
        if isinstance(self.precision_plugin, StagePrecision):  # type: ignore[has-type]
            self.precision_plugin = Precision()
        super().setup(trainer)
        if (pipeline := self.pipeline) is not None:
            known: Precision = self.precision_plugin
            if type(known) is not Precision:
                raise InputError(
                    f"{type(known).__name__} does not support pipeline stages",
                    fix='plan with precision="bf16-mixed" or "fp16-mixed", and leave precision= of the Trainer out',
                )
            self.precision_plugin = StagePrecision(pipeline)

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader unchanged; the first one that pads its batches determines how all are padded across ranks."""
        if self._padding is None and len(self.parallel) == 1:
            (parallel,) = self.parallel.values()
            self._padding = BatchPadding.of_loader(parallel, getattr(dataloader, "collate_fn", None))
        return super().process_dataloader(dataloader)

    def batch_to_device(self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0) -> object:
        """Move a batch to its device, padded to the length of those on ranks with other samples."""
        if self._padding is not None and isinstance(batch, Mapping):
            (parallel,) = self.parallel.values()
            batch = self._padding.on_all_ranks(batch, parallel)
        return super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's entry in a checkpoint; no state before its first step. Raises InputError for LBFGS."""
        with unstepped([optimizer]) as fresh:
            found: dict[str, Any] = super().optimizer_state(optimizer)
        if fresh:
            found["state"] = {}
        if (pipeline := self.pipeline) is not None:
            name_groups(found["param_groups"], pipeline)
        return found

    def save_checkpoint(self, checkpoint: dict[str, object], filepath: object, storage_options: object = None) -> None:
        """Save this rank's parts, and the random states of parallel modules."""
        states = {name: held.autopar.rng_state.state_dict() for name, held in self.parallel.items()}
        super().save_checkpoint({**checkpoint, STATES: states}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: object, weights_only: bool | None = None) -> dict[str, object]:
        """Load this rank's parts, also from another number of ranks, and the random states of parallel modules.

        Nothing in a file is executed, unless `weights_only` is False. The library's own loader reads one file with everything;
        it refuses parts if ranks have different parameters, if none is split, or if optimizers were not saved.
        """
        folder = Path(self.broadcast(checkpoint_path))
        load = self._load_parts if folder.is_dir() else super().load_checkpoint
        found: dict[str, object] = load(folder, weights_only is not False)
        states = found.get(STATES)
        known: Mapping[str, Mapping[str, object]] = states if isinstance(states, Mapping) else {}
        for name, held in self.parallel.items():
            if name in known:
                held.autopar.rng_state.load_state_dict(known[name])
        return found

    def _load_parts(self, folder: Path, weights_only: bool) -> dict[str, object]:
        """Load the model from a folder of parts, and optimizers if it has them."""
        module, reader = self.lightning_module, CheckpointReader(folder)
        saved = reader.read_metadata().state_dict_metadata
        names = {parameter: name for name, parameter in module.named_parameters()}
        state = {"state_dict": get_model_state_dict(module)}
        load_checkpoint(state, reader)
        module.load_state_dict(state["state_dict"], strict=module.strict_loading)
        for number, optimizer in enumerate(self.optimizers):
            own = f"optimizer_{number}"
            if _has(saved, own):  # not of weights alone
                with unstepped([optimizer]):
                    steps: dict[str, Any] = {own: get_optimizer_state_dict(module, optimizer)}
                drop_state(steps[own], unsaved(steps[own], saved, own))
                for place, group in enumerate(steps[own]["param_groups"]):
                    for option in [*group]:  # a scheduler that was made after it was saved adds one
                        if not _has(saved, f"{own}.param_groups.{place}.{option}"):
                            del group[option]
                load_checkpoint(steps, reader)
                optimizer.load_state_dict(state_of(optimizer, names, steps[own]))
        found: dict[str, object] = torch.load(folder / _METADATA_FILENAME, weights_only=weights_only)
        return found


def _has(saved: Iterable[str], name: str) -> bool:
    """Whether a checkpoint has an entry, or parts of it."""
    return any(one == name or one.startswith(f"{name}.") for one in saved)


class StagePrecision(Precision):  # type: ignore[misc]
    """The library's own, but clips gradients by their norm over all stages."""

    def __init__(self, pipeline: PipelineModule) -> None:
        super().__init__()
        self.pipeline = pipeline

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip the gradients of an optimizer; every rank calls it, even if it stores none of them."""
        self.pipeline.clip_grad_norm_(clip_val, parameters=self.main_params(optimizer))


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """The library's `grad_norm` where gradients are split: the norm of each, and of all together; every rank calls it.

    Args:
        module: a Lightning module, or a parallel one.
        norm_type: of the norms, a positive number or "inf".
        group_separator: between the kind of the norm and the parameter's name.

    Raises:
        InputError: the type is no positive number, or a module is in pipeline stages.
    """
    kind = number_of("norm_type", norm_type, least=5e-324)
    if any(isinstance(held, PipelineModule) for held in module.modules()):
        fix = "parallel.clip_grad_norm_(float('inf')), which returns the norm over all stages"
        raise InputError("a rank of a pipeline has the gradients of its own stages only", fix=fix)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.grad is not None}
    norms = {f"grad_{kind}_norm{group_separator}{name}": norm_of([parameter], kind) for name, parameter in trained.items()}
    return norms | ({f"grad_{kind}_norm_total": norm_of(trained.values(), kind)} if norms else {})


__all__ = ["AutoparStrategy", "StagePrecision", "grad_norm"]

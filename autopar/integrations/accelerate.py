"""Hugging Face accelerate: an `Accelerator` whose `prepare` takes parallel modules.

    parallel = autopar.parallelize(model, batch, mesh, inputs="sharded")
    accelerator = Accelerator()
    parallel, optimizer, loader = accelerator.prepare(parallel, optimizer, loader)

The library's own would wrap the module in DistributedDataParallel, shard the data by rank regardless of the plan, and save only
rank 0's part of the state. Needs the package accelerate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard, SkipBatchSampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler, Sampler

from autopar.codegen import ParallelModule
from autopar.errors import InputError
from autopar.integrations.padded_batches import BatchPadding
from autopar.integrations.safetensors import full_state_dict
from autopar.integrations.training_state import load_training_state, save_training_state

STATES = "autopar"  # the folder of a saved state that has weights, the optimizers' and the random state; the next is autopar_1


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The library's Accelerator over parallel modules.

    A prepared loader gives every rank its part of the planned batch, whose size is `batch_size` times `parallel.data_world`;
    incomplete batches are dropped. It shuffles if the given loader does, in an order determined by `seed` and the epoch.
    `save_state` writes parts; `get_state_dict` and `save_model` gather the weights on rank 0.
    """

    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *args: object, seed: int = 0, **options: object) -> None:
        super().__init__(*args, **options)
        self.seed = seed
        self.parallel: ParallelModule | None = None  # the last one prepared, whose batches loaders have
        self._ranks_of: tuple[ParallelModule, list[int]] | None = None  # a module, and the ranks of its shares

    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> object:
        """Prepare a parallel module, loaders, optimizers and schedulers, in any order."""
        self.parallel = next((found for found in args if isinstance(found, ParallelModule)), self.parallel)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """Return a parallel module unchanged; prepare any other module as the library does."""
        if not isinstance(model, ParallelModule):
            found: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return found
        if self.native_amp:
            fix = 'parallelize with precision="bf16-mixed", and leave mixed_precision out'
            raise InputError("a parallel module runs outside of autocast: its casts are part of the plan", fix=fix)
        self.parallel = model
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: DataLoader[object], device_placement: bool | None = None, slice_fn_for_dispatch: object = None
    ) -> DataLoader[object]:
        """A loader of this rank's part of every batch; raises InputError if the batch size is not the planned one."""
        if self.parallel is None:
            found: DataLoader[object] = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
            return found
        if data_loader in self._dataloaders:
            return data_loader
        batch, shares = self.parallel.autopar.inputs.batch, self.parallel.data_world
        if not isinstance(data_loader.dataset, Sized) or data_loader.batch_size is None:
            what = "a loader of samples by number in batches is needed: not of an iterable data set, and without batch_sampler"
            raise InputError(what, fix="DataLoader(dataset, batch_size=...)")
        if data_loader.batch_size * shares != batch:
            raise InputError(
                f"the loader has batches of {data_loader.batch_size}, but the planned batch is {batch}, in {shares} share(s)",
                fix=f"batch_size={batch // shares}, or plan with another batch",
            )
        sampler = self.parallel.sampler(
            data_loader.dataset, shuffle=isinstance(data_loader.sampler, RandomSampler), seed=self.seed
        )
        device = self.device if device_placement or self.device_placement else None
        loader = PartLoader.of(data_loader, self.parallel, sampler, device=device)
        self._dataloaders.append(loader)
        return loader

    def skip_first_batches(self, dataloader: DataLoader[object], num_batches: int = 0) -> DataLoader[object]:
        """A prepared loader without its first batches, to resume within an epoch; others as the library does."""
        if isinstance(dataloader, PartLoader):
            sampler = _SkippingSampler(dataloader.batch_sampler, num_batches)
            return PartLoader.of(
                dataloader, dataloader.parallel, sampler, device=dataloader.device, iteration=dataloader.iteration
            )
        found: DataLoader[object] = super().skip_first_batches(dataloader, num_batches)
        return found

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """A schedule counted in batches of the loaders before `prepare`, of which each step takes one per share."""
        prepared = super().prepare_scheduler(scheduler)
        if self.parallel is None or isinstance(prepared, PartScheduler):
            return prepared
        self._schedulers.remove(prepared)
        found = PartScheduler(prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer)
        found.shares = self.parallel.data_world
        self._schedulers.append(found)
        return found

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip gradients of the parallel module by their norm over all stages; clip others as the library does.

        In a pipeline a rank may store none of the clipped parameters.
        """
        given = [*parameters]
        owner = next((module for module in reversed(self._parallel()) if set(given).issubset(module.parameters())), None)
        if owner is None:
            norm: torch.Tensor = super().clip_grad_norm_(given, max_norm, norm_type)
            return norm
        self.unscale_gradients()
        return owner.clip_grad_norm_(max_norm, norm_type, parameters=given)

    def gather(self, tensor: object) -> object:
        """Gather results of a parallel module, and parts of its batches, whole on every rank; every rank calls it.

        Plain tensors are joined as parts along the samples, except those that are equal on all ranks and have as many rows as
        the batch.
        """
        if self.parallel is None:
            return super().gather(tensor)
        gathered = self.parallel.gather(tensor)  # of a pipeline's last stage
        alike = pytree.tree_structure(tensor) == pytree.tree_structure(gathered)
        results = self._results(pytree.tree_leaves(tensor if alike else gathered), pytree.tree_leaves(gathered))
        if alike:
            gathered = pytree.tree_map(_own, tensor, gathered)
        return recursively_apply(self._whole, gathered, results, error_on_other_type=True)

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> object:
        """Gather as `gather` does: prepared loaders drop incomplete batches, so that no sample comes twice."""
        if self.parallel is None or use_gather_object:
            return super().gather_for_metrics(input_data, use_gather_object)
        return self.gather(input_data)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The whole weights of a parallel module on rank 0, nothing elsewhere; every rank calls it."""
        if isinstance(model, ParallelModule):
            return full_state_dict(model)
        found: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
        return found

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: object) -> str:
        """Save everything prepared: ranks' parts with torch.distributed.checkpoint, the rest as the library does."""
        with self._parts_aside():
            location: str = super().save_state(output_dir, safe_serialization, **options)
        for folder, module in self._folders(location):
            save_training_state(module, self._optimizers_of(module), folder)
        return location

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, object] | None = None, **options: object) -> None:
        """Load what `save_state` saved, also from another number of ranks; raises InputError if its folder is missing."""
        if input_dir is None:
            raise InputError("load_state of parallel modules needs the folder", fix="load_state(folder)")
        with self._parts_aside():
            super().load_state(input_dir, load_kwargs, **options)
        for folder, module in self._folders(input_dir):
            load_training_state(module, self._optimizers_of(module), folder)

    def _results(self, own: Sequence[object], gathered: Sequence[object]) -> list[object]:
        """Gather results: DTensors, and those that some ranks of a pipeline lack."""
        assert self.parallel is not None
        split = torch.tensor([not _is_part(one) for one in own], dtype=torch.int32, device=self.device)
        if self.parallel.data_world > 1:
            dist.all_reduce(split, dist.ReduceOp.MAX)
        return [whole for whole, known in zip(gathered, split.tolist(), strict=True) if known]

    def _whole(self, tensor: torch.Tensor, results: Sequence[object]) -> torch.Tensor:
        """Join the parts of a tensor along the samples on every rank; a number per rank gives a row."""
        assert self.parallel is not None
        if tensor.ndim == 0:
            found: torch.Tensor = super().gather(tensor)
            return found
        if self.parallel.data_world == 1 or any(tensor is one for one in results):
            return tensor
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        shares = [parts[rank] for rank in self._ranks_with_shares(self.parallel)]
        first, *others = (share.view(torch.uint8) for share in shares)  # NaNs, too, are equal
        if len(tensor) == self.parallel.autopar.inputs.batch and all(torch.equal(first, other) for other in others):
            return tensor
        return torch.cat(shares)

    def _ranks_with_shares(self, parallel: ParallelModule) -> list[int]:
        """For each share of the samples a rank that has it; ranks exchange this once, and every rank calls it."""
        if self._ranks_of is None or self._ranks_of[0] is not parallel:
            shares: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(shares, parallel.data_rank)
            self._ranks_of = parallel, [shares.index(share) for share in range(parallel.data_world)]
        return self._ranks_of[1]

    def _parallel(self) -> list[ParallelModule]:
        """The parallel modules, in the order in which they were prepared."""
        return [model for model in self._models if isinstance(model, ParallelModule)]

    def _folders(self, location: str) -> Iterator[tuple[str, ParallelModule]]:
        """Where the state of each parallel module is saved; modules must be prepared in the order of the run that saved it."""
        for number, module in enumerate(self._parallel()):
            yield os.path.join(location, f"{STATES}_{number}" if number else STATES), module

    def _optimizers_of(self, module: ParallelModule) -> list[torch.optim.Optimizer]:
        """The unwrapped prepared optimizers of a module: those of its parameters, and those without parameters on this rank of
        a pipeline.
        """
        own, found = set(module.parameters()), []
        for prepared in self._optimizers:
            trained = [parameter for group in prepared.optimizer.param_groups for parameter in group["params"]]
            if not trained or not own.isdisjoint(trained):
                found.append(prepared.optimizer)
        return found

    @contextmanager
    def _parts_aside(self) -> Iterator[None]:
        """Keep the library from saving and loading what ranks hold in parts."""
        models, optimizers, parallel = self._models, self._optimizers, self._parallel()
        aside = [optimizer for module in parallel for optimizer in self._optimizers_of(module)]
        self._models = [model for model in models if model not in parallel]
        self._optimizers = [prepared for prepared in optimizers if not any(prepared.optimizer is one for one in aside)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


def _is_part(own: object) -> bool:
    """Whether this rank has a plain tensor, not a result that is split or missing here."""
    return isinstance(own, torch.Tensor) and not isinstance(own, DTensor)


def _own(own: object, gathered: object) -> object:
    """This rank's number or part of the batch; results that are split or missing here are returned as gathered."""
    return own if _is_part(own) else gathered


class PartLoader(DataLoaderShard):  # type: ignore[misc]
    """A loader of this rank's samples that yields its part of every batch, padded to the length on ranks with other samples."""

    parallel: ParallelModule
    padding: BatchPadding | None

    @staticmethod
    def of(loader: DataLoader[object], parallel: ParallelModule, sampler: Sampler[list[int]], **options: object) -> PartLoader:
        """A copy of a loader for a parallel module, with the batches of a sampler."""
        found = PartLoader(
            loader.dataset,
            batch_sampler=sampler,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            persistent_workers=loader.persistent_workers,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=loader.worker_init_fn,
            **options,
        )
        found.parallel, found.padding = parallel, BatchPadding.of_loader(parallel, loader.collate_fn)
        return found

    def __iter__(self) -> Iterator[object]:
        for samples in super().__iter__():
            if self.padding is not None and isinstance(samples, Mapping):
                samples = self.padding.on_all_ranks(samples, self.parallel)
            yield self.parallel.shard(samples, samples=True)


class _SkippingSampler(SkipBatchSampler):  # type: ignore[misc]
    """The library's own, which also passes on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Use the sample order of this epoch."""
        self.batch_sampler.set_epoch(epoch)


class PartScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A schedule that steps once for each share of a batch, where the library's does for each process."""

    shares: int

    def step(self, *args: object, **options: object) -> None:
        """Step with the optimizer, as the library does: not while gradients accumulate, nor past the end of a schedule."""
        if not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **options)
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self.shares):
                if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", math.inf):
                    self.scheduler.step(*args, **options)


__all__ = ["Accelerator", "PartLoader", "PartScheduler"]

"""Hugging Face transformers: a `Trainer` for parallel modules, and `save_pretrained`.

    parallel = autopar.parallelize(model, batch, mesh, inputs="sharded")
    trainer = Trainer(parallel, model, args=args, train_dataset=dataset)
    trainer.train()

The library's Trainer would wrap the module in DistributedDataParallel, shard the data by rank regardless of the plan, and write
only rank 0's part of the weights and the optimizer state. Needs the packages transformers, accelerate and safetensors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from autopar.codegen import ParallelModule
from autopar.errors import CheckpointError, InputError
from autopar.integrations.padded_batches import BatchPadding
from autopar.integrations.safetensors import full_state_dict, load_pretrained
from autopar.integrations.training_state import load_training_state, load_weights, save_training_state
from autopar.integrations.transformers_checkpoint import load_whole_state
from autopar.integrations.transformers_labels import counted_labels, label_names
from autopar.integrations.transformers_loaders import EpochLoader, EvaluationLoader, LengthGrouped
from autopar.runtime.gathered_steps import step_gathered
from autopar.runtime.rank_consistency import from_rank_0

COUNT = "num_items_in_batch"  # the library's word for the labels of all batches of a step, which its models divide by
RENAMED = ("label", "label_ids")  # columns of a data set that the library's collators call labels
STATES = "autopar"  # the folder of a checkpoint that has the optimizer's and the random state, and the weights in parts


UNSUPPORTED = {  # arguments of the library that reach into a module of its own, and what does the same here
    "bf16": 'precision="bf16-mixed" of autopar.parallelize',
    "fp16": 'precision="fp16-mixed" of autopar.parallelize',
    "torch_compile": "parallel.compile() before training",
    "gradient_checkpointing": 'recompute="blocks" of autopar.parallelize',
    "label_smoothing_factor": "a forward that computes the smoothed loss",
    "neftune_noise_alpha": "a forward that adds the noise",
    "predict_with_generate": "autopar.integrations.generation.parallel_generator, called with the batches of evaluation",
}
FULL_EVAL = {"bf16": torch.bfloat16, "fp16": torch.float16}  # what NAME_full_eval casts the module to, behind training


def save_pretrained(parallel: nn.Module, model: nn.Module, folder: str | Path, **options: object) -> None:
    """Write a parallel module's weights in the library's format, for `from_pretrained(folder)`.

    Every rank calls it; the whole weights are gathered on the host of rank 0, which writes. For a `peft` model adapters are
    written, as it does itself.

    Args:
        parallel: the module that `autopar.parallelize` returned.
        model: the model that was passed to it, with or without weights: it provides the configuration and the names of tensors.
        folder: where to write.
        **options: those of the library's `save_pretrained`, such as `max_shard_size`.

    Raises:
        CheckpointError: rank 0 cannot write; on every rank.
    """
    weights = full_state_dict(parallel)

    def written() -> str:
        try:
            with _trained_prompts(model, weights):
                model.save_pretrained(folder, state_dict=weights, **options)  # type: ignore[operator]
        except Exception as error:
            said = f"{type(error).__name__}: {error}, on rank 0"
            raise CheckpointError(f"the weights were not written into {folder}", error=said) from error
        return ""

    from_rank_0(written, parallel.autopar.context)  # type: ignore[union-attr, arg-type]


@contextmanager
def _trained_prompts(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put the trained prompts into a `peft` model: it writes what its own encoders compute, and ignores a state passed to
    it.
    """
    untrained: list[tuple[nn.Module, str, nn.Parameter]] = []
    for path, encoder in model.named_modules():
        for name, own in [*encoder.named_parameters(recurse=False)] if path.startswith("prompt_encoder.") else ():
            if (weight := weights.get(f"{path}.{name}")) is not None:
                untrained.append((encoder, name, own))
                encoder.register_parameter(name, nn.Parameter(weight, requires_grad=False))
    try:
        yield
    finally:
        for encoder, name, own in untrained:
            encoder.register_parameter(name, own)


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """The library's Trainer over a parallel module.

    A step is one planned batch, of which every rank loads its samples: its size is `per_device_train_batch_size` times
    `parallel.data_world`. An incomplete batch is dropped in training, and an error in evaluation. Checkpoints hold the weights
    for `from_pretrained`, and the optimizer state in parts.

    Args:
        parallel: what `autopar.parallelize` returned; with `inputs="sharded"` ranks load only their own samples.
        model: the model that was passed to it.
        **options: those of the library's Trainer.

    Raises:
        InputError: the batch size (for evaluation too, if there is any) is not the planned one, or an argument asks for
            something that the plan or forward decides.
    """

    def __init__(self, parallel: ParallelModule, model: nn.Module, **options: object) -> None:
        self.source = model
        for name, fix in UNSUPPORTED.items():
            if asked := getattr(options.get("args"), name, None):
                raise InputError(f"{name}={asked!r} is not supported: the graph of the module is fixed", fix=fix)
        _check_full_eval(parallel, options.get("args"))
        if options.get("compute_loss_func") is not None:
            raise InputError("compute_loss_func is not supported", fix="a forward that computes the loss, and plans it")
        if "inputs" in getattr(options.get("args"), "include_for_metrics", ()) and parallel.data_world > 1:
            what = 'include_for_metrics=["inputs"] is not supported: each rank has its own share of the inputs'
            raise InputError(what, fix='inputs="whole" of autopar.parallelize, or metrics of predictions and labels')
        super().__init__(model=parallel, **options)
        self.is_distributed_loading_by_transformers = True  # the library's word for: neither wrap it nor shard it
        self.model_accepts_loss_kwargs = False
        self.counted = counted_labels(model)
        self.longest: Mapping[str, int] = {}  # of the inputs that were padded last
        self.weights: list[float] = []  # of the losses of the batches that are still to come in this step
        paths = [planned.path for planned in parallel.autopar.signature.tensors]
        self.loss_is_scaled_for_ga = COUNT in paths
        self.columns = [*dict.fromkeys(path.partition(".")[0] for path in paths)]
        self.has_own_loss = type(self).compute_loss is not Trainer.compute_loss
        if self.args.label_names is None:
            self.label_names = label_names(model, paths, unplanned=self.has_own_loss)
        taken = [*dict.fromkeys([*self.columns, *(self.label_names if self.has_own_loss else ())])]
        self._signature_columns = [*taken, *(RENAMED if "labels" in taken else ())]
        routed = getattr(getattr(model, "config", None), "output_router_logits", False)
        if routed and self.counted is not None and not self.loss_is_scaled_for_ga and self.args.gradient_accumulation_steps > 1:
            what = "the router's loss is averaged over the batches of a step, where the library's Trainer adds it up"
            warnings.warn(str(InputError(what, fix=f'to add it up: "{COUNT}": torch.tensor(1) in the sample')), stacklevel=2)
        self._check_batch("per_device_train_batch_size")
        if self.eval_dataset is not None:
            self._check_batch("per_device_eval_batch_size")
            if self.args.eval_strategy != "no":
                for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else (self.eval_dataset,):
                    self._check_samples(dataset)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that decay, found in the user's model, where the classes of modules tell which are norms."""
        found: list[str] = super().get_decay_parameter_names(self.source)
        return found

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The library's optimizer; one that treats weights as matrices steps on whole ones."""
        made: torch.optim.Optimizer = super().create_optimizer(model)
        return step_gathered(made) if isinstance(made, transformers.Adafactor) else made

    def floating_point_ops(self, inputs: dict[str, object]) -> float:
        """A rank's part of the operations of a batch, by the library's count for the user's model; the library sums over ranks.

        The batch is the last one prepared, padded to the longest of all ranks.
        """
        name = getattr(self.source, "main_input_name", "input_ids")
        if isinstance(given := inputs.get(name), torch.Tensor) and (length := self.longest.get(name)):
            inputs = {**inputs, name: given.new_empty(len(given), length, device="meta")}
        counted: int = transformers.Trainer.floating_point_ops(SimpleNamespace(model=self.source), inputs)
        copies: int = self.args.world_size // self.model.data_world  # ranks that have the same samples
        return counted / copies

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """The number of samples per optimizer step."""
        return int(self.model.autopar.inputs.batch * args.gradient_accumulation_steps)

    def get_batch_samples(
        self, epoch_iterator: Iterator[object], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], None]:
        """The batches of an optimizer step; if the library counts labels, each mean loss is weighted by its share of them.

        If the count is an input of the plan, the library's own losses already have these weights.
        """
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.weights, counts = [], self._counts(samples, device)
        if self.loss_is_scaled_for_ga and counts is not None:
            samples = [{**batch, COUNT: counts.sum()} for batch in samples]
        elif counts is not None:
            self.weights = (counts * len(samples) / counts.sum().clamp(min=1)).tolist()
        return samples, None

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, num_items_in_batch: object = None
    ) -> object:
        """The loss of a batch, which the library then divides by the number of batches in a step."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if self.model.training and self.weights:
            loss = loss * self.weights.pop(0)
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> DataLoader[object]:
        """The samples of this rank, in an order determined by `seed` and the epoch."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        strategy = self.args.train_sampling_strategy
        if strategy not in ("random", "sequential", "group_by_length"):
            raise InputError(
                f"train_sampling_strategy={strategy!r} is not supported", fix="random, sequential or group_by_length"
            )
        return self._loader(
            self.train_dataset, EpochLoader, shuffle=strategy != "sequential", seed=seed, group=strategy == "group_by_length"
        )

    def get_eval_dataloader(self, eval_dataset: str | Dataset[object] | None = None) -> DataLoader[object]:
        """The samples of this rank, in order."""
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.get_test_dataloader(self.eval_dataset[found] if isinstance(found, str) else found)

    def get_test_dataloader(self, test_dataset: Dataset[object]) -> DataLoader[object]:
        """The samples of this rank, in order."""
        self._check_batch("per_device_eval_batch_size")
        self._check_samples(test_dataset)
        return self._loader(test_dataset, EvaluationLoader, shuffle=False, seed=0)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, object, object]:
        """The loss, with whole logits and labels on every rank."""
        if self.loss_is_scaled_for_ga and (counts := self._counts([inputs], self.args.device)) is not None:
            inputs = {**inputs, COUNT: counts.sum()}
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if labels is not None:
            parts, names = self.model.autopar.inputs, self.label_names
            several = labels if isinstance(labels, tuple) else (labels,)
            whole = tuple(
                parts.whole(name, label) if name in parts.shapes else label for name, label in zip(names, several, strict=True)
            )
            labels = whole if isinstance(labels, tuple) else whole[0]
        return loss, logits if prediction_loss_only else self.model.gather(logits), labels

    def evaluation_loop(self, *args: object, **options: object) -> object:
        """The library's loop; gathered results are whole on every rank."""
        self.gather_function = lambda tensors: tensors
        return super().evaluation_loop(*args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights for `from_pretrained`; every rank calls it."""
        folder = output_dir or self.args.output_dir
        save_pretrained(self.model, self.source, folder)
        if self.args.should_save:
            processing = self.processing_class
            if processing is None:
                processing = getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _check_batch(self, name: str) -> None:
        batch, shares, asked = self.model.autopar.inputs.batch, self.model.data_world, getattr(self.args, name)
        if asked * shares != batch:
            raise InputError(
                f"{name}={asked} is not the planned batch of {batch}, in {shares} share(s)",
                fix=f"{name}={batch // shares}, or plan with another batch",
            )

    def _check_samples(self, dataset: Dataset[object]) -> None:
        batch = self.model.autopar.inputs.batch
        if isinstance(dataset, Sized) and len(dataset) % batch and not self.args.dataloader_drop_last:
            raise InputError(
                f"the data set has {len(dataset)} samples, which is not a multiple of the planned batch of {batch}",
                fix="pad it, or leave the rest out: dataloader_drop_last=True",
            )

    def _loader(
        self, dataset: Dataset[object], kind: type[EpochLoader], *, shuffle: bool, seed: int, group: bool = False
    ) -> DataLoader[object]:
        if not isinstance(dataset, Sized):
            raise InputError("the data set has no length", fix="a data set of samples by number, not an iterable one")
        own, args = self.model.sampler(dataset, shuffle=shuffle, seed=seed), self.args
        if group:
            lengths, together = self._get_train_sampler(dataset).lengths, self.get_total_train_batch_size(args)
            own = LengthGrouped(self.model.autopar.inputs, dataset, lengths, together=together, seed=seed)
        collate = self._get_collator_with_removed_columns(self.data_collator, description="autopar")
        return kind(
            dataset,
            batch_sampler=own,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _counts(self, samples: Sequence[Mapping[str, object]], device: torch.device) -> torch.Tensor | None:
        """The number of labels of each batch on all ranks, by the library's count; None if it does not count them."""
        labels = [found for batch in samples if isinstance(found := batch.get("labels"), torch.Tensor)]
        if self.counted is None or not labels:
            return None
        counts = torch.stack([found[self.counted].ne(-100).sum() for found in labels]).to(device)
        if dist.is_initialized():
            dist.all_reduce(counts)
            counts //= dist.get_world_size() // self.model.data_world  # ranks that have the same samples
        return counts

    def _prepare_inputs(self, inputs: dict[str, torch.Tensor]) -> Mapping[str, object]:
        padding = self._padding()
        lengths = padding.lengths(inputs, self.model)
        padded, self.longest = padding.padded(inputs, lengths), lengths.longest
        given: dict[str, object] = super()._prepare_inputs(padded)
        beside = {
            name: self._whole(name, given.pop(name)) for name in [*given] if self.has_own_loss and name not in self.columns
        }
        return {**self.model.shard(given, samples=True), **beside}

    def _whole(self, name: str, given: object) -> object:
        """The inputs for a custom loss that the plan does not take: of all samples, like the outputs."""
        return self.model.autopar.inputs.whole_samples(name, given) if isinstance(given, torch.Tensor) else given

    def _padding(self) -> BatchPadding:
        """The padding of batches, by the data collator's rules."""
        word = getattr(getattr(self.source, "config", None), "pad_token_id", None) or 0
        signature = self.model.autopar.signature
        return BatchPadding.of(signature, self.data_collator, self.processing_class, self.label_names, word=word)

    def _set_signature_columns_if_needed(self) -> None:
        """Use the planned arguments."""

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: the plan reduces the gradient of every parameter."""

    def _clip_grad_norm(self, model: ParallelModule) -> torch.Tensor:
        return model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: ParallelModule, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if os.path.isdir(states := os.path.join(resume_from_checkpoint, STATES)):
            load_weights(self.model, states)  # of adapters the other files have no more
        else:
            load_pretrained(self.model, self.source, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_training_state(self.model, [self._own_optimizer()], os.path.join(output_dir, STATES))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isfile(schedule := os.path.join(checkpoint, SCHEDULER_NAME)):
            return
        if os.path.isdir(states := os.path.join(checkpoint, STATES)):
            load_training_state(self.model, [self._own_optimizer()], states)
        else:
            self._load_whole_optimizer(os.path.join(checkpoint, OPTIMIZER_NAME))
        self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_whole_optimizer(self, path: str) -> None:
        """Load what the library's own Trainer saved; if that is not possible, warn and leave the optimizer as it is."""
        decays = self.get_decay_parameter_names(self.source)
        try:
            load_whole_state(self.model, self._own_optimizer(), path, self.source, decays)
        except (CheckpointError, InputError) as error:
            what = f"the optimizer begins anew, as its state was not read: {error.what}"
            warnings.warn(str(CheckpointError(what, **error.details)), stacklevel=2)

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        prepared = self.optimizer
        own: torch.optim.Optimizer = prepared.optimizer if isinstance(prepared, AcceleratedOptimizer) else prepared
        return own


def _check_full_eval(parallel: nn.Module, args: object) -> None:
    """Raise InputError for arguments that make evaluation cast the module to another dtype than the plan's."""
    dtypes = {parameter.dtype for parameter in parallel.parameters() if parameter.is_floating_point()}
    for name, dtype in FULL_EVAL.items():
        if getattr(args, f"{name}_full_eval", False) and dtypes - {dtype}:
            held = next(iter(dtypes - {dtype}))
            raise InputError(
                f"{name}_full_eval=True casts the module to {dtype} when training has ended, and its plan computes with {held}",
                fix=f'leave it out, and parallelize with precision="{name}-mixed" to compute in {name}, evaluation too',
            )


__all__ = ["Trainer", "save_pretrained"]

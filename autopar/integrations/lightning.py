"""Lightning: a strategy for modules that make a parallel module in `configure_model`.

    class Training(lightning.LightningModule):
        def configure_model(self):                       # called once the processes run, and again by a later fit or test
            if self.net is None:
                self.net = autopar.parallelize(Model(), batch, mesh, inputs="sharded")

        def training_step(self, batch):
            return self.net(*self.net.shard(batch, samples=True))

    lightning.Trainer(accelerator="cpu", devices=2, strategy=AutoparStrategy())

Loaders get the library's DistributedSampler, which shuffles, for the shares of the samples that the plan has:
fewer than ranks where some compute with the same ones. Checkpoints are folders of parts. Needs the package lightning.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.strategies import ModelParallelStrategy

from autopar.codegen import ParallelModule
from autopar.errors import InputError

STATES = "autopar"  # the entry of a checkpoint that has the random states


class AutoparStrategy(ModelParallelStrategy):  # type: ignore[misc]
    """The library's ModelParallelStrategy over parallel modules: their shares of the samples, and their random states.

    Args:
        options: those of `ModelParallelStrategy`; its data and tensor parallel sizes mean nothing here.
    """

    def __init__(self, **options: object) -> None:
        super().__init__(**options)

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
        """Which samples a rank loads; raises InputError where parallel modules disagree."""
        shares = {(held.data_world, held.data_rank) for held in self.parallel.values()}
        if len(shares) > 1:
            raise InputError("the parallel modules take other shares of the samples", fix='inputs="whole" for all of them')
        ((world, rank),) = shares
        return {"num_replicas": world, "rank": rank}

    def save_checkpoint(self, checkpoint: dict[str, object], filepath: object, storage_options: object = None) -> None:
        """Save parts, and what the parallel modules draw from."""
        states = {name: held.autopar.rng_state.state_dict() for name, held in self.parallel.items()}
        super().save_checkpoint({**checkpoint, STATES: states}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: object, weights_only: bool | None = None) -> dict[str, object]:
        """Load parts, perhaps of another number of ranks, and what the parallel modules drew from.

        Nothing that a file says is executed, unless `weights_only` is False.
        """
        found: dict[str, object] = super().load_checkpoint(checkpoint_path, weights_only is not False)
        states = found.get(STATES)
        known: Mapping[str, Mapping[str, object]] = states if isinstance(states, Mapping) else {}
        for name, held in self.parallel.items():
            if name in known:
                held.autopar.rng_state.load_state_dict(known[name])
        return found


__all__ = ["AutoparStrategy"]

"""Sizes that vary: a plan made for one batch runs on others, with the numbers of the sequential model."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.plan import Plan
from autopar.planner import Options, read_program
from autopar.resize import Resizer
from autopar.runtime.workers import WorkerPool
from autopar.sizes import Dims, Dynamic, placed
from autopar.verification import verify
from tests import models, table

WORDS: dict[str, Dims | Dynamic] = {"batch": 0, "sequence": Dynamic(1, least=8, most=24)}
IMAGES: dict[str, Dims | Dynamic] = {"batch": {"pixel_values": 0, "labels": 0}}
DYNAMIC = {"gpt2": WORDS, "llama": WORDS, "t5": WORDS, "bert": WORDS, "opt": WORDS, "cnn": IMAGES, "vit": IMAGES}


def at(sample: models.Sample, batch: int, length: int = models.LENGTH) -> models.Sample:
    """A sample of another size: rows and columns are repeated or left out."""
    rows, columns = torch.arange(batch) % models.BATCH, torch.arange(length) % models.LENGTH
    return {name: tensor[rows][:, columns] if tensor.ndim == 2 else tensor[rows] for name, tensor in sample.items()}


def made(name: str, sizes: tuple[int, ...], strategy: str | int, **options: object) -> Plan:
    """A plan at the sample's size; a number stands for a random one."""
    model, sample = models.make(name)
    if isinstance(strategy, int):
        return autopar.testing.random_plan(
            model, sample, table.mesh(sizes), seed=strategy, dynamic=DYNAMIC[name], **options  # type: ignore[arg-type]
        )  # fmt: skip
    return autopar.plan(
        model, sample, table.mesh(sizes), strategy=strategy, dynamic=DYNAMIC[name], **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["auto", "megatron", 0, 1, 2])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", DYNAMIC)
def test_a_plan_carried_to_other_sizes_and_back_is_itself(name: str, sizes: tuple[int, ...], strategy: str | int) -> None:
    model, sample = models.make(name)
    plan = made(name, sizes, strategy)
    here = read_program(model, sample).program
    there = read_program(model, sample, places=placed(plan.dynamic, [16, 24][: len(plan.dynamic)])).program
    carried = Resizer(plan, here).plan_for(there, "batch=16")
    assert carried.hash == there.hash != plan.hash
    assert Resizer(carried, there).plan_for(here, "batch=8") == plan


@pytest.mark.parametrize("strategy", ["auto", "fsdp", 5])
@pytest.mark.parametrize(
    "name, batch, length",
    [("gpt2", 4, 16), ("gpt2", 16, 8), ("llama", 4, 16), ("llama", 16, 24), ("t5", 16, 8), ("cnn", 4, 16), ("cnn", 16, 16)],
)
def test_loss_and_gradients_at_another_size_are_those_of_the_sequential_model(
    pool: WorkerPool, name: str, batch: int, length: int, strategy: str | int
) -> None:
    model, sample = models.make(name)
    plan = made(name, (4,), strategy)
    found = verify(model, at(sample, batch, length), table.mesh((4,)), plan, Options(), pool)
    assert found.ok, str(found)
    assert found.max_error <= 1e-9
    assert any(note.startswith("may vary: batch (dim 0 of") for note in found.notes)

"""`torch.compile(parallel)`, from the first call on, has the losses and gradients of the module that runs eagerly."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.support import models, table

CASES = [
    ("gpt2", 0),
    ("cnn", "fsdp"),
    pytest.param("gpt2", "ddp", marks=pytest.mark.thorough),
    pytest.param("gpt2", "megatron", marks=pytest.mark.thorough),
]


def compiled(asked: tuple[str, str | int, str]) -> None:
    """Two steps, the first of which compiles; a number stands for a random plan, which recomputes and offloads."""
    name, how, backend = asked
    model, sample = models.make(name)
    on = table.mesh((2,))
    if isinstance(how, int):
        plan = autopar.testing.random_plan(model, sample, on, seed=how)
    else:
        plan = autopar.plan(model, sample, on, strategy=how)
    losses, gradients = [], []
    for fast in (True, False):
        torch.manual_seed(0)  # of dropout
        parallel = autopar.parallelize(model, sample, on, plan=plan)
        called = torch.compile(parallel, backend=backend) if fast else parallel
        for _ in range(2):
            loss = called(**sample)["loss"]
            loss.backward()
            losses.append(float(full_tensor(loss.detach())))
        gradients.append({key: full_tensor(value.grad) for key, value in parallel.named_parameters() if value.grad is not None})
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradient, gradients[1][key], rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("model, plan", CASES)
def test_a_compiled_module_has_the_numbers_of_the_eager_one(pool: WorkerPool, model: str, plan: str | int) -> None:
    pool.run(f"{__name__}:compiled", (model, plan, "aot_eager"), ranks=2)

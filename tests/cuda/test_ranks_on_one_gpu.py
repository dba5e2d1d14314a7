"""Several ranks share a GPU, joined by gloo, which can sum there: data parallelism (scattering weights kills a process)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import autopar
from autopar.plan.plan import Plan
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.cuda.test_one_gpu import losses_and_weights, on_gpu
from tests.support import models

pytestmark = pytest.mark.gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model of the table and its plan."""

    model: str
    plan: Plan


def differences(run: Run) -> tuple[str, float, float]:
    """The device, and the largest differences of losses and weights after some steps beside the user's module."""
    model, sample = on_gpu(run.model)
    expected, trained = losses_and_weights(model, sample)
    fresh, _ = on_gpu(run.model)
    parallel = autopar.parallelize(fresh, sample, plan=run.plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3, fused=True)
    errors = []
    for loss in expected:
        optimizer.zero_grad()
        found = parallel(**sample)["loss"]
        found.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        errors.append(abs(float(full_tensor(found.detach())) - loss) / loss)
    weights = [full_tensor(parameter).detach().cpu() for parameter in parallel.parameters()]
    apart = max(float((one - other).abs().max()) for one, other in zip(weights, trained, strict=True))
    return str(next(parallel.parameters()).device.type), max(errors), apart


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_ranks_train_as_the_module_does(pool: WorkerPool, model: str, strategy: str) -> None:
    made, sample = models.make(model)
    plan = autopar.plan(made.eval(), sample, (2, 2), strategy=strategy, device="h100")
    for device, loss, weights in pool.run(f"{__name__}:differences", Run(model=model, plan=plan), ranks=4):  # type: ignore[misc]
        assert device == "cuda"
        assert loss < 1e-4
        assert weights < 1e-3

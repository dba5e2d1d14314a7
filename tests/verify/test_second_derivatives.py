"""Second derivatives, of gradient penalties and in Hessian-vector products, are those of the plain model."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import autopar
from autopar.plan.plan import Plan
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.support import table

ROWS, LENGTH, WIDTH, VOCABULARY = 4, 6, 8, 12


class Layer(nn.Module):
    """Attention that is written out, for fused attention has one derivative only, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (self.query(x) @ self.key(x).mT).softmax(-1) @ x
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Scorer(nn.Module):
    """Layers between a table of words and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.table.weight.T).flatten(0, 1), targets.flatten())


def scorer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    words, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH))
    return Scorer().double(), {"words": words, "targets": targets}


def derivatives(module: nn.Module, sample: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of a loss with a gradient penalty, then a product of the Hessian with a vector."""
    parameters = list(module.parameters())
    first = torch.autograd.grad(module(**sample), parameters, create_graph=True)
    product = torch.autograd.grad([one.square().sum() for one in first], parameters, retain_graph=True)
    loss = module(**sample)
    penalty = [whole(one.square().sum()) for one in torch.autograd.grad(loss, parameters, create_graph=True)]
    (loss + torch.stack(penalty).sum()).backward()
    return [full_tensor(one).detach() for one in (*product, *(p.grad for p in parameters if p.grad is not None))]


def whole(scalar: torch.Tensor) -> torch.Tensor:
    """A number that may be a DTensor as a plain tensor."""
    return scalar.full_tensor() if hasattr(scalar, "full_tensor") else scalar  # type: ignore[no-any-return]


def difference(plan: Plan) -> float:
    """The largest difference of second derivatives from the plain model's."""
    model, sample = scorer()
    parallel = autopar.parallelize(model, sample, (2,), plan=plan, device="cpu")
    pairs = zip(derivatives(parallel, sample), derivatives(model, sample), strict=True)
    return max(float((found - expected).abs().max() / (1 + expected.abs().max())) for found, expected in pairs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "recompute": "blocks"},
        {"strategy": "ddp", "microbatches": 2},
        {"strategy": "megatron", "constraints": {"table.weight": "S(0)"}},
        {"strategy": "megatron", "constraints": {":reshape#0": "S(1)"}},
    ],
    ids=str,
)
def test_second_derivatives_are_the_plain_models(pool: WorkerPool, options: dict[str, object]) -> None:
    plan = autopar.plan(*scorer(), table.mesh((2,)), **options)
    differences = pool.run(f"{__name__}:difference", plan, ranks=2, keep=True)
    assert max(differences) < 1e-9  # type: ignore[type-var, operator]

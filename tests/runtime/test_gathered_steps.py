"""Optimizers that need whole weights: the numbers of one process, over weights split in any way."""

from __future__ import annotations

import copy
import functools
import math
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autopar
from autopar.errors import InputError
from autopar.runtime.gathered_steps import step_gathered
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from tests.support.optimizer_steps import Make, model, sample, stepped_alike

ADAFACTOR: list[Make] = [functools.partial(optim.Adafactor, lr=0.1, weight_decay=0.1, foreach=how) for how in (False, True)]
PLANS: dict[str, tuple[tuple[int, ...], dict[str, object]]] = {
    "fsdp": ((2,), {"strategy": "fsdp"}),
    "megatron": ((2,), {"strategy": "megatron"}),
    "rows and columns": ((2, 2), {"constraints": {"0.weight": "S(1), S(0)", "0.bias": "I, S(0)", "2.weight": "I, S(1)"}}),
}


def compared(name: str) -> None:
    """Three steps beside those of one process."""
    mesh, options = PLANS[name]
    for make in ADAFACTOR:
        parallel = autopar.parallelize(model(), sample(), mesh, device="h100", outputs="whole", **options)
        optimizer = stepped_alike(parallel, make, step_gathered, rtol=1e-10, atol=1e-12)
        assert {*optimizer.state} == {*parallel.parameters()}
        copy.deepcopy(optimizer.state_dict())
        assert any(p.to_local().shape != p.shape for p in parallel.parameters() if isinstance(p, DTensor))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANS)
def test_adafactor_over_split_weights_has_the_numbers_of_one_process(pool: WorkerPool, name: str) -> None:
    pool.run(f"{__name__}:compared", name, ranks=math.prod(PLANS[name][0]), keep=True)


def by_lbfgs(strategy: str) -> None:
    """Three steps of L-BFGS, which computes with DTensors, beside those of one process."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = []
    for module in (model(), autopar.parallelize(model(), x, (2,), device="h100", outputs="whole", strategy=strategy)):
        optimizer = optim.LBFGS(module.parameters(), lr=0.1, max_iter=5)

        def closure(module: nn.Module = module, optimizer: optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(module(x), x.sin())
            loss.backward()
            return loss.detach()

        losses.append([float(optimizer.step(closure)) for _ in range(3)])
    assert losses[0][2] < losses[0][0] / 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_l_bfgs_over_split_weights_has_the_numbers_of_one_process(pool: WorkerPool, strategy: str) -> None:
    pool.run(f"{__name__}:by_lbfgs", strategy, ranks=2, keep=True)


def by_muon(strategy: str) -> None:
    """Three steps of Muon, which computes with DTensors, beside those of one process; in double precision for bfloat16."""
    x = sample()
    pair = [model(), autopar.parallelize(model(), x, (2,), device="h100", outputs="whole", strategy=strategy)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
        for module in pair:
            optimizer = optim.Muon([p for p in module.parameters() if p.dim() == 2], lr=0.1)
            for _ in range(3):
                functional.mse_loss(module(x), x.sin()).backward()
                optimizer.step()
                optimizer.zero_grad()
    for own, expected in zip(pair[1].parameters(), pair[0].parameters(), strict=True):
        torch.testing.assert_close(full_tensor(own.detach()), expected.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_muon_over_split_weights_has_the_numbers_of_one_process(pool: WorkerPool, strategy: str) -> None:
    pool.run(f"{__name__}:by_muon", strategy, ranks=2, keep=True)


class Normed(optim.Optimizer):
    """Steps by the gradient over its norm with momentum, as some of timm do, in place: DTensor has no such operator."""

    by_group = False

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1, *, caution: bool = False) -> None:
        super().__init__(params, {"lr": lr, "caution": caution, "steps": 0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += self.by_group
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                kept = state.setdefault("kept", torch.zeros_like(parameter))
                kept.mul_(0.5).add_(parameter.grad / parameter.grad.norm().clamp_(min=1e-3), alpha=1 / state["step"])
                parameter.sub_(kept, alpha=group["lr"])


def of_timm(patch: pytest.MonkeyPatch, place: str, name: str, **fields: object) -> Callable[..., optim.Optimizer]:
    """`Normed` by the name of an optimizer of timm, which is no package that tests need."""
    kind = type(name, (Normed,), {"__module__": f"timm.optim.{place}", **fields})
    patch.setitem(sys.modules, f"timm.optim.{place}", SimpleNamespace(**{name: kind}))
    return kind


def by_timm(strategy: str) -> None:
    """Gathered steps of an optimizer of timm beside those of one process, and others that are refused."""
    parallel = autopar.parallelize(model(), sample(), (2,), device="h100", outputs="whole", strategy=strategy)
    with pytest.MonkeyPatch.context() as patch:
        mars = of_timm(patch, "mars", "Mars")
        counting = of_timm(patch, "lion", "Lion", by_group=True)
        stepped_alike(parallel, mars, step_gathered, rtol=1e-10, atol=1e-12)
        functional.mse_loss(parallel(sample()), sample().sin()).backward()
        for made, fix in (
            (mars(parallel.parameters()), "autopar.step_gathered"),
            (optim.Adafactor(parallel.parameters()), "autopar.step_gathered"),
            (counting(parallel.parameters(), caution=True), "autopar.step_gathered"),
            (of_timm(patch, "kron", "Kron")(parallel.parameters()), "strategy='ddp'"),
            (of_timm(patch, "lamb", "Lamb")(parallel.parameters(), caution=True), "without caution=True"),
        ):
            with pytest.raises(InputError, match="computes with whole weights, and these are split") as refusal:
                made.step()
            assert fix in refusal.value.details["fix"]
        with pytest.raises(InputError, match="Lion counts in a group of weights, not by weight"):
            step_gathered(counting(parallel.parameters())).step()
        whole = autopar.parallelize(model(), sample(), (2,), device="h100", outputs="whole", strategy="ddp")
        stepped_alike(whole, mars, lambda optimizer: optimizer, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_optimizers_of_timm_that_need_whole_weights_are_gathered_or_refused(pool: WorkerPool, strategy: str) -> None:
    """Before, each ended in an error of DTensor, and `step_gathered` took none."""
    pool.run(f"{__name__}:by_timm", strategy, ranks=2, keep=True)


def test_what_does_not_step_weight_by_weight_is_refused() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(InputError, match="LBFGS is not known to step each weight by itself"):
        step_gathered(optim.LBFGS([weight]))
    weight.grad = torch.ones(2, 2)
    with pytest.raises(InputError, match="takes no closure"):
        step_gathered(optim.Adafactor([weight])).step(lambda: 0.0)

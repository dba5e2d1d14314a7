"""Training matches the sequential model: optimizer steps in float64, and checkpoints that move between meshes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autopar
from autopar.parallelize import assemble, tensors_of
from autopar.passes.no_dropout import without_dropout
from autopar.passes.to_float64 import promote
from autopar.plan.options import Options
from autopar.planning.planner import connected_mesh, plan_program
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.verify.execution import sequential
from tests.support import models
from tests.support.planning import Run

LEFT = {"*.weight": "S(0), *"}  # stored split on the outer axis too
PLANS = [
    ("gpt2", "megatron", (2, 2), LEFT),
    pytest.param("llama", "megatron", (2, 2), LEFT, marks=pytest.mark.thorough),
    pytest.param("gpt2", "fsdp", (2, 2), {}, marks=pytest.mark.thorough),
    pytest.param("llama", "auto", (2, 2), {"*.mlp.*.weight": "S(1), S(0)"}, marks=pytest.mark.thorough),
]


def double(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().double() if tensor.is_floating_point() else tensor.detach()
    return nn.Parameter(wide) if isinstance(tensor, nn.Parameter) else wide


def three_steps(run: Run) -> float:
    """Train side by side; the largest difference of losses, norms and weights."""
    context = connect(run.plan.mesh, device="cpu")
    parallel, plain = assemble(run.captured, run.tensors, run.plan, context), sequential(run.captured, run.tensors)
    pair = [(module, torch.optim.AdamW(module.parameters(), lr=1e-2)) for module in (parallel, plain)]
    errors = []
    for batch in run.batches:
        seen = []
        for module, optimizer in pair:
            loss = module.run(batch)[0]
            loss.backward()
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            seen += [loss.detach(), norm]
        errors += [float(abs(seen[0] - seen[2])), float(abs(whole_norm(seen[1]) - seen[3]))]
        assert seen[3] > 0.5, "clipping has something to do"
    expected = dict(plain.named_parameters())
    for name, parameter in parallel.named_parameters():
        errors.append(float((full_tensor(parameter).detach() - expected[name].detach()).abs().max()))
    return max(errors)


def whole_norm(norm: torch.Tensor) -> torch.Tensor:
    """The norm as a number: clipping leaves it as partial results."""
    full: torch.Tensor = norm.full_tensor()  # type: ignore[attr-defined]
    return full


@pytest.mark.parametrize("name, strategy, sizes, constraints", PLANS)
def test_three_steps_of_adamw_with_clipping_equal_the_sequential_ones(
    pool: WorkerPool, name: str, strategy: str, sizes: tuple[int, ...], constraints: dict[str, str]
) -> None:
    model, sample = models.make(name)
    captured = models.captured(name)
    program = promote(without_dropout(captured.program))
    options = Options(device="h100", strategy=strategy, constraints=constraints)
    plan = plan_program(program, connected_mesh(sizes, options), options)
    batches = [captured.signature.bind((), {**sample, **models.words()}) for _ in range(3)]
    tensors = {key: double(tensor) for key, tensor in tensors_of(model).items()}
    assert sum("S" in plan.layouts[key] for key, _ in model.named_parameters()) >= 6
    run = Run(replace(captured, program=program), plan, tensors, batches)
    errors = pool.run(f"{__name__}:three_steps", run, ranks=plan.mesh.size, keep=True)
    assert max(errors) < 1e-9  # type: ignore[type-var, operator]


def small() -> tuple[nn.Module, models.Sample]:
    """GPT-2 in eval mode: without dropout, steps repeat."""
    model, sample = models.make("gpt2")
    return model.eval(), sample


def trained(parallel: nn.Module, optimizer: torch.optim.Optimizer, sample: models.Sample) -> float:
    """The loss of one step."""
    optimizer.zero_grad()
    loss = parallel(**sample)["loss"]
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def values(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every weight and every moment, whole."""
    for parameter in module.parameters():
        yield full_tensor(parameter).detach()
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            yield full_tensor(optimizer.state[parameter][moment])


def save(folder: str) -> tuple[float, list[torch.Tensor]]:
    """Train on (2, 2) and save; the loss of the step after, and what was saved. Loads on (4,) too."""
    model, sample = small()
    parallel = autopar.parallelize(model, sample, (2, 2), device="h100", strategy="megatron", constraints=LEFT)
    optimizer = adamw(parallel)
    for _ in range(2):
        trained(parallel, optimizer, sample)
    weights, moments = get_state_dict(parallel, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    saved = [value.clone() for value in values(parallel, optimizer)]
    after = trained(parallel, optimizer, sample)

    other = autopar.parallelize(model, sample, (4,), device="h100", strategy="fsdp")
    recompute = adamw(other)
    load(other, recompute, folder)
    for found, expected in zip(values(other, recompute), saved, strict=True):
        assert torch.equal(found, expected)
    assert trained(other, recompute, sample) == pytest.approx(after, abs=1e-5)
    return after, saved


def load(module: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load a checkpoint into a module and an optimizer that has not stepped yet."""
    weights, moments = get_state_dict(module, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def test_a_checkpoint_of_one_mesh_loads_on_another_and_on_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    after, saved = pool.run(f"{__name__}:save", folder, ranks=4, keep=True)[0]  # type: ignore[misc]
    model, sample = small()
    alone = autopar.parallelize(model, sample, (1,), device="h100")
    optimizer = adamw(alone)
    with pytest.warns(UserWarning, match="single process"):  # as is meant
        load(alone, optimizer, folder)
    for found, expected in zip(values(alone, optimizer), saved, strict=True):
        assert torch.equal(found, expected)
    assert trained(alone, optimizer, sample) == pytest.approx(after, abs=1e-5)


class Layers(nn.Module):
    """Layers that can be stages; the first and the last one share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.layers[3][0].weight = self.layers[0][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def hooked(options: dict[str, Any]) -> list[int]:
    """Two steps in which hooks clamp gradients, and step each weight when it has one; how often these were called."""
    model, x = Layers(), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    parallel = autopar.parallelize(model, x, device="h100", **options)
    calls: list[nn.Parameter] = []

    def update(parameter: nn.Parameter) -> None:
        calls.append(parameter)
        with torch.no_grad():
            parameter -= 100.0 * parameter.grad
        parameter.grad = None

    for module in (parallel, model):
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]
    for _ in range(2):
        (loss := model(x)).backward()
        calls.clear()
        torch.testing.assert_close(parallel.step(x), loss.detach())
        for name, parameter in parallel.named_parameters():
            torch.testing.assert_close(full_tensor(parameter.detach()), model.get_parameter(name).detach())
    return [sum(one is parameter for one in calls) for parameter in parallel.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": (2,), "strategy": "fsdp", "microbatches": 2},
        {"mesh": {"pp": 2}, "pipeline": "pp", "microbatches": 2},
        {"mesh": {"pp": 2}, "pipeline": "pp", "microbatches": 1},
    ],
    ids=str,
)
def test_hooks_of_parameters_see_the_gradient_of_the_batch_once(options: dict[str, Any], pool: WorkerPool) -> None:
    """They saw that of every micro-batch, or stage: other gradients, and two steps in the place of one."""
    for calls in pool.run(f"{__name__}:hooked", options, ranks=2, keep=True):
        assert {*calls} == {1}  # type: ignore[misc]

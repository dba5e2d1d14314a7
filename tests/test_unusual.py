"""Models that are written in unusual ways have equal numbers on a mesh, and send what their plans list."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.planner import Options, read_program
from autopar.runtime.workers import WorkerPool
from autopar.verification import Report, verify
from tests import planning, table

Made = tuple[nn.Module, object]
PLANS = ("auto", "fsdp", "megatron", 0, 1, 2)


def verified(made: Made, plan: str | int, pool: WorkerPool, sizes: tuple[int, ...] = (4,)) -> Report:
    """The report of a model under a strategy, or under the random plan of a seed."""
    (model, batch), on = made, table.mesh(sizes)
    if isinstance(plan, int):
        chosen = autopar.testing.random_plan(model, batch, on, seed=plan)
    else:
        chosen = autopar.plan(model, batch, on, strategy=plan)
    return verify(model, batch, on, chosen, Options(), pool)


# --- weights that are used through views ----------------------------------------------------------------------------------

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # products of (16, 8) and (8, 16)
    "transposed twice": lambda x, w: x @ w.t().t(),
    "reshaped": lambda x, w: x @ w.view(2, 4, 16).reshape(8, 16),
    "with a dim more": lambda x, w: (x.unsqueeze(0) @ w.unsqueeze(0)).squeeze(0),
    "in slices": lambda x, w: torch.cat([x @ w[:, :8], x @ w[:, 8:]], 1),
    "in chunks": lambda x, w: torch.cat([x @ part for part in w.chunk(2, 1)], 1),
    "itself and as a view": lambda x, w: x @ w + x.relu() @ w.t().t(),
    "one view twice": lambda x, w: x @ (v := w.t()).t() + (2 * x) @ v.t(),
}
COPIED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copied by a reshape": lambda x, w: x @ w.t().reshape(8, 16),
}


class Through(nn.Module):
    """A weight between two layers, used in one of the ways."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((USES | COPIED)[self.use](self.first(x).relu(), self.weight)).square().sum()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("use", USES)
def test_a_weight_is_gathered_again_if_the_backward_needs_a_view_of_it(pool: WorkerPool, use: str, plan: str | int) -> None:
    report = verified((Through(use), torch.randn(16, 8)), plan, pool)
    assert report.ok, str(report)


@pytest.mark.parametrize("plan", ["auto", "fsdp", "megatron"])
@pytest.mark.parametrize("use", COPIED)
def test_a_copy_of_a_weight_is_kept(pool: WorkerPool, use: str, plan: str) -> None:
    report = verified((Through(use), torch.randn(16, 8)), plan, pool)
    assert report.ok, str(report)


class Stack(nn.Module):
    """Square layers whose weights stand transposed, or not."""

    def __init__(self, depth: int, width: int, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x @ weight.t() if self.transposed else x @ weight).relu()
        return x.sum()


def test_a_weight_takes_time_and_memory_once_whether_it_is_used_itself_or_as_a_view() -> None:
    on = planning.mesh((8,), planning.link(100))
    plans = []
    for transposed in (True, False):
        with torch.device("meta"):
            made = read_program(Stack(6, 1024, transposed=transposed), torch.empty(64, 1024))
        plans.append(planning.plan(made, on, strategy="fsdp"))
    (first, second) = ((plan.step_time, plan.peak_memory, len(plan.collectives)) for plan in plans)
    assert first == pytest.approx(second)


# --- names ------------------------------------------------------------------------------------------------------------------

HIDDEN = ("graph", "code", "meta", "run", "recompile", "autopar", "print_readable", "_graph", "_code", "class", "if", "None")


class Named(nn.Module):
    """A layer, a parameter and a buffer under names that Python or fx uses for something else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.box = nn.ModuleDict({"inner": nn.Linear(8, 8)})
        self.name = name
        if name in ("class", "if", "None"):  # inside a container too
            self.box[name] = nn.Linear(8, 8)
        self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.box.values():
            x = layer(x).relu()
        return self._modules[self.name](x).square().sum()  # type: ignore[misc]


class Bare(nn.Module):
    """A parameter and a buffer under such names."""

    def __init__(self, parameter: str, buffer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_parameter(parameter, nn.Parameter(torch.randn(8)))
        self.register_buffer(buffer, torch.randn(8))
        self.names = parameter, buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self._parameters[self.names[0]] + self._buffers[self.names[1]]).square().sum()


@pytest.mark.parametrize(
    "model",
    [*(Named(name) for name in HIDDEN), *(Bare(*pair) for pair in zip(HIDDEN, HIDDEN[1:] + HIDDEN[:1], strict=True))],
    ids=lambda model: "-".join(name for name, _ in (*model.named_children(), *model.named_parameters(recurse=False))),
)
def test_names_that_python_or_fx_uses_stay_in_the_state_and_train(model: nn.Module, pool: WorkerPool) -> None:
    batch = torch.randn(8, 8)
    parallel = autopar.parallelize(model, batch, (1,), device="h100")
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert [name for name, _ in parallel.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    expected = model(batch)
    for module in (parallel, copy.deepcopy(parallel)):
        module.load_state_dict(model.state_dict())
        loss = module(batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
    report = verified((model, batch), "fsdp", pool)
    assert report.ok, str(report)


ARGUMENTS = "torch inf nan device NoneType fx_pytree all_gather__reduce_scatter begin finish local getitem self_ gathers axis0"


@pytest.mark.parametrize("name", ARGUMENTS.split())
def test_an_argument_may_be_called_like_what_the_emitted_code_uses(pool: WorkerPool, name: str) -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        exec(f"def forward(self, {name}): return self.layer({name}).relu().sum()", globals(), locals())

    report = verified((Called(), torch.randn(8, 8)), "fsdp", pool)
    assert report.ok, str(report)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron"])
def test_a_parameter_that_is_never_used_is_stored_whole_under_every_strategy(pool: WorkerPool, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_parameter("unused", nn.Parameter(torch.randn(8, 8)))
    report = verified((model, torch.randn(8, 8)), strategy, pool)
    assert report.ok, str(report)
    assert report.plan.layouts["unused"] == "I"

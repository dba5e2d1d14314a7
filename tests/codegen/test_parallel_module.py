"""A parallel module is used like the original: state, modes, random numbers, errors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import InputError, MeshError
from autopar.ir.mesh import Mesh
from autopar.runtime.storage import full_tensor, to_local
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Axis, FlattenedAxes, _flattened_group
from tests.support import models

MESH = (2,)
RANKS = 2


class Odd(nn.Module):
    """What a state dict can hold: ties, unused and frozen parameters, buffers of both kinds, and names against the alphabet."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(3))
        self.second = nn.Linear(8, 8)
        self.middle = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU())
        self.frozen = nn.Linear(16, 8).requires_grad_(False)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.drop = nn.Dropout(rate)
        self.register_buffer("kept", torch.randn(8))
        self.register_buffer("lost", torch.randn(8), persistent=False)
        self.alone = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.second(x) + self.kept * self.lost + self.alone)
        return self.drop(self.frozen(self.middle(x)))


def odd() -> tuple[Odd, torch.Tensor]:
    """The model with a batch of it: the same whatever came before."""
    torch.manual_seed(0)
    return Odd(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def parallel_of(model: nn.Module, sample: object, mesh: object = MESH, **options: object) -> fx.GraphModule:
    return autopar.parallelize(model, sample, mesh, device="h100", **options)


def called(module: nn.Module, sample: object) -> torch.Tensor:
    """The first output, whole."""
    found = module(**sample) if isinstance(sample, Mapping) else module(sample)
    return full_tensor(found if isinstance(found, torch.Tensor) else found["logits"])


def same_state(name: str) -> None:
    model, sample = odd() if name == "odd" else models.make(name)
    twin = copy.deepcopy(model)
    parallel = parallel_of(model, sample, strategy="fsdp")
    assert isinstance(parallel, fx.GraphModule)
    state, original = parallel.state_dict(), model.state_dict()
    assert set(state) == set(original)
    assert [key for key, _ in parallel.named_parameters()] == [key for key, _ in model.named_parameters()]
    for remove in (True, False):
        names = {key for key, _ in model.named_buffers(remove_duplicate=remove)}
        assert names <= {key for key, _ in parallel.named_buffers(remove_duplicate=remove)}
    for key, tensor in state.items():
        torch.testing.assert_close(full_tensor(tensor), original[key])
    for key, parameter in parallel.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter.data, DTensor)
        assert parameter.requires_grad == model.get_parameter(key).requires_grad
    ours, theirs = (dict(m.named_parameters(remove_duplicate=False)) for m in (parallel, model))
    assert set(ours) == set(theirs)
    for one in ours:
        assert [other for other in ours if ours[other] is ours[one]] == [o for o in theirs if theirs[o] is theirs[one]]
    untouched(model, twin)


def untouched(model: nn.Module, twin: nn.Module) -> None:
    """The user's model has the tensors, gradients, mode and hooks that it had."""
    assert model.training == twin.training
    for (key, tensor), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), key
        assert type(tensor) is torch.Tensor
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["odd", "gpt2", pytest.param("t5", marks=pytest.mark.thorough)])
def test_names_order_ties_unused_parameters_and_buffers_are_the_originals(pool: WorkerPool, name: str) -> None:
    pool.run(f"{__name__}:same_state", name, ranks=RANKS, keep=True)


def modes(name: str) -> None:
    torch.manual_seed(0)
    model, sample = odd() if name == "odd" else models.make(name)
    parallel = parallel_of(model, sample, strategy="megatron")
    assert parallel.training
    assert not torch.equal(called(parallel, sample), called(parallel, sample)), "two calls drop differently"
    parallel.eval()
    model.eval()
    expected = called(model, sample).detach()
    torch.testing.assert_close(called(parallel, sample), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        found = called(parallel, sample)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    parallel.train()
    assert not torch.equal(called(parallel, sample), found), "train mode drops again"


@pytest.mark.parametrize("name", ["odd", pytest.param("bert", marks=pytest.mark.thorough)])
def test_dropout_ends_in_eval_mode_and_nothing_is_kept_without_gradients(pool: WorkerPool, name: str) -> None:
    pool.run(f"{__name__}:modes", name, ranks=RANKS, keep=True)


def gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a step, whole."""
    module.zero_grad()
    full_tensor(module(x)).square().sum().backward()
    return {name: full_tensor(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def froze(strategy: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 8)), torch.randn(16, 8)
    model[3].requires_grad_(False)
    parallel = parallel_of(model, x, (2,), strategy=strategy, outputs="whole")
    for names in (["2.weight"], ["2.weight", "2.bias", "0.bias"], []):
        for module in (model, parallel):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name not in names and not name.startswith("3."))
        found, expected = gradients(parallel, x), gradients(model, x)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)
    with pytest.raises(InputError, match="argument input requires a gradient"):
        parallel(x.clone().requires_grad_())
    parallel.requires_grad_()
    with pytest.raises(InputError, match=r"(?s)3.weight and 1 more require a gradient.*parallelize it again"):
        parallel(x)
    with torch.no_grad():
        assert full_tensor(parallel(x)).isfinite().all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "megatron"])
def test_parameters_may_be_frozen_later_but_not_unfrozen(pool: WorkerPool, strategy: str) -> None:
    pool.run(f"{__name__}:froze", strategy, ranks=2, keep=True)


def copied_in_a_step(_: None) -> None:
    """In the middle of a step, as EMA and sweeps copy a module: the copy goes on by itself, without gradients as any copy."""
    model, x = odd()
    parallel = parallel_of(model, x, strategy="fsdp")
    called(parallel, x).sum().backward()
    kept = {key: full_tensor(p).detach().clone() for key, p in parallel.named_parameters()}
    twin = copy.deepcopy(parallel)
    grads = {key: p.grad for key, p in parallel.named_parameters() if p.grad is not None}
    assert any(isinstance(grad, DTensor) and grad.storage_offset() for grad in grads.values()), "gradients within a bucket"
    assert all(parameter.grad is None for parameter in twin.parameters()), "as in copies of the user's module"
    called(twin, x).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    called(twin, x).sum().backward()
    for key, parameter in parallel.named_parameters():
        assert torch.equal(full_tensor(parameter), kept[key])
        if key in grads:
            assert not torch.equal(full_tensor(twin.get_parameter(key)), kept[key])


def test_a_module_is_copied_in_a_step(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:copied_in_a_step", ranks=RANKS, keep=True)


def on_merged_axes(_: None) -> None:
    model, x = odd()
    expected = called(model.eval(), x)
    names = ("a", "b", "c", "d")
    for mesh in (dict(zip(names, (2, 1, 2, 1), strict=True)), init_device_mesh("cpu", (2, 1, 2, 1), mesh_dim_names=names)):
        parallel = parallel_of(model, x, mesh)
        assert (parallel.autopar.plan.axes, parallel.autopar.plan.sizes) == (("a_b_c_d",), (4,))
        torch.testing.assert_close(called(parallel, x), expected)
        again = parallel_of(model, x, mesh, plan=parallel.autopar.plan)
        torch.testing.assert_close(called(again, x), expected)


def test_axes_that_were_merged_run_on_the_mesh_that_was_given(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:on_merged_axes", ranks=4)


def on_ranks_in_any_order(folder: str) -> None:
    model, x = odd()
    expected = called(model.eval(), x)
    for ranks, together in (([[0, 1], [2, 3]], True), ([[3, 1], [2, 0]], False)):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
        parallel = parallel_of(model, x, mesh, strategy="fsdp")
        assert parallel.autopar.plan is not None
        assert ("a_b" in {sent.axis for sent in parallel.autopar.plan.collectives}) == together
        torch.testing.assert_close(called(parallel, x), expected)
        checkpoint.save(parallel.state_dict(), checkpoint_id=f"{folder}/{together}")
        held = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        checkpoint.load(held, checkpoint_id=f"{folder}/{together}")
        torch.testing.assert_close(held, dict(model.state_dict()), rtol=0, atol=0)
    made = autopar.plan(model, x, {"a": 2, "b": 2}, device="h100", strategy="fsdp")
    with pytest.raises(MeshError, match=r"ranks \[0, 2, 1, 3\] there do not ascend"):
        parallel_of(model, x, DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b")), plan=made)

    with pytest.raises(MeshError, match=r"\[\[0, 1\], \[3, 2\]\] stand in another order along one row"):
        parallel_of(model, x, DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("a", "b")), strategy="fsdp")


def test_ranks_of_a_device_mesh_that_do_not_ascend_send_over_one_axis_each(pool: WorkerPool, tmp_path: Path) -> None:
    """A process group has its ranks in ascending order, whatever that of the mesh; torch's checkpoints go by the mesh's."""
    pool.run(f"{__name__}:on_ranks_in_any_order", str(tmp_path), ranks=4)


def in_groups_of_its_own(_: None) -> None:
    model, x = odd()
    expected = called(model.eval(), x)
    own = dist.new_group([0])
    parallel = parallel_of(model, x, {"a": 2, "b": 2}, strategy="fsdp")
    assert parallel.autopar.plan is not None
    assert "a_b" in {sent.axis for sent in parallel.autopar.plan.collectives}
    torch.testing.assert_close(called(parallel, x), expected)
    if isinstance(own, dist.ProcessGroup):
        dist.destroy_process_group(own)


def test_ranks_may_be_in_different_numbers_of_process_groups(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:in_groups_of_its_own", ranks=4, timeout=120)


def test_all_ranks_refuse_several_axes_over_which_some_do_not_ascend() -> None:
    grid: Any = SimpleNamespace(mesh=torch.tensor([[[0, 1], [2, 3]], [[4, 6], [5, 7]]]))
    with pytest.raises(MeshError, match=r"ranks \[4, 6, 5, 7\] there do not ascend"):
        _flattened_group(grid, (1, 2))


def test_axes_of_one_name_are_refused() -> None:
    mesh = Mesh(axes=("x_y", "x", "y_x"), sizes=(2, 2, 2))
    axes = [Axis(name=name, size=2, index=0, group="") for name in mesh.axes]
    over = FlattenedAxes(mesh.name_of, axes, lambda places: "")
    assert over((0, 1)).name == "x_y_x"
    with pytest.raises(MeshError, match="called 'x_y_x', as others are"):
        over((1, 2))
    assert over((0, 1)).size == 4


def seeded_by_rank(_: None) -> list[torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    model, sample = odd()
    parallel = parallel_of(model, sample, strategy="fsdp")
    tensors = [*parallel.parameters(), *parallel.buffers()]
    return [full_tensor(tensor).detach().clone() for tensor in tensors] + [called(parallel.eval(), sample).detach()]


def test_ranks_that_were_seeded_differently_get_the_weights_of_rank_0(pool: WorkerPool) -> None:
    first, *others = pool.run(f"{__name__}:seeded_by_rank", ranks=RANKS)
    torch.manual_seed(0)
    model, sample = odd()
    held = dict(model.named_parameters()) | dict(model.named_buffers()) | {"alone": model.alone}
    for found, expected in zip(first, [*held.values(), called(model.eval(), sample)], strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(found, expected.detach())
    for other in others:
        assert all(map(torch.equal, first, other))  # type: ignore[call-overload]


class Drop(nn.Module):
    """Dropout of ones: what is left tells what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x)


def dropped(layout: str) -> torch.Tensor:
    torch.manual_seed(torch.distributed.get_rank())
    ones = torch.ones(64, 64)
    parallel = parallel_of(Drop(), ones, (2, 2), constraints={"drop": layout}, outputs="whole")
    return called(parallel, ones)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout, parts", [("S(0), I", 2), ("I, S(0)", 2), ("S(0), S(0)", 4), ("I, I", 1)])
def test_dropout_draws_alike_for_the_same_value_and_differently_for_its_parts(
    pool: WorkerPool, layout: str, parts: int
) -> None:
    found = pool.run(f"{__name__}:dropped", layout, ranks=4, keep=True)
    assert all(torch.equal(mask, found[0]) for mask in found)  # type: ignore[arg-type]
    chunks = found[0].chunk(parts)  # type: ignore[attr-defined]
    for index, one in enumerate(chunks):
        assert 0.4 < (one > 0).double().mean() < 0.6
        assert all(0.4 < (one == other).double().mean() < 0.6 for other in chunks[:index]), "independent draws"


def resumed(asked: tuple[str, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a module draws after two calls and a checkpoint, and what another draws that loads it."""
    ones, (folder, captured_in_training) = torch.ones(64, 64), asked
    first, second = (
        parallel_of(Drop().train(captured_in_training), ones, constraints={"drop": "S(0)"}, outputs="whole").train()
        for _ in range(2)
    )
    for _ in range(2):
        called(first, ones)
    checkpoint.save({"random": first.autopar.rng_state}, checkpoint_id=folder)
    assert second.autopar.rng_state.seed != first.autopar.rng_state.seed
    checkpoint.load({"random": second.autopar.rng_state}, checkpoint_id=folder)
    return called(first, ones), called(second, ones)


@pytest.mark.parametrize("captured_in_training", [True, False])
def test_a_run_that_resumes_goes_on_with_the_draws(pool: WorkerPool, captured_in_training: bool, tmp_path: Path) -> None:
    asked = (str(tmp_path), captured_in_training)
    for went_on, resumed_here in pool.run(f"{__name__}:resumed", asked, ranks=RANKS):  # type: ignore[misc]
        assert 0.4 < (went_on > 0).double().mean() < 0.6
        assert torch.equal(went_on, resumed_here)


def from_meta(_: None) -> None:
    torch.manual_seed(0)
    expected, sample = models.make("gpt2")
    with torch.device("meta"):
        model = models.MODELS["gpt2"]()[0]
    parallel = parallel_of(model, sample, strategy="fsdp")
    assert all(parameter.is_meta for parameter in parallel.parameters())
    with pytest.raises(InputError, match=r"transformer\.wte\.weight.* on the meta device"):
        parallel(**sample)
    autopar.initialize(parallel, model)
    assert torch.isfinite(parallel(**sample).loss)
    parallel.load_state_dict(distributed(parallel, expected))
    check = parallel.eval()
    torch.testing.assert_close(called(check, sample), called(expected.eval(), sample).detach(), atol=1e-5, rtol=1e-5)

    empty = parallel_of(model.train(), sample, strategy="megatron")
    empty.load_state_dict(distributed(empty, expected), assign=True)
    torch.testing.assert_close(called(empty.eval(), sample), called(expected, sample).detach(), atol=1e-5, rtol=1e-5)

    given = {name: tensor.double() for name, tensor in expected.state_dict().items()}
    for strategy in ("fsdp", "ddp"):
        filled = parallel_of(model.train(), sample, strategy=strategy)
        with pytest.raises(InputError, match="into which load_state_dict copies nothing") as refusal:
            filled.load_state_dict(given)
        assert "assign=True" in refusal.value.details["fix"]
        assert str(filled.load_state_dict(given, assign=True)) == "<All keys matched successfully>"
        assert all(to_local(p).untyped_storage().nbytes() == to_local(p).nbytes for p in filled.parameters()), (
            "a rank's own part"
        )
        copy.deepcopy(filled)
        assert filled.get_parameter("lm_head.weight") is filled.get_parameter("transformer.wte.weight")
        torch.testing.assert_close(called(filled.eval(), sample), called(expected, sample).detach(), atol=1e-5, rtol=1e-5)


def distributed(parallel: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict, laid out as the parallel module's."""
    given = model.state_dict()
    return {
        key: torch.distributed.tensor.distribute_tensor(given[key], like.device_mesh, like.placements)
        for key, like in parallel.state_dict().items()
    }


def test_a_model_on_meta_is_parallelized_and_then_initialised_or_loaded(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:from_meta", ranks=RANKS, keep=True)


def mistakes(_: None) -> None:
    torch.manual_seed(0)
    model, sample = odd()
    parallel = parallel_of(model, sample, (2, 2))
    with pytest.raises(InputError, match="the ranks were given different values for x") as caught:
        parallel(sample + torch.distributed.get_rank() // 2)
    assert "[2, 3] differ" in str(caught.value)
    parallel(sample)
    for wrong, message in ((sample[:8], "dim 0 is 8, planned 16"), (sample.double(), "another dtype")):
        with pytest.raises(InputError, match=message):
            parallel(wrong)


def test_other_inputs_than_planned_or_than_the_other_ranks_is_an_error_on_every_rank(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:mistakes", ranks=4, keep=True)


def test_a_mesh_of_one_device_needs_no_processes() -> None:
    torch.manual_seed(0)
    model, sample = models.make("llama")
    parallel = parallel_of(model, sample, {"dp": 1, "tp": 1})
    assert isinstance(parallel, fx.GraphModule)
    assert not torch.distributed.is_initialized()
    assert not any(isinstance(parameter, DTensor) for parameter in parallel.parameters())
    expected = model(**sample)
    found = parallel(**sample)
    torch.testing.assert_close(found.loss, expected.loss)
    expected.loss.backward()
    found.loss.backward()
    for one, other in zip(parallel.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


class Keywords(nn.Module):
    """Takes and returns containers, arguments by keyword among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x: dict[str, torch.Tensor], *, scale: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y = self.layer(x["a"]) * scale
        return y.square().sum(), (y,)


def hooked(module: nn.Module) -> list[object]:
    """What hooks of a module will see, in order."""
    seen: list[object] = []
    module.register_forward_pre_hook(lambda m, args, kwargs: seen.append((m is module, args, kwargs)), with_kwargs=True)
    module.register_forward_hook(lambda m, args, kwargs, out: seen.append((m is module, args, kwargs, out)), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: seen.append((m is module, args, out)))
    return seen


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("copied", [False, True])
def test_hooks_see_what_those_of_the_users_module_see(copied: bool, microbatches: int) -> None:
    torch.manual_seed(0)
    model, x, scale = Keywords(), {"a": torch.randn(4, 4)}, torch.randn(4)
    parallel: nn.Module = parallel_of(model, {"x": x, "scale": scale}, (1,), microbatches=microbatches)
    parallel = copy.deepcopy(parallel) if copied else parallel
    expected, found = hooked(model), hooked(parallel)
    for module in (model, parallel):
        for mode in (True, False):
            module.train(mode)(x, scale=scale)[0].backward()
    torch.testing.assert_close(found, expected)
    assert len(found) == 6
    parallel.register_forward_pre_hook(lambda _, args, kwargs: (args, {"scale": 0 * kwargs["scale"]}), with_kwargs=True)
    assert parallel(x, scale=scale)[0] == 0

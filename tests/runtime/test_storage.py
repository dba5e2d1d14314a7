"""Stored parameters: every rank gets its shard of rank 0's, and torch operations on them equal those on the whole tensor."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import LayoutError
from autopar.ir.layout import I, Layout, P, shard, split
from autopar.ir.mesh import Mesh
from autopar.runtime.storage import full_tensor, layout_of, placements, storable, store, to_local
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Context, connect

SHAPE = (24, 16)
Sizes = tuple[int, ...]


def layouts(sizes: Sizes) -> list[Layout]:
    """Every stored layout of the shape: both nestings, blocked splits, both dims, none."""
    every = [[I, *(split(d, s) for d in (0, 1) for s in range(1, SHAPE[d]) if SHAPE[d] % (s * n) == 0)] for n in sizes]
    return [layout for layout in itertools.product(*every) if storable(layout, SHAPE, sizes)]


def wholes(seed: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(count)]


def stored(sizes: Sizes, chosen: list[Layout], device: str = "cpu") -> tuple[Context, dict[str, nn.Parameter]]:
    """Rank 0's values count; the others hold something else, or are on meta."""
    context = connect(Mesh.of(sizes))
    values = wholes(0 if dist.get_rank() == 0 else 99, len(chosen))
    if dist.get_rank() % 2 or device == "meta":
        values = [value.to("meta") for value in values]
    named = {f"p{i}": nn.Parameter(value) for i, value in enumerate(values)}
    return context, store(named, {f"p{i}": layout for i, layout in enumerate(chosen)}, context)  # type: ignore[return-value]


def every_layout(payload: tuple[Sizes, int]) -> None:
    sizes, step = payload
    chosen = layouts(sizes)[::step]
    context, parameters = stored(sizes, chosen)
    gradients = wholes(1, len(chosen))
    for layout, value, gradient, parameter in zip(chosen, wholes(0, len(chosen)), gradients, parameters.values(), strict=True):
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert layout_of(parameter) == layout
        mine = shard(value, layout, sizes, context.coordinates)
        assert torch.equal(parameter.to_local(), mine), layout
        assert torch.equal(full_tensor(parameter), value), layout
        (to_local(parameter) * shard(gradient, layout, sizes, context.coordinates)).sum().backward()
        assert parameter.grad is not None
        assert torch.equal(full_tensor(parameter.grad), gradient), layout
        assert parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]


def further(*cases: object) -> list[object]:
    """Cases for `make thorough`."""
    return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]  # type: ignore[misc]


@pytest.mark.parametrize("sizes, step", [((2, 4), 4), ((2, 2, 2), 20), *further(((2, 4), 1), ((4, 2), 1), ((2, 2, 2), 5))])
def test_every_rank_stores_its_shard_of_rank_0_and_its_gradient_is_that_of_the_whole(
    pool: WorkerPool, sizes: Sizes, step: int
) -> None:
    """Of the layouts every so many."""
    pool.run(f"{__name__}:every_layout", (sizes, step), ranks=Mesh.of(sizes).size, keep=True)


def test_placements_are_read_in_mesh_order() -> None:
    assert placements((split(0, 12), split(0, 3)), SHAPE, (2, 4)) == (Shard(0), Shard(0))
    assert placements((split(0, 3), split(0, 6)), SHAPE, (2, 4)) == (_StridedShard(0, split_factor=4), Shard(0))
    assert placements((I, split(0, 2)), SHAPE, (2, 4)) == (Replicate(), _StridedShard(0, split_factor=3))


def test_the_rows_behind_a_users_weight_are_no_padding() -> None:
    """A checkpoint's tensor that is longer, or one tensor for all weights: they were read as zeros."""
    longer = torch.ones(8, 3)
    weight = nn.Parameter(longer[:7])
    for _ in range(2):
        assert torch.equal(to_local(weight, (8, 3)), torch.cat([torch.ones(7, 3), torch.zeros(1, 3)]))
    weight.data = longer[:7]
    assert torch.equal(to_local(weight, (8, 3))[7], torch.zeros(3))
    weight.data = to_local(weight, (8, 3)).detach()[:7]  # the room is there, and nothing moves
    place = weight.data_ptr()
    assert to_local(weight, (8, 3)).data_ptr() == place


def test_an_addend_cannot_be_stored() -> None:
    with pytest.raises(LayoutError, match="cannot be stored"):
        placements((P, I), SHAPE, (2, 4))


def test_a_mesh_of_one_device_stores_plain_parameters_of_its_own() -> None:
    value = nn.Parameter(torch.ones(SHAPE))
    kept = store({"w": value}, {"w": (I, I)}, connect(Mesh.of((1, 1))))["w"]
    assert type(kept) is nn.Parameter
    assert torch.equal(kept, value)
    assert kept.data_ptr() != value.data_ptr()


def on_meta(sizes: Sizes) -> None:
    _, parameters = stored(sizes, layouts(sizes)[:5], "meta")
    assert all(isinstance(p, DTensor) and p.is_meta and tuple(p.shape) == SHAPE for p in parameters.values())


def test_a_mesh_of_one_device_stores_on_that_device() -> None:
    stored = store({"w": nn.Parameter(torch.ones(4, 2).T)}, {"w": (I,)}, connect(Mesh.of(1), device="meta"))
    assert stored["w"].is_meta, "meta stands for a GPU, and the model was made on the CPU"
    assert stored["w"].is_contiguous()


def test_what_is_on_meta_on_rank_0_stays_on_meta(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:on_meta", (2, 2), ranks=4, keep=True)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
}


def steps(parameters: list[nn.Parameter], name: str, gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Three clipped optimizer steps with given gradients; the norms."""
    optimizer = OPTIMIZERS[name](parameters)
    norms = []
    for given in gradients:
        optimizer.zero_grad()
        for parameter, gradient in zip(parameters, given, strict=True):
            (to_local(parameter) * gradient).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, 1.0))
        optimizer.step()
    return norms


def train(payload: tuple[Sizes, str]) -> None:
    sizes, name = payload
    chosen = layouts(sizes)[::12]
    context, parameters = stored(sizes, chosen)
    gradients = [wholes(seed, len(chosen)) for seed in (1, 2, 3)]
    mine = [[shard(g, x, sizes, context.coordinates) for g, x in zip(gs, chosen, strict=True)] for gs in gradients]
    plain = [nn.Parameter(value) for value in wholes(0, len(chosen))]
    norms = steps(list(parameters.values()), name, mine)
    for norm, expected in zip(norms, steps(plain, name, gradients), strict=True):
        torch.testing.assert_close(full_tensor(norm), expected, rtol=1e-12, atol=1e-12)
    for parameter, expected in zip(parameters.values(), plain, strict=True):
        torch.testing.assert_close(full_tensor(parameter), expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_clipped_optimizer_steps_equal_those_on_whole_parameters(pool: WorkerPool, name: str) -> None:
    pool.run(f"{__name__}:train", ((2, 2), name), ranks=4, keep=True)


def save(payload: tuple[Sizes, str]) -> None:
    sizes, folder = payload
    _, parameters = stored(sizes, layouts(sizes)[::8][:6])
    optimizer = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        to_local(parameter).sum().backward()
    optimizer.step()
    dcp.save({"model": parameters, "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load(payload: tuple[Sizes, str]) -> None:
    sizes, folder = payload
    chosen = (layouts(sizes)[::-4] * 6)[:6]
    context = connect(Mesh.of(sizes))
    zeros = {f"p{i}": nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for i in range(6)}
    parameters = store(zeros, {f"p{i}": layout for i, layout in enumerate(chosen)}, context)
    mine = torch.optim.AdamW(parameters.values())
    for parameter in parameters.values():
        to_local(parameter).sum().backward()
    mine.step()  # makes the state that is loaded into
    for state in mine.state.values():
        state["exp_avg"].zero_()
    dcp.load({"model": parameters, "optimizer": mine.state_dict()}, checkpoint_id=folder)
    expected = [nn.Parameter(value) for value in wholes(0, len(chosen))]
    optimizer = torch.optim.AdamW(expected)
    for parameter in expected:
        parameter.sum().backward()
    optimizer.step()
    assert all(state["step"] == 1 for state in mine.state.values())
    for layout, parameter, value in zip(chosen, parameters.values(), expected, strict=True):
        assert torch.equal(full_tensor(parameter), value), layout
        assert torch.equal(full_tensor(mine.state[parameter]["exp_avg"]), optimizer.state[value]["exp_avg"]), layout


def test_a_checkpoint_saved_on_one_mesh_loads_on_another(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(f"{__name__}:save", ((2, 2), str(tmp_path)), ranks=4, keep=True)
    pool.run(f"{__name__}:load", ((4,), str(tmp_path)), ranks=4)
    pool.run(f"{__name__}:load", ((1,), str(tmp_path)), ranks=1)

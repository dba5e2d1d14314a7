"""Ranks that captured different programs are told where these differ, and what may have reordered them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError, PlanError
from autopar.runtime.workers import WorkerPool


class InSomeOrder(nn.Module):
    """Two weights that forward goes through in the order of the words it is given, as that of a set is each process's own."""

    def __init__(self, words: list[str], wide: bool = False) -> None:
        super().__init__()
        self.words = words
        self.held = nn.ParameterDict({word: nn.Parameter(torch.ones(8)) for word in ("far", "near")})
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = {word: x * self.held[word] for word in self.words}
        return rows["far"].exp() + rows["near"] if not self.wide else rows["far"] + rows["near"]


def refused(wide: bool) -> str:
    """What a rank is told whose model goes through its words backwards, or that computes something else."""
    second = bool(dist.get_rank())
    model = InSomeOrder(["near", "far"] if second and not wide else ["far", "near"], wide and second)
    try:
        autopar.parallelize(model, torch.ones(4, 8), (2,))
    except PlanError as error:
        return str(error)
    return "nothing"


class Scaled(nn.Module):
    """A weight of a width, times a number."""

    def __init__(self, width: int, number: float) -> None:
        super().__init__()
        self.weight, self.number = nn.Parameter(torch.ones(width)), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum() * self.number


def differing(meshes: bool) -> str:
    """What a rank is told whose mesh has another shape, or who alone gives parts of its inputs."""
    second = bool(dist.get_rank())
    mesh = (1, 2) if meshes and second else (2,)
    try:
        autopar.parallelize(Scaled(8, 0.5), torch.ones(4, 8), mesh, inputs="whole" if meshes or second else "sharded")
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def told(of_ranks: list[tuple[int, int, float]]) -> str:
    """What a rank is told whose sample has another length, or whose weight another width, or number another value."""
    length, width, number = of_ranks[dist.get_rank()]
    try:
        autopar.parallelize(Scaled(width, number), torch.ones(length, 8), (2,))
    except PlanError as error:
        return str(error)
    return "nothing"


def test_programs_in_another_order_are_told_from_other_programs(pool: WorkerPool) -> None:
    for said in pool.run(f"{__name__}:refused", False, ranks=2):
        assert isinstance(said, str)
        assert said.startswith("the ranks captured different programs: the same operators in another order\n")
        assert "ranks   [1] differ from rank 0" in said
        assert "rank 0  :mul#0: float32[4, 8] grad = aten.mul.Tensor(%x, %held.far)" in said
        assert "rank 1  :mul#0: float32[4, 8] grad = aten.mul.Tensor(%x, %held.near)" in said
        assert "test_rank_consistency.py" in said
        assert "PYTHONHASHSEED=0" in said
    for said in pool.run(f"{__name__}:refused", True, ranks=2):
        assert isinstance(said, str)
        assert said.startswith("the ranks captured different programs\n")
        assert "fix     build the same model" in said


def test_samples_of_other_shapes_are_named_with_what_each_rank_gave(pool: WorkerPool) -> None:
    for said in pool.run(f"{__name__}:told", [(4, 8, 0.5), (6, 8, 0.5)], ranks=2):
        assert isinstance(said, str)
        assert said.startswith("the samples of the ranks differ in x: float32[4, 8] on rank 0; float32[6, 8] on rank 1\n")
        assert "fix  give every rank the same sample" in said


@pytest.mark.parametrize(
    "second, where",
    [
        ((4, 1, 0.5), "rank 1  weight: float32[1] grad"),
        ((4, 8, 0.25), "rank 1  :mul#1: float32[] grad = aten.mul.Tensor(%:sum#0, 0.25)"),
    ],
)
def test_weights_of_other_shapes_and_other_numbers_are_not_another_order(
    pool: WorkerPool, second: tuple[int, int, float], where: str
) -> None:
    for said in pool.run(f"{__name__}:told", [(4, 8, 0.5), second], ranks=2):
        assert isinstance(said, str)
        assert said.startswith("the ranks captured different programs\n")
        assert where in said


def test_meshes_of_other_shapes_and_inputs_that_only_some_give_in_parts_are_named(pool: WorkerPool) -> None:
    """Other meshes would make process groups that wait for each other, until the ranks' timeout of half an hour."""
    for said in pool.run(f"{__name__}:differing", True, ranks=2):
        assert isinstance(said, str)
        assert said.startswith("MeshError: the ranks have different meshes: (axis0=2) of cpu on rank 0; (axis0=1, axis1=2) of")
    for said in pool.run(f"{__name__}:differing", False, ranks=2):
        assert isinstance(said, str)
        assert said.startswith("PlanError: the ranks differ in inputs=: sharded on rank 0; whole on rank 1\n")

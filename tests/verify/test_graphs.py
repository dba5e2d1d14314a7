"""Layers over the edges of a graph, with given self-loops removed and one added per node, as in torch_geometric."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.support import table
from tests.support.threads import Threads

NODES, EDGES = 8, 24


def with_loops(edges: torch.Tensor, count: int) -> torch.Tensor:
    """The edges that are no loops, and one loop for each node."""
    loops = torch.arange(count, device=edges.device).view(1, -1).repeat(2, 1)
    return torch.cat([edges[:, edges[0] != edges[1]], loops], 1)


def summed(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """The sum of the rows of each node."""
    shape = [-1] + [1] * (rows.dim() - 1)
    return rows.new_zeros(count, *rows.shape[1:]).scatter_add_(0, index.view(shape).expand_as(rows), rows)


class Convolution(nn.Module):
    """T. Kipf and M. Welling, "Semi-Supervised Classification with Graph Convolutional Networks", 2017."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        edges = with_loops(edges, len(x))
        source, target = edges[0], edges[1]
        degree = summed(torch.ones(edges.shape[1], device=x.device), target, len(x))
        scale = degree.pow_(-0.5).masked_fill_(degree == float("inf"), 0.0)
        weight = scale[source] * scale[target]
        return summed(weight.view(-1, 1) * self.lin(x).index_select(0, source), target, len(x))


class Attention(nn.Module):
    """P. Veličković et al., "Graph Attention Networks", 2018: a softmax over the edges of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.scores = nn.Linear(6, 4), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        edges, h = with_loops(edges, len(x)), self.lin(x)
        source, target = edges[0], edges[1]
        score = F.leaky_relu((h * self.scores[0]).sum(-1)[source] + (h * self.scores[1]).sum(-1)[target], 0.2)
        largest = score.new_zeros(len(x)).scatter_reduce_(0, target, score.detach(), "amax", include_self=False)
        score = (score - largest.index_select(0, target)).exp()
        total = summed(score, target, len(x)) + 1e-16
        return summed((score / total.index_select(0, target)).unsqueeze(-1) * h[source], target, len(x))


def drawn() -> torch.Tensor:
    return torch.randint(NODES, (2, EDGES), generator=torch.Generator().manual_seed(0))


GRAPHS: dict[str, Callable[[], torch.Tensor]] = {
    "some loops": drawn,
    "no loops": lambda: torch.stack([drawn()[0], (drawn()[0] + 1) % NODES]),
    "loops alone": lambda: drawn()[:1].repeat(2, 1),
}


@pytest.mark.parametrize("plan", ["fsdp", 0, 1, 2])
@pytest.mark.parametrize("layer", [Convolution, Attention])
def test_layers_over_edges_have_equal_numbers(threads: Threads, layer: type[nn.Module], plan: str | int) -> None:
    """Whatever the edges are when the program runs: it is captured with one graph, and called with others."""
    torch.manual_seed(0)
    model, on, x = layer(), table.mesh((4,)), torch.randn(NODES, 6)
    for make in GRAPHS.values():
        sample = {"x": x, "edges": make()}
        if isinstance(plan, int):
            made = autopar.testing.random_plan(model, sample, on, seed=plan)
        else:
            made = autopar.plan(model, sample, on, strategy=plan)
        report = verify(model, sample, on, made, Options(), threads)
        assert report.ok, str(report)


@pytest.mark.parametrize("layer", [Convolution, Attention])
def test_one_program_runs_other_graphs(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = layer(), torch.randn(NODES, 6)
    parallel = autopar.parallelize(model, {"x": x, "edges": drawn()}, mesh=1)
    for make in GRAPHS.values():
        torch.testing.assert_close(parallel(x=x, edges=make()), model(x, make()))

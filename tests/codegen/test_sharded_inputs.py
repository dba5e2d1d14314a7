"""A rank passes its own part of the batch: the numbers of the whole batch, and errors for anything that is not a part of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.errors import ConstraintError, InputError
from autopar.runtime.storage import full_tensor, placements
from autopar.runtime.workers import WorkerPool

Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A mean loss over targets some of which are ignored, unevenly over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(32, 16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return functional.cross_entropy(self.head(x + self.drop(self.body(x))).flatten(0, 1), labels.flatten())


def batch(seed: int, samples: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(32, (2, samples, 6), generator=generator)
    return ids, labels.where(torch.rand(labels.shape, generator=generator) < torch.linspace(0.2, 1, samples)[:, None], -100)


def pair(mesh: tuple[int, ...], **options: object) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The same model twice: given whole batches, and given parts."""
    torch.manual_seed(0)
    model, made = Net(), []
    for inputs in ("whole", "sharded"):
        torch.manual_seed(1)  # of dropout
        made.append(autopar.parallelize(model, batch(0), mesh, device="h100", inputs=inputs, **options))
    return made[0], made[1]


def difference(whole: fx.GraphModule, parts: fx.GraphModule, given: object, sample: Batch) -> float:
    """The largest difference of loss and gradients between a whole batch and what this rank has of it."""
    losses = whole.step(*sample), parts.step(*given)  # type: ignore[misc]
    seen = [abs(losses[0] - losses[1])]
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in (one, other)]
        seen.append((local[0] - local[1]).abs().max())
        one.grad = other.grad = None
    return float(torch.stack(seen).max())


def equal(payload: tuple[tuple[int, ...], dict[str, object]]) -> tuple[float, int, int, list[list[int]]]:
    """The largest difference over two steps and an evaluation, this rank's share, and the shapes of its parts."""
    mesh, options = payload
    whole, parts = pair(mesh, **options)
    worst = 0.0
    for step in range(2):
        sample = batch(step)
        given = parts.shard(sample)
        worst = max(worst, difference(whole, parts, given, sample))
    assert [*map(type, whole.shard(sample))] == [torch.Tensor] * 2
    assert whole.shard(sample)[0] is sample[0], "a module that takes inputs whole is given them whole"
    with torch.no_grad():
        worst = max(worst, float((whole.eval()(*sample) - parts.eval()(*given)).abs()))
    return worst, parts.data_rank, parts.data_world, [list(tensor.shape) for tensor in given]


CASES = {
    "in micro-batches": ((2,), {"strategy": "fsdp", "microbatches": 2}, [0, 1], 2, [4, 6]),
    "two data ranks": ((2,), {"strategy": "ddp"}, [0, 1], 2, [4, 6]),
    "the sequence is split too": (
        (2, 2),
        {"constraints": {"ids": "S(0), S(1)", "labels": "S(0), S(1)"}},
        [0, 0, 1, 1],
        2,
        [4, 3],
    ),
    "one axis splits the batch": ((2, 2), {"strategy": "megatron"}, [0, 0, 1, 1], 2, [4, 6]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_parts_give_the_numbers_of_the_whole_batch(pool: WorkerPool, name: str) -> None:
    mesh, options, ranks, world, shape = CASES[name]
    found = pool.run(f"{__name__}:equal", (mesh, options), ranks=len(ranks), keep=True)
    assert max(one[0] for one in found) == 0.0
    assert [one[1:] for one in found] == [(rank, world, [shape, shape]) for rank in ranks]


def loaded(_: None) -> list[float]:
    """Differences over an epoch whose samples each rank loads itself, and of DTensors in the planned layout."""
    options = {"constraints": {"ids": "S(0), S(1)", "labels": "S(0), I"}}
    whole, parts = pair((2, 2), **options)
    dataset = TensorDataset(*batch(7, samples=20))
    loader = DataLoader(dataset, batch_sampler=parts.sampler(dataset, shuffle=True, seed=3))
    everything = DataLoader(dataset, batch_sampler=whole.sampler(dataset, shuffle=True, seed=3))
    found, seen = [], []
    for own, sample in zip(loader, everything, strict=True):
        assert len(own[0]) == 4
        assert torch.equal(parts.autopar.inputs.whole_samples("no input", own[1]), sample[1])
        found.append(difference(whole, parts, parts.shard(own, samples=True), sample))
        seen += [*map(tuple, sample[0].tolist())]
    assert len(seen) == len(set(seen)) == 16, "two whole batches of the twenty samples"
    mesh = parts.autopar.context.device_mesh
    ids, labels = parts.shard(sample)
    where = [Shard(0), Shard(1)]
    given = DTensor.from_local(ids, mesh, where), labels
    found.append(difference(whole, parts, given, sample))
    return found


def test_every_rank_loads_its_own_samples_and_gives_dtensors_or_local_tensors(pool: WorkerPool) -> None:
    assert pool.run(f"{__name__}:loaded", ranks=4, keep=True) == [[0.0, 0.0, 0.0]] * 4


def refused(_: None) -> None:
    whole, parts = pair((2, 2), strategy="megatron")
    sample, rank = batch(0), dist.get_rank()
    ids, labels = parts.shard(sample)
    with pytest.raises(InputError, match=r"another shape than planned: dim 0 is 8, planned 4|refused on rank 1"):
        parts(*(sample if rank == 1 else (ids, labels)))
    with pytest.raises(InputError, match=r"same part of ids were given different values\n +ranks +rank 3 differs from rank 2"):
        parts(ids + (rank == 3), labels)
    mesh = parts.autopar.context.device_mesh
    other = DTensor.from_local(ids[:, :3], mesh, [Shard(0), Shard(1)])
    with pytest.raises(InputError, match="argument ids is a DTensor in another layout than the planned one"):
        parts(other, labels)
    with pytest.raises(InputError, match="argument ids is a DTensor, but the module takes the whole batch"):
        whole(other, sample[1])
    with pytest.raises(InputError, match=r"argument ids cannot be cut as the plan splits it"):
        parts.shard((sample[0][:7], sample[1]))
    with pytest.raises(InputError, match="the data set has 4 samples, fewer than the batch of 8"):
        parts.sampler(range(4))
    with pytest.raises(InputError, match="ranks have different shapes of weights, which is not an input of the plan"):
        parts.autopar.inputs.whole_samples("weights", ids[:, : 1 + rank])
    assert torch.isfinite(parts(ids, labels)), "and the module serves the next call"


def test_what_is_no_part_of_the_batch_is_an_error_on_every_rank(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:refused", ranks=4, keep=True)


def resized(_: None) -> float:
    whole, parts = pair((2,), strategy="ddp", dynamic={"batch": 0})
    sample = batch(4, samples=12)
    return difference(whole, parts, parts.shard(sample), sample)


def test_parts_of_a_batch_of_another_size(pool: WorkerPool) -> None:
    assert pool.run(f"{__name__}:resized", ranks=2, keep=True) == [0.0, 0.0]


def staged(_: None) -> list[float]:
    """Differences of losses and gradients over an epoch of pipeline stages, beside the user's module on whole batches.

    Then DTensors in the planned layout; and a rank is given what the others of its share are not.
    """
    torch.manual_seed(0)  # the same weights on every rank
    model = Net().double().eval()
    mesh, options = {"pp": 2, "dp": 2}, {"pipeline": "pp", "strategy": "fsdp", "microbatches": 2}
    parallel = autopar.parallelize(model, batch(0), mesh, inputs="sharded", device="h100", **options)
    rank, found = dist.get_rank(), []
    assert (parallel.data_rank, parallel.data_world) == (rank % 2, 2)
    dataset = TensorDataset(*batch(7, samples=20))
    loader = DataLoader(dataset, batch_sampler=parallel.sampler(dataset, shuffle=True, seed=3))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    for own, rows in zip(loader, order[:16].split(8), strict=True):
        assert len(own[0]) == 4
        found.append(float(parallel.step(*parallel.shard(own, samples=True)) - trained(model, dataset[rows])))
    own, (ids, labels) = parallel.autopar.inputs, parallel.shard(dataset[rows])
    where = placements(own.layout("ids"), (8, 6), (2, 2))
    given = DTensor.from_local(ids, own.context.device_mesh, where)
    found.append(float(parallel.step(given, labels) - trained(model, dataset[rows])))
    expected = dict(model.named_parameters())
    found += [float((full_tensor(p.grad) - expected[name].grad).abs().max()) for name, p in parallel.named_parameters()]
    with pytest.raises(InputError, match=r"same part of ids were given different values\n +ranks +rank 3 differs from rank 1"):
        parallel.step(ids + (rank == 3), labels)
    return found


def trained(model: nn.Module, sample: Batch) -> torch.Tensor:
    """The loss of a step; gradients add up."""
    loss: torch.Tensor = model(*sample)
    loss.backward()
    return loss.detach()


def test_ranks_of_all_stages_load_the_samples_of_their_share(pool: WorkerPool) -> None:
    for found in pool.run(f"{__name__}:staged", ranks=4, keep=True):
        assert len(found) > 4
        assert max(map(abs, found)) < 1e-12


def test_an_unknown_way_of_giving_inputs_is_refused() -> None:
    with pytest.raises(ConstraintError, match="inputs='halves' is not known"):
        autopar.parallelize(Net(), batch(0), (1,), inputs="halves")

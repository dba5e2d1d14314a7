"""Which part of every input of a call a rank gives: the whole batch, or its own part in the plan's layout.

    whole:    every rank gives the same batch, and the emitted code slices it
    sharded:  a rank passes the part that it computes with: a plain tensor, or a DTensor in the planned placements

Micro-batches cut the whole batch before the mesh does, so that a part has samples of every one of them: in the digits of a
layout that is the layout of a micro-batch, as it stands.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from numbers import Integral

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import Sampler

from autopar.errors import InputError, LayoutError
from autopar.ir.layout import I, Layout, Shape, each_split, join, parse, shard, text
from autopar.runtime.first_message import before_message
from autopar.runtime.storage import placements
from autopar.runtime.world import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class InputParts:
    """How the inputs of a call are distributed over ranks.

    `shapes` are those of the whole batch and `layouts` the plan's, by path of the input; unless `sharded`, ranks pass inputs
    whole.
    """

    context: Context
    shapes: Mapping[str, Shape]
    layouts: Mapping[str, Layout]
    sharded: bool

    def layout(self, path: str) -> Layout:
        """The layout in which an input is passed: all I if it is whole on every rank."""
        return self.layouts[path] if self.sharded else (I,) * len(self.context.axes)

    def resized(self, shapes: Mapping[str, Shape]) -> InputParts:
        """The parts of a batch of other sizes; raises InputError if it cannot be cut like this."""
        layouts = {path: self._at(path, shape) for path, shape in shapes.items()}
        return replace(self, shapes=shapes, layouts=layouts)

    def counts(self, path: str) -> Shape:
        """Into how many parts each dim of an input is cut between ranks."""
        ones = [1] * len(self.shapes[path])
        for axis, state in each_split(self.layout(path)):
            ones[state.dim] *= self.context.mesh.sizes[axis]
        return tuple(ones)

    def local(self, path: str, given: torch.Tensor) -> torch.Tensor:
        """The emitted code's tensor for a rank's argument; raises InputError for a DTensor in another layout."""
        if not isinstance(given, DTensor):
            return given
        own, sizes = self.context.device_mesh, self.context.mesh.sizes
        if not self.sharded:
            raise InputError(
                f"argument {path} is a DTensor, but the module takes the whole batch on every rank",
                fix='autopar.parallelize(..., inputs="sharded"), or give the whole tensor',
            )
        layout = self._at(path, tuple(given.shape))
        wanted = placements(layout, tuple(given.shape), sizes)
        if own is None or given.device_mesh != own or tuple(given.placements) != wanted:
            raise InputError(
                f"argument {path} is a DTensor in another layout than the planned one",
                given=f"{given.placements} on {given.device_mesh}",
                planned=f"{wanted} on {own}: {text(layout, tuple(given.shape), sizes)}",
                fix=f"{path}.redistribute(...), or parallel.shard(batch)",
            )
        part: torch.Tensor = given.to_local(grad_placements=wanted)
        return part

    def part(self, path: str, tensor: torch.Tensor, *, samples: bool = False) -> torch.Tensor:
        """This rank's part of a whole input, as a copy; with `samples` the input has only its `indices` of the batch."""
        shape = tuple(tensor.shape)
        samples = samples and self._has_samples(path) and self.world > 1
        if samples and shape:
            shape = (shape[0] * self.world, *shape[1:])
        layout = self._at(path, shape)
        if all(state == I for state in layout):
            return tensor
        sizes, here = self.context.mesh.sizes, self.context.coordinates
        if samples:
            first = tuple(state if state.dim == 0 else I for state in layout)
            layout = tuple(I if state.dim == 0 else state for state in layout)
            own = shard(torch.arange(shape[0]), first, sizes, here)
            tensor = tensor[torch.searchsorted(self.indices(shape[0]), own)]
        return shard(tensor, layout, sizes, here).clone(memory_format=torch.contiguous_format)

    def whole(self, path: str, part: torch.Tensor) -> torch.Tensor:
        """The whole input from all ranks' parts; all ranks call it, as it all-gathers."""
        shape = tuple(size * count for size, count in zip(part.shape, self.counts(path), strict=True))
        return part if shape == tuple(part.shape) else self._joined(part, shape, self._at(path, shape))

    def whole_samples(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Gather a tensor that is not an input of the plan from each rank's samples to all samples; all ranks call it.

        Raises InputError where ranks have other shapes.
        """
        if self.world == 1 or part.ndim == 0:
            return part
        shapes: list[object] = [None] * self.context.mesh.size
        before_message()
        dist.all_gather_object(shapes, tuple(part.shape))
        if odd := next((shape for shape in shapes if shape != shapes[0]), None):
            raise InputError(
                f"ranks have different shapes of {name}, which is not an input of the plan",
                given=f"{shapes[0]} and {odd}",
                fix="pad it alike",
            )
        shape = (len(part) * self.world, *part.shape[1:])
        return self._joined(part, shape, self._samples(shape[0]))

    def _joined(self, part: torch.Tensor, shape: Shape, layout: Layout) -> torch.Tensor:
        """The whole of what lies on the ranks in a layout; all ranks call it."""
        own = part.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.context.mesh.size)]
        before_message()
        dist.all_gather(parts, own)
        return join([parts[rank] for rank in self._ranks], shape, layout, self.context.mesh.sizes)

    def indices(self, batch: int | None = None) -> torch.Tensor:
        """The places in the whole batch of this rank's samples."""
        size = self.batch if batch is None else batch
        return shard(torch.arange(size), self._samples(size), self.context.mesh.sizes, self.context.coordinates)

    @property
    def batch(self) -> int:
        """The samples of the whole batch: dim 0 of the first input."""
        shape = next(iter(self.shapes.values()))
        if not shape:
            raise InputError(
                "the first input is a scalar and has no samples", fix="a batch whose first input has them in dim 0"
            )
        return shape[0]

    @property
    def world(self) -> int:
        """The number of shares of the samples: ranks that compute with the same ones count once."""
        return math.prod(self.context.mesh.sizes[axis] for axis, _ in each_split(self._samples()))

    @property
    def rank(self) -> int:
        """The index of this rank's share of the samples, out of `world`."""
        firsts = sorted(dict.fromkeys(map(self._first_sample, self._coordinates)))
        return firsts.index(self._first_sample(self.context.coordinates))

    def owners(self, path: str) -> list[int]:
        """For every rank, the first one that gives the same part of an input."""
        axes = [axis for axis, _ in each_split(self.layout(path))]
        firsts: dict[tuple[int, ...], int] = {}
        found = [0] * self.context.mesh.size
        by_rank = dict(zip(self._ranks, self._coordinates, strict=True))
        for rank in sorted(by_rank):
            found[rank] = firsts.setdefault(tuple(by_rank[rank][axis] for axis in axes), rank)
        return found

    @property
    def split(self) -> tuple[str, ...]:
        """The inputs that ranks pass in different parts."""
        return tuple(path for path in self.shapes if any(count > 1 for count in self.counts(path)))

    @property
    def _coordinates(self) -> list[tuple[int, ...]]:
        """The coordinates of all places of the mesh, in row-major order."""
        return list(itertools.product(*map(range, self.context.mesh.sizes)))

    @property
    def _ranks(self) -> list[int]:
        """The rank at every place of the mesh, in row-major order."""
        grid = self.context.device_mesh
        return list(range(self.context.mesh.size)) if grid is None else list(map(int, grid.mesh.flatten().tolist()))

    def _has_samples(self, path: str) -> bool:
        return self.shapes[path][:1] == (self.batch,)

    def _samples(self, batch: int | None = None) -> Layout:
        """The layout of the samples: the axes that split dim 0 alike in every input that has them."""
        having = [
            self._at(path, (self.batch if batch is None else batch, *shape[1:]))
            for path, shape in self.shapes.items()
            if self._has_samples(path)
        ]
        return tuple(
            first if first.kind == "S" and first.dim == 0 and all(state == first for state in others) else I
            for first, *others in zip(*having, strict=True)
        )

    def _first_sample(self, coordinates: tuple[int, ...]) -> int:
        return int(shard(torch.arange(self.batch), self._samples(), self.context.mesh.sizes, coordinates)[0])

    def _at(self, path: str, shape: Shape) -> Layout:
        """How an input of this whole shape is given, where sizes may be others than planned; raises InputError."""
        layout, planned, sizes = self.layout(path), self.shapes[path], self.context.mesh.sizes
        if shape == planned or all(state == I for state in layout):
            return layout
        words = text(layout, planned, sizes)
        try:
            return tuple(state or I for state in parse(words, shape, sizes, path))
        except LayoutError as error:
            raise InputError(
                f"argument {path} cannot be cut as the plan splits it",
                given=list(shape),
                planned=f"{list(planned)}, split {words}",
                fix="a size that is a multiple of the parts: of the ranks that split it, times the micro-batches",
            ) from error


class BatchSampler(Sampler[list[int]]):
    """The indices of this rank's samples of a data set, batch by batch: the `batch_sampler` of a DataLoader.

    Create it with the same arguments on every rank. With `shuffle` an order is drawn for every epoch from `seed` and the epoch,
    which `set_epoch` sets. An incomplete last batch is dropped.

    To resume within an epoch, `start(epoch, step)` skips the batches that were trained on.
    """

    def __init__(self, parts: InputParts, dataset: Sized, *, shuffle: bool = False, seed: int = 0) -> None:
        if not isinstance(dataset, Sized):
            fix = "a data set with __len__ and __getitem__; of one that is only iterated, parallel.shard(batch)"
            raise InputError(f"the data set has no length: it is a {type(dataset).__name__}", fix=fix)
        self.size, self.batch, self.own = len(dataset), parts.batch, parts.indices().tolist()
        self.shuffle, self.seed, self.epoch, self.first = shuffle, _integer("seed", seed), 0, 0
        if self.size < self.batch:
            raise InputError(
                f"the data set has {self.size} samples, fewer than the batch of {self.batch}", fix="plan with a smaller batch"
            )

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from now on."""
        self.epoch = _integer("epoch", epoch)

    def start(self, epoch: int, step: int) -> None:
        """Continue in this epoch after so many of its batches; later epochs are whole."""
        if not 0 <= _integer("step", step) <= len(self):
            raise InputError(f"an epoch has {len(self)} batches, and cannot go on after {step}", fix="step % len(sampler)")
        self.set_epoch(epoch)
        self.first = step

    def __len__(self) -> int:
        return self.size // self.batch

    def order(self) -> Sequence[int]:
        """The samples in the order of this epoch."""
        if not self.shuffle:
            return range(self.size)
        order: list[int] = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        return order

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        skipped, self.first = self.first, 0
        for first in range(skipped * self.batch, len(self) * self.batch, self.batch):
            yield [order[first + place] for place in self.own]


def _integer(name: str, given: object) -> int:
    if not isinstance(given, Integral):
        raise InputError(f"{name}={given!r} is not an integer")
    return int(given)


__all__ = ["BatchSampler", "InputParts"]

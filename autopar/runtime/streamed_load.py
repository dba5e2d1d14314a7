"""Loading: each rank reads its parts of the tensors of a checkpoint, one after the other, and no tensor whole.

A checkpoint is anything that can be read in ranges (`TensorReader`); a stored tensor knows by its layout which ranges of every
dim are this rank's. Nothing is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.ir.layout import I, Shape, shard, split
from autopar.runtime.disk import on_disk, seal
from autopar.runtime.host_memory import moved
from autopar.runtime.initialize import Parallel, install
from autopar.runtime.storage import layout_of, stored_like


class TensorReader(Protocol):
    """A checkpoint whose tensors can be read in parts."""

    def names(self) -> Collection[str]:
        """The tensors in it."""
        ...

    def shape(self, name: str) -> Shape:
        """The whole shape of one."""
        ...

    def read(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """A range of one; it may be a view of the file."""
        ...


def load(parallel: nn.Module, reader: TensorReader, aliases: Mapping[str, str]) -> None:
    """Fill a parallel module's parameters and persistent buffers; `aliases` has another name of a tensor in the checkpoint.

    A tensor of several names is found under any of them. Tensors on meta are replaced. Raises InputError, before anything is
    loaded, for tensors that the checkpoint lacks or has in another shape.
    """
    assert isinstance(parallel, Parallel)
    found = _found(parallel, reader, aliases)
    for (stored, names), source in found:
        layout = layout_of(stored) if isinstance(stored, DTensor) else None
        part = stored.to_local() if isinstance(stored, DTensor) else stored
        new = torch.empty_like(part, device=parallel.autopar.context.device) if part.is_meta else part.detach()
        if part.is_meta and (home := parallel.autopar.place(names[0])) != I:
            new, layout = moved(new, home, parallel.autopar.context.disk), layout and (*layout[:-1], home)
        with torch.no_grad():
            for here, there in ranges(stored):
                new[here].copy_(reader.read(source, there))
        if on_disk(new):
            seal(new)
        if part.is_meta:
            filled = stored_like(stored, new, layout, parallel.autopar.storage)
            for name in names:
                install(parallel, name, filled)


def ranges(stored: torch.Tensor) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where this rank's part of a stored tensor is: ranges of the part, and the ranges of the whole that belong there."""
    if not stored.ndim:
        return [((), ())]
    dims = [[*zip(_lengths(runs), runs, strict=True)] for runs in map(_runs, _indices(stored))]
    return [(tuple(here for here, _ in one), tuple(there for _, there in one)) for one in itertools.product(*dims)]


def _indices(stored: torch.Tensor) -> list[torch.Tensor]:
    """For every dim the indices of the whole that this rank holds."""
    if not isinstance(stored, DTensor):
        return [torch.arange(size) for size in stored.shape]
    layout, mesh = layout_of(stored), stored.device_mesh
    sizes, here = tuple(mesh.shape), tuple(mesh.get_coordinate() or ())
    alone = [
        tuple(split(0, state.stride) if state.kind == "S" and state.dim == dim else I for state in layout)
        for dim in range(stored.ndim)
    ]
    return [shard(torch.arange(size), one, sizes, here) for size, one in zip(stored.shape, alone, strict=True)]


def _runs(indices: torch.Tensor) -> list[slice]:
    """Indices as ranges without gaps."""
    if not len(indices):
        return []
    cuts = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    edges = itertools.pairwise([0, *cuts, len(indices)])
    return [slice(int(indices[first]), int(indices[last - 1]) + 1) for first, last in edges]


def _lengths(runs: list[slice]) -> list[slice]:
    """Ranges of these lengths, one after the other."""
    edges = [0, *itertools.accumulate(run.stop - run.start for run in runs)]
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def _found(
    parallel: nn.Module, reader: TensorReader, aliases: Mapping[str, str]
) -> list[tuple[tuple[torch.Tensor, list[str]], str]]:
    """The tensors that a state dict has, each with all its names, and its name in the checkpoint."""
    saved = set(parallel.state_dict())
    named = (*parallel.named_parameters(remove_duplicate=False), *parallel.named_buffers(remove_duplicate=False))
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    there, found, missing = set(reader.names()), [], []
    for tensor, names in groups.values():
        persistent = [name for name in names if name in saved]
        source = next((one for name in persistent for one in (name, aliases.get(name)) if one in there), None)
        if source is not None:
            found.append(((tensor, names), source))
        elif persistent:
            missing.append(persistent[0])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"the checkpoint has no {missing[0]}{more}",
            missing=", ".join(missing[:8]) + (", ..." if len(missing) > 8 else ""),
            checkpoint=", ".join(sorted(there)[:8]) + (", ..." if len(there) > 8 else ""),
            fix="give the checkpoint of this model: the names of its tensors are those of the model's state_dict()",
        )
    for (tensor, names), source in found:
        if tuple(tensor.shape) != reader.shape(source):
            what = f"{names[0]} has the shape {tuple(tensor.shape)}, but {reader.shape(source)} in the checkpoint"
            raise InputError(what, fix="give the checkpoint of a model of the same sizes")
    return found


__all__ = ["TensorReader", "load", "ranges"]

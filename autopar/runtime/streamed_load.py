"""Loads a checkpoint: each rank reads only its own parts of the tensors, one tensor after the other.

A checkpoint is anything that can be read in ranges (`TensorReader`); the layout of a stored tensor tells which ranges of every
dim belong to this rank. Ranks do not communicate.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.ir.layout import I, Shape, shard, split
from autopar.runtime.disk import on_disk, seal
from autopar.runtime.host_memory import moved
from autopar.runtime.initialize import Parallel, install
from autopar.runtime.storage import layout_of, local_part_like, stored_like, to_local


class TensorReader(Protocol):
    """A checkpoint whose tensors can be read in parts."""

    def names(self) -> Collection[str]:
        """The names of the tensors in the checkpoint."""
        ...

    def shape(self, name: str) -> Shape:
        """The full shape of a tensor."""
        ...

    def read(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """A range of a tensor; it may be a view of the file."""
        ...


def load(parallel: nn.Module, reader: TensorReader, aliases: Mapping[str, str]) -> None:
    """Fill a parallel module's parameters and persistent buffers; `aliases` has another name of a tensor in the checkpoint.

    A tensor with several names is found under any of them. Tensors on meta are replaced. Raises InputError, before anything is
    loaded, for tensors that the checkpoint lacks or has in another shape.
    """
    assert isinstance(parallel, Parallel)
    for (stored, names), source in _found(parallel, reader, aliases):
        held = stored
        if stored.is_meta:
            part = torch.empty_like(to_local(stored).detach(), device=parallel.autopar.context.device)
            held = _replaced(parallel, stored, names, part)
        part = to_local(held).detach()
        with torch.no_grad():
            for here, there in ranges(held):
                part[here].copy_(reader.read(source, there))
        if on_disk(part):
            seal(part)


def fill(parallel: nn.Module, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace a parallel module's meta tensors by given values, under all their names; returns the stored tensors.

    A value is a whole tensor, of which this rank takes its part, or a DTensor; it is cast to the plan's dtype, and copied only
    if necessary.
    """
    assert isinstance(parallel, Parallel)
    filled: dict[str, torch.Tensor] = {}
    for stored, names in _groups(parallel):
        if known := [name for name in names if name in given]:
            value = given[known[0]].detach()
            if isinstance(value, DTensor) and isinstance(stored, DTensor):
                part = value.redistribute(stored.device_mesh, stored.placements).to_local()
            else:
                part = local_part_like(value, stored)
            part = part.to(parallel.autopar.context.device, stored.dtype).contiguous()
            if part.untyped_storage().nbytes() != part.nbytes:  # the whole would stay in memory
                part = part.clone()
            filled |= dict.fromkeys(known, _replaced(parallel, stored, names, part))
    return filled


def _replaced(parallel: Parallel, stored: torch.Tensor, names: Sequence[str], part: torch.Tensor) -> torch.Tensor:
    """Store a part where the plan wants it, in place of the meta tensor under all its names; returns the stored tensor."""
    layout, home = layout_of(stored) if isinstance(stored, DTensor) else None, parallel.autopar.place(names[0])
    if home != I:
        part, layout = moved(part, home, parallel.autopar.context.disk), layout and (*layout[:-1], home)
    made = stored_like(stored, part, layout, parallel.autopar.storage)
    assert isinstance(parallel, nn.Module)
    for name in names:
        install(parallel, name, made)
    return made


def ranges(stored: torch.Tensor) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Which ranges of this rank's part of a stored tensor correspond to which ranges of the whole."""
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


def _groups(parallel: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """The parameters and buffers of a module, each with all its names."""
    named = (*parallel.named_parameters(remove_duplicate=False), *parallel.named_buffers(remove_duplicate=False))
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [*groups.values()]


def _found(
    parallel: nn.Module, reader: TensorReader, aliases: Mapping[str, str]
) -> list[tuple[tuple[torch.Tensor, list[str]], str]]:
    """The tensors of a state dict, each with all its names and its name in the checkpoint."""
    saved = set(parallel.state_dict())
    there, found, missing = set(reader.names()), [], []
    for tensor, names in _groups(parallel):
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


__all__ = ["TensorReader", "fill", "load", "ranges"]

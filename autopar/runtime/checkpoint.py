"""Support in torch.distributed.checkpoint for DTensors whose dim is split in blocks.

torch describes a rank's part of a DTensor as one box, but a blocked split has several: torch 2.13 then refuses to save it and
reads wrong elements back. Checkpointing asks a DTensor for its boxes through three methods, and there may be several;
`install` gives blocked DTensors (optimizer states too, since they inherit the placements) the true ones. Other DTensors keep
torch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.ir.layout import take

IndexRun = tuple[int, int, int]  # start in the whole, length, start in the part
# torch's own methods are not annotated
OF_TORCH: tuple[Callable[..., list[WriteItem]], Callable[..., list[ChunkStorageMetadata]], Callable[..., torch.Tensor]] = (
    DTensor.__create_write_items__,
    DTensor.__create_chunk_list__,
    DTensor.__get_tensor_shard__,
)


def runs(
    size: int, dim: int, placements: Sequence[Placement], sizes: Sequence[int], coordinates: Sequence[int]
) -> list[IndexRun]:
    """The indices of a dim that a rank holds, as contiguous runs; the mesh divides the dim."""
    held = torch.arange(size)
    for placement, parts, index in zip(placements, sizes, coordinates, strict=True):
        if placement.is_shard(dim) or (isinstance(placement, _StridedShard) and placement.dim == dim):
            left = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            held = take(held, 0, left, parts, index)
    breaks = [0, *(int(i) + 1 for i in (held.diff() != 1).nonzero()), len(held)]
    return [(int(held[start]), end - start, start) for start, end in itertools.pairwise(breaks) if end > start]


def boxes(stored: DTensor) -> list[tuple[IndexRun, ...]]:
    """The boxes of the global tensor that this rank holds, each with one run per dim."""
    sizes, here = stored.device_mesh.mesh.shape, stored.device_mesh.get_coordinate()
    assert here is not None
    dims = (runs(size, dim, stored.placements, sizes, here) for dim, size in enumerate(stored.shape))
    return list(itertools.product(*dims))


def install() -> None:
    """Patch DTensor so that checkpointing sees the boxes of blocked splits; idempotent."""
    DTensor.__create_write_items__ = _write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = _chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = _tensor_shard  # type: ignore[method-assign]


def _blocked(stored: DTensor) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in stored.placements)


def _chunk(box: tuple[IndexRun, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(start for start, _, _ in box), sizes=torch.Size(length for _, length, _ in box)
    )


def _write_items(self: DTensor, fqn: str, object: object) -> list[WriteItem]:
    if not _blocked(self):
        return OF_TORCH[0](self, fqn, object)
    properties = TensorProperties.create_from_tensor(self.to_local())
    chunks = map(_chunk, boxes(self))
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
        )
        for chunk in chunks
    ]


def _chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    return list(map(_chunk, boxes(self))) if _blocked(self) else OF_TORCH[1](self)


def _tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The part of the local tensor that holds the box at this offset: a view, which loading writes to."""
    if not _blocked(self):
        return OF_TORCH[2](self, index)
    part = self.to_local()
    box = next(box for box in boxes(self) if _chunk(box).offsets == index.offset)
    for dim, (_, length, start) in enumerate(box):
        part = part.narrow(dim, start, length)
    return part

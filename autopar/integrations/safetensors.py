"""Weights in safetensors files, as from Hugging Face: each rank reads only its parts of the tensors.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parallel = autopar.parallelize(model, batch, mesh)
    load_pretrained(parallel, model, folder)

Needs the package safetensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from autopar import files
from autopar.codegen.pipeline_module import PipelineModule
from autopar.errors import InputError
from autopar.runtime.initialize import initialize
from autopar.runtime.storage import full_tensor
from autopar.runtime.streamed_load import load

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
GATHERED = "the whole tensors of all stages"  # as errors call what is exchanged
LARGEST_INDEX = 1 << 28  # bytes of an index that is read


class SafetensorsReader:
    """Reads a folder of safetensors files, one open at a time: a file is memory-mapped while it is read."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: tuple[str, safe_open] | None = None
        self._files = self._index()

    def names(self) -> Collection[str]:
        """The tensors in the folder, by file."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """A range of a tensor, as a view of the file's memory."""
        file = self._file(name)
        found: torch.Tensor = file.get_slice(name)[where] if where else file.get_tensor(name)
        return found

    def close(self) -> None:
        """Close the file that is open."""
        if self._open:
            self._open[1].__exit__(None, None, None)
        self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def _index(self) -> dict[str, str]:
        """The file of every tensor."""
        if (index := self.folder / INDEX).is_file():
            held = _weight_map(index)
        elif (self.folder / SINGLE).is_file():
            held = [SINGLE]
        else:
            what = f"{self.folder} has neither {SINGLE} nor {INDEX}"
            raise InputError(what, fix="a folder that save_pretrained wrote, or a downloaded one")
        found: dict[str, str] = {}
        for file in held:
            found |= dict.fromkeys(self._opened(file).keys(), file)
        return found

    def _file(self, name: str) -> safe_open:
        return self._opened(self._files[name])

    def _opened(self, file: str) -> safe_open:
        if self._open is None or self._open[0] != file:
            self.close()
            try:
                self._open = file, safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"{self.folder / file} cannot be read: {error}", fix="copy or download it again") from error
        return self._open[1]


def load_pretrained(parallel: nn.Module, model: nn.Module, folder: str | Path) -> tuple[str, ...]:
    """Fill a parallel module from the safetensors files of a folder; each rank reads its parts only.

    Every rank calls it, with a folder that it can read. Meta tensors that are not in the checkpoint (buffers such as rotary
    frequencies) are initialised by the model's own code. Create the optimizer afterwards: meta tensors are replaced.

    Args:
        parallel: the module that `autopar.parallelize` returned.
        model: the model that was passed to it.
        folder: written by `save_pretrained`, or downloaded from the Hub.

    Returns:
        The tensors in the files that the model does not have.

    Raises:
        InputError: a file is missing or damaged, or a tensor is missing or has another shape.
    """
    with SafetensorsReader(folder) as reader:
        names = parallel.autopar.stages.saved if isinstance(parallel, PipelineModule) else parallel.state_dict().keys()
        aliases = _aliases(names, _prefix(model))
        load(parallel, reader, aliases)
        known = {*names, *aliases.values()}
        unknown = tuple(sorted(name for name in reader.names() if name not in known))
    if any(tensor.is_meta for tensor in (*parallel.parameters(), *parallel.buffers())):
        initialize(parallel, model)
    return unknown


def full_state_dict(parallel: nn.Module) -> dict[str, torch.Tensor]:
    """The whole tensors of a parallel module's state dict on the host of rank 0; elsewhere, an empty dict.

    Every rank calls it: tensors are gathered one by one and kept only on rank 0, to which other pipeline stages send theirs.
    Tied names share a tensor.
    """
    found: dict[str, torch.Tensor] = {}
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    for same, whole in _whole_tensors(parallel):
        if first:
            tensor = whole.to("cpu", copy=True).contiguous()
            found |= dict.fromkeys(same, tensor)
    return found


def _whole_tensors(parallel: nn.Module) -> Iterator[tuple[Sequence[str], torch.Tensor]]:
    """Each tensor of a state dict whole, under all of its names; in a pipeline on the ranks that store it and on rank 0."""
    own = parallel.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, stored in own.items():
        tied.setdefault(id(stored), []).append(name)
    if not isinstance(parallel, PipelineModule):
        yield from ((names, full_tensor(own[names[0]].detach())) for names in tied.values())
        return
    rank, sent = parallel.autopar.stages.rank, set[str]()
    with_rank_0 = not any(parallel.autopar.storage.coordinates)  # along the pipeline's axis
    described = [(tuple(names), tuple(own[names[0]].shape), own[names[0]].dtype) for names in tied.values()]
    for place, tensors in enumerate(rank.described_by_all(described)):
        for names, shape, dtype in tensors:
            if names[0] in sent:  # several stages read it
                continue
            sent.add(names[0])
            if place == rank.index:
                whole = full_tensor(own[names[0]].detach())
                if place and with_rank_0:
                    with rank.exchanging(GATHERED):
                        rank.send(whole.to(rank.device).contiguous(), 0).wait()
                yield names, whole
            elif with_rank_0 and rank.index == 0:
                whole = torch.empty(shape, dtype=dtype, device=rank.device)
                with rank.exchanging(GATHERED):
                    rank.receive(whole, place).wait()
                yield names, whole


def _weight_map(index: Path) -> list[str]:
    """The files that an index names, always inside of this folder."""
    try:
        found: Any = files.parse(files.read(index, LARGEST_INDEX))
        named = sorted(set(found["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is damaged: {error!r}", fix="copy or download it again") from error
    for file in named:
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index} names {file!r}, which is not a file of its folder")
    return named


def _prefix(model: nn.Module) -> str:
    """The attribute of a Hugging Face model with a head that holds the base model."""
    found = next((vars(kind)["base_model_prefix"] for kind in type(model).__mro__ if "base_model_prefix" in vars(kind)), "")
    return found if isinstance(found, str) else ""


def _aliases(names: Collection[str], prefix: str) -> dict[str, str]:
    """The names of tensors in the checkpoint of the base model."""
    start = f"{prefix}."
    return {name: name.removeprefix(start) for name in names if name.startswith(start)} if prefix else {}


__all__ = ["SafetensorsReader", "full_state_dict", "load_pretrained"]

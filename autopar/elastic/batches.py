"""The global batches of a training run and the position in them, which survives restarts and changes in the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from autopar.elastic.generators import HostState, host_state, set_host_state
from autopar.errors import InputError

Data = Iterable[Any] | Callable[[int], Any]  # a loader of batches, or a function from the number of a step to its batch


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader that knows its position, as torchdata's `StatefulDataLoader` does."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Batches:
    """Yields the batch of each step; a loader starts over when it ends.

    A loader's position is the number of batches taken in this epoch, and the states of the host's generators and its own at the
    start of the epoch, which reproduce its shuffling. To resume, those batches are loaded again and dropped, unless the loader
    keeps its own position.
    """

    def __init__(self, data: Data) -> None:
        if not callable(data) and not isinstance(data, Iterable):
            what = f"data is a {type(data).__name__}, which is neither a loader nor a function"
            raise InputError(what, fix="a DataLoader of global batches, or a function from the number of a step to its batch")
        self.data = data
        self.epoch, self.taken = 0, 0
        self._began: HostState = {}
        self._own: list[torch.Tensor] = []  # of the loader's generators, when the epoch began
        self._left: Iterator[Any] | None = None

    def take(self, step: int) -> Any:
        """Return the batch of a step. Raises InputError for an empty loader."""
        if not isinstance(self.data, Iterable):
            return self.data(step)
        for _ in range(2):
            if self._left is None:
                self._began, self.taken = host_state(), 0
                self._own = [generator.get_state() for generator in generators(self.data)]
                self._left = iter(self.data)
            for batch in self._left:
                self.taken += 1
                return batch
            self._left, self.epoch = None, self.epoch + 1
        raise InputError("data yields no batch", fix="a loader that can be iterated again and again; a generator cannot")

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        if not isinstance(self.data, Iterable):
            return {}
        own = self.data.state_dict() if isinstance(self.data, StatefulLoader) else None
        return {"epoch": self.epoch, "taken": self.taken, "began": self._began, "own": own, "generators": self._own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position; the host's generators are left as they were after the last batch taken."""
        if not isinstance(self.data, Iterable) or not state or not state["began"]:
            return
        self.epoch, self.taken, self._began = state["epoch"], state["taken"], state["began"]
        if isinstance(self.data, StatefulLoader) and state["own"] is not None:
            self.data.load_state_dict(state["own"])
            self._left = iter(self.data)
            return
        if self.epoch and getattr(self.data, "persistent_workers", False):
            iter(self.data)  # the first of a process draws a seed for its workers, which later epochs do not
        self._own = state.get("generators", [])
        set_host_state(self._began)
        for generator, began in zip(generators(self.data), self._own, strict=False):
            generator.set_state(began)
        self._left = iter(self.data)
        for number in range(self.taken):
            if next(self._left, self) is self:
                what = f"data ends after {number} batches, and {self.taken} of this epoch were taken before"
                raise InputError(what, fix="the loader of the run that is resumed, or a new folder of checkpoints")


def generators(loader: object) -> list[torch.Generator]:
    """The generators that a loader and its samplers use besides the host's, each once."""
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(place, "generator", None) for place in places)
    return list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))


__all__ = ["Batches", "Data", "StatefulLoader"]

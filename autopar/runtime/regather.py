"""A gathered weight is dropped after its use and gathered again for the backward.

Emitted code makes a gathered value with `regathered(gathers, conversion, x, axis)` inside `with gathers.active():`. When
autograd saves a tensor that lies in the memory of such a value (linear saves a transposed view, say), only its geometry is
kept, and the conversion runs again when the backward asks for it. What autograd does with the gradient is not touched.

    Gathered   how a value is made: a function of plain arguments and of other gathered values
    Saved      a tensor in the memory of a gathered value: one that autograd saved, or the source of another gathered value
    Use        the claim of a saved tensor on the gathered value

A value that was made again is kept until each of its uses was served, so that a backward makes it once; a second backward
(`retain_graph`) makes it anew. Memory is recognised by its storage, and a mark dies with the storage: a freed address is soon
used again by something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary

from autopar.runtime.collectives import BY_NAME
from autopar.runtime.world import Axis


class Gathered:
    """How a gathered value, which fills a storage of its own, is made again: `function(source, *arguments)`."""

    __slots__ = ("_arguments", "_function", "_served", "_source", "_stride", "_uses", "_value", "dtype", "round")

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        source: torch.Tensor | Saved,
        arguments: tuple[object, ...],
        first: torch.Tensor,
    ) -> None:
        self._function, self._source, self._arguments = function, source, arguments
        self._stride, self.dtype = first.stride(), first.dtype
        self._value: torch.Tensor | None = None
        self._uses = 0  # that exist
        self._served = 0  # of them, since the value was made
        self.round = 0  # how often the value was let go

    def value(self) -> torch.Tensor:
        """The value, made again unless it is still there from another use."""
        if self._value is None:
            source = self._source if isinstance(self._source, torch.Tensor) else self._source.tensor()
            with torch.no_grad():
                value = self._function(source, *self._arguments)
            alike = value.stride() == self._stride and not value.storage_offset()
            self._value = value if alike else value.new_empty_strided(value.size(), self._stride).copy_(value)
        return self._value

    def add(self) -> None:
        """One more use."""
        self._uses += 1

    def serve(self) -> None:
        """A use has got the value."""
        self._served += 1
        self._let_go()

    def remove(self, *, served: bool) -> None:
        """A use has ended; `served` if it has got the value that is there now."""
        self._uses -= 1
        self._served -= served
        self._let_go()

    def _let_go(self) -> None:
        if self._value is not None and self._served >= self._uses:
            self._value = None
            self._served = 0
            self.round += 1


class Use:
    """One reason to make a gathered value again; it ends with the object."""

    __slots__ = ("_of", "_round")

    def __init__(self, of: Gathered) -> None:
        self._of, self._round = of, -1
        of.add()

    def take(self) -> torch.Tensor:
        """The value; a use that asks twice counts once, as long as others wait for the same value."""
        value, now = self._of.value(), self._of.round
        if self._round != now:
            self._round = now
            self._of.serve()
        return value

    def __del__(self) -> None:
        self._of.remove(served=self._round == self._of.round)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor that lies in the memory of a gathered value, as geometry."""

    use: Use
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor, gathered: Gathered) -> Saved:
        """The geometry of a tensor."""
        return Saved(use=Use(gathered), size=tensor.size(), stride=tensor.stride(), offset=int(tensor.storage_offset()))

    def tensor(self) -> torch.Tensor:
        """The tensor, in the value made again."""
        return self.use.take().as_strided(self.size, self.stride, self.offset)


class Gathers:
    """The gathered values of a parallel model that are alive now, by the storage in which they lie."""

    def __init__(self) -> None:
        self._marks: MutableMapping[torch.UntypedStorage, Gathered] = WeakIdKeyDictionary()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around a forward: what autograd saves of gathered values is their geometry only."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def run(self, function: Callable[..., torch.Tensor], x: torch.Tensor, *arguments: object) -> torch.Tensor:
        """`function(x, *arguments)`, marked to be made again, unless it lies in the memory of `x` or nothing is saved at all.

        `x` is kept until the backward, unless it was made so itself.
        """
        value = function(x, *arguments)
        alias = value.untyped_storage() is x.untyped_storage()
        if torch.is_grad_enabled() and not alias and _fills_its_storage(value):
            made = self._gathered(x)
            origin = Saved.of(x, made) if made else x.detach()
            self._marks[value.untyped_storage()] = Gathered(function, origin, arguments, value)
        return value

    def _gathered(self, tensor: torch.Tensor) -> Gathered | None:
        found = self._marks.get(tensor.untyped_storage())
        return found if found and found.dtype == tensor.dtype else None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        gathered = self._gathered(tensor)
        return Saved.of(tensor, gathered) if gathered else tensor

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.tensor()

    def __deepcopy__(self, memo: dict[int, object]) -> Gathers:
        return Gathers()


def regathered(gathers: Gathers, conversion: str, x: torch.Tensor, axis: Axis, *place: int) -> torch.Tensor:
    """The conversion of this name, its result dropped after its use and made again for the backward.

    The target of a `call_function` node: `regathered(gathers, "all_gather__reduce_scatter", weight, dp, 0)`. (A name, since fx
    cannot print a function as an argument.) Such conversions may follow each other, with views between them.
    """
    return gathers.run(BY_NAME[conversion], x, axis, *place)


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()

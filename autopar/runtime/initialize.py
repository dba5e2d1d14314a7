"""Deferred initialisation: a model on meta is initialised by its own code, module by module, and each rank keeps its shard.

The model's code (`reset_parameters`, or Hugging Face's `initialize_weights`) runs on a copy of the model whose tensors are on
meta. When it reads or writes one of them, a materialised global tensor takes its place; when it proceeds to another module, the
global tensor is cut to this rank's shard and freed; when it returns (GPT-2 initialises some weights twice), it is gathered. All
ranks run the same code with the same seed, so global tensors are equal on all ranks, and equal to the sequential model's.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import InputError
from autopar.ir.layout import I, Layout, State, place, shard
from autopar.runtime.drawing import drawing
from autopar.runtime.host_memory import moved
from autopar.runtime.progress import progress
from autopar.runtime.random import agreed_seed
from autopar.runtime.storage import all_unsharded, full_tensor, layout_of, store, stored_like, to_dtensor, with_dtype
from autopar.runtime.world import Context


@runtime_checkable
class Resettable(Protocol):
    """A module that initialises the parameters and buffers that it holds itself: torch's own convention."""

    def reset_parameters(self) -> None: ...


@runtime_checkable
class OldResettable(Protocol):
    """A module with `reset_parameters` under the name that nn.MultiheadAttention and nn.Transformer use."""

    def _reset_parameters(self) -> None: ...


@runtime_checkable
class WholeResettable(Protocol):
    """A model that initialises all modules below it, buffers too: Hugging Face's `PreTrainedModel`."""

    def initialize_weights(self) -> None: ...


class InitialValues(Protocol):
    """The attributes of a parallel module's state that are read here.

    `storage` is the mesh over which its tensors are stored: with pipeline stages that of the rank's own.
    """

    context: Context
    storage: Context
    alike: bool

    def place(self, name: str) -> State:
        """Where a parameter is stored: H, D, or I for the device."""
        ...


@runtime_checkable
class Parallel(Protocol):
    """A module made by `autopar.parallelize`."""

    autopar: InitialValues


def initialize(parallel: nn.Module, model: nn.Module) -> None:
    """Initialise the tensors of a parallel module that are on meta, by the code of the model that it was built from.

    Every rank calls it. Tensors that are not on meta (loaded ones) are kept. Create the optimizer afterwards, since parameters
    on meta are replaced. With pipeline stages every rank runs the code of all of them, module by module, and keeps its own
    tensors.

    Args:
        parallel: the module that `autopar.parallelize` returned.
        model: the model on meta that was passed to it; its code runs on a copy.

    Raises:
        InputError: the model is a different one, its code leaves a tensor on meta, or it computes a weight from one that
            another pipeline stage stores.
    """
    stored = _tensors(parallel)
    if not isinstance(parallel, Parallel):
        raise InputError(f"initialize takes a module made by autopar.parallelize, not a {type(parallel).__name__}")
    state, context = parallel.autopar, parallel.autopar.storage
    whole_everywhere: Layout = (I,) * len(context.axes)
    layouts = dict.fromkeys(_tensors(model), whole_everywhere)
    layouts |= {name: layout_of(tensor) for name, tensor in stored.items() if isinstance(tensor, DTensor)}
    layouts |= {name: (*layout[:-1], there) for name, layout in layouts.items() if (there := state.place(name)) != I}
    missing = [name for name, tensor in stored.items() if tensor.is_meta]
    if foreign := [name for name in missing if name not in _tensors(model)]:
        raise InputError(
            f"{foreign[0]} cannot be initialised: {type(model).__name__} has no such parameter or buffer",
            fix="give the model from which the parallel module was made",
        )
    if not (missing or not state.alike):
        return
    with progress("initialising the weights"):
        seed = agreed_seed(state.context)
        found = initialized(model, layouts, context, seed=seed, needed=missing, everything=not state.alike)
    cast = {id(found[name]): with_dtype(found[name], stored[name].dtype) for name in missing}
    for name in missing:
        install(parallel, name, cast[id(found[name])])


def initialized(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    context: Context,
    *,
    seed: int | None = None,
    needed: Sequence[str] | None = None,
    everything: bool = False,
) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers, initialised by its own code and stored in these layouts, by name.

    Every rank calls it. `model` is not changed; tensors that are not on meta keep rank 0's value; tied names share a tensor.
    `seed` is by default drawn from rank 0's generator. Where only some are `needed`, the code sets the others on meta, which
    costs nothing, or with `everything` in memory that is freed again, so that ranks which need others draw the same numbers.
    Raises InputError when the model's code leaves a needed tensor on meta, or computes it from one that is not.
    """
    seed = agreed_seed(context) if seed is None else seed
    fresh = copy.deepcopy(model)
    shards = _Shards(fresh, layouts, context, needed, everything)
    cpu = torch.device("cpu")
    with torch.no_grad(), drawing(seed, cpu), drawing(seed, context.device if context.device.type != "cpu" else META):
        with shards:
            _run(fresh)
        return shards.finish(fresh, model)


META = torch.device("meta")


def _run(module: nn.Module) -> None:
    """Initialise the children, then what the module holds itself."""
    if isinstance(module, WholeResettable):
        for part in module.modules():
            vars(part).pop("_is_hf_initialized", None)  # it would skip a module that had weights before it came to meta
        module.initialize_weights()
        return
    for child in module.children():
        _run(child)
    if isinstance(module, Resettable):
        module.reset_parameters()
    elif isinstance(module, OldResettable):
        module._reset_parameters()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def install(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace the parameter or buffer of this name; a buffer keeps its persistence."""
    owner, leaf = dict(root.named_modules(remove_duplicate=False))[_owner(name)], name.rpartition(".")[2]
    held: dict[str, torch.Tensor | None] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
    held[leaf] = tensor


@dataclass(slots=True, kw_only=True)
class _Whole:
    """A materialised global tensor; it was written if its version differs from `blank` (-1 if it had values from the start)."""

    tensor: torch.Tensor
    blank: int


class _Shards(TorchFunctionMode):
    """Materialises tensors on meta while the module that owns them is initialised, and keeps this rank's shard of each."""

    def __init__(
        self,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        context: Context,
        needed: Sequence[str] | None,
        everything: bool,
    ) -> None:
        super().__init__()
        self.layouts, self.context = layouts, context
        tensors = _tensors(module)
        wanted = {id(tensors[name]) for name in (tensors if needed is None else needed)}
        self.needed = frozenset(name for name, tensor in tensors.items() if id(tensor) in wanted)
        made = tensors if everything else self.needed
        self.placeholders = {id(t): (name, t) for name, t in reversed(tensors.items()) if t.is_meta and name in made}
        self.freed: set[str] = set()  # which were written, and are not needed
        self.lost: set[str] = set()  # of these, which were used again
        self.live: dict[str, _Whole] = {}
        self.parts: dict[str, torch.Tensor] = {}  # this rank's, of the tensors that were written

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        touched = [self.placeholders[id(leaf)] for leaf in leaves if id(leaf) in self.placeholders]
        owners = {_owner(name) for name, _ in touched}
        for name in [name for name in self.live if touched and _owner(name) not in owners]:
            self.drop(name)
        for name, placeholder in touched:
            if name not in self.live:
                self.live[name] = self.whole(name, placeholder)
        if touched and func is DATA:
            return self.live[touched[0][0]].tensor.detach()  # the same memory, but writes are counted
        return func(*tree_map(self.real, args), **tree_map(self.real, kwargs))

    def real(self, leaf: object) -> object:
        """The materialised tensor for a tensor on meta; any other object unchanged."""
        found = self.placeholders.get(id(leaf))
        return self.live[found[0]].tensor if found else leaf

    def whole(self, name: str, placeholder: torch.Tensor) -> _Whole:
        """The global tensor: gathered if it was initialised before, else uninitialised memory."""
        if name not in self.parts:
            blank = torch.empty_like(placeholder, device=self.context.device, requires_grad=False)
            if name in self.freed and blank.is_floating_point():  # what is computed from it shows
                self.lost.add(name)
                blank.fill_(math.nan)
            return _Whole(tensor=blank, blank=blank._version)
        stored = to_dtensor(self.parts[name], tuple(placeholder.shape), self.layouts[name], self.context)
        return _Whole(tensor=full_tensor(stored).clone(), blank=-1)

    def drop(self, name: str) -> None:
        """Keep this rank's shard of a tensor if it was written; keep the tensor while its storage is in use."""
        found = self.live.pop(name)
        like, storage = found.tensor.detach().to("meta"), weakref.ref(found.tensor.untyped_storage())
        if found.tensor._version != found.blank and name in self.needed:
            self.parts[name] = self.part(name, found.tensor)
        elif found.tensor._version != found.blank:
            self.freed.add(name)
        del found
        held = storage()
        if held is not None:
            recompute = torch.empty(0, dtype=like.dtype, device=self.context.device).set_(held, 0, like.size(), like.stride())
            self.live[name] = _Whole(tensor=recompute, blank=-1)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, in memory of its own."""
        part = shard(tensor.detach(), self.layouts[name], self.context.mesh.sizes, self.context.coordinates)
        own = part.to(self.context.device).clone(memory_format=torch.contiguous_format)
        return moved(own, place(self.layouts[name]), self.context.disk)

    def finish(self, module: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
        """Every needed tensor of the model as stored; ties are those of `model`, values those of its initialised copy."""
        for name in list(self.live):
            self.drop(name)
        now, originals = _tensors(module), {name: t for name, t in _tensors(model).items() if name in self.needed}
        stored = store({name: tensor for name, tensor in originals.items() if not tensor.is_meta}, self.layouts, self.context)
        made: dict[int, torch.Tensor] = {}
        lost = []
        whole = all_unsharded(self.layouts.values())
        for name, original in originals.items():
            if original.is_meta and id(original) not in made:
                place = self.placeholders.get(id(now[name]))
                part = self.part(name, now[name]) if place is None else self.parts.get(place[0])
                if part is None:
                    lost.append(name)
                    continue
                made[id(original)] = stored_like(original, part, None if whole else self.layouts[name], self.context)
        if lost:
            raise _left_on_meta(model, lost)
        if self.lost and (wrong := [name for name, part in self.parts.items() if part.isnan().any()]):
            raise InputError(
                f"{wrong[0]} is computed from a weight of another pipeline stage, which this rank does not store",
                weights=", ".join(sorted(self.lost)),
                fix="parallelize a model with weights, or load a checkpoint into the parallel module",
            )
        return {name: stored[name] if name in stored else made[id(original)] for name, original in originals.items()}


DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # what reading `tensor.data` calls


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _left_on_meta(model: nn.Module, names: list[str]) -> InputError:
    owner = _owner(names[0])
    kind = type(model.get_submodule(owner)).__name__
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return InputError(
        f"{names[0]}{more} cannot be initialised: the model's code leaves {'them' if more else 'it'} on meta",
        names=", ".join(names[:8]) + (", ..." if len(names) > 8 else ""),
        module=f"{owner or 'the model'} is a {kind}",
        fix=f"give {kind} a method reset_parameters() that sets its parameters and buffers, or load a checkpoint",
    )

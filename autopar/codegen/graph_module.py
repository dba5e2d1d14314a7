"""An `fx.GraphModule` that is named, called, copied and saved like the original module.

fx's own keeps only what its graph refers to, runs the emitted code as its `forward`, and refuses some names.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import fx, nn
from torch.fx.graph import PythonCode

from autopar.codegen.absent_attributes import absent
from autopar.errors import InputError
from autopar.passes.precision import DTYPES, MIXED
from autopar.runtime.storage import given_like, in_parts, of_another_rank

Change = Callable[[torch.Tensor], torch.Tensor]

HELD = ("_modules", "_parameters", "_buffers")  # the tables in which torch keeps a module's content


class _StoredModule(nn.Module):
    """A module whose tensors are stored as the plan says: nothing takes their place that is stored in another way.

    `_autopar_prefix` is what names of its tensors begin with in the whole module; the names here are those of the user.
    """

    _autopar_prefix = ""

    def _apply(self, fn: Change, recurse: bool = True) -> Self:
        """Implement `to`, `half`, `cuda` and the like for every tensor; refuses casts."""
        _refuse_cast(self, fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load this module's own tensors, also as a part of another module: whole ones, of which each rank takes its part, or
        DTensors; refuses what another rank saved of them.
        """
        own = {f"{prefix}{name}": held for name, held in (*self._parameters.items(), *self._buffers.items())}
        others = [name for name in own if of_another_rank(state_dict.get(name))]
        if others:
            raise InputError(
                f"{others[0]} was saved on another rank, and has only that rank's part",
                fix="a file for all ranks: save with torch.distributed.checkpoint, or on rank 0 what get_model_state_dict of "
                "torch.distributed.checkpoint.state_dict returns with StateDictOptions(full_state_dict=True)",
            )
        for name, stored in own.items():
            if isinstance(given := state_dict.get(name), torch.Tensor) and stored is not None:
                state_dict[name] = given_like(given, stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuses None, and parameters that are stored whole in the place of split ones."""
        if value is None or isinstance(value, nn.Parameter | nn.Module):
            self._check_place(name, value)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add or replace a parameter; refuses what `__setattr__` refuses."""
        self._check_place(name, param)
        super().register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add or replace a submodule; refuses what `__setattr__` refuses."""
        self._check_place(name, module)
        super().add_module(name, module)

    def _check_place(self, name: str, value: nn.Parameter | nn.Module | None) -> None:
        """Raise InputError if the emitted code has no use for a value in the place of what has this name."""
        held = self._modules.get(name) or self._parameters.get(name)
        if value is None and (held is not None or self._buffers.get(name) is not None):
            what, fix = (
                f"{self._autopar_prefix}{name} cannot be removed: the emitted code reads it",
                "remove it before parallelize",
            )
            raise InputError(what, fix=fix)
        before = _parameters_of(held, self._autopar_prefix + name)
        for path, parameter in _parameters_of(value, self._autopar_prefix + name).items():
            if in_parts(before.get(path)) and not in_parts(parameter):
                raise InputError(
                    f"{path} cannot be replaced by a whole tensor: every rank stores the part that the plan gives it",
                    fix=f'load_state_dict({{"{path}": tensor}}, strict=False) for other values; another layer belongs into '
                    "the model before parallelize",
                )


def _parameters_of(value: nn.Parameter | nn.Module | None, name: str) -> dict[str, nn.Parameter]:
    """The parameters of an attribute, by path from its owner."""
    if isinstance(value, nn.Module):
        return dict(value.named_parameters(name))
    return {} if value is None else {name: value}


class Submodule(_StoredModule):
    """A submodule that holds its namesake's tensors, but has no code: that is in the graph of the whole."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._autopar_prefix = prefix

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuses a `forward`, which nothing would call."""
        if name == "forward":
            what = "the forward of a submodule was set on a parallel module, which has no effect: only the whole was planned"
            raise InputError(what, fix="set it on the model before parallelize")
        super().__setattr__(name, value)

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise InputError(
            "a submodule of a parallel module cannot be called: only the whole was planned",
            fix="make the submodule parallel by itself, or return from the model's forward what you need of it",
        )


class GraphModule(_StoredModule, fx.GraphModule):
    """A module that runs a graph on flat tensors; `hold` adds its parameters and buffers."""

    emitted: Callable[..., Sequence[torch.Tensor]]  # what this rank runs, on flat tensors

    def __init__(self, graph: fx.Graph, name: str) -> None:
        super().__init__(nn.Module(), fx.Graph(), name)
        self.graph = graph

    def __getattr__(self, name: str) -> Any:
        """A parameter, buffer or submodule; where there is none of that name the error says what to do."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (error := absent(name)) is None:
                raise
        raise error

    def hold(self, name: str, tensor: torch.Tensor, *, persistent: bool) -> None:
        """Register a parameter or buffer under its dotted name, with `Submodule`s for its parents.

        torch's own functions would refuse names that `fx.GraphModule` uses, like "graph".
        """
        root: nn.Module = self
        *path, leaf = name.split(".")
        for depth, part in enumerate(path, 1):
            root = root._modules.setdefault(part, Submodule(".".join([*path[:depth], ""])))  # type: ignore[assignment]
        if isinstance(tensor, nn.Parameter):
            root._parameters[leaf] = tensor
        else:
            root._buffers[leaf] = tensor
            if not persistent:
                root._non_persistent_buffers_set.add(leaf)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function on every submodule and on this one, with a warning: `fn` is not told their classes."""
        warnings.warn(
            "submodules of a parallel model have no classes of their own: a function that asks for them, isinstance(module, "
            "nn.Linear), does nothing; apply it to the model before parallelize",
            stacklevel=2,
        )
        return super().apply(fn)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A module with its own copies of parameters in the same processes; fx would copy only what the graph refers to.

        Gradients are not copied, as in any other module: copies of DTensors would have them.
        """
        copied: Self = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo.update({id(parameter.grad): None for parameter in self.parameters() if parameter.grad is not None})
        return copied._holding(copy.deepcopy(self.__dict__, memo))

    def __copy__(self) -> Self:
        """A module over the same parameters."""
        copied: Self = type(self).__new__(type(self))
        return copied._holding(dict(self.__dict__))

    def _holding(self, held: dict[str, Any]) -> Self:
        """This new module with the attributes of another; a submodule named "graph" must not replace fx's graph."""
        self.__dict__.update(held | {name: {} for name in HELD})
        self.graph = held["_graph"]
        self.__dict__.update({name: held[name] for name in HELD})
        self._compiled_call_impl = None  # it calls the other module
        return self

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "a parallel module cannot be pickled: it holds this rank's part and the groups of running processes",
            fix="save its state_dict() with torch.distributed.checkpoint, and its plan with parallel.autopar.plan.save(path)",
        )

    def recompile(self) -> PythonCode:
        """Compile the emitted code as `emitted`: fx would make it the `forward` of a class per module.

        So the module is called like the user's, and its hooks see the same.
        """
        code = super().recompile()
        own = type(self)
        own.emitted = own.forward
        del own.forward
        return code


def warn_of_hidden(module: nn.Module) -> None:
    """Warn of what a model calls like something that a parallel module has: torch's functions walk to tensors by attributes."""
    held = [(name, one) for table in HELD for name, one in getattr(module, table).items() if one is not None]
    if hidden := [name for name, one in held if getattr(module, name) is not one]:
        more = f" and {len(hidden) - 3} more" if len(hidden) > 3 else ""
        warnings.warn(
            f"the model's {', '.join(hidden[:3])}{more} cannot be reached as an attribute: a parallel module has something "
            "else of that name. It is trained, but torch's get_model_state_dict and get_parameter, save_training_state and "
            "elastic runs do not find its tensors; give it another name in the model",
            stacklevel=3,
        )


def _refuse_cast(module: nn.Module, change: Change) -> None:
    """Raise InputError, before anything changes, if a function of tensors would cast what a module holds."""
    held = dict.fromkeys((tensor.dtype, tensor.device) for tensor in (*module.parameters(), *module.buffers()))
    for dtype, device in held:
        to = change(torch.empty(0, dtype=dtype, device=device)).dtype
        if to != dtype:
            named = " or ".join(f'"{name}"' for name, found in (DTYPES | MIXED).items() if found == to)
            raise InputError(
                f"a parallel module cannot be cast: its plan computes with weights and buffers of {dtype}, not {to}",
                fix=f"{f'parallelize(..., precision={named}), or ' if named else ''}cast the model before it is made parallel",
            )


__all__ = ["HELD", "GraphModule", "warn_of_hidden"]

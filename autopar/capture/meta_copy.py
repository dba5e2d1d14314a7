"""The model without its weights: a copy on the meta device, and the list of its parameters and buffers.

The copy is traced in place of the user's module, which is left untouched and whose weights are never copied. A tensor that the
module holds under several names stays one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.closures import copied_model
from autopar.capture.held_tensors import held_tensors
from autopar.capture.python_places import count_iterators
from autopar.capture.shared_memory import SharedMemory
from autopar.errors import CaptureError
from autopar.ir.program import Parameter, Value

# Where the classes of models and parameters that are no longer ordinary are defined: what they are, and what to pass instead.
MADE = {
    "autopar.codegen.": ("what autopar.parallelize returned", "give the model that it was made of"),
    "torch.distributed.": ("parallel already, by torch.distributed", "give the model before fully_shard or parallelize_module"),
    "torch.nn.parallel.distributed": ("wrapped in DistributedDataParallel", "give its .module"),
    "torch.jit.": ("TorchScript", "give the module before torch.jit.script or trace"),
}
READABLE = 1024  # elements of an integer buffer whose values are read


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaCopy:
    """A model on the meta device, its tensors, the first name of each name, and the values of buffers that may decide."""

    module: nn.Module
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    first: dict[str, str]
    names: dict[int, str]  # the first name of a buffer, by the id of its copy
    values: dict[str, torch.Tensor]
    shared: SharedMemory


def skeleton(model: nn.Module, dtype: torch.dtype | None = None, *, frozen: bool = False) -> MetaCopy:
    """Copy `model` without its weights, and list its parameters and buffers in the order in which it names them.

    Tensors in plain attributes, and in containers and objects there, count as buffers outside the state dict. Floating tensors
    are copied in `dtype`, if given; with `frozen` nothing has a gradient. Raises CaptureError if the module cannot be copied,
    has a parameter that is already parallel or has a hook, or trains a tensor that is not one of its parameters.
    """
    parameters: list[tuple[str, torch.Tensor]] = list(model.named_parameters(remove_duplicate=False))
    held = [(name, one.tensor) for name, one in held_tensors(model).items()]
    if unregistered := next((name for name, tensor in held if tensor.is_leaf and tensor.requires_grad), ""):
        raise CaptureError(
            f"{unregistered} requires a gradient, but is none of the model's parameters",
            fix="register it: an nn.Parameter as an attribute of a module, or in an nn.ParameterList or nn.ParameterDict",
        )
    buffers = [*dense_buffers(model, remove_duplicate=False), *held]
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"the backward hook on module {path or type(model).__name__} would be lost",
                fix="change the gradient in an operator of your own: torch.library.custom_op",
            )
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None and module.training:
            raise CaptureError(
                f"{path or type(module).__name__} has momentum=None: what it averages depends on the number of calls before",
                fix="give it a momentum, such as 0.1, or put it into evaluation mode",
            )
    memo: dict[int, torch.Tensor] = {}
    for name, tensor in (*parameters, *buffers):
        refuse_made(name, tensor)
        if nn.parameter.is_lazy(tensor):
            raise CaptureError(f"{name} has no shape yet: its module is lazy", fix="call the model once before it is captured")
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            fix = "add the hook to the parallel model's parameter instead"
            raise CaptureError(f"the hook on {name} would be lost", fix=fix)
        trained = tensor.requires_grad and tensor.is_leaf and not frozen  # what a call left behind is replaced by the next
        memo.setdefault(id(tensor), _hollow(tensor, dtype, trained=trained))
    shared = SharedMemory.of((*parameters, *buffers), frozen=frozen)
    try:
        hollow = copied_model(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied: {error}", fix="keep what cannot be copied outside the module"
        ) from error
    _forget_caches(hollow)
    count_iterators(hollow)
    persistent = set(model.state_dict(keep_vars=True))
    known = _grouped(parameters, memo, persistent), _grouped(buffers, memo, persistent)
    first = {name: held.value.name for held in (*known[0], *known[1]) for name in held.names}
    values = {name: _as(tensor.detach(), dtype) for name, tensor in buffers if _readable(tensor)}
    names = {id(memo[id(tensor)]): first[name] for name, tensor in buffers}
    return MetaCopy(
        module=hollow, parameters=known[0], buffers=known[1], first=first, names=names, values=values, shared=shared
    )


def dense_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """`model.named_buffers`, without sparse buffers outside the state dict, which no program reads.

    Raises CaptureError for a sparse buffer in the state dict.
    """
    for name, tensor in model.named_buffers(remove_duplicate=remove_duplicate):
        if tensor.layout is torch.strided:
            yield name, tensor
        elif name in model.state_dict(keep_vars=True):
            fix = "register it with persistent=False if forward does not read it, or store it dense: tensor.to_dense()"
            raise CaptureError(f"the buffer {name} is sparse", fix=fix)


def refuse_made(name: str, held: object) -> None:
    """Raise CaptureError for a module or tensor whose class is defined in `MADE`."""
    for base in type(held).__mro__:
        if found := next((what for path, what in MADE.items() if f"{base.__module__}.".startswith(path)), None):
            raise CaptureError(f"{name} is {found[0]}", fix=found[1])


def _readable(tensor: torch.Tensor) -> bool:
    """Whether a buffer holds a few integers or a single number, which may decide a size or a branch."""
    most = 1 if tensor.is_floating_point() else READABLE
    return not (tensor.is_meta or tensor.is_complex()) and tensor.numel() <= most


def _forget_caches(hollow: nn.Module) -> None:
    """Stop all submodules from returning a cache, whatever their configuration says: it is not a tensor."""
    for module in hollow.modules():
        config = vars(module).get("config")
        if getattr(config, "use_cache", False) is True:
            vars(config)["use_cache"] = False


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor, cast if it is floating and a dtype is given."""
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def _hollow(tensor: torch.Tensor, dtype: torch.dtype | None, *, trained: bool) -> torch.Tensor:
    empty = _as(tensor.detach().to("meta"), dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=trained)
    return empty.requires_grad_(trained)


def _grouped(
    named: list[tuple[str, torch.Tensor]], hollow: dict[int, torch.Tensor], persistent: set[str]
) -> tuple[Parameter, ...]:
    """One Parameter per tensor, with all of its names."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), []).append(name)
    return tuple(_held(tuple(names), hollow[key], persistent) for key, names in groups.items())


def _held(names: tuple[str, ...], tensor: torch.Tensor, persistent: set[str]) -> Parameter:
    value = Value(name=names[0], shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
    return Parameter(value=value, names=names, persistent=any(name in persistent for name in names))

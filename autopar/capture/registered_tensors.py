"""Parameters and buffers that forward reaches by another path than their registration: `self.both = [self.first, self.second]`.

torch.export replaces the tensors that modules have registered by traced ones. Other references still lead to the original
tensors, which it would treat as constants, without gradients. So these are replaced in calls by their traced counterparts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

StandIns = Mapping[int, torch.Tensor]  # from the id of a formerly registered tensor to its replacement


class RegisteredTensors:
    """The parameters and buffers of a module, as they were before tracing."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, dict(_registered(module))

    def stand_ins(self) -> StandIns:
        """The replacements that are registered now."""
        now = dict(_registered(self._module))
        return {id(before): now[name] for name, before in self._before.items() if now.get(name, before) is not before}


def standing_in(stand_ins: StandIns, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with tensors replaced by their stand-ins."""
    if not any(id(leaf) in stand_ins for leaf in pytree.arg_tree_leaves(*args, **kwargs)):
        return args, kwargs
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda one: stand_ins.get(id(one), one), (args, kwargs))
    return found


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by name: names are unique across modules, and within a module across both kinds."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


__all__ = ["RegisteredTensors", "StandIns", "standing_in"]

"""Parameters and buffers that forward reaches by another path than their registration: `self.both = [self.first, self.second]`.

torch.export puts what it traces into the places where modules register tensors. Other references lead to the tensors as they
were before, which it takes for constants, without gradients. In calls these are replaced by what stands in their places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

StandIns = Mapping[int, torch.Tensor]  # by the id of a tensor that was registered: what is registered in its place


class RegisteredTensors:
    """The parameters and buffers of a module, as they are before it is traced."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, dict(_registered(module))

    def stand_ins(self) -> StandIns:
        """What is registered now in the places of others."""
        now = dict(_registered(self._module))
        return {id(before): now[name] for name, before in self._before.items() if now.get(name, before) is not before}


def standing_in(stand_ins: StandIns, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with what stands in for tensors there."""
    if not any(id(leaf) in stand_ins for leaf in pytree.arg_tree_leaves(*args, **kwargs)):
        return args, kwargs
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda one: stand_ins.get(id(one), one), (args, kwargs))
    return found


def _registered(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of different modules are apart, as are those of a parameter and a buffer of one module."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


__all__ = ["RegisteredTensors", "StandIns", "standing_in"]

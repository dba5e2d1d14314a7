"""Models that share parameters: of each, a parallel module has its own."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

_Made = tuple[weakref.ref[nn.Module], tuple[weakref.ref[nn.Parameter], ...]]
_made: weakref.WeakKeyDictionary[nn.Module, _Made] = weakref.WeakKeyDictionary()  # of what model each parallel module is


def remember(model: nn.Module, parallel: nn.Module) -> None:
    """Note of what model a parallel module was made."""
    _made[parallel] = weakref.ref(model), tuple(map(weakref.ref, model.parameters()))


def warn_of_shared_parameters(model: nn.Module) -> None:
    """Warn of trained parameters of a model that are also another one's, of which there is a parallel module."""
    others = [held for source, held in _made.values() if source() is not model]
    known = {id(parameter) for held in others for ref in held if (parameter := ref()) is not None}
    if shared := [name for name, parameter in model.named_parameters() if id(parameter) in known and parameter.requires_grad]:
        more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
        warnings.warn(
            f"{', '.join(shared[:3])}{more} are parameters of another model too, which was made parallel: each parallel module "
            "has and trains a copy of its own; make one model of both, with an argument that says which to run, and over=",
            stacklevel=3,
        )

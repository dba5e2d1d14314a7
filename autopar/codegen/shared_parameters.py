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
    """Warn of trained parameters that a model shares with one of which there is a parallel module, where both have others too:
    one that contains the other may be compared with it."""
    own = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for source, references in _made.values():
        known = {id(parameter) for reference in references if (parameter := reference()) is not None}
        shared = [name for key, name in own.items() if key in known]
        if source() is not model and shared and known - own.keys() and own.keys() - known:
            more = f" and {len(shared) - 3} more" if len(shared) > 3 else ""
            warnings.warn(
                f"{', '.join(shared[:3])}{more} are parameters of another model too, which was made parallel: each parallel "
                "module trains a copy of its own; make one model of both, with an argument that says which to run, and over=",
                stacklevel=3,
            )
            return

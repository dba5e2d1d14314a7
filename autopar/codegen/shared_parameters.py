"""Detects models that share parameters: each parallel module has its own copies."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

_Made = tuple[weakref.ref[nn.Module], tuple[weakref.ref[nn.Parameter], ...]]
_made: weakref.WeakKeyDictionary[nn.Module, _Made] = weakref.WeakKeyDictionary()  # of what model each parallel module is


def remember(model: nn.Module, parallel: nn.Module) -> None:
    """Record the model that a parallel module was made from."""
    _made[parallel] = weakref.ref(model), tuple(map(weakref.ref, model.parameters()))


def warn_of_shared_parameters(model: nn.Module) -> None:
    """Warn if a model shares trained parameters with one that is already parallel, and both have others too: a model that
    contains the other may just be compared with it.
    """
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

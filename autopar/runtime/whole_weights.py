"""Refuses optimizers that compute with whole weights if weights are split, unless `gathered_steps` gathers them.

DTensors support norms, means over a weight and products too, but when these are written in place or into plain tensors, DTensor
raises an error whose wording depends on the operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import cache

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError

# Optimizers that step each weight by itself, by module: their counts are per weight, and they read no other weight.
# L-BFGS takes all of them for one vector, LAMB and Adan of timm count the steps of a group, and Kron draws random numbers.
WEIGHT_BY_WEIGHT: Mapping[str, str] = {
    "torch.optim": "Adafactor",
    "transformers.optimization": "Adafactor",
    "timm.optim.adafactor": "Adafactor",
    "timm.optim.adafactor_bv": "AdafactorBigVision",
    "timm.optim.adamp": "AdamP",
    "timm.optim.adamw": "AdamWLegacy",
    "timm.optim.adopt": "Adopt",
    "timm.optim.laprop": "LaProp",
    "timm.optim.lion": "Lion",
    "timm.optim.mars": "Mars",
    "timm.optim.nadamw": "NAdamW",
    "timm.optim.nvnovograd": "NvNovoGrad",
    "timm.optim.rmsprop_tf": "RMSpropTF",
    "timm.optim.sgdp": "SGDP",
    "timm.optim.sgdw": "SGDW",
}

# Optimizers, of these and others, that cannot compute with DTensors. In timm none can with `caution`, a mean over the weight.
OF_WHOLE = {
    "torch.optim": ("Adafactor",),
    "transformers.optimization": ("Adafactor",),
    "timm.optim.adafactor": ("Adafactor",),
    "timm.optim.adamp": ("AdamP",),
    "timm.optim.kron": ("Kron",),
    "timm.optim.mars": ("Mars",),
    "timm.optim.nvnovograd": ("NvNovoGrad",),
    "timm.optim.sgdp": ("SGDP",),
}
GATHERED = weakref.WeakSet[optim.Optimizer]()  # optimizers whose steps are gathered


@cache
def install() -> None:
    """Make optimizers that need whole weights raise an error before they step split ones."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: optim.Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    if torch.compiler.is_compiling() or optimizer in GATHERED or not _of_whole(optimizer):
        return
    if any(_split(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        name = type(optimizer).__name__
        fix = "another optimizer, without caution=True if it has that; or strategy='ddp', which splits no weights"
        if name == WEIGHT_BY_WEIGHT.get(_place(optimizer)):
            fix = "autopar.step_gathered(optimizer), which gathers one weight at a time"
        raise InputError(f"{name} computes with whole weights, and these are split", fix=fix)


def _of_whole(optimizer: optim.Optimizer) -> bool:
    place = _place(optimizer)
    if type(optimizer).__name__ in OF_WHOLE.get(place, ()):
        return True
    return place.startswith("timm.optim.") and any(group.get("caution") for group in optimizer.param_groups)


def _place(optimizer: optim.Optimizer) -> str:
    """The module of an optimizer's class, as the tables name it."""
    place = type(optimizer).__module__
    return "torch.optim" if place.startswith("torch.optim.") else place


def _split(parameter: object) -> bool:
    return isinstance(parameter, DTensor) and any(not place.is_replicate() for place in parameter.placements)


__all__ = ["GATHERED", "WEIGHT_BY_WEIGHT", "install"]

"""Losses over classes that torch.export can trace where the number of rows is not known: torch asks whether there are any."""

from __future__ import annotations

from collections.abc import Callable

import torch

_NONE = 0  # torch.nn._reduction's number
_LIBRARY = torch.library.Library("autopar_selected", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = {
    "cross_entropy_loss": "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100, "
    "float label_smoothing=0.0",
    "nll_loss_nd": "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100",
}
LOSSES = {f"autopar_selected.{name}.default": f"aten.{name}.default" for name in _SCHEMAS}  # those of ATen that are meant


def _shape(scores: torch.Tensor, target: torch.Tensor, weight: object = None, reduction: int = 1, *_: object) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], *scores.shape[2:]) if reduction == _NONE else ())


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}({_schema}) -> Tensor")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autopar_selected::{_name}", _shape, lib=_LIBRARY)


def of_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of `torch._C._nn`; the one of this library with its name where a size is not known."""
    traced = getattr(torch.ops.autopar_selected, original.__name__)

    def loss(scores: torch.Tensor, *args: object) -> torch.Tensor:
        known = all(isinstance(size, int) for size in scores.shape)
        return original(scores, *args) if known else traced(scores, *args)

    return loss

"""Losses that torch.export can trace, in place of ATen's that read unknown values: whether there are any rows, or lengths."""

from __future__ import annotations

from collections.abc import Callable

import torch

_NONE = 0  # the value in torch.nn._reduction
_LIBRARY = torch.library.Library("autopar_selected", "DEF")  # type: ignore[no-untyped-call]
_SCHEMAS = {
    "cross_entropy_loss": "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100, "
    "float label_smoothing=0.0",
    "nll_loss_nd": "Tensor self, Tensor target, Tensor? weight=None, int reduction=1, SymInt ignore_index=-100",
}
_ALIGNED = (
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank=0, int reduction=1, "
    "bool zero_infinity=False) -> Tensor"
)
_MEANT = {f"autopar_selected.{name}.default": f"aten.{name}.default" for name in _SCHEMAS} | {
    "autopar_selected.ctc_loss.default": "aten.ctc_loss.Tensor"
}  # their counterparts in ATen


def _aligned(
    scores: torch.Tensor, targets: object, inputs: object, lengths: object, blank: int = 0, reduction: int = 1, *_: object
) -> torch.Tensor:
    return scores.new_empty(scores.shape[1:-1] if reduction == _NONE else ())


def _shape(scores: torch.Tensor, target: torch.Tensor, weight: object = None, reduction: int = 1, *_: object) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], *scores.shape[2:]) if reduction == _NONE else ())


for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}({_schema}) -> Tensor")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"autopar_selected::{_name}", _shape, lib=_LIBRARY)

_LIBRARY.define(_ALIGNED)  # type: ignore[no-untyped-call]
torch.library.register_fake("autopar_selected::ctc_loss", _aligned, lib=_LIBRARY)


def of_lengths(literal: Callable[..., torch.Tensor]) -> Callable[..., Callable[..., torch.Tensor]]:
    """`torch.ctc_loss`, replaced by this library's loss; `literal` turns lengths given as numbers into tensors."""

    def loss(scores: torch.Tensor, targets: torch.Tensor, *rest: object) -> torch.Tensor:
        lengths = (one if isinstance(one, torch.Tensor) else literal(one) for one in rest[:2])
        found: torch.Tensor = torch.ops.autopar_selected.ctc_loss(scores, targets, *lengths, *rest[2:])
        return found

    return lambda _: loss


def of_rows(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss of `torch._C._nn`, replaced by this library's where a size is not known."""
    traced = getattr(torch.ops.autopar_selected, original.__name__)

    def loss(scores: torch.Tensor, *args: object) -> torch.Tensor:
        known = all(isinstance(size, int) for size in scores.shape)
        return original(scores, *args) if known else traced(scores, *args)

    return loss


def meant(target: object) -> str:
    """The operator of a node; for one of this library, its counterpart in ATen."""
    return _MEANT.get(str(target), str(target))

"""Capture: an ordinary module becomes a Program, and its call a Signature.

skeleton    a copy without weights, on the meta device
signature   how it is called and what it returns
trace       torch.export, with what it would lose watched
lower       the exported graph as a Program
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autopar.capture.lower import lower
from autopar.capture.meta_copy import skeleton
from autopar.capture.signature import Signature, read_call
from autopar.capture.trace import trace
from autopar.errors import CaptureError
from autopar.ir.dynamic_dims import InputDim
from autopar.ir.program import Program

__all__ = ["Captured", "Signature", "capture"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A model as a program, and how the user calls it; `training` is the mode in which it was captured."""

    program: Program
    signature: Signature
    training: bool = True


def capture(
    model: nn.Module, sample_input: object, dtype: torch.dtype | None = None, places: Mapping[InputDim, int] | None = None
) -> Captured:
    """Trace a model in its present mode on a sample of the global batch (a tensor, a tuple of arguments, or a mapping).

    With a `dtype` what is floating has that one in the program, as after `model.to(dtype)`, but not in the signature; `places`
    are dims of the sample that get another size.
    Neither model nor sample are changed, moved or computed with. Raises CaptureError, naming the line of the model, for what
    cannot be captured, and InputError for a sample that does not fit `forward`.
    """
    call = read_call(model, sample_input).at(places or {})
    bones = skeleton(model, dtype)
    held = set(bones.first)
    for path, leaf in call.leaves:
        if path in held and isinstance(leaf, torch.Tensor):
            raise CaptureError(
                f"forward's argument {path} has the name of a parameter or buffer of the model", fix="rename one of them"
            )
    cast = call.to(dtype) if dtype else call
    traced = trace(bones.module, cast)
    program, signature = lower(traced, bones, cast), call.signature(traced.returned)
    return Captured(program=program, signature=signature, training=model.training)

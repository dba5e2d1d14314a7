"""The labels of models of transformers: which inputs they are, and which of their numbers the library counts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import EllipsisType

import transformers
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.utils import find_labels


def label_names(model: nn.Module, planned: Sequence[str], *, unplanned: bool = False) -> list[str]:
    """The planned inputs that are labels: those of the library (`start_positions`), in its order, and what is called so.

    With `unplanned`, those of the library that are not planned, too.
    """
    known = [name for one in (model, _inner(model)) for name in find_labels(type(one)) if unplanned or name in planned]
    return [*dict.fromkeys([*known, *(name for name in planned if "label" in name)])]


def counted_labels(model: nn.Module) -> tuple[slice | EllipsisType, ...] | None:
    """The labels that the library counts so that a step's loss is a mean over all of them: an index; None if it counts none.

    It does where forward takes what it does not name, unless the model says otherwise. Where labels are shifted, the first of a
    row is the target of no token.
    """
    inner = _inner(model)
    takes = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(inner.forward).parameters.values())
    if not getattr(inner, "accepts_loss_kwargs", takes):
        return None
    shifted = isinstance(inner, transformers.PreTrainedModel) and LOSS_MAPPING.get(inner.loss_type) is ForCausalLMLoss
    return (..., slice(1, None)) if shifted and not getattr(inner.config, "is_encoder_decoder", False) else (...,)


def _inner(model: nn.Module) -> nn.Module:
    """The library's model in one that wraps it, as `peft` does."""
    return next((found for found in model.modules() if isinstance(found, transformers.PreTrainedModel)), model)


__all__ = ["counted_labels", "label_names"]

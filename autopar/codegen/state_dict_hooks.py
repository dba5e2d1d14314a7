"""State dict hooks of the model, which a parallel module does not run: it saves stored tensors under the model's names."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

from torch import nn

_TABLES = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_METHODS = ("get_extra_state", "set_extra_state", "_save_to_state_dict", "_load_from_state_dict")


def warn_of_state_dict_hooks(model: nn.Module) -> None:
    """Warn about modules with state dict hooks, extra state or custom loading; torch's own hooks, which read files of older
    versions, are ignored.
    """
    if found := [name for path, module in model.named_modules() for name in _own(path or type(model).__name__, module)]:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        warnings.warn(
            f"state_dict and load_state_dict of the parallel model do not call what the model does there: "
            f"{', '.join(found[:3])}{more}; load a checkpoint that needs it into the model, before parallelize",
            stacklevel=3,
        )


def _own(path: str, module: nn.Module) -> Iterator[str]:
    for table in _TABLES:
        if any(map(_is_foreign, vars(module)[table].values())):
            yield f"{table.strip('_')} of {path}"
    for name in _METHODS:
        if _is_foreign(getattr(type(module), name)):
            yield f"{name} of {path}"


def _is_foreign(function: object) -> bool:
    """Whether a function is not torch's own."""
    function = getattr(function, "hook", function)  # with its module, as load_state_dict keeps it
    while isinstance(function, functools.partial):
        function = function.func
    return not f"{getattr(function, '__module__', '')}.".startswith("torch.")

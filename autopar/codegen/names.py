"""Names in emitted code: identifiers for values, suffixes for converted values, attributes of the module."""

from __future__ import annotations

import keyword
import re

from torch import fx, nn

STATE = "autopar"  # the one attribute of the emitted module that is not the user's
# Attributes of the emitted module that hide the user's.
TAKEN = frozenset((*dir(fx.GraphModule(nn.Module(), fx.Graph())), STATE, "run", "step", "accumulate", "joined"))
# What a conversion's first primitive makes of a value, as a suffix of the name.
SUFFIXES = {
    "all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "scattered", "all_to_all": "exchanged",
    "slice": "sliced", "pad": "padded", "keep": "partial", "identity": "replicated",
}  # fmt: skip


def identifier(name: str) -> str:
    """A valid Python name for a value: "h.0.attn:addmm#0" becomes h_0_attn_addmm_0."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return plain if plain and not plain[0].isdigit() and not keyword.iskeyword(plain) and plain != "self" else f"_{plain}"


def is_attribute(path: str) -> bool:
    """Whether emitted code can access a parameter or buffer as an attribute: no keyword, no attribute of fx.GraphModule."""
    first, *rest = path.split(".")
    return first not in TAKEN and not any(map(keyword.iskeyword, (first, *rest)))

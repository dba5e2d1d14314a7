"""Names in emitted code: identifiers for values, suffixes for converted values, attributes of the module."""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Iterable

from torch import fx, nn

STATE = "autopar"  # the one attribute of the emitted module that is not the user's
OWN = frozenset(dir(nn.Module()))  # attributes of every module
# What a conversion's first primitive makes of a value, as a suffix of the name.
SUFFIXES = {
    "all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "scattered", "all_to_all": "exchanged",
    "slice": "sliced", "pad": "padded", "keep": "partial", "identity": "replicated",
    "fetch": "fetched", "read": "read",
}  # fmt: skip


def identifier(name: str) -> str:
    """A valid Python name for a value: "h.0.attn:addmm#0" becomes h_0_attn_addmm_0."""
    plain = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return plain if plain and not plain[0].isdigit() and not keyword.iskeyword(plain) and plain != "self" else f"_{plain}"


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """A valid Python name for each of several different names; clashes are numbered."""
    found: dict[str, str] = {}
    for name in names:
        plain, taken = identifier(name), set(found.values())
        numbered = (f"{plain}_{count}" for count in itertools.count(1))
        found[name] = next(text for text in itertools.chain((plain,), numbered) if text not in taken)
    return found


def attributes(module: type[fx.GraphModule]) -> frozenset[str]:
    """The attributes of a class's instances that would hide the user's: methods and declared attributes."""
    declared = (name for base in module.__mro__ for name in vars(base).get("__annotations__", ()))
    return frozenset((*dir(fx.GraphModule(nn.Module(), fx.Graph())), *dir(module), *declared))


def is_attribute(path: str, taken: frozenset[str]) -> bool:
    """Whether emitted code can access a parameter or buffer as an attribute.

    That is if every part of its name consists of ASCII letters, digits and underscores (Python merges other letters that look
    alike: NFKC), and is neither a keyword nor an attribute of the emitted module (`taken`), or of a plain one inside it.
    """
    first, *rest = path.split(".")
    plain = all(re.fullmatch(r"\w+", part, re.ASCII) and not keyword.iskeyword(part) for part in (first, *rest))
    return plain and first not in taken and OWN.isdisjoint(rest)

"""Rules of operators that make tensors: each rank makes its part of a constant; positions are counted whole."""

from __future__ import annotations

import torch

from autopar.ir.program import Argument
from autopar.operators.call import Call, Local
from autopar.operators.families.views import result_size
from autopar.operators.pattern_text import unread
from autopar.operators.rule import OpSharding, Rule, op


def strided(call: Call) -> OpSharding | None:
    """-> ...; no rule for other strides than those of elements in their order"""
    in_order = torch.empty(call.result, device="meta").stride()
    return call.fit("-> ...", random=True) if call.numbers("stride") == in_order else None


def strides(call: Call, local: Local) -> dict[str, Argument]:
    """The size and the strides of the part of one rank."""
    return {"size": tuple(local.results[0]), "stride": torch.empty(local.results[0], device="meta").stride()}


def new(call: Call) -> OpSharding:
    """-> ...; the operand gives its dtype only"""
    return call.fit(f"{unread(call.rank('self'))} -> ...")


def unwritten(call: Call) -> OpSharding:
    """-> ...; the operand gives its dtype only, and elements are whatever the memory holds"""
    return call.fit(f"{unread(call.rank('self'))} -> ...", random=True)


COUNTED = ("arange.default", "arange.start", "arange.start_step", "linspace.default", "logspace.default")
# memory that is not written yet is as good as drawn at random
DRAWN = ("rand.default", "randn.default", "randint.default", "randint.low", "normal.float_float", "empty.memory_format")
ALIKE, SIZED, POSITIONS = op("... -> ..."), op("-> ...", local=result_size("size")), op("-> _")

TABLE: dict[str, Rule] = {
    **{f"aten.{name}": POSITIONS for name in COUNTED},
    "aten.eye.default": op("-> _ _"),
    "aten.eye.m": op("-> _ _"),
    "aten.tril_indices.default": op("-> _ _"),
    "aten.triu_indices.default": op("-> _ _"),
    "aten.scalar_tensor.default": op("-> ()"),
    **{f"aten.{name}": SIZED for name in ("zeros.default", "ones.default", "full.default")},
    **{f"aten.{name}": op("-> ...", local=result_size("size"), random=True) for name in DRAWN},
    "aten.empty_strided.default": op(strided, local=strides),
    "aten.empty_like.default": op("... -> ...", random=True),
    "aten.new_empty.default": op(unwritten, local=result_size("size")),
    "aten.randperm.default": op("-> _", random=True),
    **{f"aten.new_{name}.default": op(new, local=result_size("size")) for name in ("zeros", "ones", "full")},
    **{f"aten.{name}_like.default": ALIKE for name in ("zeros", "ones", "full")},
}

"""Rules of operators that make tensors: each rank makes its part of a constant; positions are counted whole."""

from __future__ import annotations

from autopar.rules.call import Call
from autopar.rules.pointwise import unread
from autopar.rules.rule import Fitted, Rule, rule
from autopar.rules.views import result_size


def new(call: Call) -> Fitted:
    """-> ...; the operand gives its dtype only"""
    return call.fit(f"{unread(call.rank('self'))} -> ...")


ALIKE, SIZED, POSITIONS = rule("... -> ..."), rule("-> ...", local=result_size("size")), rule("-> _")

TABLE: dict[str, Rule] = {
    **{f"aten.{name}": POSITIONS for name in ("arange.default", "arange.start", "arange.start_step", "linspace.default")},
    "aten.eye.default": rule("-> _ _"),
    "aten.eye.m": rule("-> _ _"),
    "aten.scalar_tensor.default": rule("-> ()"),
    **{f"aten.{name}": SIZED for name in ("zeros.default", "ones.default", "full.default")},
    "aten.rand.default": rule("-> ...", local=result_size("size"), random=True),
    "aten.randn.default": rule("-> ...", local=result_size("size"), random=True),
    **{f"aten.new_{name}.default": rule(new, local=result_size("size")) for name in ("zeros", "ones", "full")},
    **{f"aten.{name}_like.default": ALIKE for name in ("zeros", "ones", "full")},
}

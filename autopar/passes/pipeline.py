"""The passes that every captured program goes through, in order."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.program import Program
from autopar.passes.batched_gathers import gathered
from autopar.passes.broadcast_attention import expanded
from autopar.passes.causal_masks import causal
from autopar.passes.dead_code_elimination import dead
from autopar.passes.in_place import in_place
from autopar.passes.mean_losses import means
from autopar.passes.order_of_use import in_order_of_use
from autopar.passes.simplify import simplify

PASSES: tuple[Callable[[Program], Program], ...] = (
    simplify, causal, gathered, expanded, means, dead, in_order_of_use, in_place,
)  # fmt: skip


def normalise(program: Program) -> Program:
    """Normalise the program: canonical ops, known causal masks, gathers within samples, plain attention, means as quotients, no
    dead code, an order that does not depend on hash seeds, and caches written in place.
    """
    for rewrite in PASSES:
        program = rewrite(program)
    return program

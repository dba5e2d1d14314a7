"""Rules of operators that make tensors: each rank makes its part of a constant; positions are counted whole."""

from __future__ import annotations

import torch

from autopar.ir.program import Argument
from autopar.operators import own_order
from autopar.operators.call import Call, Local
from autopar.operators.facts import OpKind
from autopar.operators.families.views import result_size
from autopar.operators.index_facts import integers
from autopar.operators.rule import OpSharding, Rule, op


def strided(call: Call) -> OpSharding | None:
    """Uninitialised memory, of which any part will do; only contiguous strides have a rule."""
    in_order = torch.empty(call.result, device="meta").stride()
    return call.fit("-> ...", random=True) if call.numbers("stride") == in_order else None


def strides(call: Call, local: Local) -> dict[str, Argument]:
    """The size and the strides of one rank's part."""
    return {"size": tuple(local.results[0]), "stride": torch.empty(local.results[0], device="meta").stride()}


TABLE: dict[str, Rule] = {
    # constants: each rank makes its part
    "aten.zeros.default": op("-> ...", local=result_size("size"), fills=0, index_fact=integers.zeros),
    "aten.ones.default": op("-> ...", local=result_size("size"), fills=1, index_fact=integers.ones),
    "aten.full.default": op(
        "-> ...", local=result_size("size"), fills="fill_value", indifferent="fill_value", index_fact=integers.fill
    ),
    "aten.zeros_like.default": op("... -> ...", index_fact=integers.zeros, own_order=own_order.empty_like),
    "aten.ones_like.default": op("... -> ...", index_fact=integers.ones),
    "aten.full_like.default": op("... -> ...", index_fact=integers.fill),
    "aten.new_zeros.default": op("_... -> ...", local=result_size("size"), fills=0),
    "aten.new_ones.default": op("_... -> ...", local=result_size("size"), fills=1),
    "aten.new_full.default": op("_... -> ...", local=result_size("size"), fills="fill_value"),
    "aten.scalar_tensor.default": op("-> ()", fills="s"),
    # positions
    "aten.arange.default": op("-> _", local=own_order.arange_end, index_fact=integers.arange, own_order=own_order.arange),
    "aten.arange.start": op("-> _", local=own_order.arange_end, index_fact=integers.arange, own_order=own_order.arange),
    "aten.arange.start_step": op("-> _", index_fact=integers.arange),
    "aten.linspace.default": op("-> _"),
    "aten.logspace.default": op("-> _"),
    "aten.eye.default": op("-> _ _"),
    "aten.eye.m": op("-> _ _"),
    "aten.tril_indices.default": op("-> _ _"),
    "aten.triu_indices.default": op("-> _ _"),
    # random numbers
    "aten.rand.default": op("-> ...", local=result_size("size"), random=True, kind=OpKind.DRAW),
    "aten.randn.default": op("-> ...", local=result_size("size"), random=True, kind=OpKind.DRAW),
    "aten.randint.default": op("-> ...", local=result_size("size"), random=True, kind=OpKind.DRAW_INTEGERS),
    "aten.randint.low": op("-> ...", local=result_size("size"), random=True, kind=OpKind.DRAW_INTEGERS),
    "aten.normal.float_float": op("-> ...", local=result_size("size"), random=True, kind=OpKind.DRAW),
    "aten.randperm.default": op("-> _", random=True, kind=OpKind.DRAW_INTEGERS),
    # uninitialised memory is as good as random numbers
    "aten.empty.memory_format": op("-> ...", local=result_size("size"), random=True),
    "aten.empty_strided.default": op(strided, local=strides),
    "aten.empty_like.default": op("... -> ...", random=True, own_order=own_order.empty_like),
    "aten.new_empty.default": op("_... -> ...", local=result_size("size"), random=True),
}

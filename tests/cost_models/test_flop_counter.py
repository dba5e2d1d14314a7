"""Floating-point operations of rows, against `torch.utils.flop_counter`.

torch does not count operators that it does not decompose into matrix products (mv, dot, addbmm, bilinear); `test_spellings.py`
compares these with a product written in another way.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.program import Op, Value, filled, overload
from autopar.operators import RULES, fit, row_of
from autopar.operators.call import Call, Local
from autopar.operators.facts import OpKind
from autopar.operators.flops import Product
from tests.operators.drawing import Example
from tests.operators.examples import EXAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Operations of one call, as torch counts them, and its products, as the row says."""

    op: Op
    call: Call
    forward: int
    backward: int
    products: tuple[Product, ...]

    @property
    def gradients(self) -> list[int]:
        """The positions of the operands that get one."""
        return [place for place, value in enumerate(self.call.operands) if value.requires_grad]


def counted(target: str, example: Example) -> Counted:
    op, values, tensors = example.build(target)
    leaves = {name: tensor.clone().requires_grad_(values[name].requires_grad) for name, tensor in tensors.items()}
    given, named = filled(op.args, op.kwargs, lambda ref: leaves[ref.name])
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        found = overload(target)(*given, **named)
    ends = [one for one in ([found] if isinstance(found, torch.Tensor) else found) if one.requires_grad]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as backward:
        if ends and forward.get_total_flops():
            wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
            torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)
    return Counted(
        op=op,
        call=Call.of(op, values),
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops(),
        products=tuple(products(op, values)),
    )


def products(op: Op, values: dict[str, Value]) -> list[Product]:
    """The products of an op at its global shapes, as its row says."""
    flops, fitted = row_of(op).flops, fit(op, values)
    if flops is None or fitted is None:
        return []
    shapes = [values[name].shape for name in op.operands]
    local = Local(fitted=fitted, operands=shapes, results=[result.shape for result in op.results], parts=())
    return list(flops(Call.of(op, values), local))


@pytest.mark.parametrize("target", sorted(EXAMPLES))
@pytest.mark.filterwarnings("ignore")
def test_operations_are_those_that_torch_counts(target: str) -> None:
    for example in EXAMPLES[target]:
        found = counted(target, example)
        if not found.forward:
            continue
        forward = sum(product.flops for product in found.products)
        backward = sum(made.flops for product in found.products for made in product.backward(found.gradients))
        if row_of(found.op).kind is OpKind.ATTENTION:  # torch counts what is not fused: no half of causal scores, none again
            half = 1 + bool(found.call.arguments["is_causal"])
            forward, backward = half * forward, half * (backward - sum(p.flops for p in found.products if p.again))
        if groups := found.call.number("groups", 1) - 1:  # torch counts the gradient of a grouped weight as of a whole one
            if target == "aten.convolution_backward.default":
                forward += groups * found.products[-1].flops
            else:
                backward += groups * forward
        assert found.forward == forward
        if target != "aten.convolution_backward.default":
            assert found.backward == backward


def test_torch_counts_a_good_part_of_the_table() -> None:
    seen = {target for target in EXAMPLES if any(counted(target, example).forward for example in EXAMPLES[target])}
    assert len(seen) >= 30
    assert [target for target in seen if RULES[target].flops is None] == []

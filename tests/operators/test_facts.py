"""Facts in rows other than how an operator splits, against torch."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.program import Op, filled, overload
from autopar.ir.schema import bound, packed
from autopar.operators import RULES, alias_of, row_of, writes
from autopar.operators.facts import Alias, Autocast
from tests.operators.examples import EXAMPLES

quietly = pytest.mark.filterwarnings("ignore")
NAMED = [t for t, rule in RULES.items() if any((rule.picks, rule.training, rule.rate, rule.writes, rule.fills))]
# torch casts inside of these: they decompose into an operator that is cast, or take mixed dtypes and cast themselves.
CAST_INSIDE = {
    *(f"aten.conv{n}d.padding" for n in (1, 2, 3)),
    "aten.cat.default", "aten.stack.default", "aten.cross_entropy_loss.default", "aten.nll_loss_nd.default",
    *(f"aten.{name}.default" for name in ("arccos", "arcsin", "arctan2", "concat", "concatenate")),
    "aten.norm.ScalarOpt_dtype", "aten.norm.ScalarOpt_dim_dtype",
}  # fmt: skip
REFUSED = {"aten.binary_cross_entropy.default"}  # under autocast torch raises


def run(op: Op, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    given, named = filled(op.args, op.kwargs, lambda ref: tensors[ref.name])
    found = overload(op.target)(*given, **named)
    return [found] if isinstance(found, torch.Tensor) else list(found)


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@quietly
@pytest.mark.parametrize("target", sorted(EXAMPLES))
def test_results_share_the_memory_that_the_row_says(target: str) -> None:
    for example in EXAMPLES[target]:
        op, values, tensors = example.build(target)
        said = alias_of(op, values)
        shared = {memory(result) for result in run(op, tensors)} & {memory(tensor) for tensor in tensors.values()}
        assert said is Alias.MAYBE or bool(shared) == (said is Alias.ALWAYS)


@quietly
@pytest.mark.parametrize("target", sorted(EXAMPLES))
def test_an_op_writes_what_is_said(target: str) -> None:
    for example in EXAMPLES[target]:
        op, _, tensors = example.build(target)
        given = {name: tensor.clone() for name, tensor in tensors.items()}
        run(op, given)
        changed = {name for name in given if not torch.equal(given[name], tensors[name]) and not tensors[name].isnan().any()}
        if overload(target)._schema.is_mutable:  # the schema does not say that evaluation writes nothing
            assert changed <= set(writes(op))
        else:
            assert changed == set(writes(op))


@pytest.mark.parametrize("target", sorted(NAMED))
def test_a_row_names_arguments_of_its_operator(target: str) -> None:
    rule, formals = RULES[target], {formal.name for formal in overload(target)._schema.arguments}
    assert formals.issuperset(name for name in (rule.picks, rule.training, rule.rate, *rule.writes) if name)
    assert not isinstance(rule.fills, str) or rule.fills in formals


@quietly
@pytest.mark.parametrize("target", sorted(t for t, rule in RULES.items() if rule.random and (rule.training or rule.rate)))
def test_nothing_is_drawn_where_the_arguments_say_so(target: str) -> None:
    for example in EXAMPLES[target]:
        op, _, tensors = example.build(target)
        row = row_of(op)
        for name, off in ((row.training, False), (row.rate, 0.0)):
            if name:
                args, kwargs = packed(target, bound(op) | {name: off})
                still = Op(name="y", target=target, args=args, kwargs=kwargs, results=op.results)
                for one, two in zip(run(still, tensors), run(still, tensors), strict=True):
                    assert torch.equal(one, two)


def test_autocast_casts_the_operators_that_torch_casts() -> None:
    """Those with a kernel of their own under CUDA's autocast, and those that torch decomposes into them."""
    cast = {target for target, rule in RULES.items() if rule.autocast}
    kernels = {t for t in RULES if torch._C._dispatch_has_kernel_for_dispatch_key(overload(t).name(), "AutocastCUDA")}
    assert cast - kernels == CAST_INSIDE
    assert kernels - cast == REFUSED
    assert all(rule.autocast is not Autocast.LOWER or rule.flops or "prelu" in t or "addr" in t for t, rule in RULES.items())

"""Rules of operators that work on several tensors, element by element."""

from __future__ import annotations

from autopar.operators import own_order, padding
from autopar.operators.call import Call
from autopar.operators.facts import Alias, Autocast, Mixed, OpKind
from autopar.operators.index_facts import integers, predicates
from autopar.operators.rule import OpSharding, Rule, arithmetic, op


def prelu(call: Call) -> OpSharding:
    """`b c ..., c -> b c ...`: one weight per channel, or one for all."""
    if call.rank("weight") == 0 or call.shape("weight")[0] == 1:
        return call.fit("..., ... -> ...")
    return call.fit("b c ..., c -> b c ...")


def searched(call: Call) -> OpSharding:
    """`... _, ... n -> ... n`; a single sorted row may serve all values."""
    row, values = ("_", "...") if call.rank("sorted_sequence") == 1 else ("... _", "... n")
    held = ", ".join([row, values, *(row for _ in call.positions("sorter"))])
    return call.fit(f"{held} -> {values}")


TABLE: dict[str, Rule] = {
    # sums are jointly linear in both tensors, products in each of them
    "aten.add.Tensor": arithmetic(
        "..., ... -> ...", linear="self other", hands_on="self other", padding=padding.added, index_fact=integers.plus
    ),
    "aten.sub.Tensor": arithmetic(
        "..., ... -> ...", linear="self other", hands_on="self", padding=padding.subtracted, index_fact=integers.minus
    ),
    "aten.subtract.Tensor": arithmetic(
        "..., ... -> ...", linear="self other", hands_on="self", padding=padding.subtracted, index_fact=integers.minus
    ),
    "aten.rsub.Tensor": arithmetic(
        "..., ... -> ...", linear="self other", hands_on="other", index_fact=integers.reversed_minus
    ),
    "aten.mul.Tensor": arithmetic(
        "..., ... -> ...", linear="self, other", padding=padding.scaled, index_fact=predicates.product
    ),
    "aten.multiply.Tensor": arithmetic(
        "..., ... -> ...", linear="self, other", padding=padding.scaled, index_fact=predicates.product
    ),
    "aten.div.Tensor": arithmetic("..., ... -> ...", linear="self", padding=padding.divided),
    "aten.divide.Tensor": arithmetic("..., ... -> ...", linear="self", padding=padding.divided),
    "aten.true_divide.Tensor": arithmetic("..., ... -> ...", linear="self"),
    "aten.ldexp.Tensor": op("..., ... -> ...", linear="self"),
    "aten.lerp.Scalar": op("..., ... -> ...", linear="self end"),
    "aten.lerp.Tensor": op("..., ..., ... -> ...", linear="self end"),
    "aten.addcmul.default": op("..., ..., ... -> ...", linear="self tensor1, self tensor2", autocast=Autocast.WIDEST),
    "aten.addcdiv.default": op("..., ..., ... -> ...", linear="self tensor1", autocast=Autocast.WIDEST),
    "aten.copy.default": op("..., ... -> ...", linear="self src, src"),
    "aten.copy_.default": op("..., ... -> ...", alias=Alias.ALWAYS),  # of a buffer: the result has its layout
    "aten.fill.Tensor": op("..., ... -> ...", linear="value"),
    # arithmetic that is not linear
    "aten.div.Tensor_mode": op("..., ... -> ...", own_order=own_order.floor_divide),
    "aten.floor_divide.default": op("..., ... -> ...", own_order=own_order.floor_divide),
    "aten.remainder.Tensor": op("..., ... -> ..."),
    "aten.fmod.Tensor": op("..., ... -> ..."),
    "aten.pow.Tensor_Tensor": op("..., ... -> ...", autocast=Autocast.FP32),
    "aten.float_power.Tensor_Tensor": op("..., ... -> ..."),
    "aten.hypot.default": op("..., ... -> ..."),
    "aten.atan2.default": op("..., ... -> ...", autocast=Autocast.WIDEST),
    "aten.arctan2.default": op("..., ... -> ...", autocast=Autocast.WIDEST),
    "aten.copysign.Tensor": op("..., ... -> ..."),
    "aten.nextafter.default": op("..., ... -> ..."),
    "aten.heaviside.default": op("..., ... -> ..."),
    "aten.gcd.default": op("..., ... -> ..."),
    "aten.lcm.default": op("..., ... -> ..."),
    "aten.logaddexp.default": op("..., ... -> ..."),
    "aten.logaddexp2.default": op("..., ... -> ..."),
    "aten.xlogy.Tensor": op("..., ... -> ..."),
    "aten.special_xlogy.default": op("..., ... -> ..."),
    "aten.special_xlog1py.default": op("..., ... -> ..."),
    "aten.special_zeta.default": op("..., ... -> ..."),
    "aten.igamma.default": op("..., ... -> ..."),
    "aten.igammac.default": op("..., ... -> ..."),
    "aten.polar.default": op("..., ... -> ..."),
    "aten.prelu.default": op(prelu, autocast=Autocast.LOWER),
    # complex numbers
    "aten.complex.default": op("..., ... -> ...", linear="real imag"),
    # the larger and the smaller
    "aten.maximum.default": op("..., ... -> ..."),
    "aten.minimum.default": op("..., ... -> ..."),
    "aten.max.other": op("..., ... -> ..."),
    "aten.min.other": op("..., ... -> ..."),
    "aten.fmax.default": op("..., ... -> ..."),
    "aten.fmin.default": op("..., ... -> ..."),
    "aten.clamp.Tensor": op("..., ..., ... -> ..."),
    "aten.clip.Tensor": op("..., ..., ... -> ..."),
    "aten.clamp_min.Tensor": op("..., ... -> ..."),
    "aten.clamp_max.Tensor": op("..., ... -> ..."),
    # comparisons
    "aten.eq.Tensor": op("..., ... -> ...", index_fact=predicates.equal),
    "aten.ne.Tensor": op("..., ... -> ...", index_fact=predicates.not_equal),
    "aten.not_equal.Tensor": op("..., ... -> ...", index_fact=predicates.not_equal),
    "aten.lt.Tensor": op("..., ... -> ...", index_fact=predicates.less),
    "aten.less.Tensor": op("..., ... -> ...", index_fact=predicates.less),
    "aten.le.Tensor": op("..., ... -> ...", index_fact=predicates.at_most),
    "aten.less_equal.Tensor": op("..., ... -> ...", index_fact=predicates.at_most),
    "aten.gt.Tensor": op("..., ... -> ...", index_fact=predicates.greater),
    "aten.greater.Tensor": op("..., ... -> ...", index_fact=predicates.greater),
    "aten.ge.Tensor": op("..., ... -> ...", index_fact=predicates.at_least),
    "aten.greater_equal.Tensor": op("..., ... -> ...", index_fact=predicates.at_least),
    "aten.isclose.default": op("..., ... -> ..."),
    # bits
    "aten.bitwise_and.Tensor": op("..., ... -> ...", kind=OpKind.AND, index_fact=predicates.both),
    "aten.bitwise_or.Tensor": op("..., ... -> ...", kind=OpKind.OR, index_fact=predicates.either),
    "aten.bitwise_xor.Tensor": op("..., ... -> ..."),
    "aten.__and__.Tensor": op("..., ... -> ...", kind=OpKind.AND, index_fact=predicates.both),
    "aten.__or__.Tensor": op("..., ... -> ...", kind=OpKind.OR, index_fact=predicates.either),
    "aten.__xor__.Tensor": op("..., ... -> ..."),
    "aten.logical_and.default": op("..., ... -> ...", kind=OpKind.AND, index_fact=predicates.both),
    "aten.logical_or.default": op("..., ... -> ...", kind=OpKind.OR, index_fact=predicates.either),
    "aten.logical_xor.default": op("..., ... -> ..."),
    "aten.bitwise_left_shift.Tensor": op("..., ... -> ..."),
    "aten.bitwise_right_shift.Tensor": op("..., ... -> ..."),
    # choices
    "aten.where.self": op("..., ..., ... -> ...", linear="self other", mixed=Mixed.FILL, index_fact=predicates.where),
    "aten.where.ScalarOther": op("..., ... -> ...", linear="self other", mixed=Mixed.FILL, index_fact=predicates.where),
    "aten.where.ScalarSelf": op("..., ... -> ...", linear="self other", mixed=Mixed.FILL, index_fact=predicates.where),
    "aten.where.Scalar": op("... -> ...", mixed=Mixed.FILL, index_fact=predicates.where),
    "aten.masked_fill.Scalar": op("..., ... -> ...", linear="self value", mixed=Mixed.FILL, index_fact=predicates.masked_fill),
    "aten.masked_fill.Tensor": op(
        "..., ..., ... -> ...", linear="self value", mixed=Mixed.FILL, index_fact=predicates.masked_fill
    ),
    # search: one of the two stays whole
    "aten.bucketize.Tensor": op("..., _ -> ..."),
    "aten.searchsorted.Tensor": op(searched),
    "aten.isin.Tensor_Tensor": op("..., _... -> ..."),
}

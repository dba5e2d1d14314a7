"""Rules of operators that work on one tensor, element by element."""

from __future__ import annotations

from autopar.operators import own_order, padding
from autopar.operators.call import Call
from autopar.operators.facts import Alias, Autocast, OpKind
from autopar.operators.index_facts import integers, predicates
from autopar.operators.rule import Rule, arithmetic, op


def unless_cast(call: Call) -> Alias:
    """The operand itself, unless its dtype changes or a copy is requested."""
    same = call.operands[0].dtype == call.op.results[0].dtype
    return Alias.ALWAYS if same and not call.arguments.get("copy") else Alias.NEVER


def unless_complex(call: Call) -> Alias:
    """The operand itself, if it is real."""
    return Alias.NEVER if call.operands[0].dtype.is_complex else Alias.ALWAYS


TABLE: dict[str, Rule] = {
    # copies, casts and signs: linear, the tensor itself passes through
    "aten.alias.default": op("... -> ...", linear="self", alias=Alias.ALWAYS, kind=OpKind.SAME, padding=padding.arranged),
    "aten.detach.default": op("... -> ...", linear="self", alias=Alias.ALWAYS, kind=OpKind.SAME),
    "aten.clone.default": op("... -> ...", linear="self", hands_on="self", kind=OpKind.SAME, padding=padding.arranged),
    "aten.contiguous.default": op(
        "... -> ...", linear="self", hands_on="self", alias=Alias.MAYBE, kind=OpKind.SAME, padding=padding.arranged
    ),
    "aten.lift_fresh.default": op("... -> ...", linear="self", alias=Alias.ALWAYS, kind=OpKind.SAME),
    "aten.lift_fresh_copy.default": op(
        "... -> ...", linear="self", hands_on="self", kind=OpKind.SAME, padding=padding.arranged
    ),
    "aten.to.dtype": op(
        "... -> ...", linear="self", alias=unless_cast, kind=OpKind.CAST, padding=padding.arranged, index_fact=integers.same
    ),
    "aten.to.device": op(
        "... -> ...", linear="self", alias=unless_cast, kind=OpKind.CAST, padding=padding.arranged, index_fact=integers.same
    ),
    "aten.to.dtype_layout": op(
        "... -> ...", linear="self", alias=unless_cast, kind=OpKind.CAST, padding=padding.arranged, index_fact=integers.same
    ),
    "aten.to.other": op(
        "..., _... -> ...",
        linear="self",
        alias=unless_cast,
        kind=OpKind.CAST,
        padding=padding.arranged,
        index_fact=integers.same,
    ),
    "aten.type_as.default": op("..., _... -> ...", linear="self", alias=unless_cast, kind=OpKind.CAST),
    "aten._to_copy.default": op("... -> ...", linear="self", kind=OpKind.CAST),
    "aten.neg.default": op("... -> ...", linear="self", padding=padding.zero_to_zero, index_fact=integers.negative),
    "aten.negative.default": op("... -> ...", linear="self", index_fact=integers.negative),
    "aten.positive.default": op("... -> ...", linear="self", alias=Alias.ALWAYS),
    # complex numbers, and their real and imaginary parts in a last dim
    "aten.real.default": op("... -> ...", linear="self", alias=Alias.ALWAYS),
    "aten.imag.default": op("... -> ...", linear="self", alias=Alias.ALWAYS),
    "aten.conj.default": op("... -> ...", linear="self", alias=Alias.ALWAYS),
    "aten._conj.default": op("... -> ...", linear="self", alias=Alias.ALWAYS),
    "aten.conj_physical.default": op("... -> ...", linear="self", alias=unless_complex),
    "aten.resolve_conj.default": op("... -> ...", linear="self", alias=Alias.MAYBE),
    "aten.resolve_neg.default": op("... -> ...", linear="self", alias=Alias.MAYBE),
    "aten.view_as_real.default": op("... -> ... _", linear="self", alias=Alias.ALWAYS),
    "aten.view_as_complex.default": op("... _ -> ...", linear="self", alias=Alias.ALWAYS, kind=OpKind.MEMORY),
    "aten.angle.default": op("... -> ..."),
    "aten.sgn.default": op("... -> ..."),
    "aten.isreal.default": op("... -> ..."),
    # arithmetic with a number: a sum is jointly linear in tensor and number
    "aten.add.Scalar": arithmetic(
        "... -> ...", linear="self other", hands_on="self", padding=padding.added, index_fact=integers.plus
    ),
    "aten.sub.Scalar": arithmetic(
        "... -> ...", linear="self other", hands_on="self", padding=padding.subtracted, index_fact=integers.minus
    ),
    "aten.subtract.Scalar": arithmetic(
        "... -> ...", linear="self other", hands_on="self", padding=padding.subtracted, index_fact=integers.minus
    ),
    "aten.rsub.Scalar": arithmetic("... -> ...", linear="self other", index_fact=integers.reversed_minus),
    "aten.mul.Scalar": arithmetic("... -> ...", linear="self", padding=padding.scaled, index_fact=predicates.product),
    "aten.multiply.Scalar": arithmetic("... -> ...", linear="self", padding=padding.scaled, index_fact=predicates.product),
    "aten.div.Scalar": arithmetic("... -> ...", linear="self", padding=padding.divided),
    "aten.divide.Scalar": arithmetic("... -> ...", linear="self", padding=padding.divided),
    "aten.div.Scalar_mode": op("... -> ...", own_order=own_order.floor_divide),
    "aten.floor_divide.Scalar": op("... -> ...", own_order=own_order.floor_divide),
    "aten.remainder.Scalar": op("... -> ..."),
    "aten.fmod.Scalar": op("... -> ..."),
    "aten.deg2rad.default": op("... -> ...", linear="self"),
    "aten.rad2deg.default": op("... -> ...", linear="self"),
    "aten.fill.Scalar": op("... -> ..."),
    "aten.zero.default": op("... -> ..."),
    "aten.nan_to_num.default": op("... -> ..."),
    # powers and roots
    "aten.pow.Tensor_Scalar": op("... -> ...", padding=padding.power, autocast=Autocast.FP32),
    "aten.pow.Scalar": op("... -> ...", autocast=Autocast.FP32),
    "aten.float_power.Tensor_Scalar": op("... -> ..."),
    "aten.float_power.Scalar": op("... -> ..."),
    "aten.square.default": op("... -> ..."),
    "aten.sqrt.default": op("... -> ..."),
    "aten.rsqrt.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.reciprocal.default": op("... -> ...", autocast=Autocast.FP32),
    # exponentials and logarithms
    "aten.exp.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.exp2.default": op("... -> ..."),
    "aten.expm1.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.log.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.log10.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.log1p.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.log2.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.xlogy.Scalar_Self": op("... -> ..."),
    "aten.xlogy.Scalar_Other": op("... -> ..."),
    "aten.special_exp2.default": op("... -> ..."),
    "aten.special_expm1.default": op("... -> ..."),
    "aten.special_log1p.default": op("... -> ..."),
    # angles
    "aten.cos.default": op("... -> ...", padding=padding.finite),
    "aten.cosh.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.sin.default": op("... -> ...", padding=padding.finite),
    "aten.sinh.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.tan.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.tanh.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.acos.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.arccos.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.acosh.default": op("... -> ..."),
    "aten.arccosh.default": op("... -> ..."),
    "aten.asin.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.arcsin.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.asinh.default": op("... -> ..."),
    "aten.arcsinh.default": op("... -> ..."),
    "aten.atan.default": op("... -> ..."),
    "aten.arctan.default": op("... -> ..."),
    "aten.atanh.default": op("... -> ..."),
    "aten.arctanh.default": op("... -> ..."),
    "aten.sinc.default": op("... -> ..."),
    "aten.special_sinc.default": op("... -> ..."),
    # rounding, signs and bounds
    "aten.ceil.default": op("... -> ..."),
    "aten.floor.default": op("... -> ..."),
    "aten.round.default": op("... -> ..."),
    "aten.trunc.default": op("... -> ..."),
    "aten.fix.default": op("... -> ..."),
    "aten.frac.default": op("... -> ..."),
    "aten.abs.default": op("... -> ..."),
    "aten.absolute.default": op("... -> ..."),
    "aten.sign.default": op("... -> ..."),
    "aten.signbit.default": op("... -> ..."),
    "aten.copysign.Scalar": op("... -> ..."),
    "aten.clamp.default": op("... -> ..."),
    "aten.clip.default": op("... -> ..."),
    "aten.clamp_max.default": op("... -> ..."),
    "aten.clamp_min.default": op("... -> ..."),
    # activations
    "aten.relu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.relu6.default": op("... -> ..."),
    "aten.elu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.celu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.selu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.gelu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.silu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.mish.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.sigmoid.default": op("... -> ...", padding=padding.finite),
    "aten.special_expit.default": op("... -> ...", padding=padding.finite),
    "aten.log_sigmoid.default": op("... -> ...", padding=padding.finite),
    "aten.hardsigmoid.default": op("... -> ...", padding=padding.finite),
    "aten.hardswish.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.hardtanh.default": op("... -> ...", padding=padding.bounded),
    "aten.hardshrink.default": op("... -> ..."),
    "aten.softshrink.default": op("... -> ..."),
    "aten.softplus.default": op("... -> ...", padding=padding.finite, autocast=Autocast.FP32),
    "aten.leaky_relu.default": op("... -> ...", padding=padding.zero_to_zero),
    "aten.threshold.default": op("... -> ..."),
    "aten.logit.default": op("... -> ..."),
    "aten.special_logit.default": op("... -> ..."),
    # comparisons with a number, and questions
    "aten.eq.Scalar": op("... -> ...", index_fact=predicates.equal),
    "aten.ne.Scalar": op("... -> ...", index_fact=predicates.not_equal),
    "aten.not_equal.Scalar": op("... -> ...", index_fact=predicates.not_equal),
    "aten.lt.Scalar": op("... -> ...", index_fact=predicates.less),
    "aten.less.Scalar": op("... -> ...", index_fact=predicates.less),
    "aten.le.Scalar": op("... -> ...", index_fact=predicates.at_most),
    "aten.less_equal.Scalar": op("... -> ...", index_fact=predicates.at_most),
    "aten.gt.Scalar": op("... -> ...", index_fact=predicates.greater),
    "aten.greater.Scalar": op("... -> ...", index_fact=predicates.greater),
    "aten.ge.Scalar": op("... -> ...", index_fact=predicates.at_least),
    "aten.greater_equal.Scalar": op("... -> ...", index_fact=predicates.at_least),
    "aten.isfinite.default": op("... -> ..."),
    "aten.isinf.default": op("... -> ..."),
    "aten.isnan.default": op("... -> ..."),
    "aten.isneginf.default": op("... -> ..."),
    "aten.isposinf.default": op("... -> ..."),
    "aten.isin.Tensor_Scalar": op("... -> ..."),
    # bits
    "aten.bitwise_not.default": op("... -> ...", index_fact=predicates.negation),
    "aten.logical_not.default": op("... -> ...", index_fact=predicates.negation),
    "aten.bitwise_and.Scalar": op("... -> ...", index_fact=predicates.both),
    "aten.bitwise_or.Scalar": op("... -> ...", index_fact=predicates.either),
    "aten.bitwise_xor.Scalar": op("... -> ..."),
    "aten.__and__.Scalar": op("... -> ...", index_fact=predicates.both),
    "aten.__or__.Scalar": op("... -> ...", index_fact=predicates.either),
    "aten.__xor__.Scalar": op("... -> ..."),
    "aten.bitwise_left_shift.Tensor_Scalar": op("... -> ..."),
    "aten.bitwise_right_shift.Tensor_Scalar": op("... -> ..."),
    # special functions
    "aten.digamma.default": op("... -> ..."),
    "aten.lgamma.default": op("... -> ..."),
    "aten.polygamma.default": op("... -> ..."),
    "aten.mvlgamma.default": op("... -> ..."),
    "aten.special_psi.default": op("... -> ..."),
    "aten.special_gammaln.default": op("... -> ..."),
    "aten.erf.default": op("... -> ..."),
    "aten.erfc.default": op("... -> ..."),
    "aten.erfinv.default": op("... -> ...", autocast=Autocast.FP32),
    "aten.special_erf.default": op("... -> ..."),
    "aten.special_erfc.default": op("... -> ..."),
    "aten.special_erfcx.default": op("... -> ..."),
    "aten.special_erfinv.default": op("... -> ..."),
    "aten.i0.default": op("... -> ..."),
    "aten.special_i0.default": op("... -> ..."),
    "aten.special_i0e.default": op("... -> ..."),
    "aten.special_i1.default": op("... -> ..."),
    "aten.special_i1e.default": op("... -> ..."),
    "aten.special_bessel_j0.default": op("... -> ..."),
    "aten.special_bessel_j1.default": op("... -> ..."),
    "aten.special_entr.default": op("... -> ..."),
    "aten.special_ndtr.default": op("... -> ..."),
    "aten.special_log_ndtr.default": op("... -> ..."),
    "aten.special_ndtri.default": op("... -> ..."),
    # classes
    "aten.one_hot.default": op("... -> ... _"),
}

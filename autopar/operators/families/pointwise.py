"""Rules of operators that work element by element."""

from __future__ import annotations

from autopar.operators.call import Call
from autopar.operators.pattern_text import unread
from autopar.operators.rule import OpSharding, Rule, op

ONE, TWO, THREE = "... -> ...", "..., ... -> ...", "..., ..., ... -> ..."

UNARY = """
    abs acos acosh asin asinh atan atanh bitwise_not ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac
    hardsigmoid hardswish isfinite isinf isnan lgamma log log10 log1p log2 log_sigmoid logical_not mish reciprocal relu relu6
    round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh sqrt square tan tanh trunc
    celu clamp.default clamp_max clamp_min elu gelu hardshrink hardtanh leaky_relu logit nan_to_num softplus softshrink
    threshold pow.Tensor_Scalar pow.Scalar polygamma
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
    bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar __and__.Scalar __or__.Scalar __xor__.Scalar
    remainder.Scalar fmod.Scalar floor_divide.Scalar div.Scalar_mode
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
    angle fix i0 isneginf isposinf isreal mvlgamma float_power.Tensor_Scalar float_power.Scalar copysign.Scalar
    xlogy.Scalar_Self xlogy.Scalar_Other isin.Tensor_Scalar
    special_bessel_j0 special_bessel_j1 special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
    special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
    special_ndtr special_ndtri special_psi special_sinc
"""  # of which none is linear

BINARY = """
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor maximum minimum max.other min.other fmax fmin
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    __and__.Tensor __or__.Tensor __xor__.Tensor logical_and logical_or logical_xor atan2 hypot copysign.Tensor
    pow.Tensor_Tensor remainder.Tensor fmod.Tensor floor_divide div.Tensor_mode isclose logaddexp logaddexp2
    xlogy.Tensor nextafter heaviside gcd lcm igamma igammac float_power.Tensor_Tensor
    special_xlog1py special_xlogy special_zeta
"""

SAME = """
    neg negative positive alias detach clone contiguous lift_fresh real conj _conj conj_physical resolve_conj resolve_neg
    to.dtype to.device to.dtype_layout _to_copy
"""  # linear in their only tensor: what goes through is the tensor itself, up to its sign, dtype or place

VIEWS = ("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default")


DRAWS = """
    bernoulli bernoulli.p poisson exponential uniform log_normal cauchy geometric random random.from random.to
    normal.Tensor_float normal.float_Tensor normal_functional rand_like randn_like randint_like randint_like.low_dtype
"""
DRAWS_OF_TWO = "bernoulli.Tensor binomial normal.Tensor_Tensor"


def names(words: str) -> list[str]:
    """Targets of a list of operator names; an overload that is not named is the default one."""
    return [f"aten.{word if '.' in word else f'{word}.default'}" for word in words.split()]


def typed_like(call: Call) -> OpSharding:
    """... -> ...; the other tensor gives its dtype only"""
    return call.fit(f"..., {unread(call.rank('other'))} -> ...")


def prelu(call: Call) -> OpSharding:
    """... c ..., c -> ... c ...; the channels are dim 1"""
    if call.rank("weight") == 0 or call.shape("weight")[0] == 1:
        return call.fit("..., ... -> ...")
    return call.fit("b c ..., c -> b c ...")


def searched(call: Call) -> OpSharding:
    """... s!, ... n -> ... n; one sorted row serves any values"""
    row, values = ("_", "...") if call.rank("sorted_sequence") == 1 else ("... _", "... n")
    held = ", ".join([row, values, *(row for _ in call.positions("sorter"))])
    return call.fit(f"{held} -> {values}")


def contained(call: Call) -> OpSharding:
    """..., e! -> ...; all that is sought must be known"""
    return call.fit(f"..., {unread(call.rank('test_elements'))} -> ...")


def rrelu(call: Call) -> OpSharding:
    """... -> ...; draws random slopes in training"""
    return call.fit(ONE, random=bool(call.arguments["training"]))


def dropout(call: Call) -> OpSharding:
    """... -> ...; draws random numbers in training"""
    return call.fit(ONE if len(call.op.results) == 1 else "... -> ..., ...", random=draws(call))


def feature_dropout(call: Call) -> OpSharding:
    """b c ...! -> b c ...!; a channel is dropped as one"""
    return call.fit("b c ...! -> b c ...!", random=draws(call))


def draws(call: Call) -> bool:
    """Whether a dropout is in training and has a rate."""
    return bool(call.arguments["train"]) and call.arguments["p"] != 0


TABLE: dict[str, Rule] = {
    **{target: op(ONE) for target in names(UNARY)},
    **{target: op(TWO) for target in names(BINARY)},
    **{target: op(ONE, linear="self", view=target in VIEWS) for target in names(SAME)},
    "aten.to.other": op(typed_like, linear="self"),
    "aten.type_as.default": op(typed_like, linear="self"),
    # the sum of two tensors is linear in both at once, a product in each of them
    "aten.add.Tensor": op(TWO, linear="self other"),
    "aten.add.Scalar": op(ONE, linear="self other"),
    "aten.sub.Tensor": op(TWO, linear="self other"),
    "aten.sub.Scalar": op(ONE, linear="self other"),
    "aten.rsub.Tensor": op(TWO, linear="self other"),
    "aten.rsub.Scalar": op(ONE, linear="self other"),
    "aten.mul.Tensor": op(TWO, linear="self, other"),
    "aten.mul.Scalar": op(ONE, linear="self"),
    "aten.div.Tensor": op(TWO, linear="self"),
    "aten.div.Scalar": op(ONE, linear="self"),
    "aten.true_divide.Tensor": op(TWO, linear="self"),
    "aten.ldexp.Tensor": op(TWO, linear="self"),
    "aten.lerp.Scalar": op(TWO, linear="self end"),
    "aten.lerp.Tensor": op(THREE, linear="self end"),
    "aten.addcmul.default": op(THREE, linear="self tensor1, self tensor2"),
    "aten.addcdiv.default": op(THREE, linear="self tensor1"),
    "aten.copy.default": op(TWO, linear="self src, src"),
    "aten.fill.Scalar": op(ONE),
    "aten.fill.Tensor": op(TWO, linear="value"),
    "aten.zero.default": op(ONE),
    "aten.deg2rad.default": op(ONE, linear="self"),
    "aten.rad2deg.default": op(ONE, linear="self"),
    "aten.bucketize.Tensor": op("..., _ -> ..."),
    "aten.searchsorted.Tensor": op(searched),
    "aten.isin.Tensor_Tensor": op(contained),
    "aten.one_hot.default": op("... -> ... _"),
    # choices
    "aten.where.self": op(THREE, linear="self other"),
    "aten.where.ScalarOther": op(TWO, linear="self other"),
    "aten.where.ScalarSelf": op(TWO, linear="self other"),
    "aten.where.Scalar": op(ONE),
    "aten.masked_fill.Scalar": op(TWO, linear="self value"),
    "aten.masked_fill.Tensor": op(THREE, linear="self value"),
    "aten.clamp.Tensor": op(THREE),
    "aten.clamp_min.Tensor": op(TWO),
    "aten.clamp_max.Tensor": op(TWO),
    "aten.prelu.default": op(prelu),
    # complex numbers, and their real and imaginary parts in a last dim
    "aten.complex.default": op(TWO, linear="real imag"),
    "aten.polar.default": op(TWO),
    "aten.imag.default": op(ONE, linear="self", view=True),
    "aten.view_as_real.default": op("... -> ... _", linear="self", view=True),
    "aten.view_as_complex.default": op("... _ -> ...", linear="self", view=True),
    # random
    "aten.dropout.default": op(dropout, linear="input"),
    "aten.native_dropout.default": op(dropout),
    "aten.feature_dropout.default": op(feature_dropout, linear="input"),
    "aten.alpha_dropout.default": op(dropout),
    "aten.feature_alpha_dropout.default": op(feature_dropout),
    "aten.rrelu.default": op(rrelu),
    **{target: op(ONE, random=True) for target in names(DRAWS)},
    **{target: op(TWO, random=True) for target in names(DRAWS_OF_TWO)},
    "aten.multinomial.default": op("... _ -> ... _", random=True),
}

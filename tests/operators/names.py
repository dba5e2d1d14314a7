"""Names of operators whose examples are alike: element by element, random, on square matrices, and second names."""

from __future__ import annotations

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
"""
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
"""
DRAWS = """
    bernoulli bernoulli.p poisson _standard_gamma exponential uniform log_normal cauchy geometric random random.from random.to
    normal.Tensor_float normal.float_Tensor normal_functional rand_like randn_like randint_like randint_like.low_dtype
"""
SQUARES = """
    inverse linalg_inv linalg_inv_ex det logdet slogdet linalg_det linalg_slogdet matrix_power linalg_matrix_power matrix_exp
    linalg_matrix_exp cholesky cholesky_inverse linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_qr
    linalg_svd linalg_svdvals linalg_pinv.atol_rtol_float pinverse linalg_lu_factor linalg_cond
    linalg_matrix_rank.atol_rtol_float
"""
ALIASES = {  # torch's second names
    "aten.multiply": "aten.mul",
    "aten.subtract": "aten.sub",
    "aten.divide": "aten.div",
    "aten.absolute": "aten.abs",
    "aten.clip": "aten.clamp",
    "aten.concat": "aten.cat",
    "aten.concatenate": "aten.cat",
    "aten.greater": "aten.gt",
    "aten.greater_equal": "aten.ge",
    "aten.less": "aten.lt",
    "aten.less_equal": "aten.le",
    "aten.not_equal": "aten.ne",
    "aten.lift_fresh_copy": "aten.clone",
    "aten.special_expit": "aten.sigmoid",
    **{f"aten.arc{name}": f"aten.a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")},
}
FORMS = ("default", "Tensor", "Scalar")


def names(words: str) -> list[str]:
    """Targets of a list of operator names; an overload that is not named is the default one."""
    return [f"aten.{word if '.' in word else f'{word}.default'}" for word in words.split()]

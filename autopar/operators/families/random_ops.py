"""Rules of operators that draw random numbers: dropouts in training, and samples of distributions."""

from __future__ import annotations

from autopar.operators.call import Call
from autopar.operators.rule import OpSharding, Rule, op


def rrelu(call: Call) -> OpSharding:
    """Element by element; draws random slopes in training."""
    return call.fit("... -> ...", random=bool(call.arguments["training"]))


def dropout(call: Call) -> OpSharding:
    """Element by element; draws random numbers in training."""
    return call.fit("... -> ..." if len(call.op.results) == 1 else "... -> ..., ...", random=draws(call))


def feature_dropout(call: Call) -> OpSharding:
    """`b c ...! -> b c ...!`: a channel is dropped as one."""
    return call.fit("b c ...! -> b c ...!", random=draws(call))


def draws(call: Call) -> bool:
    """Whether a dropout is in training and has a rate."""
    return bool(call.arguments["train"]) and call.arguments["p"] != 0


TABLE: dict[str, Rule] = {
    # dropouts
    "aten.dropout.default": op(dropout, linear="input"),
    "aten.native_dropout.default": op(dropout),
    "aten.alpha_dropout.default": op(dropout),
    "aten.feature_dropout.default": op(feature_dropout, linear="input"),
    "aten.feature_alpha_dropout.default": op(feature_dropout),
    "aten.rrelu.default": op(rrelu),
    # an element of the result for each of the operand
    "aten.bernoulli.default": op("... -> ...", random=True),
    "aten.bernoulli.p": op("... -> ...", random=True),
    "aten.poisson.default": op("... -> ...", random=True),
    "aten.exponential.default": op("... -> ...", random=True),
    "aten.uniform.default": op("... -> ...", random=True),
    "aten.log_normal.default": op("... -> ...", random=True),
    "aten.cauchy.default": op("... -> ...", random=True),
    "aten.geometric.default": op("... -> ...", random=True),
    "aten.random.default": op("... -> ...", random=True),
    "aten.random.from": op("... -> ...", random=True),
    "aten.random.to": op("... -> ...", random=True),
    "aten.normal.Tensor_float": op("... -> ...", random=True),
    "aten.normal.float_Tensor": op("... -> ...", random=True),
    "aten.normal_functional.default": op("... -> ...", random=True),
    "aten.rand_like.default": op("... -> ...", random=True),
    "aten.randn_like.default": op("... -> ...", random=True),
    "aten.randint_like.default": op("... -> ...", random=True),
    "aten.randint_like.low_dtype": op("... -> ...", random=True),
    # two parameters for each element
    "aten.bernoulli.Tensor": op("..., ... -> ...", random=True),
    "aten.binomial.default": op("..., ... -> ...", random=True),
    "aten.normal.Tensor_Tensor": op("..., ... -> ...", random=True),
    # samples of each row's classes
    "aten.multinomial.default": op("... _ -> ... _", random=True),
}

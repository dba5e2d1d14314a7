"""Rules of operators that draw random numbers: dropouts in training, and samples of distributions."""

from __future__ import annotations

from autopar.operators import padding
from autopar.operators.call import Call
from autopar.operators.facts import Alias, OpKind
from autopar.operators.rule import Rule, op


def if_idle(call: Call) -> Alias:
    """The operand itself, if nothing is dropped."""
    return Alias.NEVER if call.arguments["train"] is not False and call.arguments["p"] != 0 else Alias.ALWAYS


TABLE: dict[str, Rule] = {
    # dropouts
    "aten.dropout.default": op(
        "... -> ...",
        linear="input",
        alias=if_idle,
        random=True,
        training="train",
        rate="p",
        kind=OpKind.DROPOUT,
        padding=padding.zero_to_zero,
    ),
    "aten.native_dropout.default": op("... -> ..., ...", random=True, training="train", rate="p", kind=OpKind.DROPOUT),
    "aten.alpha_dropout.default": op("... -> ...", alias=if_idle, random=True, training="train", rate="p"),
    "aten.feature_dropout.default": op(
        "b c ...! -> b c ...!", linear="input", alias=if_idle, random=True, training="train", rate="p"
    ),
    "aten.feature_alpha_dropout.default": op("b c ...! -> b c ...!", alias=if_idle, random=True, training="train", rate="p"),
    "aten.rrelu.default": op("... -> ...", random=True, training="training"),
    # one element of the result per element of the operand
    "aten.bernoulli.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.bernoulli.p": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.poisson.default": op("... -> ...", random=True, kind=OpKind.DRAW_COUNTS),
    "aten.exponential.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten._standard_gamma.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.uniform.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.log_normal.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.cauchy.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.geometric.default": op("... -> ...", random=True, kind=OpKind.DRAW_COUNTS),
    "aten.random.default": op("... -> ...", random=True, kind=OpKind.DRAW_INTEGERS),
    "aten.random.from": op("... -> ...", random=True, kind=OpKind.DRAW_INTEGERS),
    "aten.random.to": op("... -> ...", random=True, kind=OpKind.DRAW_INTEGERS),
    "aten.normal.Tensor_float": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.normal.float_Tensor": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.normal_functional.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.rand_like.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.randn_like.default": op("... -> ...", random=True, kind=OpKind.DRAW),
    "aten.randint_like.default": op("... -> ...", random=True, kind=OpKind.DRAW_INTEGERS),
    "aten.randint_like.low_dtype": op("... -> ...", random=True, kind=OpKind.DRAW_INTEGERS),
    # two parameters per element
    "aten.bernoulli.Tensor": op("..., ... -> ...", random=True, kind=OpKind.DRAW),
    "aten.binomial.default": op("..., ... -> ...", random=True, kind=OpKind.DRAW_COUNTS),
    "aten.normal.Tensor_Tensor": op("..., ... -> ...", random=True, kind=OpKind.DRAW),
    # samples of each row's classes
    "aten.multinomial.default": op("... _ -> ... _", random=True, alone=True, kind=OpKind.DRAW_CLASSES),
}

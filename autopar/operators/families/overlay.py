"""What is known of operators beside how they split; moves into the rows of the families as these are written out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from autopar.operators import padding
from autopar.operators.call import Call, Local
from autopar.operators.facts import Alias, Autocast, Mean, Mixed, OpKind, says
from autopar.operators.flops import Product, chain, contraction, product

ALWAYS, MAYBE, NEVER = Alias.ALWAYS, Alias.MAYBE, Alias.NEVER


def names(words: str) -> Iterator[str]:
    return (f"aten.{word if '.' in word else f'{word}.default'}" for word in words.split())


# contraction.py
def window(call: Call, local: Local) -> int:
    """2 x outputs x window; of a transposed convolution 2 x inputs x window. The weight is (out, in / groups, window...)."""
    moved = local.operands[0] if transposed(call) else local.results[0]
    return 2 * math.prod(moved) * math.prod(local.operands[1][1:])


def transposed(call: Call) -> bool:
    """Whether a convolution spreads its input instead of gathering it."""
    return "transpose" in call.op.target or bool(call.arguments.get("transposed"))


def rows(call: Call, local: Local) -> int:
    """2 x results x columns: each row is multiplied by one matrix only."""
    return 2 * math.prod(local.results[0]) * local.operands[0][-1]


# attention.py
def scores_and_values(call: Call, local: Local) -> list[Product]:
    """q k^T is b h q k d, and the weighted sum b h q k e; half of both if causal. The scores are not saved."""
    query, key, value = local.operands[:3]
    pairs = (1 if call.arguments["is_causal"] else 2) * math.prod(query[:-1]) * key[-2]
    return [
        Product(flops=pairs * query[-1], left=frozenset({0}), right=frozenset({1}), again=True),
        Product(flops=pairs * value[-1], left=frozenset({0, 1}), right=frozenset({2})),
    ]


# linalg_fft.py
def powers(call: Call, local: Local) -> list[Product]:
    """Squares, and products of squares."""
    matrix, n = local.operands[0], abs(call.number("n"))
    count = n.bit_length() + n.bit_count() - 2 if n else 0
    itself = frozenset({0})
    return [Product(flops=2 * math.prod(matrix) * matrix[-1], left=itself, right=itself) for _ in range(count)]


# recurrent.py
def gate_products(call: Call, local: Local) -> list[Product]:
    """For each layer and direction the sequence and the states of all steps times their matrices; states need gradients."""
    matrices = [p for p in call.positions("params") if len(local.operands[p]) == 2]
    steps, everything = math.prod(local.operands[0][:2]), frozenset(range(len(local.operands)))
    first = first_layer(call, len(matrices))
    return [
        Product(
            flops=2 * steps * math.prod(local.operands[p]),
            left=frozenset({0}) if place in first else everything,
            right=frozenset({p}),
        )
        for place, p in enumerate(matrices)
    ]


def first_layer(call: Call, count: int) -> set[int]:
    """Which of the matrices multiply the sequence itself."""
    directions = 2 if call.arguments["bidirectional"] else 1
    each = count // (call.number("num_layers") * directions)
    return {direction * each for direction in range(directions)}


def cell_products(call: Call, local: Local) -> list[Product]:
    """The input and the state times their matrices."""
    weights = [call.positions(name)[0] for name in ("w_ih", "w_hh")]
    given = 0, 1
    rows_of = math.prod(local.operands[0][:-1])
    return [
        Product(flops=2 * rows_of * math.prod(local.operands[w]), left=frozenset({x}), right=frozenset({w}))
        for x, w in zip(given, weights, strict=True)
    ]


# backward_ops.py
def convolution_gradients(call: Call, local: Local) -> list[Product]:
    """A product of the size of the convolution for each of the gradients of input and weight that is asked for."""
    result, given, weight = local.operands[:3]
    moved = given if call.arguments["transposed"] else result
    flops = 2 * math.prod(moved) * math.prod(weight[1:])
    asked = call.arguments["output_mask"]
    assert isinstance(asked, tuple)
    return [
        Product(flops=flops, left=frozenset({0}), right=frozenset({other}))
        for wanted, other in zip(asked[:2], (2, 1), strict=True)
        if wanted
    ]


# views.py, pointwise.py
def unless_cast(call: Call) -> Alias:
    """The operand itself, unless its dtype changes or a copy is asked for."""
    same = call.operands[0].dtype == call.op.results[0].dtype
    return ALWAYS if same and not call.arguments.get("copy") else NEVER


def unless_complex(call: Call) -> Alias:
    """The operand itself, where it is real."""
    return NEVER if call.operands[0].dtype.is_complex else ALWAYS


def if_idle(call: Call) -> Alias:
    """The operand itself, where nothing is dropped."""
    return NEVER if call.arguments["train"] is not False and call.arguments["p"] != 0 else ALWAYS


def einsum_alias(call: Call) -> Alias:
    """A view where one tensor is permuted, or its diagonal taken, and nothing summed."""
    before, arrow, after = str(call.arguments["equation"]).partition("->")
    kept = after if arrow else [letter for letter in before if letter == "." or before.count(letter) == 1]
    return ALWAYS if len(call.operands) == 1 and set(before) <= {*kept, " "} else NEVER


LINEAR = says("linear", k="in-features", n="out-features")
MATRICES = says("matrix product", k="inner dim")
CONVOLUTION = says("convolution", b="batch", i="in-channels", o="out-channels", g="groups of channels")
LOSS, SCORED = says("loss"), says("loss", c="classes")
NORM = says("norm")

CONVOLUTIONS = """
    conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution
"""
TWO = "mv dot vdot inner tensordot linalg_matmul linalg_vecdot addmv addbmm"

FACTS: list[tuple[str, dict[str, Any]]] = [
    # what it costs
    ("linear matmul mm bmm addmm baddbmm bilinear einsum " + TWO, {"flops": contraction}),
    ("linalg_multi_dot chain_matmul", {"flops": chain}),
    (CONVOLUTIONS, {"flops": product(window, 0, 1)}),
    ("scaled_dot_product_attention", {"flops": scores_and_values, "kind": OpKind.ATTENTION}),
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", {"flops": gate_products, "kind": OpKind.RECURRENT}),
    ("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", {"flops": cell_products}),
    ("matrix_power linalg_matrix_power", {"flops": powers}),
    ("convolution_backward", {"flops": convolution_gradients}),
    ("embedding", {"picks": "weight"}),
    ("index.Tensor _unsafe_index.Tensor index_select gather take_along_dim take", {"picks": "self"}),
    ("add.Tensor", {"hands_on": ("self", "other")}),
    ("add.Scalar sub.Tensor sub.Scalar clone contiguous", {"hands_on": ("self",)}),
    ("rsub.Tensor", {"hands_on": ("other",)}),
    # memory and state
    ("reshape flatten.using_ints ravel reshape_as contiguous resolve_conj resolve_neg", {"alias": MAYBE}),
    ("to.dtype to.device to.dtype_layout to.other type_as", {"alias": unless_cast}),
    ("dropout feature_dropout alpha_dropout feature_alpha_dropout", {"alias": if_idle}),
    ("_conj conj real positive", {"alias": ALWAYS}),
    ("conj_physical", {"alias": unless_complex}),
    ("einsum", {"alias": einsum_alias}),
    ("batch_norm native_batch_norm", {"writes": ("running_mean", "running_var"), "training": "training"}),
    ("instance_norm", {"writes": ("running_mean", "running_var"), "training": "use_input_stats"}),
    (
        "dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout",
        {"random": True, "training": "train", "rate": "p"},
    ),
    ("rrelu", {"random": True, "training": "training"}),
    ("scaled_dot_product_attention", {"random": True, "rate": "dropout_p"}),
    ("lstm.input gru.input rnn_tanh.input rnn_relu.input", {"training": "train", "rate": "dropout"}),
    # kinds
    ("contiguous clone lift_fresh alias detach", {"kind": OpKind.SAME}),
    ("to.dtype to.device to.dtype_layout to.other _to_copy type_as", {"kind": OpKind.CAST}),
    (
        "view reshape _unsafe_view view_as reshape_as flatten.using_ints unflatten.int ravel squeeze squeeze.dim squeeze.dims",
        {"kind": OpKind.RESHAPE},
    ),
    ("expand expand_as broadcast_to", {"kind": OpKind.EXPAND}),
    ("zeros new_zeros", {"fills": 0}),
    ("ones new_ones", {"fills": 1}),
    ("full new_full", {"fills": "fill_value"}),
    ("scalar_tensor", {"fills": "s"}),
    (
        "rand randn rand_like randn_like bernoulli bernoulli.p normal.float_float normal.Tensor_float normal.float_Tensor "
        "normal_functional uniform exponential log_normal",
        {"kind": OpKind.DRAW},
    ),
    ("bernoulli.Tensor normal.Tensor_Tensor", {"kind": OpKind.DRAW}),
    ("dropout native_dropout feature_dropout", {"kind": OpKind.DROPOUT}),
    ("__and__.Tensor bitwise_and.Tensor logical_and", {"kind": OpKind.AND}),
    ("__or__.Tensor bitwise_or.Tensor logical_or", {"kind": OpKind.OR}),
    (
        "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits",
        {"mean": Mean.ELEMENTS},
    ),
    ("cross_entropy_loss nll_loss nll_loss_nd", {"mean": Mean.TARGETS}),
    # padding
    (
        "alias clone contiguous to.dtype to.device to.dtype_layout to.other reshape transpose.int permute t unsqueeze squeeze "
        "squeeze.dim squeeze.dims expand slice.Tensor select.int split.Tensor split.sizes split_with_sizes chunk unbind.int "
        "cat stack flip",
        {"padding": padding.arranged},
    ),
    ("embedding", {"padding": padding.embedded}),
    ("linear matmul mm bmm addmm baddbmm einsum " + TWO, {"padding": padding.product}),
    ("layer_norm rms_norm", {"padding": padding.finite}),
    ("sigmoid softplus log_sigmoid hardsigmoid sin cos", {"padding": padding.finite}),
    (
        "relu gelu silu mish tanh leaky_relu elu selu celu hardtanh hardswish neg dropout",
        {"padding": padding.zero_to_zero},
    ),
    ("mul.Tensor mul.Scalar", {"padding": padding.scaled}),
    ("div.Tensor div.Scalar", {"padding": padding.divided}),
    ("add.Tensor add.Scalar", {"padding": padding.added}),
    ("sub.Tensor sub.Scalar", {"padding": padding.subtracted}),
    ("pow.Tensor_Scalar", {"padding": padding.power}),
    ("nll_loss nll_loss_nd", {"padding": padding.named}),
    ("cross_entropy_loss", {"padding": padding.classified}),
    ("sum sum.dim_IntList", {"padding": padding.summed}),
    ("logsumexp", {"padding": padding.log_sum}),
    ("softmax.int special_softmax _softmax", {"padding": padding.distribution(padding.ZERO)}),
    ("log_softmax.int special_log_softmax _log_softmax", {"padding": padding.distribution(padding.LOWEST)}),
    ("scaled_dot_product_attention", {"padding": padding.attention}),
    # autocast
    (
        "linear matmul mm bmm addmm addbmm baddbmm addmv mv addr chain_matmul einsum prelu conv1d conv2d conv3d conv1d.padding "
        "conv2d.padding conv3d.padding conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution "
        "linalg_vecdot linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention",
        {"autocast": Autocast.LOWER},
    ),
    (
        "acos asin cosh cosine_embedding_loss cdist cosine_similarity cross_entropy_loss cumprod cumsum dist erfinv exp expm1 "
        "group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log_softmax.int log1p log2 margin_ranking_loss "
        "mse_loss multi_margin_loss nll_loss nll_loss_nd norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype "
        "norm.ScalarOpt_dim_dtype nuclear_norm.dim poisson_nll_loss pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor prod "
        "prod.dim_int reciprocal renorm rsqrt sinh smooth_l1_loss huber_loss soft_margin_loss softmax.int softplus sum "
        "sum.dim_IntList tan binary_cross_entropy_with_logits logsumexp linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord frobenius_norm.dim native_layer_norm rms_norm pdist triplet_margin_loss "
        "multilabel_margin_loss upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        {"autocast": Autocast.FP32},
    ),
    (
        "addcdiv addcmul atan2 bilinear cat cross dot vdot grid_sampler index_put scatter_add stack tensordot",
        {"autocast": Autocast.WIDEST},
    ),
    (
        "batch_norm instance_norm rms_norm native_layer_norm native_group_norm lstm.input gru.input rnn_tanh.input "
        "rnn_relu.input lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
        {"mixed": Mixed.FP32},
    ),
    (
        "where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar masked_fill.Tensor",
        {"mixed": Mixed.FILL},
    ),
    # words
    ("linear addmm mm", {"says": LINEAR}),
    ("matmul bmm baddbmm addbmm einsum inner tensordot linalg_matmul", {"says": MATRICES}),
    ("embedding", {"says": says("embedding", v="vocabulary", h="width")}),
    (
        "scaled_dot_product_attention",
        {"says": says("attention", **{"...0": "heads"}, h="heads", q="sequence")},
    ),
    ("cross_entropy_loss nll_loss nll_loss_nd", {"says": SCORED}),
    ("mse_loss", {"says": LOSS}),
    ("layer_norm rms_norm", {"says": NORM}),
    ("group_norm", {"says": says("norm", b="batch", g="groups of channels")}),
    ("batch_norm", {"says": says("norm", b="batch", c="channels")}),
    (CONVOLUTIONS, {"says": CONVOLUTION}),
]


SECOND_NAMES = """
    multiply=mul subtract=sub divide=div concat=cat concatenate=cat lift_fresh_copy=clone special_expit=sigmoid
    arccos=acos arcsin=asin arctan2=atan2
"""


def facts() -> dict[str, dict[str, Any]]:
    """Every fact by target."""
    found: dict[str, dict[str, Any]] = {}
    for words, fields in FACTS:
        for target in names(words):
            found.setdefault(target, {}).update(fields)
    for pair in SECOND_NAMES.split():
        second, first = pair.split("=")
        for form in ("default", "Tensor", "Scalar"):
            if f"aten.{first}.{form}" in found:
                found[f"aten.{second}.{form}"] = found[f"aten.{first}.{form}"]
    return found

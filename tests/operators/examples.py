"""One or more calls of every operator in the table, with small dims of different sizes so that a wrong rule cannot pass."""

from __future__ import annotations

import functools
from functools import partial

import torch

from autopar.ir.program import Op, Value
from tests.operators import examples_algebra, examples_backward, examples_planes
from tests.operators.drawing import (
    Ends,
    Example,
    Positive,
    T,
    between,
    bools,
    buffer,
    cplx,
    ex,
    half,
    ints,
    labels,
    places,
    pos,
    signs,
    t,
)
from tests.operators.names import ALIASES, BINARY, DRAWS, FORMS, SAME, UNARY, names

BITS = ("bitwise", "__", "logical", "gcd", "lcm")
UNDERIVED = ("floor_divide", "nextafter", "heaviside", "igamma", "special_bessel")  # without a derivative
NUMBER_FIRST = ("pow.Scalar", "float_power.Scalar", "xlogy.Scalar_Self")
MORE_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "aten.clamp.default": (-0.5, 0.5),
    "aten.clamp_max.default": (0.5,),
    "aten.clamp_min.default": (0.5,),
    "aten.threshold.default": (0.1, 2.0),
    "aten.log_sigmoid.default": (),
    "aten.mvlgamma.default": (1,),
}


def operand(name: str, *shape: int) -> T:
    """Integers for operators on bits, numbers without a gradient where there is no derivative, else positive numbers."""
    if name.startswith(BITS):
        return ints(*shape, high=9)
    if name == "acosh":
        return Positive(shape, low=1.1)
    return buffer(*shape) if name.startswith(UNDERIVED) else pos(*shape)


def unary(target: str) -> list[Example]:
    name, form = target.split(".")[1:]
    tensor = operand(name, 4, 6)
    if target in MORE_ARGUMENTS:
        return [ex(tensor, *MORE_ARGUMENTS[target])]
    if target.endswith(NUMBER_FIRST):
        return [ex(2.0, tensor)]
    if name == "polygamma":
        return [ex(1, tensor)]
    if form == "Scalar_mode":
        return [ex(tensor, 0.3, rounding_mode="floor")]
    if form in ("Scalar", "Tensor_Scalar", "Scalar_Other"):
        return [ex(tensor, 2 if tensor.dtype == torch.int64 else 0.4)]
    return [ex(tensor)]


def draws(target: str) -> list[Example]:
    more: dict[str, tuple[object, ...]] = {
        "aten.bernoulli.p": (0.5,),
        "aten.random.from": (2, 9),
        "aten.random.to": (9,),
        "aten.geometric.default": (0.5,),
        "aten.randint_like.default": (9,),
        "aten.randint_like.low_dtype": (2, 9),
    }
    if target == "aten.normal.float_Tensor":
        return [ex(0.0, buffer(4, 6))]
    return [ex(buffer(4, 6), *more.get(target, ()))]


def binary(target: str) -> list[Example]:
    name, form = target.split(".")[1:]
    make = partial(between, low=2, high=9) if name == "special_zeta" else partial(operand, name)
    mode = {"rounding_mode": "floor"} if form == "Tensor_mode" else {}
    return [ex(make(4, 6), make(4, 6), **mode), ex(make(2, 4, 6), make(4, 1), **mode), ex(make(6), make(4, 1), **mode)]


def same(target: str) -> list[Example]:
    more: dict[str, tuple[object, ...]] = {
        "aten.to.dtype": (torch.float32,),
        "aten.to.device": (torch.device("cpu"), torch.float64),
    }
    return [ex(cplx(4, 6) if target == "aten._conj.default" else t(4, 6), *more.get(target, ()))]


BOTH = [ex(t(4, 6), t(4, 6)), ex(t(2, 4, 6), t(4, 1)), ex(t(6), t(4, 1)), ex(t(4, 6), 2.0)]
MATRIX = [ex(t(4, 6), t(10, 6)), ex(t(4, 6), t(10, 6), t(10)), ex(t(2, 4, 6), t(9, 6), bias=t(9)), ex(t(6), t(10, 6), t(10))]
ANY_MATMUL = [
    ex(t(4, 6), t(6, 10)),
    ex(t(2, 4, 6), t(2, 6, 9)),
    ex(t(2, 9, 4, 6), t(9, 6, 10)),
    ex(t(2, 1, 4, 6), t(1, 9, 6, 10)),
    ex(t(2, 4, 6), t(6, 10)),
    ex(t(4, 6), t(2, 6, 10)),
    ex(t(6), t(6)),
    ex(t(6), t(2, 6, 4)),
    ex(t(2, 4, 6), t(6)),
]


def convolutions(space: tuple[int, ...], form: object = 1) -> list[Example]:
    """Windows of 3 over planes, with and without bias, batch and groups."""
    window, n = (3,) * len(space), len(space)
    stride, pad, dilate = (1,) * n, form if isinstance(form, str) else (1,) * n, (1,) * n
    return [
        ex(t(2, 6, *space), t(4, 6, *window)),
        ex(t(2, 6, *space), t(10, 6, *window), t(10), stride, pad),
        ex(t(6, *space), t(4, 6, *window), t(4)),
        ex(t(2, 6, *space), t(6, 1, *window), t(6), stride, pad, dilate, 6),
        ex(t(2, 12, *space), t(20, 3, *window), t(20), stride, pad, dilate, 4),
    ]


def transposed(space: tuple[int, ...]) -> list[Example]:
    window, n = (3,) * len(space), len(space)
    one, zero = (1,) * n, (0,) * n
    return [
        ex(t(2, 6, *space), t(6, 4, *window)),
        ex(t(2, 6, *space), t(6, 10, *window), t(10), one, one),
        ex(t(2, 12, *space), t(12, 5, *window), t(20), one, one, zero, 4),
    ]


def batch_norms() -> dict[str, list[Example]]:
    """In training and in evaluation, with and without weights."""
    held, rates = (t(6), t(6), buffer(6), buffer(6)), (0.1, 1e-5)
    both = [ex(t(4, 6, 10), *held, training, *rates) for training in (True, False)]
    own = [*both, ex(t(4, 6), None, None, buffer(6), buffer(6), False, *rates)]
    return {
        "aten.batch_norm.default": [ex(*one.args, False) for one in own],
        "aten.native_batch_norm.default": both,
        "aten._native_batch_norm_legit.default": both,
        "aten._native_batch_norm_legit.no_stats": [ex(t(4, 6, 10), *held[:2], True, *rates)],
        "aten._native_batch_norm_legit_no_training.default": [ex(t(4, 6, 10), *held, *rates)],
    }


def losses() -> list[Example]:
    """No reduction, mean and sum."""
    return [ex(t(4, 6), t(4, 6), n) for n in range(3)]


HEADS = [
    ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5)),
    ex(t(4, 6, 3), t(4, 10, 3), t(4, 10, 5)),
    ex(t(2, 4, 6, 3), t(2, 4, 6, 3), t(2, 4, 6, 5), None, 0.0, True),
    ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(2, 1, 6, 10)),
    ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(1, 1, 6, 10), scale=0.3),
    ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(2, 4, 1, 10)),
    ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(6, 10)),
    ex(t(2, 12, 6, 3), t(2, 4, 6, 3), t(2, 4, 6, 5), None, 0.0, True, enable_gqa=True),
    ex(t(2, 8, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(2, 1, 6, 10), enable_gqa=True),
    ex(t(2, 8, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(2, 8, 6, 10), enable_gqa=True),
    ex(t(2, 4, 6, 3), t(2, 1, 10, 3), t(2, 1, 10, 5), enable_gqa=True),
    ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), None, 0.5),
    ex(t(2, 4, 6, 3), t(2, 4, 6, 3), t(2, 4, 6, 3), None, 0.0, True),
    ex(t(2, 8, 6, 3), t(2, 4, 6, 3), t(2, 4, 6, 3), None, 0.0, True, scale=0.3, enable_gqa=True),
    ex(t(2, 4, 6, 3), t(2, 4, 9, 3), t(2, 4, 9, 3)),
    ex(t(2, 4, 6, 3), t(2, 4, 9, 3), t(2, 4, 9, 3), buffer(2, 1, 6, 9)),
    ex(t(2, 4, 6, 3), t(2, 4, 9, 3), t(2, 4, 9, 3), bools(2, 1, 1, 9)),
    ex(t(2, 4, 6, 3), t(2, 4, 9, 3), t(2, 4, 9, 3), bools(6, 9), scale=0.3),
    ex(t(2, 4, 6, 3), t(2, 2, 9, 3), t(2, 2, 9, 3), buffer(2, 4, 6, 9), enable_gqa=True),
]
RESHAPES = [
    ((2, 6, 10), (12, 10)),
    ((12, 10), (2, 6, 10)),
    ((2, 6, 10), (2, 6, 2, 5)),
    ((2, 6, 2, 5), (2, 6, 10)),
    ((4, 6), (6, 4)),
    ((4, 6), (3, 8)),
    ((6, 4), (4, 6)),
    ((2, 1, 6), (1, 12, 1)),
    ((4, 6, 10), (-1,)),
    ((12, 15), (4, 9, 5)),
    ((1,), ()),
]
VOCABULARY = 7
STATISTICS = ("std", "var", "var_mean", "std_mean")
PUTS = [
    ex(t(4, 6), (bools(4, 6),), t()),
    ex(t(4, 6, 10), (None, bools(6)), t(10)),
    *(ex(t(4, 6, 10), (None, places(2, high=6)), t(4, 2, 10), more) for more in (False, True)),
    ex(t(4, 6, 10), (ints(9, high=4), ints(2, 1, high=6)), t(2, 9, 10), True),
    ex(t(4, 6, 10), (ints(9, high=4), None, ints(2, 1, high=9)), t(9, 6), True),
    ex(t(4, 6, 10), (ints(9, high=4),), t(), True),
]

TABLE: dict[str, list[Example]] = {
    **{target: unary(target) for target in names(UNARY)},
    **{target: binary(target) for target in names(BINARY)},
    **{target: same(target) for target in names(SAME)},
    **{f"aten.{name}.Tensor": [*BOTH, ex(t(4, 6), 0.0)] for name in ("add", "sub", "mul")},
    **{f"aten.{name}.Tensor": BOTH for name in ("div", "true_divide")},
    **{f"aten.{name}.Scalar": [ex(t(4, 6), 0.0), ex(t(4, 6), 2.0)] for name in ("add", "sub", "rsub", "mul")},
    "aten.rsub.Tensor": BOTH[:3],
    "aten.div.Scalar": [ex(t(4, 6), 2.0)],
    "aten.to.other": [ex(t(4, 6), t(3))],
    "aten.type_as.default": [ex(t(4, 6), t(3, 2))],
    "aten.ldexp.Tensor": [ex(t(4, 6), ints(6))],
    "aten.lerp.Scalar": [ex(t(4, 6), t(6), 0.3)],
    "aten.lerp.Tensor": [ex(t(4, 6), t(6), t(4, 1))],
    "aten.addcmul.default": [ex(t(4, 6), t(6), t(4, 1), value=2)],
    "aten.addcdiv.default": [ex(t(4, 6), t(6), pos(4, 1))],
    "aten.copy.default": [ex(buffer(4, 6), buffer(6))],
    "aten.copy_.default": [ex(buffer(4, 6), buffer(4, 6)), ex(buffer(4, 6), buffer(6))],
    "aten.where.self": [ex(bools(4, 1), t(4, 6), t(6))],
    "aten.where.ScalarOther": [ex(bools(4, 1), t(4, 6), 0), ex(bools(4, 6), t(6), -9.0)],
    "aten.where.ScalarSelf": [ex(bools(4, 1), 0, t(4, 6)), ex(bools(4, 6), -9.0, t(6))],
    "aten.where.Scalar": [ex(bools(4, 6), 1.0, 2.0)],
    "aten.masked_fill.Scalar": [ex(t(4, 6), bools(6), 0.0), ex(t(4, 6), bools(4, 1), -9.0)],
    "aten.masked_fill.Tensor": [ex(t(4, 6), bools(6), t())],
    "aten.clamp.Tensor": [ex(t(4, 6), t(6), t(4, 1)), ex(t(4, 6), None, t(6))],
    "aten.clamp_min.Tensor": [ex(t(4, 6), t(6))],
    "aten.clamp_max.Tensor": [ex(t(4, 6), t(6))],
    "aten.prelu.default": [ex(t(4, 6, 10), t(6)), ex(t(4, 6, 10), t(1))],
    **{
        f"aten.{n}.default": [ex(t(4, 6, 10), 0.0, True), ex(t(4, 6, 10), 0.5, False), ex(t(4, 6, 10), 0.5, True)]
        for n in ("dropout", "native_dropout", "feature_dropout", "alpha_dropout")
    },
    "aten.feature_alpha_dropout.default": [ex(t(4, 6, 10), 0.5, False), ex(t(4, 6, 10), 0.5, True)],
    "aten.rrelu.default": [ex(t(4, 6), 0.1, 0.3, False), ex(t(4, 6), 0.1, 0.3, True)],
    **{target: draws(target) for target in names(DRAWS)},
    "aten.bernoulli.Tensor": [ex(buffer(4, 6), buffer(4, 6))],
    "aten.binomial.default": [ex(buffer(4, 6), buffer(4, 6))],
    "aten.normal.Tensor_Tensor": [ex(buffer(4, 6), buffer(4, 6))],
    "aten.multinomial.default": [ex(buffer(4, 6), 3)],
    "aten.fill.Scalar": [ex(t(4, 6), 2.5)],
    "aten.fill.Tensor": [ex(t(4, 6), t())],
    "aten.zero.default": [ex(t(4, 6))],
    "aten.bucketize.Tensor": [ex(t(4, 6), t(3))],
    "aten.one_hot.default": [ex(ints(4, 6), 3)],
    "aten.deg2rad.default": [ex(t(4, 6))],
    "aten.rad2deg.default": [ex(t(4, 6))],
    "aten.searchsorted.Tensor": [
        ex(buffer(6), buffer(4, 10)),
        ex(buffer(4, 6), buffer(4, 10)),
        ex(buffer(4, 6), buffer(4, 10), sorter=places(4, 6, high=6)),
    ],
    "aten.isin.Tensor_Tensor": [ex(ints(4, 6, high=9), ints(2, 3, high=9))],
    # contractions
    "aten.linear.default": [*MATRIX, ex(t(4, 6), t(6))],
    "aten.matmul.default": ANY_MATMUL,
    "aten.mm.default": ANY_MATMUL[:1],
    "aten.bmm.default": [ex(t(2, 4, 6), t(2, 6, 9))],
    "aten._grouped_mm.default": [
        ex(half(12, 32), half(4, 32, 16), Ends((4,), torch.int32, 12)),
        ex(half(4, 16, 32), half(32, 24), Ends((4,), torch.int32, 24)),
        ex(half(16, 24), half(24, 32), Ends((4,), torch.int32, 24)),
        ex(half(2, 8, 16), half(2, 16, 32)),
        ex(half(12, 16), half(4, 16, 8), offs=Ends((4,), torch.int32, 12)),
    ],
    "aten.mv.default": [ex(t(4, 6), t(6))],
    "aten.dot.default": [ex(t(6), t(6))],
    "aten.outer.default": [ex(t(4), t(6))],
    "aten.ger.default": [ex(t(4), t(6))],
    "aten.vdot.default": [ex(t(6), t(6))],
    "aten.inner.default": [ex(t(2, 4, 6), t(10, 6)), ex(t(6), t(6)), ex(t(4, 6), t())],
    "aten.tensordot.default": [ex(t(2, 4, 6), t(6, 10, 4), (1, 2), (2, 0)), ex(t(4, 6), t(6, 10), (-1,), (0,))],
    "aten.kron.default": [ex(t(2, 4), t(6, 10)), ex(t(4), t(6, 10)), ex(t(2, 4), t(6))],
    "aten.linalg_multi_dot.default": [ex((t(4, 6), t(6, 10), t(10, 2))), ex((t(6), t(6, 10), t(10)))],
    "aten.chain_matmul.default": [ex((t(4, 6), t(6, 10), t(10, 2)))],
    "aten.linalg_matmul.default": ANY_MATMUL,
    "aten.linalg_vecdot.default": [ex(t(4, 6, 10), t(6, 10)), ex(t(4, 6, 10), t(4, 6, 10), dim=1)],
    "aten.linalg_cross.default": [ex(t(4, 6, 3), t(1, 6, 3)), ex(t(4, 3, 6), t(4, 3, 1), dim=1)],
    "aten.cross.default": [ex(t(4, 6, 3), t(4, 6, 3)), ex(t(4, 3, 6), t(4, 3, 6), 1)],
    "aten.cdist.default": [ex(t(2, 4, 6), t(2, 10, 6), p, None) for p in (1.0, 2.0, 3.0)] + [ex(t(2, 4, 6), t(10, 6))],
    "aten._cdist_forward.default": [ex(t(2, 4, 6), t(2, 10, 6), p, None) for p in (1.0, 2.0)],
    "aten.pdist.default": [ex(t(4, 6), p) for p in (1.0, 2.0)],
    "aten._pdist_forward.default": [ex(t(4, 6), p) for p in (1.0, 2.0)],
    "aten.pairwise_distance.default": [ex(t(4, 6, 10), t(6, 10)), ex(t(4, 6), t(4, 6), 3.0, 1e-6, True)],
    "aten.addr.default": [ex(t(*s), t(4), t(6), beta=0.5, alpha=2) for s in ((4, 6), (6,), (4, 1))],
    "aten.addmm.default": [ex(t(*s), t(4, 6), t(6, 10), beta=0.5, alpha=2) for s in ((10,), (4, 10), (4, 1), ())],
    "aten.addmv.default": [ex(t(*s), t(4, 6), t(6)) for s in ((4,), (1,), ())],
    "aten.addbmm.default": [ex(t(*s), t(2, 4, 6), t(2, 6, 10)) for s in ((4, 10), (10,))],
    "aten.baddbmm.default": [ex(t(*s), t(2, 4, 6), t(2, 6, 10)) for s in ((2, 4, 10), (2, 1, 10), (10,))],
    "aten.bilinear.default": [ex(t(2, 4), t(2, 6), t(10, 4, 6), t(10)), ex(t(2, 4), t(2, 6), t(10, 4, 6))],
    "aten.einsum.default": [
        ex("bij,bjk->bik", (t(2, 4, 6), t(2, 6, 10))),
        ex("...ij,jk", (t(2, 4, 6), t(6, 10))),
        ex("i,i", (t(6), t(6))),
        ex("ab,bc,cd->ad", (t(4, 6), t(6, 10), t(10, 2))),
    ],
    "aten.embedding.default": [
        ex(t(VOCABULARY, 6), ints(4, 10, high=VOCABULARY)),
        ex(t(VOCABULARY, 6), ints(4, 10, high=VOCABULARY), 2),
        ex(t(VOCABULARY, 6), ints(4, 10, high=VOCABULARY), 2, True),
    ],
    "aten.conv1d.default": convolutions((5,)),
    "aten.conv2d.default": convolutions((5, 7)),
    "aten.conv3d.default": convolutions((3, 4, 5)),
    "aten.conv1d.padding": convolutions((5,), "same")[1:2],
    "aten.conv2d.padding": convolutions((5, 7), "valid")[1:2],
    "aten.conv3d.padding": convolutions((3, 4, 5), "same")[1:2],
    "aten.conv_transpose1d.default": transposed((5,)),
    "aten.conv_transpose2d.input": transposed((5, 7)),
    "aten.conv_transpose3d.input": transposed((3, 4, 5)),
    "aten.convolution.default": [
        ex(t(2, 6, 5, 7), t(4, 6, 3, 3), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
        ex(t(2, 6, 5, 7), t(6, 4, 3, 3), t(4), (1, 1), (0, 0), (1, 1), True, (0, 0), 1),
        ex(t(2, 12, 5, 7), t(20, 3, 3, 3), t(20), (1, 1), (0, 0), (1, 1), False, (0, 0), 4),
    ],
    # views
    **{f"aten.{n}.default": [ex(t(*a), b) for a, b in RESHAPES] for n in ("reshape", "view", "_unsafe_view")},
    "aten.unflatten.int": [ex(t(4, 6, 10), 1, (2, 3)), ex(t(4, 6, 10), -1, (5, -1))],
    "aten.flatten.using_ints": [ex(t(4, 6, 10)), ex(t(4, 6, 10), 1), ex(t(4, 6, 10), 0, 1)],
    "aten.ravel.default": [ex(t(4, 6))],
    "aten.unsqueeze.default": [ex(t(4, 6), d) for d in (0, 1, -1)],
    "aten.view_as.default": [ex(t(4, 6), t(2, 12))],
    "aten.reshape_as.default": [ex(t(4, 6), t(24))],
    "aten.squeeze.default": [ex(t(4, 1, 6))],
    "aten.squeeze.dim": [ex(t(4, 1, 6), 1), ex(t(4, 1, 6), -1), ex(t(), 0)],
    "aten.squeeze.dims": [ex(t(4, 1, 6), (1, 2))],
    "aten.permute.default": [ex(t(4, 6, 10), (2, 0, 1))],
    "aten.transpose.int": [ex(t(4, 6, 10), -1, 0)],
    "aten.t.default": [ex(t(4, 6)), ex(t(6))],
    "aten.numpy_T.default": [ex(t(4, 6))],
    "aten.mT.default": [ex(t(2, 4, 6))],
    "aten.movedim.int": [ex(t(4, 6, 10), 0, -1)],
    "aten.movedim.intlist": [ex(t(4, 6, 10), (0, 1), (2, 0))],
    "aten.moveaxis.int": [ex(t(4, 6, 10), 0, -1)],
    "aten.moveaxis.intlist": [ex(t(4, 6, 10), (0, 1), (2, 0))],
    "aten.adjoint.default": [ex(t(2, 4, 6))],
    "aten.mH.default": [ex(t(2, 4, 6))],
    "aten.matrix_H.default": [ex(t(4, 6))],
    "aten.atleast_1d.default": [ex(t(4)), ex(t())],
    "aten.atleast_2d.default": [ex(t(4))],
    "aten.atleast_3d.default": [ex(t(4, 6)), ex(t(4))],
    "aten.view.dtype": [ex(buffer(4, 6), torch.int64), ex(buffer(4, 6), torch.int32)],
    "aten.swapaxes.default": [ex(t(4, 6, 10), 0, 2)],
    "aten.swapdims.default": [ex(t(4, 6, 10), 0, 2)],
    "aten.expand.default": [ex(t(4, 1), (2, 4, 6)), ex(t(4, 1), (-1, 6)), ex(t(), (4,)), ex(t(4, 6), (4, 6))],
    "aten.broadcast_to.default": [ex(t(4, 1), (2, 4, 6))],
    "aten.expand_as.default": [ex(t(4, 1), t(2, 4, 6))],
    "aten.slice.Tensor": [
        ex(t(4, 6), 1, 2, 9223372036854775807),
        ex(t(4, 6), 1, 0, 6),
        ex(t(4, 6), 1, -6, 6),
        ex(t(4, 6), -2, None, None, 2),
        ex(t(4, 6)),
    ],
    "aten.narrow.default": [ex(t(4, 6), 1, 0, 2)],
    "aten.select.int": [ex(t(4, 6), 1, 3), ex(t(4, 6, 10), -2, -1)],
    "aten.unbind.int": [ex(t(4, 3, 6), 1), ex(t(4, 6))],
    "aten.split.Tensor": [ex(t(4, 18), 6, 1), ex(t(4, 10), 4, -1), ex(t(4, 6), 9, 1)],
    "aten.split.sizes": [ex(t(4, 12), (4, 4, 4), 1), ex(t(4, 12), (2, 10), 1)],
    "aten.split_with_sizes.default": [ex(t(4, 12), (4, 4, 4), 1), ex(t(4, 12), (2, 10), 1)],
    "aten.chunk.default": [ex(t(4, 12), 3, -1), ex(t(4, 10), 3, 1)],
    "aten.tensor_split.sections": [ex(t(4, 12), 3, -1), ex(t(4, 10), 3, 1)],
    "aten.tensor_split.indices": [ex(t(4, 12), (4, 8), -1), ex(t(4, 10), (3,), 1)],
    "aten.unsafe_split.Tensor": [ex(t(4, 18), 6, 1), ex(t(4, 10), 4, -1)],
    "aten.unsafe_split_with_sizes.default": [ex(t(4, 12), (4, 4, 4), 1), ex(t(4, 12), (2, 10), 1)],
    "aten.unsafe_chunk.default": [ex(t(4, 12), 3, -1), ex(t(4, 10), 3, 1)],
    "aten.hsplit.int": [ex(t(4, 12), 3), ex(t(12), 3)],
    "aten.vsplit.int": [ex(t(12, 4), 3)],
    # joins, look-ups, writes
    "aten.cat.default": [
        ex((t(4, 6), t(4, 6), t(4, 6)), 1),
        ex((t(4, 6), t(4, 10)), -1),
        ex((t(0), t(4, 10)), 0),
        ex((t(4, 6),)),
    ],
    "aten.hstack.default": [ex((t(4, 6), t(4, 6))), ex((t(4), t(4)))],
    "aten.vstack.default": [ex((t(4, 6), t(4, 6))), ex((t(4), t(4)))],
    "aten.row_stack.default": [ex((t(4, 6), t(10, 6)))],
    "aten.stack.default": [ex((t(4, 6), t(4, 6)), d) for d in (0, 1, -1)],
    "aten.repeat.default": [ex(t(4, 6), (2, 3)), ex(t(4, 6), (2, 1, 4))],
    "aten.tile.default": [ex(t(4, 6), (2, 3)), ex(t(4, 6), (3,)), ex(t(4, 6), (2, 1, 4))],
    "aten.repeat_interleave.self_int": [ex(t(4, 6), 4, 1), ex(t(4, 6), 4), ex(t(4, 6), 2, 0, output_size=8)],
    "aten.index.Tensor": [
        ex(t(6, 10), (ints(12, high=6),)),
        ex(t(6, 4, 5), (between(12, low=-6, high=6),)),
        ex(t(6), (ints(4, high=6),)),
        ex(t(4, 6, 10), (ints(2), ints(2))),
        ex(t(4, 6, 10), (None, ints(2, 1), ints(9))),
        ex(t(4, 6, 10), (ints(9), None, ints(2, 1))),
        ex(t(4, 6, 10), (None, ints(9))),
    ],
    "aten._unsafe_index.Tensor": [ex(t(4, 6, 10), (None, ints(2, 1), ints(9)))],
    "aten.index_put.default": PUTS,
    "aten._unsafe_index_put.default": PUTS[2:5],
    "aten.meshgrid.default": [ex((t(4), t(6), t(10)))],
    "aten.meshgrid.indexing": [ex((t(4), t(6), t(10)), indexing="xy"), ex((t(4), t(6)), indexing="ij")],
    "aten.rot90.default": [ex(t(4, 6, 10), 1, (0, 2)), ex(t(4, 6, 10), 2, (-1, 1))],
    "aten.flipud.default": [ex(t(4, 6))],
    "aten.fliplr.default": [ex(t(4, 6, 10))],
    "aten.unfold.default": [ex(t(4, 6), 1, 3, 2)],
    "aten.index_select.default": [ex(t(4, 6), 1, ints(10)), ex(t(4, 6), 0, ints())],
    "aten.gather.default": [ex(t(4, 6, 10), 1, ints(4, 2, 10)), ex(t(4, 6), 1, ints(2, 9))],
    "aten.take_along_dim.default": [ex(t(4, 6, 10), ints(4, 2, 10), 1)],
    "aten.scatter.src": [ex(t(4, 6), 1, ints(4, 6), t(4, 6)), ex(t(4, 6), 1, ints(2, 6), t(2, 6))],
    "aten.scatter.value": [ex(t(4, 6), 1, ints(4, 2), 0), ex(t(4, 6), 1, ints(4, 2), 2.5)],
    "aten.scatter.reduce": [ex(buffer(4, 6), 1, places(4, 2, high=6), buffer(4, 2), reduce=how) for how in ("multiply", "add")],
    "aten.scatter.value_reduce": [ex(buffer(4, 6), 1, places(4, 2, high=6), 2.5, reduce="add")],
    "aten.scatter_add.default": [
        ex(t(4, 6), 1, ints(4, 2), t(4, 2)),
        ex(t(4, 6), 0, ints(9, 6), t(9, 6)),
        ex(t(4, 6), 0, ints(10, 6), buffer(12, 6)),
        ex(t(4, 6), -1, ints(2, 10), t(2, 10)),
    ],
    "aten.scatter_reduce.two": [
        *(ex(t(4, 6), 1, ints(4, 10), t(4, 10), how) for how in ("sum", "mean", "amax", "prod")),
        ex(t(4, 6), 1, ints(4, 10), t(4, 10), "sum", include_self=False),
    ],
    "aten.index_add.default": [ex(t(4, 6), 1, ints(2), t(4, 2)), ex(t(4, 6), 0, ints(10), t(10, 6), alpha=2)],
    "aten.index_copy.default": [ex(t(4, 6), 1, places(2, high=6), t(4, 2))],
    "aten.index_copy_.default": [ex(buffer(4, 6), 1, places(2, high=6), buffer(4, 2))],
    "aten.index_reduce.default": [ex(t(4, 6), 1, ints(2), t(4, 2), how) for how in ("prod", "amax")],
    "aten.index_fill.int_Scalar": [ex(t(4, 6), 1, ints(2), 2.5)],
    "aten.index_fill.int_Tensor": [ex(t(4, 6), 1, ints(2), t())],
    "aten.take.default": [ex(t(4, 6), ints(2, 10, high=24))],
    "aten.masked_scatter.default": [ex(t(4, 6), bools(4, 6), t(24))],
    "aten.diagonal_scatter.default": [ex(t(2, 4, 6), t(2, 4), 0, 1, -1)],
    "aten.diag_embed.default": [ex(t(2, 4, 6)), ex(t(2, 4, 6), 1, 0, 2)],
    "aten.slice_scatter.default": [ex(t(4, 6), t(4, 2), 1, 0, 2)],
    "aten.select_scatter.default": [ex(t(4, 6), t(4), 1, 3)],
    "aten.diagonal.default": [ex(t(4, 6)), ex(t(2, 4, 6), 0, 1, -1)],
    # reductions
    "aten.sum.default": [ex(t(4, 6)), ex(ints(4, 6))],
    "aten.sum.dim_IntList": [ex(t(4, 6, 10), (1,)), ex(t(4, 6, 10), (0, -1), True), ex(bools(4, 6), (1,)), ex(t(4, 6), None)],
    "aten.mean.default": [ex(t(4, 6))],
    "aten.mean.dim": [ex(t(4, 6, 10), (1,)), ex(t(4, 6, 10), (0, -1), True), ex(t(4, 6), None)],
    "aten.dist.default": [ex(t(4, 6), t(6), 1), ex(t(4, 6), t(4, 6))],
    "aten.histc.default": [ex(buffer(4, 6), 5, 0.0, 1.0), ex(buffer(4, 6), 5)],
    "aten.quantile.scalar": [ex(t(4, 6, 10), 0.3, 1), ex(t(4, 6), 0.3), ex(t(4, 6), 0.3, 0, True)],
    "aten.quantile.default": [ex(t(4, 6, 10), buffer(3), 1), ex(t(4, 6), buffer(3), 0, True)],
    "aten.nanquantile.scalar": [ex(t(4, 6, 10), 0.3, 1)],
    "aten.nanquantile.default": [ex(t(4, 6, 10), buffer(3), 1)],
    "aten.count_nonzero.default": [ex(ints(4, 6)), ex(ints(4, 6), 1)],
    "aten.count_nonzero.dim_IntList": [ex(ints(4, 6), (1,))],
    "aten.nansum.default": [ex(t(4, 6), (1,))],
    "aten.nanmean.default": [ex(t(4, 6), (1,))],
    **{
        f"aten.{n}.default": [ex(t(4, 6))]
        for n in "all any max min median nanmedian mode prod std var var_mean std_mean".split()
    },
    **{f"aten.{n}.default": [ex(t(4, 6)), ex(t(4, 6, 10), dim=1)] for n in ("aminmax", "argmax", "argmin")},
    **{f"aten.{n}.default": [ex(t(4, 6)), ex(t(4, 6, 10), (1,)), ex(t(4, 6), (0,), True)] for n in ("amax", "amin")},
    **{f"aten.{n}.dim": [ex(t(4, 6, 10), 1), ex(t(4, 6), 0, True)] for n in "max min median nanmedian all any".split()},
    **{f"aten.{n}.dims": [ex(t(4, 6, 10), (0, 2)), ex(t(4, 6), (0,), True)] for n in ("all", "any")},
    **{f"aten.{n}.dim": [ex(t(4, 6, 10), (1,)), ex(t(4, 6), (0,), keepdim=True)] for n in STATISTICS},
    **{f"aten.{n}.correction": [ex(t(4, 6, 10), (1,), correction=0), ex(t(4, 6))] for n in STATISTICS},
    "aten.prod.dim_int": [ex(t(4, 6), 1)],
    "aten.logsumexp.default": [ex(t(4, 6), (1,))],
    "aten.special_logsumexp.default": [ex(t(4, 6), (1,))],
    "aten.norm.Scalar": [ex(t(4, 6), 2), ex(t(4, 6), 1)],
    "aten.norm.ScalarOpt_dim": [ex(t(4, 6), 2, (1,)), ex(t(4, 6), 1, (1,))],
    "aten.norm.ScalarOpt_dtype": [ex(t(4, 6), 2, dtype=torch.float64), ex(t(4, 6), 1, dtype=torch.float64)],
    "aten.norm.ScalarOpt_dim_dtype": [ex(t(4, 6), 2, (1,), True, dtype=torch.float64)],
    "aten.linalg_vector_norm.default": [ex(t(4, 6), 2, (1,)), ex(t(4, 6), 3), ex(t(4, 6), 1), ex(t(4, 6, 10), 1, (1,), True)],
    "aten.linalg_norm.default": [ex(t(4, 6)), ex(t(4, 6, 10), None, (1,)), ex(t(4, 6, 10), None, (0, 2), True)],
    "aten.linalg_matrix_norm.default": [ex(t(4, 6, 10), 1), ex(t(4, 6, 10), 1, (0, 1), True)],
    "aten.linalg_matrix_norm.str_ord": [ex(t(4, 6, 10)), ex(t(4, 6, 10), "nuc", (0, 1), True)],
    "aten.frobenius_norm.dim": [ex(t(4, 6, 10), (1,)), ex(t(4, 6, 10), (0, 2), True)],
    "aten.nuclear_norm.dim": [ex(t(4, 6, 10), (0, 2))],
    "aten.kthvalue.default": [ex(t(4, 6), 2)],
    **{f"aten.{n}.default": [ex(t(4, 6, 10), 1)] for n in "cumprod cummax cummin logcumsumexp sort cumsum glu".split()},
    "aten.sort.stable": [ex(t(4, 6), stable=True, dim=0)],
    "aten.argsort.default": [ex(t(4, 6))],
    "aten.argsort.stable": [ex(t(4, 6), stable=True)],
    "aten.topk.default": [ex(t(4, 6), 2), ex(t(4, 6), 2, 0)],
    "aten.diff.default": [ex(t(4, 6)), ex(t(4, 6), 1, 0, t(2, 6))],
    "aten.flip.default": [ex(t(4, 6, 10), (0, -1))],
    "aten.roll.default": [ex(t(4, 6), (2,), (1,)), ex(t(4, 6), (2,))],
    "aten.cosine_similarity.default": [ex(t(4, 6, 10), t(6, 10)), ex(t(4, 6), t(4, 6), -1)],
    "aten.tril.default": [ex(t(2, 4, 6)), ex(t(4, 6), 1)],
    "aten.triu.default": [ex(t(2, 4, 6)), ex(t(4, 6), 1)],
    # attention, norms, losses
    "aten.scaled_dot_product_attention.default": HEADS,
    "aten.softmax.int": [ex(t(4, 6, 10), 1), ex(t(4, 6), -1), ex(t(6), 0)],
    "aten.log_softmax.int": [ex(t(4, 6, 10), 1), ex(t(4, 6), -1), ex(t(6), 0)],
    "aten.special_softmax.default": [ex(t(4, 6, 10), 1)],
    "aten.special_log_softmax.default": [ex(t(4, 6, 10), 1)],
    "aten._safe_softmax.default": [ex(t(4, 6, 10), 1)],
    "aten._softmax.default": [ex(t(4, 6, 10), 1, False)],
    "aten._log_softmax.default": [ex(t(4, 6, 10), 1, False)],
    "aten.layer_norm.default": [
        ex(t(4, 10, 6), (6,), t(6), t(6)),
        ex(t(4, 10, 6), (10, 6), t(10, 6)),
        ex(t(4, 6), (6,)),
        ex(t(4, 6), (6,), None, t(6)),
        ex(t(12, 6), (12, 6), t(12, 6), t(12, 6)),
        ex(t(6), (6,)),
    ],
    "aten.native_layer_norm.default": [ex(t(4, 10, 6), (6,), t(6), t(6), 1e-5), ex(t(4, 10, 6), (10, 6), None, None, 1e-5)],
    "aten.rms_norm.default": [ex(t(4, 10, 6), (6,), t(6)), ex(t(4, 10, 6), (10, 6)), ex(t(6), (6,), t(6))],
    "aten._fused_rms_norm.default": [ex(t(4, 10, 6), (6,), t(6), 1e-5), ex(t(4, 10, 6), (10, 6), None, 1e-5)],
    "aten.native_group_norm.default": [ex(t(2, 12, 5), t(12), t(12), 2, 12, 5, 4, 1e-5)],
    **batch_norms(),
    "aten._weight_norm.default": [ex(t(4, 6, 10), t(4, 1, 1)), ex(t(4, 6, 10), t(1, 1, 10), 2), ex(t(4, 6), t(), -1)],
    "aten._weight_norm_interface.default": [ex(t(4, 6, 10), t(4, 1, 1)), ex(t(4, 6, 10), t(1, 1, 10), 2)],
    "aten.renorm.default": [ex(t(4, 6, 10), 2, 1, 0.5), ex(t(4, 6), 2, -1, 0.5)],
    "aten.group_norm.default": [
        ex(t(2, 12, 5), 4, t(12), t(12)),
        ex(t(2, 12, 3, 5), 4),
        ex(t(6, 12), 2, t(12)),
        ex(t(2, 12, 4, 3), 1, t(12), t(12)),
        ex(t(2, 10, 6), 1, None, None),
        ex(t(1, 12), 1, t(12), t(12)),
    ],
    "aten.instance_norm.default": [
        ex(t(4, 6, 10), t(6), t(6), None, None, True, 0.1, 1e-5, False),
        ex(t(4, 6, 10), None, None, buffer(6), buffer(6), True, 0.1, 1e-5, False),
    ],
    **{f"aten.{n}.default": losses() for n in "mse_loss l1_loss smooth_l1_loss huber_loss hinge_embedding_loss".split()},
    "aten.kl_div.default": [ex(t(4, 6), pos(4, 6), n) for n in range(3)],
    "aten.soft_margin_loss.default": [ex(t(4, 6), buffer(4, 6), n) for n in range(3)],
    "aten.binary_cross_entropy.default": [ex(pos(4, 6), buffer(4, 6), buffer(4, 6), n) for n in range(3)],
    "aten.binary_cross_entropy_with_logits.default": [
        *(ex(t(4, 6), pos(4, 6), buffer(4, 6), buffer(6), n) for n in range(3)),
        ex(t(4, 6), pos(4, 6)),
    ],
    "aten.cosine_embedding_loss.default": [
        *(ex(t(4, 6), t(4, 6), signs(4), 0.1, n) for n in range(3)),
        ex(t(6, 6), t(6, 6), signs(6)),
    ],
    "aten.triplet_margin_loss.default": [ex(t(4, 6), t(4, 6), t(4, 6), reduction=n) for n in range(3)],
    "aten.multi_margin_loss.default": [
        *(ex(t(4, 6), ints(4, high=6), 1, 1.0, buffer(6), n) for n in range(3)),
        ex(t(6), ints(high=6)),
    ],
    "aten.multilabel_margin_loss.default": [
        *(ex(t(4, 6), labels(4, 6), n) for n in range(3)),
        ex(t(6), labels(6)),
    ],
    "aten.ctc_loss.Tensor": [
        ex(t(10, 4, 6), between(4, 3, low=1, high=6), between(4, low=8, high=11), between(4, low=2, high=4), 0, n)
        for n in range(3)
    ],
    "aten.margin_ranking_loss.default": [ex(t(4, 6), t(4, 6), t(6), 0.1, n) for n in range(3)],
    "aten.poisson_nll_loss.default": [ex(t(4, 6), pos(4, 6), True, False, 1e-8, n) for n in range(3)],
    "aten.cross_entropy_loss.default": [
        *(ex(t(4, 6), ints(4), buffer(6), n, label_smoothing=0.1) for n in range(3)),
        *(ex(t(4, 6, 10), ints(4, 10), None, n, 1) for n in range(3)),
        *(ex(t(4, 6, 10), pos(4, 6, 10), buffer(6), n) for n in range(3)),
        *(ex(t(6), ints(), None, n) for n in range(3)),
        ex(t(6), pos(6)),
        ex(t(4, 6), pos(4, 6), None, 1, label_smoothing=0.1),
        ex(t(4, 6), ints(4), None, 2, 1),
        ex(t(6), ints(), None, 2),
        ex(T((4, 6), torch.bfloat16), pos(4, 6), Positive((6,), torch.float32, grad=False), 2, label_smoothing=0.1),
        ex(T((4, 6), torch.float32), ints(4), Positive((6,), torch.float32, grad=False), 2, label_smoothing=0.1),
    ],
    "aten.nll_loss.default": [ex(t(4, 6), ints(4), buffer(6), n) for n in range(3)],
    "aten.nll_loss_nd.default": [ex(t(4, 6, 10), ints(4, 10), None, n, 1) for n in range(3)],
    # factories
    "aten.arange.default": [ex(6)],
    "aten.arange.start": [ex(2, 6)],
    "aten.arange.start_step": [ex(2, 12, 2)],
    "aten.linspace.default": [ex(0, 1, 6)],
    "aten.eye.default": [ex(6)],
    "aten.eye.m": [ex(4, 6)],
    "aten.tril_indices.default": [ex(4, 6, -1)],
    "aten.triu_indices.default": [ex(4, 6)],
    "aten.scalar_tensor.default": [ex(2.0)],
    "aten.zeros.default": [ex((4, 6), dtype=torch.float64)],
    "aten.ones.default": [ex((4, 6))],
    "aten.full.default": [ex((4, 6), 2.5)],
    "aten.logspace.default": [ex(0, 1, 6)],
    "aten.rand.default": [ex((4, 6))],
    "aten.randn.default": [ex((4, 6))],
    "aten.randint.default": [ex(9, (4, 6))],
    "aten.randint.low": [ex(2, 9, (4, 6))],
    "aten.normal.float_float": [ex(0.0, 1.0, (4, 6))],
    "aten.randperm.default": [ex(6)],
    "aten.empty.memory_format": [ex((4, 6))],
    "aten.empty_strided.default": [ex((4, 6), (6, 1))],
    "aten.empty_like.default": [ex(t(4, 6))],
    "aten.new_empty.default": [ex(t(3, 2), (4, 6))],
    "aten.new_zeros.default": [ex(t(3, 2), (4, 6)), ex(ints(), (4, 6), dtype=torch.bool)],
    "aten.new_ones.default": [ex(t(3, 2), (4, 6)), ex(t(3), ())],
    "aten.new_full.default": [ex(t(3, 2), (4, 6), 2.5)],
    "aten.zeros_like.default": [ex(t(4, 6))],
    "aten.ones_like.default": [ex(t(4, 6))],
    "aten.full_like.default": [ex(t(4, 6), 2.5)],
    **examples_planes.TABLE,
    **examples_algebra.TABLE,
    **examples_backward.TABLE,
}

EXAMPLES = TABLE | {
    f"{second}.{form}": TABLE[f"{first}.{form}"]
    for second, first in ALIASES.items()
    for form in FORMS
    if f"{first}.{form}" in TABLE
}


@functools.cache
def calls(target: str) -> tuple[tuple[Op, dict[str, Value]], ...]:
    """The ops of an operator's examples with their values, built once per process for all who need no tensors."""
    return tuple(example.build(target)[:2] for example in EXAMPLES[target])

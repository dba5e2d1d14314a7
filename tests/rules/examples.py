"""One or more calls of every operator in the table, with small dims of different sizes so that a wrong rule cannot pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from autopar.ir import Argument, Op, Ref, Value, overload
from autopar.rules.pointwise import BINARY, SAME, UNARY, names
from autopar.rules.table import ALIASES, FORMS


@dataclass(frozen=True, slots=True)
class T:
    """A random tensor; `high` is the bound of integers."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    high: int = 3
    grad: bool = True

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.dtype == torch.int64:
            return torch.randint(0, self.high, self.shape, generator=generator)
        return torch.randn(self.shape, dtype=self.dtype, generator=generator)


@dataclass(frozen=True, slots=True)
class Positive(T):
    """A random tensor of values between 0.1 and 0.9."""

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(self.shape, dtype=self.dtype, generator=generator) * 0.8 + 0.1


@dataclass(frozen=True, slots=True)
class Example:
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...] = ()

    def build(self, target: str, seed: int = 0) -> tuple[Op, dict[str, Value], dict[str, torch.Tensor]]:
        """The op, its values by name, and its operands."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, torch.Tensor] = {}
        grads: dict[str, bool] = {}

        def ref(part: object) -> Argument:
            if isinstance(part, (tuple, list)):
                return tuple(map(ref, part))
            if isinstance(part, T):
                name = f"x{len(tensors)}"
                tensors[name] = part.draw(generator)
                grads[name] = part.grad
                return Ref(name)
            return part  # type: ignore[return-value]

        args = tuple(map(ref, self.args))
        kwargs = tuple((name, ref(value)) for name, value in self.kwargs)

        def fill(argument: Argument) -> object:
            if isinstance(argument, tuple):
                return [fill(part) for part in argument]
            return tensors[argument.name] if isinstance(argument, Ref) else argument

        found = overload(target)(*map(fill, args), **{name: fill(value) for name, value in kwargs})
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        values = {
            name: Value(name=name, shape=tuple(x.shape), dtype=x.dtype, requires_grad=x.dtype.is_floating_point and grads[name])
            for name, x in tensors.items()
        }
        outs = tuple(Value(name=f"y{i}", shape=tuple(r.shape), dtype=r.dtype) for i, r in enumerate(results))
        return Op(name="y", target=target, args=args, kwargs=kwargs, results=outs), values, tensors


def ex(*args: object, **kwargs: object) -> Example:
    return Example(args, tuple(kwargs.items()))


def t(*shape: int) -> T:
    return T(shape)


def pos(*shape: int) -> T:
    return Positive(shape)


def buffer(*shape: int) -> T:
    """Positive numbers that need no gradient."""
    return Positive(shape, grad=False)


def ints(*shape: int, high: int = 3) -> T:
    return T(shape, torch.int64, high)


def bools(*shape: int) -> T:
    return T(shape, torch.bool)


BITS = ("bitwise", "__", "logical")
UNDERIVED = ("floor_divide", "nextafter")  # without a derivative
MORE_ARGUMENTS: dict[str, tuple[object, ...]] = {
    "aten.clamp.default": (-0.5, 0.5),
    "aten.clamp_max.default": (0.5,),
    "aten.clamp_min.default": (0.5,),
    "aten.threshold.default": (0.1, 2.0),
    "aten.log_sigmoid.default": (),
}


def unary(target: str) -> list[Example]:
    name, form = target.split(".")[1:]
    tensor = ints(4, 6, high=9) if name.startswith(BITS) else buffer(4, 6) if name in UNDERIVED else pos(4, 6)
    if target in MORE_ARGUMENTS:
        return [ex(tensor, *MORE_ARGUMENTS[target])]
    if form == "Scalar" and name == "pow":
        return [ex(2.0, tensor)]
    if name == "polygamma":
        return [ex(1, tensor)]
    if form == "Scalar_mode":
        return [ex(tensor, 0.3, rounding_mode="floor")]
    if form in ("Scalar", "Tensor_Scalar"):
        return [ex(tensor, 2 if tensor.dtype == torch.int64 else 0.4)]
    return [ex(tensor)]


def binary(target: str) -> list[Example]:
    name, form = target.split(".")[1:]
    make = partial(ints, high=9) if name.startswith(BITS) else buffer if name in UNDERIVED else pos
    mode = {"rounding_mode": "floor"} if form == "Tensor_mode" else {}
    return [ex(make(4, 6), make(4, 6), **mode), ex(make(2, 4, 6), make(4, 1), **mode), ex(make(6), make(4, 1), **mode)]


def same(target: str) -> list[Example]:
    more: dict[str, tuple[object, ...]] = {
        "aten.to.dtype": (torch.float32,),
        "aten.to.device": (torch.device("cpu"), torch.float64),
    }
    return [ex(t(4, 6), *more.get(target, ()))]


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
    "aten.lerp.Scalar": [ex(t(4, 6), t(6), 0.3)],
    "aten.lerp.Tensor": [ex(t(4, 6), t(6), t(4, 1))],
    "aten.addcmul.default": [ex(t(4, 6), t(6), t(4, 1), value=2)],
    "aten.addcdiv.default": [ex(t(4, 6), t(6), pos(4, 1))],
    "aten.copy.default": [ex(buffer(4, 6), buffer(6))],
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
    "aten.bernoulli.default": [ex(pos(4, 6))],
    "aten.bernoulli.p": [ex(buffer(4, 6), 0.5)],
    "aten.rand_like.default": [ex(t(4, 6))],
    "aten.randn_like.default": [ex(t(4, 6))],
    "aten.fill.Scalar": [ex(t(4, 6), 2.5)],
    "aten.fill.Tensor": [ex(t(4, 6), t())],
    "aten.zero.default": [ex(t(4, 6))],
    "aten.bucketize.Tensor": [ex(t(4, 6), t(3))],
    "aten.one_hot.default": [ex(ints(4, 6), 3)],
    # contractions
    "aten.linear.default": [*MATRIX, ex(t(4, 6), t(6))],
    "aten.matmul.default": ANY_MATMUL,
    "aten.mm.default": ANY_MATMUL[:1],
    "aten.bmm.default": [ex(t(2, 4, 6), t(2, 6, 9))],
    "aten.mv.default": [ex(t(4, 6), t(6))],
    "aten.dot.default": [ex(t(6), t(6))],
    "aten.outer.default": [ex(t(4), t(6))],
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
    # joins, look-ups, writes
    "aten.cat.default": [
        ex((t(4, 6), t(4, 6), t(4, 6)), 1),
        ex((t(4, 6), t(4, 10)), -1),
        ex((t(0), t(4, 10)), 0),
        ex((t(4, 6),)),
    ],
    "aten.stack.default": [ex((t(4, 6), t(4, 6)), d) for d in (0, 1, -1)],
    "aten.repeat.default": [ex(t(4, 6), (2, 3)), ex(t(4, 6), (2, 1, 4))],
    "aten.tile.default": [ex(t(4, 6), (2, 3)), ex(t(4, 6), (3,)), ex(t(4, 6), (2, 1, 4))],
    "aten.repeat_interleave.self_int": [ex(t(4, 6), 4, 1), ex(t(4, 6), 4), ex(t(4, 6), 2, 0, output_size=8)],
    "aten.index.Tensor": [
        ex(t(4, 6, 10), (ints(2), ints(2))),
        ex(t(4, 6, 10), (None, ints(2, 1), ints(9))),
        ex(t(4, 6, 10), (ints(9), None, ints(2, 1))),
        ex(t(4, 6, 10), (None, ints(9))),
    ],
    "aten.index_put.default": [ex(t(4, 6), (bools(4, 6),), t())],
    "aten.meshgrid.default": [ex((t(4), t(6), t(10)))],
    "aten.meshgrid.indexing": [ex((t(4), t(6), t(10)), indexing="xy"), ex((t(4), t(6)), indexing="ij")],
    "aten.unfold.default": [ex(t(4, 6), 1, 3, 2)],
    "aten.index_select.default": [ex(t(4, 6), 1, ints(10)), ex(t(4, 6), 0, ints())],
    "aten.gather.default": [ex(t(4, 6, 10), 1, ints(4, 2, 10)), ex(t(4, 6), 1, ints(2, 9))],
    "aten.take_along_dim.default": [ex(t(4, 6, 10), ints(4, 2, 10), 1)],
    "aten.scatter.src": [ex(t(4, 6), 1, ints(4, 6), t(4, 6)), ex(t(4, 6), 1, ints(2, 6), t(2, 6))],
    "aten.scatter.value": [ex(t(4, 6), 1, ints(4, 2), 0), ex(t(4, 6), 1, ints(4, 2), 2.5)],
    "aten.scatter_add.default": [ex(t(4, 6), 1, ints(4, 2), t(4, 2)), ex(t(4, 6), 0, ints(9, 6), t(9, 6))],
    "aten.index_add.default": [ex(t(4, 6), 1, ints(2), t(4, 2))],
    "aten.slice_scatter.default": [ex(t(4, 6), t(4, 2), 1, 0, 2)],
    "aten.select_scatter.default": [ex(t(4, 6), t(4), 1, 3)],
    "aten.diagonal.default": [ex(t(4, 6)), ex(t(2, 4, 6), 0, 1, -1)],
    "aten.pad.default": [ex(t(4, 6), (0, 1)), ex(t(4, 6), (1, 0), "constant", 2.5), ex(t(4, 6, 10), (0, 0, 2, 1))],
    "aten.constant_pad_nd.default": [ex(t(4, 6), (0, 1)), ex(t(4, 6), (1, 0, 0, 2), 2.5)],
    "aten.reflection_pad1d.default": [ex(t(4, 6), (1, 2))],
    "aten.reflection_pad2d.default": [ex(t(2, 4, 6), (1, 2, 0, 0))],
    "aten.replication_pad2d.default": [ex(t(2, 4, 6), (1, 2, 0, 0))],
    "aten.pixel_shuffle.default": [ex(t(2, 16, 4, 6), 2)],
    "aten.max_pool1d.default": [ex(t(2, 4, 6), (2,))],
    "aten.max_pool2d.default": [ex(t(2, 4, 6, 8), (2, 2)), ex(t(4, 6, 8), (2, 2))],
    "aten.max_pool3d.default": [ex(t(2, 4, 6, 4, 8), (2, 2, 2))],
    "aten.max_pool2d_with_indices.default": [ex(t(2, 4, 6, 8), (2, 2))],
    "aten.adaptive_max_pool2d.default": [ex(t(2, 4, 6, 8), (2, 4))],
    "aten.avg_pool1d.default": [ex(t(2, 4, 6), (2,))],
    "aten.avg_pool2d.default": [ex(t(2, 4, 6, 8), (2, 2))],
    "aten.avg_pool3d.default": [ex(t(2, 4, 6, 4, 8), (2, 2, 2))],
    "aten.adaptive_avg_pool1d.default": [ex(t(2, 4, 6), (1,))],
    "aten.adaptive_avg_pool2d.default": [ex(t(2, 4, 6, 8), (1, 1)), ex(t(4, 6, 8), (3, 4))],
    "aten.adaptive_avg_pool3d.default": [ex(t(2, 4, 6, 4, 8), (1, 2, 2))],
    "aten.upsample_nearest1d.default": [ex(t(2, 4, 6), (12,))],
    "aten.upsample_nearest2d.default": [ex(t(2, 4, 6, 8), (12, 8))],
    "aten.upsample_bilinear2d.default": [ex(t(2, 4, 6, 8), (12, 8), False)],
    "aten.upsample_bicubic2d.default": [ex(t(2, 4, 6, 8), (12, 8), False)],
    "aten.upsample_nearest1d.vec": [ex(t(2, 4, 6), (12,), None)],
    "aten.upsample_nearest2d.vec": [ex(t(2, 4, 6, 8), None, (2.0, 2.0))],
    "aten.upsample_bilinear2d.vec": [ex(t(2, 4, 6, 8), (12, 8), True, None)],
    "aten.upsample_bicubic2d.vec": [ex(t(2, 4, 6, 8), (12, 8), True, None)],
    # reductions
    "aten.sum.default": [ex(t(4, 6)), ex(ints(4, 6))],
    "aten.sum.dim_IntList": [ex(t(4, 6, 10), (1,)), ex(t(4, 6, 10), (0, -1), True), ex(bools(4, 6), (1,)), ex(t(4, 6), None)],
    "aten.mean.default": [ex(t(4, 6))],
    "aten.mean.dim": [ex(t(4, 6, 10), (1,)), ex(t(4, 6, 10), (0, -1), True), ex(t(4, 6), None)],
    "aten.count_nonzero.default": [ex(ints(4, 6)), ex(ints(4, 6), 1)],
    "aten.count_nonzero.dim_IntList": [ex(ints(4, 6), (1,))],
    "aten.nansum.default": [ex(t(4, 6), (1,))],
    "aten.nanmean.default": [ex(t(4, 6), (1,))],
    **{
        f"aten.{n}.default": [ex(t(4, 6))]
        for n in "aminmax all any argmax argmin max min median mode prod std var amax amin".split()
    },
    **{f"aten.{n}.dim": [ex(t(4, 6, 10), 1), ex(t(4, 6), 0, True)] for n in ("max", "min", "median", "all", "any")},
    **{f"aten.{n}.dim": [ex(t(4, 6, 10), (1,)), ex(t(4, 6), (0,), keepdim=True)] for n in ("std", "var", "var_mean")},
    **{f"aten.{n}.correction": [ex(t(4, 6, 10), (1,), correction=0), ex(t(4, 6))] for n in ("std", "var", "var_mean")},
    "aten.prod.dim_int": [ex(t(4, 6), 1)],
    "aten.logsumexp.default": [ex(t(4, 6), (1,))],
    "aten.norm.Scalar": [ex(t(4, 6), 2)],
    "aten.norm.ScalarOpt_dim": [ex(t(4, 6), 2, (1,))],
    "aten.linalg_vector_norm.default": [ex(t(4, 6), 2, (1,)), ex(t(4, 6), 3)],
    "aten.kthvalue.default": [ex(t(4, 6), 2)],
    **{f"aten.{n}.default": [ex(t(4, 6, 10), 1)] for n in "cumprod cummax cummin logcumsumexp sort cumsum glu".split()},
    "aten.sort.stable": [ex(t(4, 6), stable=True, dim=0)],
    "aten.argsort.default": [ex(t(4, 6))],
    "aten.topk.default": [ex(t(4, 6), 2), ex(t(4, 6), 2, 0)],
    "aten.diff.default": [ex(t(4, 6)), ex(t(4, 6), 1, 0, t(2, 6))],
    "aten.flip.default": [ex(t(4, 6, 10), (0, -1))],
    "aten.roll.default": [ex(t(4, 6), (2,), (1,)), ex(t(4, 6), (2,))],
    "aten.cosine_similarity.default": [ex(t(4, 6, 10), t(6, 10)), ex(t(4, 6), t(4, 6), -1)],
    "aten.tril.default": [ex(t(2, 4, 6)), ex(t(4, 6), 1)],
    "aten.triu.default": [ex(t(2, 4, 6)), ex(t(4, 6), 1)],
    # attention, norms, losses
    "aten.scaled_dot_product_attention.default": HEADS,
    "aten.softmax.int": [ex(t(4, 6, 10), 1), ex(t(4, 6), -1)],
    "aten.log_softmax.int": [ex(t(4, 6, 10), 1), ex(t(4, 6), -1)],
    "aten._softmax.default": [ex(t(4, 6, 10), 1, False)],
    "aten._log_softmax.default": [ex(t(4, 6, 10), 1, False)],
    "aten.layer_norm.default": [
        ex(t(4, 10, 6), (6,), t(6), t(6)),
        ex(t(4, 10, 6), (10, 6), t(10, 6)),
        ex(t(4, 6), (6,)),
        ex(t(4, 6), (6,), None, t(6)),
    ],
    "aten.native_layer_norm.default": [ex(t(4, 10, 6), (6,), t(6), t(6), 1e-5), ex(t(4, 10, 6), (10, 6), None, None, 1e-5)],
    "aten.rms_norm.default": [ex(t(4, 10, 6), (6,), t(6)), ex(t(4, 10, 6), (10, 6))],
    "aten.group_norm.default": [ex(t(2, 12, 5), 4, t(12), t(12)), ex(t(2, 12, 3, 5), 4), ex(t(6, 12), 2, t(12))],
    "aten.batch_norm.default": [
        ex(t(4, 6, 10), t(6), t(6), buffer(6), buffer(6), True, 0.1, 1e-5, False),
        ex(t(4, 6, 10), t(6), t(6), buffer(6), buffer(6), False, 0.1, 1e-5, False),
        ex(t(4, 6), None, None, buffer(6), buffer(6), False, 0.1, 1e-5, False),
    ],
    "aten.instance_norm.default": [
        ex(t(4, 6, 10), t(6), t(6), None, None, True, 0.1, 1e-5, False),
        ex(t(4, 6, 10), None, None, buffer(6), buffer(6), True, 0.1, 1e-5, False),
    ],
    **{f"aten.{n}.default": losses() for n in "mse_loss l1_loss smooth_l1_loss huber_loss kl_div hinge_embedding_loss".split()},
    "aten.soft_margin_loss.default": [ex(t(4, 6), buffer(4, 6), n) for n in range(3)],
    "aten.binary_cross_entropy.default": [ex(pos(4, 6), buffer(4, 6), buffer(4, 6), n) for n in range(3)],
    "aten.binary_cross_entropy_with_logits.default": [
        *(ex(t(4, 6), pos(4, 6), buffer(4, 6), buffer(6), n) for n in range(3)),
        ex(t(4, 6), pos(4, 6)),
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
    "aten.scalar_tensor.default": [ex(2.0)],
    "aten.zeros.default": [ex((4, 6), dtype=torch.float64)],
    "aten.ones.default": [ex((4, 6))],
    "aten.full.default": [ex((4, 6), 2.5)],
    "aten.rand.default": [ex((4, 6))],
    "aten.randn.default": [ex((4, 6))],
    "aten.new_zeros.default": [ex(t(3, 2), (4, 6)), ex(ints(), (4, 6), dtype=torch.bool)],
    "aten.new_ones.default": [ex(t(3, 2), (4, 6)), ex(t(3), ())],
    "aten.new_full.default": [ex(t(3, 2), (4, 6), 2.5)],
    "aten.zeros_like.default": [ex(t(4, 6))],
    "aten.ones_like.default": [ex(t(4, 6))],
    "aten.full_like.default": [ex(t(4, 6), 2.5)],
}

EXAMPLES = TABLE | {
    f"{second}.{form}": TABLE[f"{first}.{form}"]
    for second, first in ALIASES.items()
    for form in FORMS
    if f"{first}.{form}" in TABLE
}

"""The law of rules on random calls: shapes, dtypes and arguments that nobody thought of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from autopar.operators.checking.execution_check import check
from tests.operators.drawing import Example, T, bools, buffer, ex, ints, t
from tests.operators.examples import binary, unary
from tests.operators.names import BINARY, UNARY, names

Shape = tuple[int, ...]
Call = tuple[str, Example]

SIZES = st.sampled_from([2, 4, 6, 3, 1])
drawn = settings(max_examples=30, derandomize=True, database=None)
rarely = settings(drawn, max_examples=12)


def obeys(call: Call) -> None:
    target, example = call
    op, values, tensors = example.build(target)
    check(op, values, tensors)


def shapes(least: int = 0, most: int = 4, sizes: SearchStrategy[int] = SIZES) -> SearchStrategy[Shape]:
    return st.lists(sizes, min_size=least, max_size=most).map(tuple)


def x(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> T:
    return T(tuple(shape), dtype)


@st.composite
def broadcastable(draw: DrawFn, shape: Shape) -> Shape:
    """A shape that broadcasts against this one: without some leading dims, some of the others of size 1."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in kept)


@st.composite
def dims_of(draw: DrawFn, rank: int, least: int = 0) -> tuple[int, ...]:
    """Some dims of a tensor, counted from either end, in any order."""
    chosen = draw(st.permutations(range(rank)))[: draw(st.integers(least, rank))]
    return tuple(dim - draw(st.sampled_from([0, rank])) for dim in chosen)


@st.composite
def dim_of(draw: DrawFn, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))


def reshaped(example: Example, wanted: Sequence[Shape]) -> Example:
    """The example with these shapes of its tensors."""
    left = iter(wanted)
    return replace(example, args=tuple(replace(a, shape=next(left)) if isinstance(a, T) else a for a in example.args))


@st.composite
def unaries(draw: DrawFn) -> Call:
    target = draw(st.sampled_from(names(UNARY)))
    return target, reshaped(unary(target)[0], [draw(shapes(most=3))])


@drawn
@given(unaries())
def test_a_split_rule_of_one_tensor_obeys_the_law(call: Call) -> None:
    obeys(call)


ADDING = ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")


@st.composite
def binaries(draw: DrawFn) -> Call:
    target = draw(st.sampled_from([*names(BINARY), *ADDING * 6]))
    whole = draw(shapes(most=4))
    pair = [whole, draw(broadcastable(whole))]
    example = ex(t(1), t(1)) if target in ADDING else binary(target)[0]
    return target, reshaped(example, pair if draw(st.booleans()) else pair[::-1])


@drawn
@given(binaries())
def test_a_split_rule_of_two_tensors_that_broadcast_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def choices(draw: DrawFn) -> Call:
    whole = draw(shapes(most=3))
    when, one, two = (draw(broadcastable(whole)) for _ in range(3))
    number = draw(st.sampled_from([0, 0.0, -2.5]))
    calls: list[Call] = [
        ("aten.where.self", ex(bools(*when), t(*one), t(*two))),
        ("aten.where.ScalarOther", ex(bools(*when), t(*one), number)),
        ("aten.where.ScalarSelf", ex(bools(*when), number, t(*two))),
        ("aten.masked_fill.Scalar", ex(t(*whole), bools(*when), number)),
        ("aten.masked_fill.Tensor", ex(t(*whole), bools(*when), t())),
        ("aten.lerp.Tensor", ex(t(*whole), t(*one), t(*two))),
        ("aten.addcmul.default", ex(t(*whole), t(*one), t(*two))),
        ("aten.clamp.Tensor", ex(t(*whole), t(*one), t(*two))),
    ]
    return draw(st.sampled_from(calls))


@drawn
@given(choices())
def test_a_split_rule_of_a_condition_and_tensors_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def products(draw: DrawFn) -> Call:
    m, n, k = (draw(SIZES) for _ in range(3))
    batch = draw(shapes(most=2))
    left, right = (*batch, m, k), (*draw(broadcastable(batch)), k, n)
    if draw(st.booleans()):
        left, right = (*draw(broadcastable(batch)), m, k), (*batch, k, n)
    vectors = draw(st.sampled_from(["neither", "left", "right", "both"]))
    if vectors in ("left", "both"):
        left = (k,)
    if vectors in ("right", "both"):
        right = (k,)
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    added = draw(st.sampled_from([(m, n), (1, n), (m, 1), (n,), (1,), ()]))
    bias = draw(st.sampled_from([(), (x((n,), dtype),)]))
    calls: list[Call] = [
        ("aten.matmul.default", ex(x(left, dtype), x(right, dtype))),
        ("aten.linear.default", ex(x((*batch, k), dtype), x((n, k), dtype), *bias)),
        ("aten.addmm.default", ex(t(*added), t(m, k), t(k, n), beta=0.5)),
        ("aten.baddbmm.default", ex(t(*draw(broadcastable((2, m, n)))), t(2, m, k), t(2, k, n))),
    ]
    return draw(st.sampled_from(calls))


@drawn
@given(products())
def test_a_split_rule_of_matrices_and_vectors_obeys_the_law(call: Call) -> None:
    obeys(call)


REDUCTIONS = "sum.dim_IntList mean.dim amax.default amin.default logsumexp.default linalg_vector_norm.default".split()
ONE_DIM = "max.dim min.dim median.dim prod.dim_int all.dim any.dim argmax.default argmin.default".split()


@st.composite
def reductions(draw: DrawFn) -> Call:
    shape, keep = draw(shapes(1)), draw(st.booleans())
    name = draw(st.sampled_from([*REDUCTIONS, *ONE_DIM]))
    tensor = t(*shape) if "all" not in name and "any" not in name else bools(*shape)
    if name in ONE_DIM:
        return f"aten.{name}", ex(tensor, draw(dim_of(len(shape))), keep)
    chosen = draw(dims_of(len(shape), least=1 if name.startswith("logsumexp") else 0))
    return f"aten.{name}", ex(tensor, *([2] if "norm" in name else []), chosen, keep)


@drawn
@given(reductions())
def test_a_split_rule_of_a_reduction_obeys_the_law(call: Call) -> None:
    obeys(call)


ALONG = "softmax.int log_softmax.int cumsum.default cumprod.default logcumsumexp.default sort.default flip.default".split()


@st.composite
def alongs(draw: DrawFn) -> Call:
    shape = draw(shapes(1))
    name, dim = draw(st.sampled_from(ALONG)), draw(dim_of(len(shape)))
    return f"aten.{name}", ex(t(*shape), (dim,) if name.startswith("flip") else dim)


@drawn
@given(alongs())
def test_a_split_rule_of_an_op_along_a_dim_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def views(draw: DrawFn) -> Call:
    shape = draw(shapes(1))
    rank = len(shape)
    dim, other = draw(dim_of(rank)), draw(dim_of(rank))
    size = shape[dim]
    outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    small = draw(broadcastable(shape))
    grown = tuple(-1 if len(small) == rank and small[d] == n and draw(st.booleans()) else n for d, n in enumerate(shape))
    first, last = sorted((dim % rank, other % rank))
    calls: list[Call] = [
        ("aten.permute.default", ex(t(*shape), tuple(draw(st.permutations(range(rank)))))),
        ("aten.transpose.int", ex(t(*shape), dim, other)),
        ("aten.movedim.int", ex(t(*shape), dim, other)),
        ("aten.unsqueeze.default", ex(t(*shape), dim)),
        ("aten.squeeze.default", ex(t(*shape))),
        ("aten.squeeze.dim", ex(t(*shape), dim)),
        ("aten.squeeze.dims", ex(t(*shape), draw(dims_of(rank)))),
        ("aten.expand.default", ex(t(*small), grown)),
        ("aten.unflatten.int", ex(t(*shape), dim, (outer, size // outer))),
        ("aten.unflatten.int", ex(t(*shape), dim, (outer, -1))),
        ("aten.flatten.using_ints", ex(t(*shape), first, last)),
        ("aten.reshape.default", ex(t(*shape), (outer, -1))),
        ("aten.reshape.default", ex(t(*shape), (*shape[: rank // 2], -1))),
        ("aten.diagonal.default", ex(t(2, *shape), draw(st.integers(-1, 1)), 0, rank)),
        ("aten.repeat.default", ex(t(*shape), (2, *(draw(st.sampled_from([1, 2])) for _ in shape)))),
        ("aten.repeat_interleave.self_int", ex(t(*shape), outer, dim)),
    ]
    return draw(st.sampled_from(calls))


@settings(drawn, max_examples=50)
@given(views())
def test_a_split_rule_of_a_view_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def cuts(draw: DrawFn) -> Call:
    shape = draw(shapes(1, 3))
    rank = len(shape)
    dim = draw(dim_of(rank))
    size = shape[dim]
    start, end = draw(st.integers(-size, size)), draw(st.integers(-size, size + 2))
    length = draw(st.integers(1, size))
    pieces = (length, size - length) if length < size else (size,)
    others = [[*shape], [*shape]]
    others[1][dim] = draw(SIZES)
    calls: list[Call] = [
        ("aten.slice.Tensor", ex(t(*shape), dim, start, end, draw(st.sampled_from([1, 1, 2])))),
        ("aten.narrow.default", ex(t(*shape), dim, size - length, length)),
        ("aten.select.int", ex(t(*shape), dim, size - length)),
        ("aten.unbind.int", ex(t(*shape), dim)),
        ("aten.split.Tensor", ex(t(*shape), length, dim)),
        ("aten.split_with_sizes.default", ex(t(*shape), pieces, dim)),
        ("aten.chunk.default", ex(t(*shape), draw(st.integers(1, 4)), dim)),
        ("aten.tensor_split.sections", ex(t(*shape), draw(st.integers(1, 4)), dim)),
        ("aten.cat.default", ex((t(*shape), t(*others[1])), dim)),
        ("aten.cat.default", ex(tuple(t(*shape) for _ in range(draw(st.integers(1, 3)))), dim)),
        ("aten.stack.default", ex((t(*shape), t(*shape)), dim)),
    ]
    return draw(st.sampled_from(calls))


@drawn
@given(cuts())
def test_a_split_rule_of_pieces_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def picks(draw: DrawFn) -> Call:
    shape = draw(shapes(1, 3))
    rank = len(shape)
    dim = draw(dim_of(rank))
    size = shape[dim]
    picked = tuple(draw(st.integers(1, n)) if d != dim % rank else draw(SIZES) for d, n in enumerate(shape))
    equal = tuple(n if d != dim % rank else draw(SIZES) for d, n in enumerate(shape))
    where = draw(st.sampled_from([picked, equal]))
    index = draw(shapes(most=2))
    at = dim % rank
    calls: list[Call] = [
        ("aten.index_select.default", ex(t(*shape), dim, ints(draw(SIZES), high=size))),
        ("aten.gather.default", ex(t(*shape), dim, ints(*where, high=size))),
        ("aten.take_along_dim.default", ex(t(*shape), ints(*equal, high=size), dim)),
        ("aten.scatter_add.default", ex(t(*shape), dim, ints(*where, high=size), t(*where))),
        ("aten.index.Tensor", ex(t(*shape), (*[None] * at, ints(*index, high=size)))),
        ("aten.index_add.default", ex(t(*shape), dim, ints(equal[at], high=size), t(*equal))),
        ("aten.embedding.default", ex(t(size, draw(SIZES)), ints(*index, high=size))),
        ("aten.embedding.default", ex(t(size, draw(SIZES)), ints(*index, high=size), draw(st.integers(0, size - 1)))),
    ]
    return draw(st.sampled_from(calls))


@drawn
@given(picks())
def test_a_split_rule_of_indexing_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def norms(draw: DrawFn) -> Call:
    shape = draw(shapes(1, 3))
    inner = shape[draw(st.integers(0, len(shape) - 1)) :]
    groups, each, batch = (draw(SIZES) for _ in range(3))
    channels, space = groups * each, draw(shapes(1, 2))
    weight = draw(st.sampled_from([(), (t(*inner),), (t(*inner), t(*inner))]))
    scale = draw(st.sampled_from([(), (t(channels), t(channels))]))
    parameters = scale or (None, None)
    training = draw(st.booleans()) and batch * math.prod(space) > 1
    calls: list[Call] = [
        ("aten.layer_norm.default", ex(t(*shape), inner, *weight)),
        ("aten.rms_norm.default", ex(t(*shape), inner, *weight[:1])),
        ("aten.group_norm.default", ex(t(batch, channels, *space), groups, *scale)),
        (
            "aten.batch_norm.default",
            ex(t(batch, channels, *space), *parameters, buffer(channels), buffer(channels), training, 0.1, 1e-5, False),
        ),
    ]
    return draw(st.sampled_from(calls))


@drawn
@given(norms())
def test_a_split_rule_of_a_norm_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def attentions(draw: DrawFn) -> Call:
    batch, heads, q, k, d, e = (draw(SIZES) for _ in range(6))
    causal, groups = draw(st.booleans()), draw(st.sampled_from([1, 1, 2]))
    lead = (batch, heads * groups) if groups > 1 or draw(st.booleans()) else (heads,)
    held = (batch, heads) if len(lead) == 2 else (heads,)
    if causal:
        k = q
    masks = [None, *(T(draw(broadcastable((*lead, q, k)))) for _ in range(2)), t(q, k)]
    found = None if causal else draw(st.sampled_from(masks))
    mask = found if found is None or len(found.shape) > 1 else None
    example = ex(t(*lead, q, d), t(*held, k, d), t(*held, k, e), mask, 0.0, causal, enable_gqa=groups > 1)
    return "aten.scaled_dot_product_attention.default", example


@drawn
@given(attentions())
def test_a_split_rule_of_attention_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def convolutions(draw: DrawFn) -> Call:
    n = draw(st.sampled_from([1, 2]))
    groups, inside, outside, batch = (draw(SIZES) for _ in range(4))
    window = tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(n))
    dilation = tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(n))
    space = tuple((w - 1) * f + 1 + draw(st.integers(0, 3)) for w, f in zip(window, dilation, strict=True))
    stride = tuple(draw(st.sampled_from([1, 2])) for _ in range(n))
    padding = tuple(draw(st.sampled_from([0, 1])) for _ in range(n))
    lead = draw(st.sampled_from([(batch,), ()]))
    bias = draw(st.sampled_from([None, t(groups * outside)]))
    given_ = t(*lead, groups * inside, *space)
    if draw(st.integers(0, 3)) == 0:
        weight = t(groups * inside, outside, *window)
        name = "conv_transpose1d.default" if n == 1 else "conv_transpose2d.input"
        return f"aten.{name}", ex(given_, weight, bias, stride, (0,) * n, (0,) * n, groups, dilation)
    weight = t(groups * outside, inside, *window)
    return f"aten.conv{n}d.default", ex(given_, weight, bias, stride, padding, dilation, groups)


@drawn
@given(convolutions())
def test_a_split_rule_of_a_convolution_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def pools(draw: DrawFn) -> Call:
    n = draw(st.sampled_from([1, 2]))
    lead = draw(shapes(2 - (n == 2 and draw(st.booleans())), 2))
    space = tuple(draw(st.sampled_from([4, 6, 7])) for _ in range(n))
    window = tuple(draw(st.sampled_from([1, 2, 3])) for _ in range(n))
    stride = tuple(draw(st.sampled_from([1, 2])) for _ in range(n))
    calls: list[Call] = [
        (f"aten.max_pool{n}d.default", ex(t(*lead, *space), window, stride)),
        (f"aten.avg_pool{n}d.default", ex(t(*lead, *space), window, stride)),
        (f"aten.adaptive_avg_pool{n}d.default", ex(t(*lead, *space), window)),
    ]
    return draw(st.sampled_from(calls))


@rarely
@given(pools())
def test_a_split_rule_of_windows_over_a_plane_obeys_the_law(call: Call) -> None:
    obeys(call)


@st.composite
def losses(draw: DrawFn) -> Call:
    n, c, reduction = draw(SIZES), draw(SIZES), draw(st.integers(0, 2))
    space = draw(shapes(most=2))
    shape = (n, c, *space)
    weight = draw(st.sampled_from([None, buffer(c)]))
    target = ints(n, *space, high=c)
    soft = T(shape, grad=False)
    calls: list[Call] = [
        ("aten.mse_loss.default", ex(t(*shape), t(*shape), reduction)),
        ("aten.smooth_l1_loss.default", ex(t(*shape), t(*shape), reduction)),
        ("aten.binary_cross_entropy_with_logits.default", ex(t(*shape), buffer(*shape), None, None, reduction)),
        ("aten.cross_entropy_loss.default", ex(t(*shape), target, weight, reduction, draw(st.integers(-1, c - 1)))),
        ("aten.cross_entropy_loss.default", ex(t(*shape), soft, weight, reduction)),
        ("aten.nll_loss_nd.default", ex(t(*shape), target, weight, reduction)),
    ]
    return draw(st.sampled_from(calls))


@drawn
@given(losses())
def test_a_split_rule_of_a_loss_obeys_the_law(call: Call) -> None:
    obeys(call)

"""Rules of products that sum over a factor: linear layers, matrix products, embeddings."""

from __future__ import annotations

import math
import string
from dataclasses import replace
from statistics import NormalDist

from autopar.ir.program import Argument
from autopar.operators import own_order, padding
from autopar.operators.call import Call, Local
from autopar.operators.double_precision import ALIGNED
from autopar.operators.facts import Alias, Autocast, Mixed, says
from autopar.operators.flops import ProductSizes, chain, contraction, product
from autopar.operators.pattern_text import term, without
from autopar.operators.rule import InternalCollective, OpSharding, ParallelForm, Rule, op


def einsum(call: Call) -> OpSharding:
    """The equation is the pattern; a letter that occurs twice in one tensor takes a diagonal, and stays whole."""
    equation = str(call.arguments["equation"]).replace(" ", "").replace("...", "*")
    sources, _, result = equation.partition("->")
    letters = [c for c in string.ascii_uppercase + string.ascii_lowercase if sources.count(c) == 1]
    result = result if "->" in equation else ("*" if "*" in sources else "") + "".join(letters)

    written = {c: "_" for term in sources.split(",") for c in term if term.count(c) > 1} | {"*": "..."}

    def dims(term: str) -> str:
        return " ".join(written.get(c, c) for c in term) or "()"

    fitted = call.fit(f"{', '.join(map(dims, sources.split(',')))} -> {dims(result)}")
    each = tuple(frozenset({position}) for position in call.positions("tensors"))  # linear in each tensor
    return replace(fitted, linear=each if call.continuous else ())


def multi_dot(call: Call) -> OpSharding:
    """`a b, b c, c d -> a d`, for any number of matrices; the first and the last may be vectors."""
    ends = [len(value.shape) for value in call.operands]
    words = [[f"d{i}", f"d{i + 1}"] for i in range(len(ends))]
    words[0], words[-1] = words[0][2 - ends[0] :], words[-1][: ends[-1]]
    result = [*words[0][:-1], *words[-1][1:]]
    fitted = call.fit(f"{', '.join(map(term, words))} -> {term(result)}")
    return replace(fitted, linear=tuple(frozenset({p}) for p in range(len(ends))) if call.continuous else ())


def inner(call: Call) -> OpSharding:
    """`a k, b k -> a b`, for any number of dims a and b; a scalar multiplies."""
    a, b = [f"a{d}" for d in range(call.rank("self"))], [f"b{d}" for d in range(call.rank("other"))]
    if not a or not b:
        return call.fit(f"{term(a)}, {term(b)} -> {term(a + b)}")
    return call.fit(f"{term([*a[:-1], 'k'])}, {term([*b[:-1], 'k'])} -> {term(a[:-1] + b[:-1])}")


def tensordot(call: Call) -> OpSharding:
    """`a k, k b -> a b`, for any number of dims a, b and k, in any order."""
    left, right = (call.numbers(name) for name in ("dims_self", "dims_other"))
    a, b = [f"a{d}" for d in range(call.rank("self"))], [f"b{d}" for d in range(call.rank("other"))]
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
        a[one] = b[other] = f"k{number}"
    return call.fit(f"{term(a)}, {term(b)} -> {term(word for word in a + b if word[0] != 'k')}")


def kron(call: Call) -> OpSharding:
    """`a b, c d -> (a c) (b d)`, for any number of dims."""
    ranks = call.rank("self"), call.rank("other")
    first, second = ([f"{letter}{d}" for d in range(rank)] for letter, rank in zip("ab", ranks, strict=True))
    short = max(ranks)
    padded = zip(["" for _ in range(short - ranks[0])] + first, ["" for _ in range(short - ranks[1])] + second, strict=True)
    return call.fit(f"{term(first)}, {term(second)} -> {term(f'({a} {b})' if a and b else a or b for a, b in padded)}")


def distances(call: Call) -> OpSharding:
    """`... p k, ... r k -> ... p r`; k stays whole but for sums of absolute values, p = 1."""
    k = "k" if call.arguments["p"] == 1 else "k!"
    return call.fit(f"... p {k}, ... r {k} -> ... p r")


def own_distances(call: Call) -> OpSharding:
    """The rows stay whole; k does too, but for sums of absolute values, p = 1."""
    return call.fit(f"_ {'k' if call.arguments['p'] == 1 else 'k!'} -> _")


def row_distances(call: Call) -> OpSharding:
    """`... k!, ... k! -> ...`; with keepdim the dim stays, of size 1."""
    return call.fit(f"... k!, ... k! -> ...{' _' if call.arguments['keepdim'] else ''}")


def cross(call: Call) -> OpSharding:
    """The dim of size 3 stays whole."""
    words = term(without(len(call.result), three(call, call.result)))
    return call.fit(f"{words}, {words} -> {words}")


def three(call: Call, shape: tuple[int, ...]) -> int:
    """The dim of a cross product: the named one, else the first of size 3."""
    dim = call.arguments["dim"]
    return dim if isinstance(dim, int) else shape.index(3)


def crossed_dim(call: Call, local: Local) -> dict[str, Argument]:
    """The dim by number, since on one rank another dim may have size 3."""
    return {"dim": three(call, call.result)}


def embedding(call: Call) -> OpSharding:
    """`v! h, ... -> ... h`; indices stay whole if gradients are scaled by frequency, or are sparse."""
    return call.fit("v! h, ... -> ... h" if plain_rows(call) else "v! h, ...! -> ...! h")


def plain_rows(call: Call) -> bool:
    """Whether the gradient of a table is the sum over the rows looked up."""
    return not call.arguments["scale_grad_by_freq"] and not call.arguments["sparse"]


VOCABULARY = ParallelForm(name="vocab_parallel_embedding", factors=("v",), able=plain_rows)


# The standard deviation of an expert's rows in a batch, relative to their mean. With a load balancing loss the fullest of 64
# experts has 1.52 and 1.72 times the mean (Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts,
# 2024, table 2), which matches normal numbers with a deviation of 0.22 and 0.31. In the first steps, or without such a loss,
# experts differ more (benchmarks/results/expert_loads.txt); with biases that follow the loads, much less.
LOAD_SPREAD = 0.25


def fullest(experts: int, ranks: int, spread: float = LOAD_SPREAD) -> float:
    """The expected number of rows of the fullest rank, as a multiple of the mean, if experts are spread evenly over ranks.

    The rows of experts are assumed normal and independent, with a deviation of `spread` times their mean. The relative
    deviation of a rank is smaller by the root of its number of experts. The largest of n normal numbers is expected at the
    quantile (n - 3/8) / (n + 1/4) (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + largest * spread * math.sqrt(ranks / experts)


def misplaced(rows: int, experts: int) -> int:
    """The expected number of a rank's rows whose expert is on another rank.

    Rows are sorted by expert and split evenly, experts likewise. The row at which the experts of one rank end deviates from the
    even split. If rows chose experts at random, its variance would be n p (1 - p), with n = rows and p the share of experts up
    to there; since experts differ by `LOAD_SPREAD`, (LOAD_SPREAD n)^2 p (1 - p) / experts is added. The mean absolute deviation
    is sqrt(2 / pi) of the root. Half of it falls into a rank's own rows, at each of their two ends; p = 1/2 is the worst case.
    """
    return math.ceil(math.sqrt(rows * (1 + LOAD_SPREAD**2 * rows / experts) / (2 * math.pi)))


def dispatched(call: Call, local: Local) -> int:
    """Elements of the rows that a rank sends to the ranks of their experts."""
    rows, width = local.operands[0]
    return misplaced(local.split("t") * rows, local.split("e") * local.operands[1][0]) * width


def combined(call: Call, local: Local) -> int:
    """Elements of the results that come back for these rows."""
    rows, matrices, width = local.operands[0][0], local.operands[1][0], local.results[0][1]
    return misplaced(local.split("t") * rows, local.split("e") * matrices) * width


def grouped(call: Call) -> OpSharding:
    """One matrix for each group of rows, of columns, or of the summed dim; without groups, a batched product.

    The rows of local parts are multiples of 16 bytes, like those of the whole.
    """
    sizes = {f"{word}8": ALIGNED for word in "mkn"}
    m, k, n = (
        f"({word} {word}8!)" if size % ALIGNED == 0 else f"{word}!"
        for word, size in zip("mkn", (call.shape("self")[-2], *call.shape("mat2")[-2:]), strict=True)
    )
    match call.rank("self"), call.rank("mat2"):
        case 2, 3:
            return call.fit(f"t! {k}, e! {k} {n}, e! -> t! {n}", sizes=sizes)
        case 3, 2:
            return call.fit(f"e! {m} {k}, {k} n!, e! -> {m} n!", sizes=sizes)
        case 2, 2:
            return call.fit(f"{m} k!, k! {n}, e! -> e! {m} {n}", sizes=sizes)
    return call.fit(f"b {m} {k}, b {k} {n} -> b {m} {n}", sizes=sizes)


def grouped_sizes(call: Call, local: Local) -> ProductSizes:
    """Sizes of one product: each row, or column, is multiplied by one matrix only, so it counts as if they shared a matrix."""
    (*batch, m, k), (*batches, _, n) = local.operands[:2]
    return ProductSizes(math.prod(batch) if batch and batches else 1, m, n, k)


def even_ends(call: Call) -> dict[str, tuple[int, ...]]:
    """Ends of groups of equal length: of rows, of columns, or of the summed dim."""
    if not call.positions("offs"):
        return {}
    first, second = (value.shape for value in call.operands[:2])
    columns, rows = len(first) == 3, len(second) == 3
    length = second[-1] if columns else first[0 if rows else 1]
    (groups,) = call.shape("offs")
    return {"offs": tuple(length * number // groups for number in range(1, groups + 1))}


def einsum_alias(call: Call) -> Alias:
    """A view if one tensor is permuted, or its diagonal taken, and nothing is summed."""
    before, arrow, after = str(call.arguments["equation"]).partition("->")
    kept = after if arrow else [letter for letter in before if letter == "." or before.count(letter) == 1]
    return Alias.ALWAYS if len(call.operands) == 1 and set(before) <= {*kept, " "} else Alias.NEVER


LINEAR = says("linear", k="in-features", n="out-features")
MATRIX_PRODUCT = says("matrix product", k="inner dim")
# Rows are dispatched to the rank of their expert, and results return to where the rows came from. The backward sends gradients
# of results to the experts and gradients of rows back, and dispatches the rows again for the gradients of weights.
DISPATCH = InternalCollective("all_to_all", dispatched, wide=False)
COMBINE = InternalCollective("all_to_all", combined, wide=False)
EXPERTS = ParallelForm(
    name="expert_parallel_grouped_mm",
    factors=("t", "e"),
    whole=(2,),
    work=lambda fitted, ranks: fullest(fitted.factor("e").size, ranks),
    forward=(DISPATCH, COMBINE),
    backward=(DISPATCH, COMBINE, DISPATCH),
)
# One matrix for each group of rows; the third operand has the ends of the groups.
GROUPED_ROWS = op(
    "t! k, e! k n, e! -> t! n",
    linear="input, weight",
    distributed=[EXPERTS],
    flops=product(grouped_sizes, 0, 1),
    timed=even_ends,
    own_order=own_order.grouped_products,
    mixed=Mixed.LOWER,
)

TABLE: dict[str, Rule] = {
    # products of matrices
    "aten.linear.default": op(
        "... k, [n] k, +[n] -> ... [n]",
        linear="input bias, weight bias",
        flops=contraction,
        defers="input weight",
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=LINEAR,
    ),
    "aten.matmul.default": op(
        "... [m] k, ... k [n] -> ... [m] [n]",
        linear="self, other",
        flops=contraction,
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=MATRIX_PRODUCT,
    ),
    "aten.linalg_matmul.default": op(
        "... [m] k, ... k [n] -> ... [m] [n]",
        linear="self, other",
        flops=contraction,
        padding=padding.product,
        says=MATRIX_PRODUCT,
    ),
    "aten.mm.default": op(
        "m k, k n -> m n",
        linear="self, mat2",
        flops=contraction,
        defers="self mat2",
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=LINEAR,
    ),
    "aten.bmm.default": op(
        "b m k, b k n -> b m n",
        linear="self, mat2",
        flops=contraction,
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=MATRIX_PRODUCT,
    ),
    "aten.mv.default": op(
        "m k, k -> m", linear="self, vec", flops=contraction, padding=padding.product, autocast=Autocast.LOWER
    ),
    "aten.dot.default": op(
        "k, k -> ()", linear="self, tensor", flops=contraction, padding=padding.product, autocast=Autocast.WIDEST
    ),
    "aten.vdot.default": op(
        "k, k -> ()", linear="self, other", flops=contraction, padding=padding.product, autocast=Autocast.WIDEST
    ),
    "aten.inner.default": op(inner, linear="self, other", flops=contraction, padding=padding.product, says=MATRIX_PRODUCT),
    "aten.outer.default": op("m, n -> m n", linear="self, vec2"),
    "aten.ger.default": op("m, n -> m n", linear="self, vec2"),
    "aten.bilinear.default": op(
        "... i, ... j, o i j, +o -> ... o",
        linear="input1 bias, input2 bias, weight bias",
        flops=contraction,
        autocast=Autocast.WIDEST,
    ),
    # a product plus a tensor, which may lack dims
    "aten.addr.default": op("+[m] [n], m, n -> m n", linear="self vec1, self vec2", autocast=Autocast.LOWER),
    "aten.addmm.default": op(
        "+[m] [n], m k, k n -> m n",
        linear="self mat1, self mat2",
        flops=contraction,
        defers="mat1 mat2",
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=LINEAR,
    ),
    "aten.addmv.default": op(
        "+[m], m k, k -> m", linear="self mat, self vec", flops=contraction, padding=padding.product, autocast=Autocast.LOWER
    ),
    "aten.addbmm.default": op(
        "+[m] [n], b m k, b k n -> m n",
        linear="self batch1, self batch2",
        flops=contraction,
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=MATRIX_PRODUCT,
    ),
    "aten.baddbmm.default": op(
        "+[b] [m] [n], b m k, b k n -> b m n",
        linear="self batch1, self batch2",
        flops=contraction,
        padding=padding.product,
        autocast=Autocast.LOWER,
        says=MATRIX_PRODUCT,
    ),
    # products of many dims, or of many tensors
    "aten.einsum.default": op(
        einsum, flops=contraction, alias=einsum_alias, padding=padding.product, autocast=Autocast.LOWER, says=MATRIX_PRODUCT
    ),
    "aten.tensordot.default": op(
        tensordot,
        linear="self, other",
        flops=contraction,
        padding=padding.product,
        autocast=Autocast.WIDEST,
        says=MATRIX_PRODUCT,
    ),
    "aten.kron.default": op(kron, linear="self, other"),
    "aten.linalg_multi_dot.default": op(multi_dot, flops=chain, autocast=Autocast.LOWER),
    "aten.chain_matmul.default": op(multi_dot, flops=chain, autocast=Autocast.LOWER),
    "aten._grouped_mm.default": op(
        grouped,
        linear="self, mat2",
        distributed=[EXPERTS],
        flops=product(grouped_sizes, 0, 1),
        timed=even_ends,
        own_order=own_order.grouped_products,
        mixed=Mixed.LOWER,
    ),
    # vectors along a dim
    "aten.linalg_vecdot.default": op(
        "... @dim ..., ... @dim ... -> ...", linear="x, y", flops=contraction, padding=padding.product, autocast=Autocast.LOWER
    ),
    "aten.linalg_cross.default": op("... _@dim ..., ... _@dim ... -> ... _@dim ...", linear="self, other"),
    "aten.cross.default": op(cross, linear="self, other", local=crossed_dim, autocast=Autocast.WIDEST),
    # distances
    "aten.cdist.default": op(distances, autocast=Autocast.FP32),
    "aten._cdist_forward.default": op(distances),
    "aten.pdist.default": op(own_distances, autocast=Autocast.FP32),
    "aten._pdist_forward.default": op(own_distances),
    "aten.pairwise_distance.default": op(row_distances),
    # rows of a table
    "aten.embedding.default": op(
        embedding,
        linear="weight",
        distributed=[VOCABULARY],
        picks="weight",
        padding=padding.embedded,
        says=says("embedding", v="vocabulary", h="width"),
    ),
}

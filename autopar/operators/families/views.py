"""Rules of operators that rearrange: reshapes by a gcd walk, permutations, broadcasts, cuts, joins."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from autopar.ir.layout import Shape
from autopar.ir.program import Argument, overload
from autopar.operators import padding
from autopar.operators.call import Call, Local
from autopar.operators.facts import Alias, OpKind
from autopar.operators.index_facts import views
from autopar.operators.pattern_text import dims, term, without
from autopar.operators.rule import OpSharding, Rule, op

Group = list[tuple[int, bool]]  # (factor number, whole)


def regroup(before: Shape, after: Shape) -> tuple[list[Group], list[Group], list[int]]:
    """The factors of two shapes of one sequence of elements, and their sizes.

    Both shapes are walked from the left. The greatest common divisor of the remaining sizes of the two current dims is a factor
    of both: the outermost digit of the rest. Coprime rests are walked together until their products agree; they stay whole.

    >>> regroup((6, 4), (4, 6))
    ([[(0, False), (1, True)], [(2, True)]], [[(0, False), (3, True)], [(4, True)]], [2, 3, 4, 2, 6])
    """
    left, right = list(before), list(after)
    old: list[Group] = [[] for _ in left]
    new: list[Group] = [[] for _ in right]
    sizes: list[int] = []
    i = j = 0
    while True:
        while i < len(left) and left[i] == 1:
            i += 1
        while j < len(right) and right[j] == 1:
            j += 1
        if i == len(left) or j == len(right):
            return old, new, sizes
        common = math.gcd(left[i], right[j])
        if common > 1:
            old[i].append((len(sizes), False))
            new[j].append((len(sizes), False))
            sizes.append(common)
            left[i] //= common
            right[j] //= common
            continue
        m, n = _meet(left[i:], right[j:])
        for groups, rests, start, count in ((old, left, i, m), (new, right, j, n)):
            for k in range(start, start + count):
                if rests[k] > 1:
                    groups[k].append((len(sizes), True))
                    sizes.append(rests[k])
        i, j = i + m, j + n


def _meet(left: Sequence[int], right: Sequence[int]) -> tuple[int, int]:
    """How many dims each side needs until their products agree."""
    m, n, a, b = 1, 1, left[0], right[0]
    while a != b:
        if a < b:
            a, m = a * left[m], m + 1
        else:
            b, n = b * right[n], n + 1
    return m, n


def reshape(call: Call) -> OpSharding:
    """The common factors of both shapes (`regroup`); merged dims may be split in blocks."""
    shape = call.operands[0].shape
    old, new, sizes = regroup(shape, call.result) if 0 not in shape else (blank(shape), blank(call.result), [])

    def text(groups: list[Group]) -> str:
        words = [" ".join(f"f{number}{'!' if whole else ''}" for number, whole in group) for group in groups]
        return term(f"({w})" if len(g) > 1 else w or "_" for w, g in zip(words, groups, strict=True))

    like = f", {text(new)}" if len(call.operands) > 1 else ""  # view_as: the shape of another tensor
    return call.fit(f"{text(old)}{like} -> {text(new)}", sizes={f"f{i}": s for i, s in enumerate(sizes)}, asks="result")


def blank(shape: Shape) -> list[Group]:
    """Dims without factors."""
    return [[] for _ in shape]


def result_size(argument: str) -> Callable[[Call, Local], dict[str, Argument]]:
    """The argument that is the shape of the result, for the local result."""
    return lambda call, local: {argument: tuple(local.results[0])}


def unflattened(call: Call, local: Local) -> dict[str, Argument]:
    """The local sizes into which a dim is unflattened."""
    dim = call.number("dim") % len(local.operands[0])
    return {"sizes": tuple(local.results[0][dim : dim + len(local.results[0]) - len(local.operands[0]) + 1])}


def squeeze(call: Call) -> OpSharding:
    """Dims of size 1 go; a longer dim stays whole if it would go when split to size 1."""
    shape = call.shape("self")
    asked = {d % max(len(shape), 1) for d in call.numbers("dim")} if "dim" in call.arguments else set(range(len(shape)))
    kept = {d: f"d{d}{'!' if d in asked else ''}" for d in range(len(shape)) if shape[d] != 1 or d not in asked}
    return call.fit(f"{term(kept.get(d, '_') for d in range(len(shape)))} -> {term(kept.values())}")


def permute(call: Call) -> OpSharding:
    """Dims change places."""
    rank = call.rank("self")
    marked = torch.empty(tuple(range(2, rank + 2)), device="meta")  # each dim known by its size
    moved = overload(call.op.target)(marked, *call.op.args[1:], **dict(call.op.kwargs)).shape
    return call.fit(f"{term(dims(rank))} -> {term(f'd{size - 2}' for size in moved)}")


def slice_(call: Call) -> OpSharding:
    """The sliced dim stays whole, unless the slice takes all of it."""
    return call.fit("... _@dim ... -> ... _@dim ..." if call.result != call.shape("self") else "... @dim ... -> ... @dim ...")


def slice_bounds(call: Call, local: Local) -> dict[str, Argument]:
    """A slice that takes the whole dim takes the whole local dim."""
    if call.op.results[0].shape[call.number("dim")] == local.results[0][call.number("dim")]:
        return {}
    return {"start": 0, "end": local.results[0][call.number("dim")]}


def unbind(call: Call) -> OpSharding:
    """`... _@dim ... -> ...`, with as many results as the dim has rows."""
    return call.fit(f"... _@dim ... -> {', '.join('...' for _ in call.op.results)}")


def cut(call: Call) -> OpSharding:
    """A dim that is cut into k equal pieces is `(k! c)`; it stays whole if they are unequal."""
    return cut_along(call, call.number("dim") % call.rank("self"))


def cut_side_by_side(call: Call) -> OpSharding:
    """A tensor is cut along dim 1, a vector along its only dim."""
    return cut_along(call, min(call.rank("self") - 1, 1))


def cut_along(call: Call, dim: int) -> OpSharding:
    """A tensor cut along a dim."""
    count = len(call.op.results)
    words = without(call.rank("self"), dim)
    if len({result.shape for result in call.op.results}) > 1:
        return call.fit(f"{term(words)} -> {', '.join(term(words) for _ in range(count))}")
    whole, piece = list(words), list(words)
    whole[dim], piece[dim] = ("(k! c)", "c") if count > 1 else ("c", "c")
    text = f"{term(whole)} -> {', '.join(term(piece) for _ in range(count))}"
    return call.fit(text, sizes={"k": count}, asks="operand")


def cut_sizes(argument: str) -> Callable[[Call, Local], dict[str, Argument]]:
    """The size or sizes of the local pieces."""

    def sizes(call: Call, local: Local) -> dict[str, Argument]:
        pieces = tuple(shape[call.number("dim")] for shape in local.results)
        return {argument: pieces if isinstance(call.arguments[argument], tuple) else pieces[0]}

    return sizes


def places(call: Call, local: Local) -> dict[str, Argument]:
    """Where the local pieces begin, except the first."""
    sizes = [shape[call.number("dim")] for shape in local.results]
    return {"indices": tuple(itertools.accumulate(sizes))[:-1]}


def bits(call: Call) -> OpSharding:
    """`... -> ...` between dtypes of one size, else `... _ -> ... _`."""
    same = call.operands[0].dtype.itemsize == call.op.results[0].dtype.itemsize
    return call.fit("... -> ..." if same else "... _ -> ... _")


TABLE: dict[str, Rule] = {
    # the same elements in another shape
    "aten.reshape.default": op(
        reshape,
        linear="self",
        alias=Alias.MAYBE,
        local=result_size("shape"),
        kind=OpKind.RESHAPE,
        padding=padding.arranged,
        index_fact=views.regroup,
    ),
    "aten.reshape_as.default": op(reshape, linear="self", alias=Alias.MAYBE, kind=OpKind.RESHAPE),
    "aten.view.default": op(reshape, linear="self", alias=Alias.ALWAYS, local=result_size("size"), kind=OpKind.RESHAPE),
    "aten.view_as.default": op(reshape, linear="self", alias=Alias.ALWAYS, kind=OpKind.RESHAPE),
    "aten.view.dtype": op(bits, alias=Alias.ALWAYS, kind=OpKind.MEMORY),
    "aten._unsafe_view.default": op(reshape, linear="self", alias=Alias.ALWAYS, local=result_size("size"), kind=OpKind.RESHAPE),
    "aten.flatten.using_ints": op(reshape, linear="self", alias=Alias.MAYBE, kind=OpKind.RESHAPE),
    "aten.unflatten.int": op(reshape, linear="self", alias=Alias.ALWAYS, local=unflattened, kind=OpKind.RESHAPE),
    "aten.ravel.default": op(reshape, linear="self", alias=Alias.MAYBE, kind=OpKind.RESHAPE),
    "aten.unsqueeze.default": op(
        reshape, linear="self", alias=Alias.ALWAYS, padding=padding.arranged, index_fact=views.regroup
    ),
    "aten.squeeze.default": op(
        squeeze, linear="self", alias=Alias.ALWAYS, kind=OpKind.RESHAPE, padding=padding.arranged, index_fact=views.regroup
    ),
    "aten.squeeze.dim": op(
        squeeze, linear="self", alias=Alias.ALWAYS, kind=OpKind.RESHAPE, padding=padding.arranged, index_fact=views.regroup
    ),
    "aten.squeeze.dims": op(
        squeeze, linear="self", alias=Alias.ALWAYS, kind=OpKind.RESHAPE, padding=padding.arranged, index_fact=views.regroup
    ),
    "aten.atleast_1d.default": op(reshape, linear="self", alias=Alias.ALWAYS),
    "aten.atleast_2d.default": op(reshape, linear="self", alias=Alias.ALWAYS),
    "aten.atleast_3d.default": op(reshape, linear="self", alias=Alias.ALWAYS),
    # dims in another order
    "aten.permute.default": op(permute, linear="self", alias=Alias.ALWAYS, padding=padding.arranged, index_fact=views.permute),
    "aten.transpose.int": op(permute, linear="self", alias=Alias.ALWAYS, padding=padding.arranged, index_fact=views.transpose),
    "aten.swapaxes.default": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.swapdims.default": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.movedim.int": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.movedim.intlist": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.moveaxis.int": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.moveaxis.intlist": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.t.default": op(
        "[a] [b] -> [b] [a]", linear="self", alias=Alias.ALWAYS, padding=padding.arranged, index_fact=views.transpose
    ),
    "aten.numpy_T.default": op(permute, linear="self", alias=Alias.ALWAYS),
    "aten.mT.default": op("... a b -> ... b a", linear="self", alias=Alias.ALWAYS),
    "aten.mH.default": op("... a b -> ... b a", linear="self", alias=Alias.ALWAYS),
    "aten.matrix_H.default": op("[a] [b] -> [b] [a]", linear="self", alias=Alias.ALWAYS),
    "aten.adjoint.default": op("... a b -> ... b a", linear="self", alias=Alias.ALWAYS),
    # broadcast
    "aten.expand.default": op(
        "... -> ...",
        linear="self",
        alias=Alias.ALWAYS,
        local=result_size("size"),
        kind=OpKind.EXPAND,
        padding=padding.arranged,
        index_fact=views.expand,
    ),
    "aten.expand_as.default": op("..., ... -> ...", linear="self", alias=Alias.ALWAYS, kind=OpKind.EXPAND),
    "aten.broadcast_to.default": op(
        "... -> ...", linear="self", alias=Alias.ALWAYS, local=result_size("size"), kind=OpKind.EXPAND
    ),
    # parts
    "aten.slice.Tensor": op(
        slice_,
        linear="self",
        indifferent="start end",
        alias=Alias.ALWAYS,
        local=slice_bounds,
        padding=padding.arranged,
        index_fact=views.cut,
    ),
    "aten.narrow.default": op("... _@dim ... -> ... _@dim ...", linear="self", indifferent="start", alias=Alias.ALWAYS),
    "aten.select.int": op(
        "... _@dim ... -> ...",
        linear="self",
        indifferent="index",
        alias=Alias.ALWAYS,
        padding=padding.arranged,
        index_fact=views.select,
    ),
    "aten.unbind.int": op(unbind, linear="self", alias=Alias.ALWAYS, padding=padding.arranged),
    "aten.split.Tensor": op(cut, linear="self", alias=Alias.ALWAYS, local=cut_sizes("split_size"), padding=padding.arranged),
    "aten.split.sizes": op(cut, linear="self", alias=Alias.ALWAYS, local=cut_sizes("split_size"), padding=padding.arranged),
    "aten.split_with_sizes.default": op(
        cut, linear="self", alias=Alias.ALWAYS, local=cut_sizes("split_sizes"), padding=padding.arranged
    ),
    "aten.chunk.default": op(cut, linear="self", alias=Alias.ALWAYS, padding=padding.arranged),
    "aten.tensor_split.sections": op(cut, linear="self", alias=Alias.ALWAYS),
    "aten.tensor_split.indices": op(cut, linear="self", alias=Alias.ALWAYS, local=places),
    "aten.unsafe_split.Tensor": op(cut, linear="self", alias=Alias.ALWAYS, local=cut_sizes("split_size")),
    "aten.unsafe_split_with_sizes.default": op(cut, linear="self", alias=Alias.ALWAYS, local=cut_sizes("split_sizes")),
    "aten.unsafe_chunk.default": op(cut, linear="self", alias=Alias.ALWAYS),
    "aten.hsplit.int": op(cut_side_by_side, linear="self", alias=Alias.ALWAYS),
    "aten.vsplit.int": op(cut, linear="self", alias=Alias.ALWAYS),
}

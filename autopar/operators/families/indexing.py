"""Rules of operators that read and write at given places: the dim they count stays whole; what is added there adds up."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autopar.ir.program import Argument, Ref
from autopar.operators import own_order
from autopar.operators.call import Call, Local
from autopar.operators.facts import Alias, Autocast
from autopar.operators.index_facts import views
from autopar.operators.pattern_text import term, without
from autopar.operators.rule import InternalCollective, OpSharding, ParallelForm, Rule, op


def index(call: Call) -> OpSharding | None:
    """Indexed dims stay whole; the dims of the indices take their place, or come first if the indices are not neighbours."""
    if masked(call):
        return None  # a mask: the number of rows depends on the data
    source, picked, indices = indexed(call, ["..."])
    source = ["v!", *source[1:]] if one_row_each(call) else source
    return call.fit(f"{term(source)}, {indices} -> {term(picked)}")


def one_row_each(call: Call) -> bool:
    """Whether a single one-dimensional index picks along the first dim."""
    indices = call.arguments["indices"]
    return isinstance(indices, tuple) and len(indices) == 1 and call.rank("indices") == 1 and not masked(call)


def rows_picked(call: Call, local: Local) -> int:
    """Elements that a rank picks; if all rows of the source are equally frequent, it sends as much as it receives."""
    return math.prod(local.results[0])


# The index stays whole, so every rank knows which ranks need its rows, and sends them.
FETCHED = ParallelForm(
    name="all_to_all_rows",
    factors=("v", "...0"),
    whole=(1,),
    able=one_row_each,
    forward=(InternalCollective("all_to_all", rows_picked, wide=False),),
    backward=(InternalCollective("all_to_all", rows_picked, wide=False),),
)


def index_put(call: Call) -> OpSharding | None:
    """Indexed dims stay whole; accumulated values may be split over the indices. A mask chooses element by element."""
    if masked(call):
        return masked_put(call)
    rank = max(len(call.operands[p].shape) for p in call.positions("indices"))
    adding = bool(call.arguments["accumulate"])
    source, picked, indices = indexed(call, [f"i{d}" if adding else "_" for d in range(rank)])
    values = term(picked[len(picked) - call.rank("values") :])
    return call.fit(f"{'+' if adding else ''}{term(source)}, {indices}, {values} -> {term(source)}")


def masked(call: Call) -> bool:
    """Whether an index is a mask."""
    return any(call.operands[p].dtype in (torch.bool, torch.uint8) for p in call.positions("indices"))


def indexed(call: Call, places: list[str]) -> tuple[list[str], list[str], str]:
    """The words of the tensor, of the elements picked from it, and of the indices; `places` are those of the indices' dims."""
    indices = call.arguments["indices"]
    assert isinstance(indices, tuple)
    taken = [d for d, part in enumerate(indices) if isinstance(part, Ref)]
    words = without(call.rank("self"), *taken)
    first = taken[0] if taken == list(range(taken[0], taken[-1] + 1)) else 0
    before, after = ([word for word in part if word != "_"] for part in (words[:first], words[first:]))
    shapes = (call.operands[p].shape for p in call.positions("indices"))
    return words, [*before, *places, *after], ", ".join(term(places[len(places) - len(shape) :]) for shape in shapes)


def masked_put(call: Call) -> OpSharding | None:
    """One mask over adjacent dims, and values that do not depend on how many elements it selects."""
    indices = call.arguments["indices"]
    assert isinstance(indices, tuple)
    first = next(d for d, part in enumerate(indices) if isinstance(part, Ref))
    words, dims = without(call.rank("self")), call.rank("indices")
    free = words[first + dims :]
    one = len(call.positions("indices")) == 1 and call.operands[call.positions("indices")[0]].dtype == torch.bool
    if not one or call.rank("values") > len(free):
        return None
    values = term(free[len(free) - call.rank("values") :])
    return call.fit(f"{term(words)}, {term(words[first : first + dims])}, {values} -> {term(words)}")


def gather(call: Call) -> OpSharding | None:
    """The dim stays whole in the source and may be split in the index; other dims go together where they are equal."""
    if not isinstance(call.arguments["dim"], int):
        return None  # over all elements
    shape, picked = (call.operands[p].shape for _, p in call.slots if p is not None)
    dim = call.number("dim") % max(len(shape), 1)
    together = [d for d in range(len(shape)) if d != dim and shape[d] == picked[d]]
    source = term(f"d{d}" if d in together else "_" for d in range(len(shape)))
    free = [f"d{d}" if d in together or d == dim else "_" for d in range(len(shape))]
    # a dim where the index is shorter than its source is read from the front: both stay whole
    return call.fit(f"{source}, {term(free)} -> {term(free)}")


def scatter(call: Call) -> OpSharding:
    """The dim stays whole; other dims go together where all are equal."""
    return scattered(call, "_")


def scatter_add(call: Call) -> OpSharding:
    """The dim stays whole in the tensor added to, may be split in the values; other dims go together where all are equal."""
    index, source, dim = call.shape("index"), call.shape("src"), call.number("dim")
    return scattered(call, "n" if index and index[dim] == source[dim] else "_")


def scatter_reduce(call: Call) -> OpSharding:
    """A sum that includes self may be split in the values, all else stays whole along the dim; sums and means are linear."""
    sums = call.arguments["reduce"] == "sum" and call.arguments["include_self"]
    fitted = scatter_add(call) if sums else scatter(call)
    linear = [("self", "src")] if call.arguments["reduce"] in ("sum", "mean") else []
    return replace(fitted, linear=call.linear(linear))


def scattered(call: Call, along: str) -> OpSharding:
    """The written values have the factor `along` in the dim; if it may be split, the tensor written to is added once."""
    shapes = [value.shape for value in call.operands]
    rank = len(shapes[0])
    dim = call.number("dim") % max(rank, 1)
    words = [f"d{d}" if d != dim and len({shape[d] for shape in shapes}) == 1 else "_" for d in range(rank)]
    written = term(along if d == dim else word for d, word in enumerate(words))
    given = ", ".join(written for _ in shapes[1:])
    return call.fit(f"{'' if along == '_' else '+'}{term(words)}, {given} -> {term(words)}")


def embedding_backward(call: Call) -> OpSharding:
    """`... h, ... -> _ h`; indices stay whole if gradients are scaled by frequency."""
    mark = "!" if call.arguments["scale_grad_by_freq"] else ""
    return call.fit(f"...{mark} h, ...{mark} -> _ h")


def input_sizes(call: Call, local: Local) -> dict[str, Argument]:
    """The shape of the local gradient."""
    return {"input_sizes": tuple(local.results[0])}


TABLE: dict[str, Rule] = {
    # by tensors of indices
    "aten.index.Tensor": op(
        index, linear="self", distributed=[FETCHED], picks="self", index_fact=views.index, own_order=own_order.index
    ),
    "aten._unsafe_index.Tensor": op(index, linear="self", picks="self"),
    "aten.index_put.default": op(index_put, linear="self values", autocast=Autocast.WIDEST, own_order=own_order.index_put),
    "aten._unsafe_index_put.default": op(index_put, linear="self values"),
    # by one tensor of indices along a dim
    "aten.index_select.default": op(
        "... _@dim ..., [i] -> ... i@dim ...", linear="self", picks="self", own_order=own_order.index_select
    ),
    "aten.index_add.default": op(
        "+... _@dim ..., [n], ... n@dim ... -> ... _@dim ...", linear="self source", own_order=own_order.index_add
    ),
    "aten.index_copy.default": op("... _@dim ..., _..., ... _@dim ... -> ... _@dim ...", linear="self source"),
    "aten.index_reduce.default": op("... _@dim ..., _..., ... _@dim ... -> ... _@dim ..."),
    "aten.index_copy_.default": op("... _@dim ..., _..., ... _@dim ... -> ... _@dim ...", alias=Alias.ALWAYS),
    "aten.index_fill.int_Scalar": op("... _@dim ..., _... -> ... _@dim ...", linear="self value"),
    "aten.index_fill.int_Tensor": op("... _@dim ..., _..., () -> ... _@dim ...", linear="self value"),
    # by an index for each element
    "aten.gather.default": op(gather, linear="self", picks="self"),
    "aten.take_along_dim.default": op(gather, linear="self", picks="self"),
    "aten.take.default": op("_..., ... -> ...", linear="self", picks="self"),
    "aten.scatter.src": op(scatter, linear="self src"),
    "aten.scatter.value": op(scatter, linear="self value"),
    "aten.scatter.reduce": op(scatter),
    "aten.scatter.value_reduce": op(scatter),
    "aten.scatter_add.default": op(scatter_add, linear="self src", autocast=Autocast.WIDEST),
    "aten.scatter_reduce.two": op(scatter_reduce),
    # by a mask: elements are taken in order, so all dims stay whole
    "aten.masked_scatter.default": op("...!, ...!, _... -> ...!", linear="self source"),
    # into a slice, a row or a diagonal
    "aten.slice_scatter.default": op(
        "... _@dim ..., ... _@dim ... -> ... _@dim ...", linear="self src", indifferent="start end"
    ),
    "aten.select_scatter.default": op("... _@dim ..., ... -> ... _@dim ...", linear="self src", indifferent="index"),
    "aten.diagonal_scatter.default": op("... _@dim1 ... _@dim2 ..., ... _ -> ... _@dim1 ... _@dim2 ...", linear="self src"),
    "aten.diagonal.default": op("... _@dim1 ... _@dim2 ... -> ... _", linear="self", alias=Alias.ALWAYS),
    "aten.diag_embed.default": op("... _ -> ... _@dim1 ... _@dim2 ...", linear="self"),
    # gradients of reading
    "aten.embedding_dense_backward.default": op(embedding_backward, linear="grad_output"),
    "aten.select_backward.default": op("... -> ... _@dim ...", linear="grad_output", local=input_sizes),
    "aten.slice_backward.default": op("... _@dim ... -> ... _@dim ...", linear="grad_output", local=input_sizes),
}

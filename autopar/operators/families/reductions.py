"""Rules of operators that reduce dims or run along one: sums and means split, the others need all of it."""

from __future__ import annotations

from autopar.operators.call import Call
from autopar.operators.pattern_text import dims, term, unread
from autopar.operators.rule import OpSharding, Rule, always, op


def reduced(call: Call) -> set[int]:
    """The dims that go: an absent, empty or None list stands for all."""
    rank = len(call.operands[0].shape)
    return {d % rank for d in call.numbers("dim")} or set(range(rank)) if rank else set()


def adding(call: Call) -> OpSharding:
    """reduced dims may be split"""
    return reduction(call, "")


def gathering(call: Call) -> OpSharding:
    """reduced dims stay whole"""
    return reduction(call, "!")


def reduction(call: Call, mark: str) -> OpSharding:
    """Some dims go; `mark` is "!" where they must be whole."""
    gone = reduced(call)
    words = dims(len(call.operands[0].shape))
    held = term(f"{word}{mark if d in gone else ''}" for d, word in enumerate(words))
    stay = ["_" if d in gone else word for d, word in enumerate(words)]
    kept = term(stay if len(call.result) == len(words) else (word for word in stay if word != "_"))
    return call.fit(f"{held} -> {', '.join(kept for _ in call.op.results)}")


def along(call: Call) -> OpSharding:
    """the dim that it runs along stays whole; the results may be longer or shorter there"""
    words = along_words(call)
    shapes = ", ".join(words for _ in call.operands)
    return call.fit(f"{shapes} -> {', '.join(words for _ in call.op.results)}")


def along_words(call: Call) -> str:
    """The dims of the first operand, `_` for those that are named."""
    rank = len(call.operands[0].shape)
    named = call.numbers("dim") or call.numbers("dims") or tuple(range(rank))
    gone = {d % rank for d in named} if rank else set()
    return term("_" if d in gone else f"d{d}" for d in range(rank))


def cosine(call: Call) -> OpSharding:
    """the compared dim stays whole and goes"""
    rank = max(len(value.shape) for value in call.operands)
    words = [word if d != call.number("dim") % rank else "k!" for d, word in enumerate(dims(rank))]
    held = ", ".join(term(words[rank - len(value.shape) :]) for value in call.operands)
    return call.fit(f"{held} -> {term(word for word in words if word != 'k!')}")


def normed(call: Call) -> OpSharding:
    """reduced dims may be split in a sum of absolute values, the 1-norm, else they stay whole"""
    return reduction(call, "" if 1 in (call.arguments.get("ord"), call.arguments.get("p")) else "!")


def distance(call: Call) -> OpSharding:
    """..., ... -> (); dims may be split in a sum of absolute values, the 1-norm, else they stay whole"""
    mark = "" if call.arguments["p"] == 1 else "!"
    return call.fit(f"...{mark}, ...{mark} -> ()")


def histogram(call: Call) -> OpSharding:
    """... -> n!; counts add up where the bounds are given, else they are the least and the greatest element"""
    given = call.arguments["min"] != call.arguments["max"]
    return call.fit(f"...{'' if given else '!'} -> _")


def quantile(call: Call) -> OpSharding:
    """reduced dims stay whole; several quantiles are a new first dim"""
    rank, gone = call.rank("self"), reduced(call)
    words = dims(rank)
    held = term(f"{word}!" if d in gone else word for d, word in enumerate(words))
    kept = ["_" if d in gone else word for d, word in enumerate(words)]
    several = ["_"] * call.rank("q")
    kept = kept if len(call.result) == rank + len(several) else [word for word in kept if word != "_"]
    return call.fit(f"{held}{', ' + unread(call.rank('q')) if call.positions('q') else ''} -> {term([*several, *kept])}")


def last(call: Call) -> OpSharding:
    """the last dims stay whole"""
    return call.fit("... _ _ -> ... _ _")


LINEAR_ALONG = op(along, linear="self prepend append")

SUMS = ("sum.default", "sum.dim_IntList", "count_nonzero.default", "count_nonzero.dim_IntList")
WHOLES = """
    amax.default amin.default aminmax.default all.default all.dim all.dims any.default any.dim any.dims
    argmax.default argmin.default
    max.default max.dim min.default min.dim median.default median.dim mode.default prod.default prod.dim_int
    logsumexp.default special_logsumexp.default std.default std.dim std.correction var.default var.dim var.correction
    var_mean.default var_mean.dim var_mean.correction std_mean.default std_mean.dim std_mean.correction
    linalg_norm.default linalg_matrix_norm.default linalg_matrix_norm.str_ord frobenius_norm.dim nuclear_norm.dim
    kthvalue.default nanmean.default nanmedian.default nanmedian.dim
"""
NORMS = "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype linalg_vector_norm.default"

ALONGS = """
    cumprod.default cummax.default cummin.default logcumsumexp.default sort.default sort.stable argsort.default topk.default
    glu.default
"""
QUANTILES = "quantile.default quantile.scalar nanquantile.default nanquantile.scalar"

TABLE: dict[str, Rule] = {
    **{f"aten.{name}": op(adding, linear="" if "count" in name else "self") for name in SUMS},
    "aten.nansum.default": op(adding),
    "aten.mean.default": op(adding, linear="self", averages=always),
    "aten.mean.dim": op(adding, linear="self", averages=always),
    **{f"aten.{name}": op(gathering) for name in WHOLES.split()},
    **{f"aten.{name}": op(normed) for name in NORMS.split()},
    **{f"aten.{name}": op(along) for name in ALONGS.split()},
    **{f"aten.{name}": op(quantile) for name in QUANTILES.split()},
    "aten.dist.default": op(distance),
    "aten.histc.default": op(histogram),
    "aten.cumsum.default": LINEAR_ALONG,
    "aten.diff.default": LINEAR_ALONG,
    "aten.flip.default": LINEAR_ALONG,
    "aten.roll.default": LINEAR_ALONG,
    "aten.cosine_similarity.default": op(cosine),
    "aten.tril.default": op(last, linear="self"),
    "aten.triu.default": op(last, linear="self"),
}

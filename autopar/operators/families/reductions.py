"""Rules of operators that reduce dims or run along one: sums and means split, the others need all of it."""

from __future__ import annotations

from autopar.operators import own_order, padding
from autopar.operators.call import Call
from autopar.operators.facts import Autocast, OpKind
from autopar.operators.index_facts import integers, predicates
from autopar.operators.pattern_text import unread
from autopar.operators.rule import OpSharding, Rule, always, op


def normed(call: Call) -> OpSharding:
    """Reduced dims may be split for the 1-norm, a sum of absolute values; otherwise they stay whole."""
    mark = "" if 1 in (call.arguments.get("ord"), call.arguments.get("p")) else "!"
    return call.fit(f"... @dim{mark} ... -> ... ..." if "dim" in call.arguments else f"...{mark} -> ()")


def distance(call: Call) -> OpSharding:
    """Dims may be split for the 1-norm, a sum of absolute values; otherwise they stay whole."""
    mark = "" if call.arguments["p"] == 1 else "!"
    return call.fit(f"...{mark}, ...{mark} -> ()")


def histogram(call: Call) -> OpSharding:
    """Counts add up if the bounds are given; otherwise these are the least and the greatest element, and all stays whole."""
    given = call.arguments["min"] != call.arguments["max"]
    return call.fit(f"...{'' if given else '!'} -> _")


def quantile(call: Call) -> OpSharding:
    """Reduced dims stay whole; several quantiles add a new first dim."""
    several = unread(call.rank("q"))
    return call.fit(f"... @dim! ..., {several} -> {several if call.rank('q') else ''} ... ...")


TABLE: dict[str, Rule] = {
    # sums and means: reduced dims may be split
    "aten.sum.default": op("... -> ()", linear="self", padding=padding.summed, autocast=Autocast.FP32),
    "aten.sum.dim_IntList": op("... @dim ... -> ... ...", linear="self", padding=padding.summed, autocast=Autocast.FP32),
    "aten.nansum.default": op("... @dim ... -> ... ..."),
    "aten.count_nonzero.default": op("... @dim ... -> ... ..."),
    "aten.count_nonzero.dim_IntList": op("... @dim ... -> ... ..."),
    "aten.mean.default": op("... -> ()", linear="self", averages=always),
    "aten.mean.dim": op("... @dim ... -> ... ...", linear="self", averages=always),
    # the largest and the smallest
    "aten.amax.default": op("... @dim! ... -> ... ..."),
    "aten.amin.default": op("... @dim! ... -> ... ..."),
    "aten.aminmax.default": op("... @dim! ... -> ... ..., ... ..."),
    "aten.argmax.default": op("... @dim! ... -> ... ...", kind=OpKind.PLACES),
    "aten.argmin.default": op("... @dim! ... -> ... ...", kind=OpKind.PLACES),
    "aten.max.default": op("...! -> ()"),
    "aten.max.dim": op("... @dim! ... -> ... ..., ... ...", kind=OpKind.PLACES),
    "aten.min.default": op("...! -> ()"),
    "aten.min.dim": op("... @dim! ... -> ... ..., ... ...", kind=OpKind.PLACES),
    "aten.kthvalue.default": op("... @dim! ... -> ... ..., ... ...", kind=OpKind.PLACES),
    # truth
    "aten.all.default": op("...! -> ()"),
    "aten.all.dim": op("... @dim! ... -> ... ..."),
    "aten.all.dims": op("... @dim! ... -> ... ..."),
    "aten.any.default": op("...! -> ()"),
    "aten.any.dim": op("... @dim! ... -> ... ..."),
    "aten.any.dims": op("... @dim! ... -> ... ..."),
    # statistics
    "aten.std.default": op("...! -> ()"),
    "aten.std.dim": op("... @dim! ... -> ... ..."),
    "aten.std.correction": op("... @dim! ... -> ... ..."),
    "aten.var.default": op("...! -> ()"),
    "aten.var.dim": op("... @dim! ... -> ... ..."),
    "aten.var.correction": op("... @dim! ... -> ... ..."),
    "aten.std_mean.default": op("...! -> (), ()"),
    "aten.std_mean.dim": op("... @dim! ... -> ... ..., ... ..."),
    "aten.std_mean.correction": op("... @dim! ... -> ... ..., ... ..."),
    "aten.var_mean.default": op("...! -> (), ()"),
    "aten.var_mean.dim": op("... @dim! ... -> ... ..., ... ..."),
    "aten.var_mean.correction": op("... @dim! ... -> ... ..., ... ..."),
    "aten.nanmean.default": op("... @dim! ... -> ... ..."),
    "aten.median.default": op("...! -> ()"),
    "aten.median.dim": op("... @dim! ... -> ... ..., ... ...", kind=OpKind.PLACES),
    "aten.nanmedian.default": op("...! -> ()"),
    "aten.nanmedian.dim": op("... @dim! ... -> ... ..., ... ..."),
    "aten.mode.default": op("... @dim! ... -> ... ..., ... ...", kind=OpKind.PLACES),
    "aten.quantile.default": op(quantile),
    "aten.quantile.scalar": op("... @dim! ... -> ... ..."),
    "aten.nanquantile.default": op(quantile),
    "aten.nanquantile.scalar": op("... @dim! ... -> ... ..."),
    "aten.histc.default": op(histogram, own_order=own_order.histc, alone=True),
    # products and exponentials
    "aten.prod.default": op("...! -> ()", autocast=Autocast.FP32),
    "aten.prod.dim_int": op("... @dim! ... -> ... ...", autocast=Autocast.FP32),
    "aten.logsumexp.default": op("... @dim! ... -> ... ...", padding=padding.log_sum, autocast=Autocast.FP32),
    "aten.special_logsumexp.default": op("... @dim! ... -> ... ..."),
    # norms and distances
    "aten.norm.Scalar": op(normed, autocast=Autocast.FP32),
    "aten.norm.ScalarOpt_dim": op(normed, autocast=Autocast.FP32),
    "aten.norm.ScalarOpt_dtype": op(normed, autocast=Autocast.FP32),
    "aten.norm.ScalarOpt_dim_dtype": op(normed, autocast=Autocast.FP32),
    "aten.linalg_vector_norm.default": op(normed, autocast=Autocast.FP32),
    "aten.linalg_norm.default": op("... @dim! ... -> ... ..."),
    "aten.linalg_matrix_norm.default": op("... @dim! ... -> ... ...", autocast=Autocast.FP32),
    "aten.linalg_matrix_norm.str_ord": op("... @dim! ... -> ... ...", autocast=Autocast.FP32),
    "aten.frobenius_norm.dim": op("... @dim! ... -> ... ...", autocast=Autocast.FP32),
    "aten.nuclear_norm.dim": op("... @dim! ... -> ... ...", autocast=Autocast.FP32),
    "aten.dist.default": op(distance, autocast=Autocast.FP32),
    "aten.cosine_similarity.default": op("... k@dim! ..., ... k@dim! ... -> ...", autocast=Autocast.FP32),
    # along a dim, which stays whole; the results may be longer or shorter there
    "aten.cumsum.default": op(
        "... _@dim ... -> ... _@dim ...",
        linear="self",
        autocast=Autocast.FP32,
        index_fact=integers.cumsum,
        own_order=own_order.cumsum,
    ),
    "aten.cumprod.default": op("... _@dim ... -> ... _@dim ...", autocast=Autocast.FP32),
    "aten.cummax.default": op("... _@dim ... -> ... _@dim ..., ... _@dim ...", kind=OpKind.PLACES),
    "aten.cummin.default": op("... _@dim ... -> ... _@dim ..., ... _@dim ...", kind=OpKind.PLACES),
    "aten.logcumsumexp.default": op("... _@dim ... -> ... _@dim ..."),
    "aten.sort.default": op(
        "... _@dim ... -> ... _@dim ..., ... _@dim ...", own_order=own_order.sort, alone=True, kind=OpKind.PLACES
    ),
    "aten.sort.stable": op(
        "... _@dim ... -> ... _@dim ..., ... _@dim ...", own_order=own_order.sort, alone=True, kind=OpKind.PLACES
    ),
    "aten.argsort.default": op("... _@dim ... -> ... _@dim ...", own_order=own_order.sort, alone=True, kind=OpKind.PLACES),
    "aten.argsort.stable": op("... _@dim ... -> ... _@dim ...", own_order=own_order.sort, alone=True, kind=OpKind.PLACES),
    "aten.topk.default": op("... _@dim ... -> ... _@dim ..., ... _@dim ...", alone=True, kind=OpKind.PLACES),
    "aten.diff.default": op(
        "... _@dim ..., ... _@dim ..., ... _@dim ... -> ... _@dim ...", linear="self prepend append", index_fact=integers.diff
    ),
    "aten.flip.default": op("... _@dims ... -> ... _@dims ...", linear="self", padding=padding.arranged),
    "aten.roll.default": op("... _@dims ... -> ... _@dims ...", linear="self"),
    "aten.glu.default": op("... _@dim ... -> ... _@dim ..."),
    # triangles of matrices
    "aten.tril.default": op("... _ _ -> ... _ _", linear="self", index_fact=predicates.lower_triangle),
    "aten.triu.default": op("... _ _ -> ... _ _", linear="self", index_fact=predicates.upper_triangle),
}

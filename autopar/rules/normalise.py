"""Rules of attention, softmax, norms and losses: what is normalised over a dim needs all of it."""

from __future__ import annotations

import math

from autopar.ir import Argument
from autopar.rules.call import Call, Local
from autopar.rules.rule import Distributed, Fitted, Rule, Sent, rule
from autopar.rules.views import dims, term

MEAN, SUM = 1, 2  # the reductions of ATen's losses; 0 is none


def attention(call: Call) -> Fitted:
    """... q d!, ... k! d!, ... k! e!, ... q k! -> ... q e!; q! when causal, heads are (h g) over h when grouped"""
    q = "q!" if call.arguments["is_causal"] else "q"
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    random = call.arguments["dropout_p"] != 0.0
    if not call.arguments["enable_gqa"] or query[-3] == key[-3] == value[-3]:
        return call.fit(f"... {q} d!, ... k! d!, ... k! e!, ... {q} k! -> ... {q} e!", random=random)
    heads, held, sizes = ("(h g)", "h", {"h": key[-3]}) if key[-3] == value[-3] else ("_", "_", {})
    text = f"... {heads} {q} d!, ... {held} k! d!, ... {held} k! e!, {mask(call, heads, q)} -> ... {heads} {q} e!"
    return call.fit(text, sizes=sizes, random=random)


def looking_back(call: Call) -> bool:
    """Whether attention is causal, in the form that fused kernels know: batch, heads, sequence, width."""
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    return bool(call.arguments["is_causal"]) and len(query) == 4 and query[-2] == key[-2] and query[-1] == value[-1]


def looking_around(call: Call) -> bool:
    """The same of attention in which every query sees every key."""
    query, value = call.shape("query"), call.shape("value")
    masked = call.arguments["is_causal"] or call.positions("attn_mask")
    return not masked and len(query) == 4 and query[-1] == value[-1]


def keys_and_values(call: Call, local: Local) -> int:
    """The chunk of both that a rank holds."""
    _, key, value, *_ = local.operands
    return math.prod(key) + math.prod(value)


def others(ranks: int) -> int:
    """All ranks but this one."""
    return ranks - 1


QUERIES = Distributed(name="queries", factors=("q",), able=looking_back, work=lambda ranks: 2 - 1 / ranks)
RINGS = [  # the last rank sees all chunks, its own by half
    Distributed(
        name="ring", factors=("q", "k"), able=able, work=work,
        forward=(Sent("all_to_all", keys_and_values, others, wide=False),),
        backward=(
            Sent("all_to_all", keys_and_values, others, wide=False),
            Sent("all_to_all", keys_and_values, lambda ranks: ranks),  # their gradients come home
        ),
    )
    for able, work in ((looking_back, lambda ranks: 2 * ranks - 1), (looking_around, lambda ranks: ranks))
]  # fmt: skip


def mask(call: Call, heads: str, q: str) -> str:
    """The dims of an attention mask, which may lack leading ones."""
    rank = call.rank("attn_mask")
    return {2: f"{q} k!", 3: f"{heads} {q} k!"}.get(rank, f"... {heads} {q} k!")


def one(call: Call) -> bool:
    """Whether one dim is normalised."""
    return len(call.numbers("normalized_shape")) == 1


def normalised_here(call: Call, local: Local) -> dict[str, Argument]:
    """The sizes of what one rank normalises."""
    return {"normalized_shape": tuple(local.operands[0][-len(call.numbers("normalized_shape")) :])}


def vectors(call: Call, local: Local) -> int:
    """A number for each vector that is normalised."""
    return math.prod(local.operands[0][:-1])


# Mean and variance of every chunk, put together; in the backward the gradient's sum, plain and times the normalised value.
LAYER_NORM = Distributed(
    name="layer_norm", factors=("n0",), able=one,
    forward=(Sent("all_gather", lambda call, local: 2 * local.split("n0") * vectors(call, local)),),
    backward=(Sent("all_reduce", lambda call, local: 2 * vectors(call, local)),),
)  # fmt: skip
RMS_NORM = Distributed(
    name="rms_norm", factors=("n0",), able=one, forward=(Sent("all_reduce", vectors),), backward=(Sent("all_reduce", vectors),)
)


def normalised(call: Call) -> Fitted:
    """... n!, n!, n! -> ... n!; n stands for all the normalised dims"""
    n = term(f"n{i}!" for i in range(len(call.numbers("normalized_shape"))))
    parameters = "".join(f", {n}" for name in ("weight", "bias") if call.positions(name))
    statistics = f", ... {n.replace('n', 's')}" * (len(call.op.results) - 1)  # native_layer_norm's mean and rstd, of size 1
    return call.fit(f"... {n}{parameters} -> ... {n}{statistics}")


def grouped(call: Call) -> Fitted:
    """b (g c!) ...!, (g c!), (g c!) -> b (g c!) ...!"""
    parameters = "".join(", (g c!)" for name in ("weight", "bias") if call.positions(name))
    statistics = ", b g" * (len(call.op.results) - 1)  # native_group_norm's mean and rstd
    count = call.number("num_groups") or call.number("group")
    return call.fit(f"b (g c!) ...!{parameters} -> b (g c!) ...!{statistics}", sizes={"g": count})


def groups(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds."""
    return {"num_groups": call.number("num_groups") // local.split("g")}


def native_groups(call: Call, local: Local) -> dict[str, Argument]:
    """The rows, channels and groups that one rank holds; the first result has the shape of the input."""
    rows, channels = local.results[0][:2]
    return {"N": rows, "C": channels, "group": call.number("group") // local.split("g")}


def batch_norm(call: Call) -> Fitted:
    """b! c ...!, c, c, c, c -> b! c ...! in training; in evaluation all splits"""
    whole = "!" if call.arguments.get("training") else ""
    plane = f"b{whole} c ...{whole}"
    given = ", c" * (len(call.operands) - 1)
    channels = call.shape("input")[1:2]
    statistics = (", c" if value.shape == channels else ", _" for value in call.op.results[1:])  # empty in evaluation
    return call.fit(f"{plane}{given} -> {plane}{''.join(statistics)}")


def trains(call: Call) -> bool:
    """Whether a batch norm takes its statistics from the batch."""
    return bool(call.arguments["training"])


def channels(call: Call, local: Local) -> int:
    """A mean and a variance for each channel; the same of the gradient."""
    return 2 * local.operands[0][1]


# The statistics are those of the whole batch, and so are the gradients of weight and bias, which the backward needs anyway.
BATCH_NORM = Distributed(
    name="batch_norm", factors=("b",), operands="I", able=trains,
    forward=(Sent("all_gather", lambda call, local: local.split("b") * channels(call, local)),),
    backward=(Sent("all_reduce", channels),),
)  # fmt: skip


def instance_norm(call: Call) -> Fitted:
    """b c ...!, c, c, c, c -> b c ...!"""
    batch = "b!" if call.positions("running_mean") else "b"  # running statistics are the means over the batch
    return call.fit(f"{batch} c ...!, c, c, c, c -> {batch} c ...!")


def softmax(call: Call) -> Fitted:
    """the normalised dim stays whole"""
    rank = call.rank("self")
    words = term("n!" if d == call.number("dim") % rank else word for d, word in enumerate(dims(rank))) if rank else "()"
    return call.fit(f"{words} -> {words}")


def rows(call: Call, local: Local) -> int:
    """A number for each distribution."""
    shape = local.operands[0]
    return math.prod(shape) // shape[call.number("dim")]


def same_dtype(call: Call) -> bool:
    """Whether a distribution has the dtype of what it is made of, or one that is named."""
    return call.arguments.get("half_to_float") is not True


# The largest number of all ranks, then the sum of exponentials; the backward subtracts a sum, too.
SOFTMAX, LOG_SOFTMAX, SAFE_SOFTMAX = (
    Distributed(
        name=name, factors=("n",), able=same_dtype, forward=(Sent("all_reduce", rows), Sent("all_reduce", rows)),
        backward=(Sent("all_reduce", rows),),
    )
    for name in ("softmax", "log_softmax", "safe_softmax")
)  # fmt: skip


def loss(call: Call) -> Fitted:
    """..., ... -> () or, without reduction, -> ..."""
    terms = ", ".join("..." for _ in call.operands)
    return call.fit(f"{terms} -> {'...' if call.number('reduction') == 0 else '()'}")


def is_mean(call: Call) -> bool:
    """Whether a loss is a mean over a count that the shapes tell."""
    return call.number("reduction") == MEAN


def classified(call: Call) -> Fitted:
    """n c! space, n space, c! -> () or, without reduction, -> n space; the mean over what is not ignored stays whole"""
    rank, reduction = call.rank("self"), call.number("reduction")
    batch, space = ("n", dims(rank - 2)) if rank > 1 else ("", [])
    soft = call.rank("target") == rank and call.operands[call.positions("target")[0]].dtype.is_floating_point
    if reduction == MEAN and not soft:
        batch, space = f"{batch}!" if batch else "", [f"{d}!" for d in space]
    scores, targets = term([batch, "c!", *space]).strip(), term([batch, *space]).strip() or "()"
    weight = ", c!" if call.positions("weight") else ""
    return call.fit(f"{scores}, {scores if soft else targets}{weight} -> {targets if reduction == 0 else '()'}")


def rowwise(call: Call) -> Fitted:
    """... c!, ... c!, ..., c! -> () or, without reduction, -> ...; rows are compared over all of c"""
    first = call.operands[0].shape

    def words(name: str, shape: tuple[int, ...]) -> str:
        if name == "weight":
            return "c!"
        return "... c!" if len(shape) == len(first) and shape[-1:] == first[-1:] else "..."

    terms = ", ".join(words(name, call.operands[p].shape) for name, p in call.slots if p is not None)
    return call.fit(f"{terms} -> {'...' if call.number('reduction') == 0 else '()'}")


def aligned(call: Call) -> Fitted | None:
    """t! n c!, n s!, n, n -> () or, without reduction, -> n"""
    if (call.rank("log_probs"), call.rank("targets"), call.rank("target_lengths")) != (3, 2, 1):
        return None  # targets one after the other are found by the lengths of those before them
    return call.fit(f"_ n _, n _, n, n -> {'n' if call.number('reduction') == 0 else '()'}")


def weight_norm(call: Call) -> Fitted:
    """each slice along the dim has its own norm: the other dims stay whole"""
    words = sliced(call.rank("v"), call.number("dim"))  # -1 names none
    held = words if call.rank("g") else "()"
    return call.fit(f"{words}, {held} -> {', '.join([words, held][: len(call.op.results)])}")


def renorm(call: Call) -> Fitted:
    """each slice along the dim has its own norm: the other dims stay whole"""
    words = sliced(call.rank("self"), call.number("dim") % call.rank("self"))
    return call.fit(f"{words} -> {words}")


def sliced(rank: int, kept: int) -> str:
    """The words of a tensor whose dims stay whole but for one."""
    return term(f"d{d}{'' if d == kept else '!'}" for d in range(rank))


def chosen(call: Call) -> bool:
    """Whether a loss is a sum over targets that are classes, or one number for each (`passes.means` makes sums of means)."""
    return call.number("reduction") != MEAN and not call.operands[call.positions("target")[0]].dtype.is_floating_point


def alone(call: Call) -> bool:
    """Whether the shares of the classes add up to one for every target: it is a class, and all weigh the same."""
    return chosen(call) and not call.positions("weight")


def shared(call: Call) -> bool:
    """Whether targets are weighed, or probabilities, in sums or one by one; weights get no gradient."""
    constant = not any(call.operands[p].requires_grad for p in call.positions("weight"))
    return call.number("reduction") != MEAN and not alone(call) and constant


def targets(call: Call, local: Local) -> int:
    """A number for each target."""
    scores = local.operands[0]
    return math.prod(scores) // scores[min(1, len(scores) - 1)]


# The largest score of all ranks; then the sum of exponentials, the scores of what is wanted, and how much that is if not one.
CLASSES = [
    Distributed(
        name="classes", factors=("c",), operands="I", results="I", able=able,
        forward=(Sent("all_reduce", targets), Sent("all_reduce", sums)),
    )
    for able, sums in (
        (alone, lambda call, local: 2 * targets(call, local)), (shared, lambda call, local: 3 * targets(call, local))
    )
]  # fmt: skip
CHOSEN = Distributed(name="chosen", factors=("c",), able=chosen)  # a rank adds nothing for targets that lie elsewhere

SOFTMAXES = {
    "softmax.int special_softmax.default _softmax.default": SOFTMAX,
    "log_softmax.int special_log_softmax.default _log_softmax.default": LOG_SOFTMAX,
    "_safe_softmax.default": SAFE_SOFTMAX,
}
BATCH_NORMS = """
    batch_norm.default native_batch_norm.default
    _native_batch_norm_legit.default _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training.default
"""
ROWWISE = ("cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss")
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
MORE_LOSSES = ("kl_div", "soft_margin_loss", "margin_ranking_loss", "hinge_embedding_loss", "poisson_nll_loss")

TABLE: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": rule(attention, linear="value", distributed=[QUERIES, *RINGS]),
    **{f"aten.{name}": rule(softmax, distributed=[form]) for names, form in SOFTMAXES.items() for name in names.split()},
    "aten.layer_norm.default": rule(normalised, local=normalised_here, distributed=[LAYER_NORM]),
    "aten.native_layer_norm.default": rule(normalised),
    "aten.rms_norm.default": rule(normalised, local=normalised_here, distributed=[RMS_NORM]),
    "aten._fused_rms_norm.default": rule(normalised),
    "aten.group_norm.default": rule(grouped, local=groups),
    "aten.native_group_norm.default": rule(grouped, local=native_groups),
    **{f"aten.{name}": rule(batch_norm) for name in BATCH_NORMS.split()},
    "aten.batch_norm.default": rule(batch_norm, distributed=[BATCH_NORM]),
    "aten.instance_norm.default": rule(instance_norm),
    **{f"aten.{name}.default": rule(loss, averages=is_mean) for name in (*LOSSES, *MORE_LOSSES)},
    **{f"aten.{name}.default": rule(rowwise, linear="weight", averages=is_mean) for name in ROWWISE},
    "aten.ctc_loss.Tensor": rule(aligned, averages=is_mean),
    "aten._weight_norm.default": rule(weight_norm, linear="g"),
    "aten._weight_norm_interface.default": rule(weight_norm),
    "aten.renorm.default": rule(renorm),
    "aten.cross_entropy_loss.default": rule(classified, averages=is_mean, distributed=CLASSES),
    "aten.nll_loss.default": rule(classified, averages=is_mean, distributed=[CHOSEN]),
    "aten.nll_loss_nd.default": rule(classified, averages=is_mean, distributed=[CHOSEN]),
}

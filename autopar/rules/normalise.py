"""Rules of attention, softmax, norms and losses: what is normalised over a dim needs all of it."""

from __future__ import annotations

from autopar.ir import Argument
from autopar.rules.call import Call, Local
from autopar.rules.rule import Fitted, Rule, rule
from autopar.rules.views import dims, term, without

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


def mask(call: Call, heads: str, q: str) -> str:
    """The dims of an attention mask, which may lack leading ones."""
    rank = call.rank("attn_mask")
    return {2: f"{q} k!", 3: f"{heads} {q} k!"}.get(rank, f"... {heads} {q} k!")


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


def instance_norm(call: Call) -> Fitted:
    """b c ...!, c, c, c, c -> b c ...!"""
    batch = "b!" if call.positions("running_mean") else "b"  # running statistics are the means over the batch
    return call.fit(f"{batch} c ...!, c, c, c, c -> {batch} c ...!")


def softmax(call: Call) -> Fitted:
    """the normalised dim stays whole"""
    words = term(without(max(call.rank("self"), 1), call.number("dim"))) if call.rank("self") else "()"
    return call.fit(f"{words} -> {words}")


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


SOFTMAXES = """
    softmax.int log_softmax.int special_softmax.default special_log_softmax.default
    _softmax.default _log_softmax.default _safe_softmax.default
"""
BATCH_NORMS = """
    batch_norm.default native_batch_norm.default
    _native_batch_norm_legit.default _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training.default
"""
ROWWISE = ("cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss")
LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
MORE_LOSSES = ("kl_div", "soft_margin_loss", "margin_ranking_loss", "hinge_embedding_loss", "poisson_nll_loss")

TABLE: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": rule(attention, linear="value"),
    **{f"aten.{name}": rule(softmax) for name in SOFTMAXES.split()},
    "aten.layer_norm.default": rule(normalised),
    "aten.native_layer_norm.default": rule(normalised),
    "aten.rms_norm.default": rule(normalised),
    "aten._fused_rms_norm.default": rule(normalised),
    "aten.group_norm.default": rule(grouped, local=groups),
    "aten.native_group_norm.default": rule(grouped, local=native_groups),
    **{f"aten.{name}": rule(batch_norm) for name in BATCH_NORMS.split()},
    "aten.instance_norm.default": rule(instance_norm),
    **{f"aten.{name}.default": rule(loss, averages=is_mean) for name in (*LOSSES, *MORE_LOSSES)},
    **{f"aten.{name}.default": rule(rowwise, linear="weight", averages=is_mean) for name in ROWWISE},
    "aten.ctc_loss.Tensor": rule(aligned, averages=is_mean),
    "aten._weight_norm.default": rule(weight_norm, linear="g"),
    "aten._weight_norm_interface.default": rule(weight_norm),
    "aten.renorm.default": rule(renorm),
    "aten.cross_entropy_loss.default": rule(classified, averages=is_mean),
    "aten.nll_loss.default": rule(classified, averages=is_mean),
    "aten.nll_loss_nd.default": rule(classified, averages=is_mean),
}

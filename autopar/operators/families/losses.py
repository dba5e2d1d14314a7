"""Rules of losses: what is compared over all classes needs all of them; sums over the rest leave addends."""

from __future__ import annotations

import math

from autopar.operators import padding
from autopar.operators.call import Call, Local
from autopar.operators.facts import Autocast, Mean, says
from autopar.operators.pattern_text import dims, term
from autopar.operators.rule import InternalCollective, OpSharding, ParallelForm, Rule, op

MEAN, SUM = 1, 2  # the reductions of ATen's losses; 0 is none


def is_mean(call: Call) -> bool:
    """Whether a loss is a mean, over a count given by the shapes."""
    return call.number("reduction") == MEAN


def classified(call: Call) -> OpSharding:
    """`n c! ..., n ..., c! -> [...]`: classes stay whole; for a mean over targets that are not ignored, all dims do."""
    rank, reduction = call.rank("self"), call.number("reduction")
    batch, space = ("n", dims(rank - 2)) if rank > 1 else ("", [])
    soft = call.rank("target") == rank and call.operands[call.positions("target")[0]].dtype.is_floating_point
    if reduction == MEAN and not soft:
        batch, space = f"{batch}!" if batch else "", [f"{d}!" for d in space]
    scores, targets = term([batch, "c!", *space]).strip(), term([batch, *space]).strip() or "()"
    weight = ", c!" if call.positions("weight") else ""
    return call.fit(f"{scores}, {scores if soft else targets}{weight} -> {targets if reduction == 0 else '()'}")


def aligned(call: Call) -> OpSharding | None:
    """`_ n _, n _, n, n -> [n]`: sequences stay whole, the batch splits."""
    if (call.rank("log_probs"), call.rank("targets"), call.rank("target_lengths")) != (3, 2, 1):
        return None  # concatenated targets are found by the lengths of those before them
    return call.fit(f"_ n _, n _, n, n -> {'n' if call.number('reduction') == 0 else '()'}")


def chosen(call: Call) -> bool:
    """Whether targets are class indices and the loss is a sum or unreduced (`passes.means` turns means into sums)."""
    return call.number("reduction") != MEAN and not call.operands[call.positions("target")[0]].dtype.is_floating_point


def alone(call: Call) -> bool:
    """Whether the weights of the classes add up to one for every target: it is a class index, and classes are not weighted."""
    return chosen(call) and not call.positions("weight")


def shared(call: Call) -> bool:
    """Whether the loss is a sum or unreduced, with class weights or probabilities as targets; weights get no gradient."""
    constant = not any(call.operands[p].requires_grad for p in call.positions("weight"))
    return call.number("reduction") != MEAN and not alone(call) and constant


def targets(call: Call, local: Local) -> int:
    """One number per target."""
    scores = local.operands[0]
    return math.prod(scores) // scores[min(1, len(scores) - 1)]


# The largest score over all ranks; then the sum of exponentials, the scores of the targets, and the targets' weight if not one.
CLASSES = [
    ParallelForm(
        name="vocab_parallel_cross_entropy", factors=("c",), operands="I", results="I", able=able, in_place=able is alone,
        forward=(InternalCollective("all_reduce", targets), InternalCollective("all_reduce", sums)),
    )
    for able, sums in (
        (alone, lambda call, local: 2 * targets(call, local)), (shared, lambda call, local: 3 * targets(call, local))
    )
]  # fmt: skip
CHOSEN = ParallelForm(
    name="vocab_parallel_nll_loss", factors=("c",), able=chosen
)  # a rank adds nothing for targets on other ranks

LOSS, SCORED = says("loss"), says("loss", c="classes")

TABLE: dict[str, Rule] = {
    # element by element
    "aten.mse_loss.default": op("..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32, says=LOSS),
    "aten.l1_loss.default": op("..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32),
    "aten.smooth_l1_loss.default": op("..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32),
    "aten.huber_loss.default": op("..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32),
    "aten.kl_div.default": op("..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32),
    "aten.soft_margin_loss.default": op("..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32),
    "aten.hinge_embedding_loss.default": op("..., ... -> [...]", averages=is_mean, autocast=Autocast.FP32),
    "aten.poisson_nll_loss.default": op("..., ... -> [...]", averages=is_mean, autocast=Autocast.FP32),
    "aten.margin_ranking_loss.default": op("..., ..., ... -> [...]", averages=is_mean, autocast=Autocast.FP32),
    "aten.binary_cross_entropy.default": op("..., ..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS),
    "aten.binary_cross_entropy_with_logits.default": op(
        "..., ..., ..., ... -> [...]", averages=is_mean, mean=Mean.ELEMENTS, autocast=Autocast.FP32
    ),
    # row by row: c stays whole
    "aten.cosine_embedding_loss.default": op("... c!, ... c!, ... -> [...]", averages=is_mean, autocast=Autocast.FP32),
    "aten.triplet_margin_loss.default": op("... c!, ... c!, ... c! -> [...]", averages=is_mean, autocast=Autocast.FP32),
    "aten.multi_margin_loss.default": op("... c!, ..., c! -> [...]", linear="weight", averages=is_mean, autocast=Autocast.FP32),
    "aten.multilabel_margin_loss.default": op("... c!, ... c! -> [...]", averages=is_mean, autocast=Autocast.FP32),
    # over classes
    "aten.cross_entropy_loss.default": op(
        classified,
        averages=is_mean,
        distributed=CLASSES,
        mean=Mean.TARGETS,
        padding=padding.classified,
        autocast=Autocast.FP32,
        says=SCORED,
    ),
    "aten.nll_loss.default": op(
        classified,
        averages=is_mean,
        distributed=[CHOSEN],
        mean=Mean.TARGETS,
        padding=padding.named,
        autocast=Autocast.FP32,
        says=SCORED,
    ),
    "aten.nll_loss_nd.default": op(
        classified,
        averages=is_mean,
        distributed=[CHOSEN],
        mean=Mean.TARGETS,
        padding=padding.named,
        autocast=Autocast.FP32,
        says=SCORED,
    ),
    "aten.ctc_loss.Tensor": op(aligned, averages=is_mean),
}

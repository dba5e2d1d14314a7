"""Rules of softmax and norms: what is normalised over a dim needs all of it."""

from __future__ import annotations

import math
from collections.abc import Callable

from autopar.ir.program import Argument
from autopar.operators import padding
from autopar.operators.call import Call, Local
from autopar.operators.facts import Autocast, Mixed, OpKind, says
from autopar.operators.pattern_text import dims, term
from autopar.operators.rule import InternalCollective, OpSharding, ParallelForm, Rule, always, op

Elements = Callable[[Call, Local], int]


def normalised_here(call: Call, local: Local) -> dict[str, Argument]:
    """The normalised sizes on one rank."""
    return {"normalized_shape": tuple(local.operands[0][-len(call.numbers("normalized_shape")) :])}


def vectors(call: Call, local: Local) -> int:
    """One number per normalised vector."""
    return math.prod(local.operands[0][: -len(call.numbers("normalized_shape"))])


def both(call: Call, local: Local) -> int:
    """Two numbers per normalised vector."""
    return 2 * vectors(call, local)


def of_all(factor: str, own: Elements) -> Elements:
    """The elements from all ranks that split a factor."""
    return lambda call, local: local.split(factor) * own(call, local)


# Mean and variance of every chunk, combined; in the backward, sums of the gradient and of gradient times normalised value.
LAYER_NORM = ParallelForm(
    name="layer_norm", factors=("n0",),
    forward=(InternalCollective("all_gather", of_all("n0", both)),), backward=(InternalCollective("all_reduce", both),),
)  # fmt: skip
RMS_NORM = ParallelForm(
    name="rms_norm",
    factors=("n0",),
    forward=(InternalCollective("all_reduce", vectors),),
    backward=(InternalCollective("all_reduce", vectors),),
)


def normalised(call: Call) -> OpSharding:
    """`... n!, n!, n! -> ... n!`, for any number of normalised dims n."""
    n = term(f"n{i}!" for i in range(len(call.numbers("normalized_shape"))))
    parameters = "".join(f", {n}" for name in ("weight", "bias") if call.positions(name))
    statistics = f", ... {n.replace('n', 's')}" * (len(call.op.results) - 1)  # native_layer_norm's mean and rstd, of size 1
    return call.fit(f"... {n}{parameters} -> ... {n}{statistics}")


def planes(call: Call, mark: str) -> str:
    """The words of the dims after rows and channels."""
    return "".join(f" {word}{mark}" for word in dims(call.rank("input") - 2))


def in_one(call: Call) -> bool:
    """Whether all channels form one group: only then is a chunk of channels a part of every group."""
    return call.number("num_groups") == 1


def moments(call: Call, local: Local) -> int:
    """A mean and a variance per group of each row; as many for the gradient."""
    rows, held = local.operands[0][:2]
    groups = call.number("num_groups")
    return 2 * rows * (groups // local.split("g") if groups else held)  # in instance norm every channel is a group


def instances(call: Call) -> bool:
    """Whether an instance norm takes its statistics from the input, and keeps no running ones."""
    return bool(call.arguments["use_input_stats"]) and not call.positions("running_mean")


GROUP_NORM, GROUP_NORM_CHANNELS, INSTANCE_NORM = (
    ParallelForm(
        name=name, factors=(factor,), able=able, forward=(InternalCollective("all_gather", of_all(factor, moments)),),
        backward=(InternalCollective("all_reduce", moments),),
    )
    for name, factor, able in (
        ("group_norm", "d0", always), ("group_norm_channels", "c", in_one), ("instance_norm", "d0", instances)
    )
)  # fmt: skip


def groups(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds."""
    return {"num_groups": call.number("num_groups") // local.split("g")}


def native_groups(call: Call, local: Local) -> dict[str, Argument]:
    """The rows, channels and groups on one rank; the first result has the shape of the input."""
    rows, channels = local.results[0][:2]
    return {"N": rows, "C": channels, "group": call.number("group") // local.split("g")}


def batch_norm(call: Call) -> OpSharding:
    """In training only channels split; in evaluation all dims do."""
    whole = "!" if call.arguments.get("training") else ""
    plane = f"b{whole} c{planes(call, whole)}"
    given = ", c" * (len(call.operands) - 1)
    channels = call.shape("input")[1:2]
    statistics = (", c" if value.shape == channels else ", _" for value in call.op.results[1:])  # empty in evaluation
    return call.fit(f"{plane}{given} -> {plane}{''.join(statistics)}")


def trains(call: Call) -> bool:
    """Whether a batch norm takes its statistics from the batch."""
    return bool(call.arguments["training"])


def channels(call: Call, local: Local) -> int:
    """A mean and a variance per channel; as many for the gradient."""
    return 2 * local.operands[0][1]


# Statistics are over the whole batch, and so are the gradients of weight and bias, which the backward needs anyway.
BATCH_NORM, BATCH_NORM_PLANES = (
    ParallelForm(
        name=name,
        factors=(factor,),
        operands="I",
        able=trains,
        forward=(InternalCollective("all_gather", of_all(factor, channels)),),
        backward=(InternalCollective("all_reduce", channels),),
    )
    for name, factor in (("sync_batch_norm", "b"), ("sync_batch_norm_spatial", "d0"))
)


def instance_norm(call: Call) -> OpSharding:
    """`b c ...!, c, c, c, c -> b c ...!`; running statistics are means over the batch, which then stays whole."""
    batch = "b!" if call.positions("running_mean") else "b"  # running statistics are the means over the batch
    return call.fit(f"{batch} c{planes(call, '!')}, c, c, c, c -> {batch} c{planes(call, '!')}")


def rows(call: Call, local: Local) -> int:
    """One number per distribution."""
    shape = local.operands[0]
    return math.prod(shape) // shape[call.number("dim")]


def same_dtype(call: Call) -> bool:
    """Whether the result has the input's dtype or a given one, and not that of `half_to_float`."""
    return call.arguments.get("half_to_float") is not True


# The maximum over all ranks, then the sum of exponentials; the backward subtracts a sum as well.
SOFTMAX, LOG_SOFTMAX, SAFE_SOFTMAX = (
    ParallelForm(
        name=name,
        factors=("n",),
        able=same_dtype,
        forward=(InternalCollective("all_reduce", rows), InternalCollective("all_reduce", rows)),
        backward=(InternalCollective("all_reduce", rows),),
    )
    for name in ("softmax", "log_softmax", "safe_softmax")
)


def weight_norm(call: Call) -> OpSharding:
    """Each slice along the dim has its own norm, so the other dims stay whole."""
    words = sliced(call.rank("v"), call.number("dim"))  # -1: no dim
    held = words if call.rank("g") else "()"
    return call.fit(f"{words}, {held} -> {', '.join([words, held][: len(call.op.results)])}")


def sliced(rank: int, kept: int) -> str:
    """The words of a tensor of which all dims but one stay whole."""
    return term(f"d{d}{'' if d == kept else '!'}" for d in range(rank))


NORM = says("norm")

TABLE: dict[str, Rule] = {
    # distributions along a dim
    "aten.softmax.int": op(
        "... n@dim! ... -> ... n@dim! ...",
        distributed=[SOFTMAX],
        padding=padding.distribution(padding.ZERO),
        autocast=Autocast.FP32,
        kind=OpKind.SOFTMAX,
    ),
    "aten.special_softmax.default": op(
        "... n@dim! ... -> ... n@dim! ...",
        distributed=[SOFTMAX],
        padding=padding.distribution(padding.ZERO),
        kind=OpKind.SOFTMAX,
    ),
    "aten._softmax.default": op(
        "... n@dim! ... -> ... n@dim! ...",
        distributed=[SOFTMAX],
        padding=padding.distribution(padding.ZERO),
        kind=OpKind.SOFTMAX,
    ),
    "aten.log_softmax.int": op(
        "... n@dim! ... -> ... n@dim! ...",
        distributed=[LOG_SOFTMAX],
        padding=padding.distribution(padding.LOWEST),
        autocast=Autocast.FP32,
    ),
    "aten.special_log_softmax.default": op(
        "... n@dim! ... -> ... n@dim! ...", distributed=[LOG_SOFTMAX], padding=padding.distribution(padding.LOWEST)
    ),
    "aten._log_softmax.default": op(
        "... n@dim! ... -> ... n@dim! ...", distributed=[LOG_SOFTMAX], padding=padding.distribution(padding.LOWEST)
    ),
    "aten._safe_softmax.default": op("... n@dim! ... -> ... n@dim! ...", distributed=[SAFE_SOFTMAX], kind=OpKind.SOFTMAX),
    # over the last dims
    "aten.layer_norm.default": op(
        normalised,
        local=normalised_here,
        distributed=[LAYER_NORM],
        padding=padding.normalised,
        autocast=Autocast.FP32,
        says=NORM,
        kind=OpKind.NORM,
    ),
    "aten.native_layer_norm.default": op(normalised, kind=OpKind.NORM, autocast=Autocast.FP32, mixed=Mixed.FP32),
    "aten.rms_norm.default": op(
        normalised,
        local=normalised_here,
        distributed=[RMS_NORM],
        padding=padding.normalised,
        autocast=Autocast.FP32,
        kind=OpKind.NORM,
        mixed=Mixed.FP32,
        says=NORM,
    ),
    "aten._fused_rms_norm.default": op(normalised, kind=OpKind.NORM),
    # over groups of channels
    "aten.group_norm.default": op(
        "b (g=num_groups c!) [d0!] ...!, (g c!), (g c!) -> b (g c!) [d0!] ...!",
        local=groups,
        distributed=[GROUP_NORM, GROUP_NORM_CHANNELS],
        kind=OpKind.NORM,
        autocast=Autocast.FP32,
        says=says("norm", b="batch", g="groups of channels"),
    ),
    "aten.native_group_norm.default": op(
        "b (g=group c!) [d0!] ...!, (g c!), (g c!) -> b (g c!) [d0!] ...!, b g, b g",
        local=native_groups,
        kind=OpKind.NORM,
        mixed=Mixed.FP32,
    ),
    # over the batch
    "aten.batch_norm.default": op(
        batch_norm,
        distributed=[BATCH_NORM, BATCH_NORM_PLANES],
        writes="running_mean running_var",
        training="training",
        kind=OpKind.NORM,
        mixed=Mixed.FP32,
        says=says("norm", b="batch", c="channels"),
    ),
    "aten.native_batch_norm.default": op(batch_norm, writes="running_mean running_var", training="training", kind=OpKind.NORM),
    "aten._native_batch_norm_legit.default": op(batch_norm, kind=OpKind.NORM),
    "aten._native_batch_norm_legit.no_stats": op(batch_norm, kind=OpKind.NORM),
    "aten._native_batch_norm_legit_no_training.default": op(batch_norm, kind=OpKind.NORM),
    # over the plane of each channel
    "aten.instance_norm.default": op(
        instance_norm,
        distributed=[INSTANCE_NORM],
        writes="running_mean running_var",
        training="use_input_stats",
        kind=OpKind.NORM,
        mixed=Mixed.FP32,
    ),
    # of each slice of a tensor
    "aten._weight_norm.default": op(weight_norm, linear="g"),
    "aten._weight_norm_interface.default": op(weight_norm),
    "aten.renorm.default": op("...! @dim ...! -> ...! @dim ...!", autocast=Autocast.FP32),
}

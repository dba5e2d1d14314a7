"""Rules of convolutions: batch and channels split, of several groups the groups; a window looks beyond its own place."""

from __future__ import annotations

import math

from autopar.ir.layout import Shape
from autopar.ir.program import Argument
from autopar.operators.call import Call, Local
from autopar.operators.facts import Autocast, says
from autopar.operators.flops import ProductSizes, product
from autopar.operators.rule import OpSharding, Rule, op


def convolution(call: Call) -> OpSharding:
    """`b i _ _, o i _ _, +o -> b o _ _`; with several groups, the groups split instead of the channels."""
    space = " ".join("_" for _ in range(call.rank("weight") - 2))
    batch = "b " if call.rank("input") == call.rank("weight") else ""
    groups = call.number("groups", 1)
    weight = "i o" if transposed(call) else "o i"
    if groups == 1:
        return call.fit(f"{batch}i {space}, {weight} {space}, +o -> {batch}o {space}")
    weight = "(g i!) o!" if transposed(call) else "(g o!) i!"
    text = f"{batch}(g i!) {space}, {weight} {space}, +(g o!) -> {batch}(g o!) {space}"
    return call.fit(text, sizes={"g": groups})


def convolution_groups(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds."""
    groups = call.number("groups", 1)
    return {"groups": groups // local.split("g")} if groups > 1 else {}


def window(call: Call, local: Local) -> ProductSizes:
    """The convolution as a matrix product."""
    given, weight, made = local.operands[0], local.operands[1], local.results[0]
    return unfolded(given, weight, made, transposed(call))


def unfolded(given: Shape, weight: Shape, made: Shape, transposed: bool) -> ProductSizes:
    """Positions x out-channels, summed over the window's in-channels.

    Transposed, positions x the window's out-channels, summed over in-channels. The weight is (out, in / groups, window...), or
    (in, out / groups, window...) if transposed. Each group is a product of its own.
    """
    here, there = (given, made) if transposed else (made, given)  # the side of weight[0], the side of weight[1]
    channels = 1 - len(weight)
    groups = max(1, there[channels] // max(1, weight[1]))
    places, own, window = math.prod(here) // max(1, here[channels]), here[channels] // groups, math.prod(weight[1:])
    return ProductSizes(groups, places, window, own) if transposed else ProductSizes(groups, places, own, window)


def transposed(call: Call) -> bool:
    """Whether a convolution is transposed."""
    return "transpose" in call.op.target or bool(call.arguments.get("transposed"))


CONVOLUTION = says("convolution", b="batch", i="in-channels", o="out-channels", g="groups of channels")


TABLE: dict[str, Rule] = {
    "aten.conv1d.default": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv1d.padding": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv2d.default": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv2d.padding": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv3d.default": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv3d.padding": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv_transpose1d.default": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv_transpose2d.input": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.conv_transpose3d.input": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
    "aten.convolution.default": op(
        convolution,
        linear="input bias, weight bias",
        local=convolution_groups,
        flops=product(window, 0, 1),
        autocast=Autocast.LOWER,
        says=CONVOLUTION,
    ),
}

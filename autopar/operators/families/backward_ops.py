"""Rules of backward operators, which models call themselves at times: a parameter's gradient adds up over the batch."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.program import Argument
from autopar.operators.call import Call, Local
from autopar.operators.families.convolution import unfolded
from autopar.operators.families.losses import SUM
from autopar.operators.families.normalization import native_groups
from autopar.operators.flops import Product
from autopar.operators.pattern_text import term
from autopar.operators.rule import OpSharding, Rule, op


def convolution(call: Call) -> OpSharding:
    """`b o _ _, b i! _ _, o i! _ _ -> b i! _ _, o i! _ _, o`; with several groups, the groups split instead of the channels."""
    space = " ".join("_" for _ in range(call.rank("weight") - 2))
    count = call.number("groups", 1)
    inside, outside = ("(g i!)", "(g o!)") if count > 1 else ("i!", "o")
    turned = f"{inside} {'o!' if count > 1 else 'o'} {space}"
    weight = turned if call.arguments["transposed"] else f"{outside} i! {space}"
    given, source = f"b {outside} {space}", f"b {inside} {space}"
    return call.fit(f"{given}, {source}, {weight} -> {source}, {weight}, {outside}", sizes={"g": count})


def convolution_local(call: Call, local: Local) -> dict[str, Argument]:
    """The groups that one rank holds, and the size of its bias."""
    return {"groups": call.number("groups", 1) // local.split("g"), "bias_sizes": tuple(local.results[2])}


def layer_norm(call: Call) -> OpSharding:
    """The normalised dims stay whole; the gradients of weight and bias are sums over the others."""
    n = term(f"n{i}!" for i in range(len(call.numbers("normalized_shape"))))
    ones = n.replace("n", "s")
    parameters = "".join(f", {n}" for name in ("weight", "bias") if call.positions(name))
    return call.fit(f"... {n}, ... {n}, ... {ones}, ... {ones}{parameters} -> ... {n}, {n}, {n}")


def batch_norm(call: Call) -> OpSharding:
    """In training only channels split; in evaluation all dims do."""
    whole = "!" if call.arguments["train"] else ""
    plane, channels = f"b{whole} c ...{whole}", call.shape("input")[1:2]
    held = "".join(f", {'c' if value.shape == channels else '_'}" for value in call.operands[2:])  # absent ones are empty
    return call.fit(f"{plane}, {plane}{held} -> {plane}, c, c")


def loss(call: Call) -> OpSharding:
    """Element by element; the gradient of a mean is divided by the global count, so all dims stay whole."""
    whole = "" if call.number("reduction") in (0, SUM) else "!"
    terms = ", ".join(f"...{whole}" for _ in call.operands[1:])
    return call.fit(f"{'()' if not call.rank('grad_output') else f'...{whole}'}, {terms} -> ...{whole}")


def convolution_gradients(call: Call, local: Local) -> list[Product]:
    """One product of the convolution's size for each requested gradient, of the input and of the weight."""
    result, given, weight = local.operands[:3]
    forward = Product(
        sizes=unfolded(given, weight, result, bool(call.arguments["transposed"])), left=frozenset({1}), right=frozenset({2})
    )
    asked = call.arguments["output_mask"]
    assert isinstance(asked, tuple)
    return [
        replace(product, left=frozenset({0}), right=frozenset({other}))
        for wanted, other, product in zip(asked[:2], (2, 1), forward.backward((1, 2)), strict=True)
        if wanted
    ]


TABLE: dict[str, Rule] = {
    # activations
    "aten.gelu_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.silu_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.sigmoid_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.tanh_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.threshold_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.elu_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.leaky_relu_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.hardtanh_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.hardswish_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.hardsigmoid_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.mish_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.softplus_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.hardshrink_backward.default": op("..., ... -> ...", linear="grad_out"),
    "aten.softshrink_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.logit_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.native_dropout_backward.default": op("..., ... -> ...", linear="grad_output"),
    "aten.glu_backward.default": op("... _@dim ..., ... _@dim ... -> ... _@dim ...", linear="grad_output"),
    # losses
    "aten.mse_loss_backward.default": op(loss, linear="grad_output"),
    "aten.smooth_l1_loss_backward.default": op(loss, linear="grad_output"),
    "aten.huber_loss_backward.default": op(loss, linear="grad_output"),
    "aten.binary_cross_entropy_backward.default": op(loss, linear="grad_output, weight"),
    # softmax and norms
    "aten._softmax_backward_data.default": op("... _@dim ..., ... _@dim ... -> ... _@dim ...", linear="grad_output"),
    "aten._log_softmax_backward_data.default": op("... _@dim ..., ... _@dim ... -> ... _@dim ...", linear="grad_output"),
    "aten.native_layer_norm_backward.default": op(layer_norm, linear="grad_out"),
    "aten.native_group_norm_backward.default": op(
        "b (g=group c!) ...!, b (g c!) ...!, b g, b g, (g c!) -> b (g c!) ...!, (g c!), (g c!)",
        linear="grad_out",
        local=native_groups,
    ),
    "aten.native_batch_norm_backward.default": op(batch_norm, linear="grad_out"),
    # convolutions
    "aten.convolution_backward.default": op(
        convolution, linear="grad_output", local=convolution_local, flops=convolution_gradients
    ),
}

"""Rules of recurrent layers: a step needs all of the last one's state, so only the batch splits; or all gates at every step."""

from __future__ import annotations

import math

from autopar.operators.call import Call, Local
from autopar.operators.facts import Autocast, Mixed, OpKind
from autopar.operators.flops import Product, ProductSizes
from autopar.operators.pattern_text import unread
from autopar.operators.rule import InternalCollective, OpSharding, ParallelForm, Rule, op


def recurrent(call: Call) -> OpSharding:
    """The batch splits; time stays whole, and so do the gates g of all weights."""
    sequence = "b _ _" if call.arguments["batch_first"] else "_ b _"
    held = {"input": sequence, "hx": "_ b _"}
    ranks = {position: len(value.shape) for position, value in enumerate(call.operands)}
    weights = unread if projected(call) else (lambda rank: " ".join(["g!", *"_" * (rank - 1)]))
    operands = (held.get(name) or weights(ranks[position]) for name, position in call.slots if position is not None)
    draws = bool(call.arguments["train"]) and call.arguments["dropout"] != 0 and call.number("num_layers") > 1
    return call.fit(f"{', '.join(operands)} -> {', '.join([sequence, *('_ b _' for _ in call.op.results[1:])])}", random=draws)


def projected(call: Call) -> bool:
    """Whether each layer has a projection matrix that makes the state narrower than the memory cell."""
    return len(call.positions("params")) > ways(call) * (4 if call.arguments["has_biases"] else 2)


def ways(call: Call) -> int:
    """The number of layers times the number of directions."""
    return call.number("num_layers") * (2 if call.arguments["bidirectional"] else 1)


def steps(call: Call, local: Local) -> int:
    """The length of the sequence."""
    return local.operands[0][1 if call.arguments["batch_first"] else 0]


def gates(call: Call, local: Local) -> int:
    """Gates of one time step of one layer in one direction, over all ranks."""
    rows = local.operands[call.positions("params")[0]][0]
    return local.operands[1][1] * rows * local.split("g")


def states(call: Call, local: Local) -> int:
    """Elements of the states of one time step in one direction."""
    return local.operands[1][1] * local.operands[1][2]


def between(call: Call, local: Local, ranks: int) -> int:
    """The number of layers that read the output of another."""
    return call.number("num_layers") - 1


# The gates of the input all at once, then those of the state at every step; the backward adds up the gradients of states.
GATES = {
    name: ParallelForm(
        name=f"gate_parallel_{name}",
        factors=("g",),
        results="I",
        able=lambda call: not projected(call),
        forward=(
            InternalCollective(
                "all_gather", lambda call, local: steps(call, local) * gates(call, local), lambda call, *_: ways(call), False
            ),
            InternalCollective("all_gather", gates, lambda call, local, _: steps(call, local) * ways(call), False),
        ),
        backward=(
            InternalCollective("all_reduce", states, lambda call, local, _: (steps(call, local) - 1) * ways(call), False),
            InternalCollective("all_reduce", lambda call, local: math.prod(local.results[0]), between, False),
        ),
    )
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}


def gate_products(call: Call, local: Local) -> list[Product]:
    """Per layer and direction, the sequence and the states of all steps times their matrices; states need gradients."""
    matrices = [p for p in call.positions("params") if len(local.operands[p]) == 2]
    steps, everything = math.prod(local.operands[0][:2]), frozenset(range(len(local.operands)))
    first = first_layer(call, len(matrices))
    return [
        Product(
            sizes=ProductSizes(1, steps, *local.operands[p]),
            left=frozenset({0}) if place in first else everything,
            right=frozenset({p}),
        )
        for place, p in enumerate(matrices)
    ]


def first_layer(call: Call, count: int) -> set[int]:
    """The places of the matrices that multiply the input sequence."""
    each = count // ways(call)
    return {direction * each for direction in range(ways(call) // call.number("num_layers"))}


def cell_products(call: Call, local: Local) -> list[Product]:
    """The products of the input and of the state with their matrices."""
    weights = [call.positions(name)[0] for name in ("w_ih", "w_hh")]
    given = 0, 1
    rows_of = math.prod(local.operands[0][:-1])
    return [
        Product(sizes=ProductSizes(1, rows_of, *local.operands[w]), left=frozenset({x}), right=frozenset({w}))
        for x, w in zip(given, weights, strict=True)
    ]


TABLE: dict[str, Rule] = {
    # sequences
    "aten.lstm.input": op(
        recurrent,
        distributed=[GATES["lstm"]],
        flops=gate_products,
        training="train",
        rate="dropout",
        kind=OpKind.RECURRENT,
        mixed=Mixed.FP32,
    ),
    "aten.gru.input": op(
        recurrent,
        distributed=[GATES["gru"]],
        flops=gate_products,
        training="train",
        rate="dropout",
        kind=OpKind.RECURRENT,
        mixed=Mixed.FP32,
    ),
    "aten.rnn_tanh.input": op(
        recurrent,
        distributed=[GATES["rnn_tanh"]],
        flops=gate_products,
        training="train",
        rate="dropout",
        kind=OpKind.RECURRENT,
        mixed=Mixed.FP32,
    ),
    "aten.rnn_relu.input": op(
        recurrent,
        distributed=[GATES["rnn_relu"]],
        flops=gate_products,
        training="train",
        rate="dropout",
        kind=OpKind.RECURRENT,
        mixed=Mixed.FP32,
    ),
    # one step: the weights stay whole
    "aten.lstm_cell.default": op(
        "... _, ... _, ... _, _ _, _ _, _, _ -> ... _, ... _", flops=cell_products, autocast=Autocast.LOWER, mixed=Mixed.FP32
    ),
    "aten.gru_cell.default": op(
        "... _, ... _, _ _, _ _, _, _ -> ... _", flops=cell_products, autocast=Autocast.LOWER, mixed=Mixed.FP32
    ),
    "aten.rnn_tanh_cell.default": op(
        "... _, ... _, _ _, _ _, _, _ -> ... _", flops=cell_products, autocast=Autocast.LOWER, mixed=Mixed.FP32
    ),
    "aten.rnn_relu_cell.default": op(
        "... _, ... _, _ _, _ _, _, _ -> ... _", flops=cell_products, autocast=Autocast.LOWER, mixed=Mixed.FP32
    ),
}

"""Rules of recurrent networks: each step reads all of the last one, so that the batch alone splits."""

from __future__ import annotations

from autopar.rules.call import Call
from autopar.rules.pointwise import unread
from autopar.rules.rule import Fitted, Rule, rule


def layers(call: Call) -> Fitted | None:
    """t! b i!, l! b h! -> t! b h!, l! b h!; or b t! i! -> b t! h!; weights stay whole"""
    if call.rank("input") != 3:
        return None
    sequence = "b _ _" if call.arguments["batch_first"] else "_ b _"
    states = ", ".join("_ b _" for _ in call.positions("hx"))
    weights = "".join(f", {unread(len(call.operands[p].shape))}" for p in call.positions("params"))
    results = ", ".join([sequence, *("_ b _" for _ in call.op.results[1:])])
    draws = call.arguments["dropout"] != 0 and call.number("num_layers") > 1 and bool(call.arguments["train"])
    return call.fit(f"{sequence}, {states}{weights} -> {results}", random=draws)


def cell(call: Call) -> Fitted:
    """... i!, ... h! -> ... h!; weights stay whole"""
    names = (name for name, position in call.slots if position is not None)
    ranks = (len(value.shape) for value in call.operands)
    held = ("... _" if name in ("input", "hx") else unread(rank) for name, rank in zip(names, ranks, strict=True))
    return call.fit(f"{', '.join(held)} -> {', '.join('... _' for _ in call.op.results)}")


TABLE: dict[str, Rule] = {
    **{f"aten.{name}.input": rule(layers) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}_cell.default": rule(cell) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}

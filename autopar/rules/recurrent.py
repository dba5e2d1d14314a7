"""Rules of recurrent layers: a step needs all of the last one's state, so only the batch splits."""

from __future__ import annotations

from autopar.rules.call import Call
from autopar.rules.pointwise import unread
from autopar.rules.rule import Fitted, Rule, rule


def recurrent(call: Call) -> Fitted:
    """_ b _, (_ b _ per state), whole weights -> _ b _, (_ b _ per state); the sequence b _ _ if the batch comes first"""
    sequence = "b _ _" if call.arguments["batch_first"] else "_ b _"
    held = {"input": sequence, "hx": "_ b _"}
    ranks = {position: len(value.shape) for position, value in enumerate(call.operands)}
    operands = (held.get(name, " ".join("_" * ranks[position])) for name, position in call.slots if position is not None)
    draws = bool(call.arguments["train"]) and call.arguments["dropout"] != 0 and call.number("num_layers") > 1
    return call.fit(f"{', '.join(operands)} -> {', '.join([sequence, *('_ b _' for _ in call.op.results[1:])])}", random=draws)


def cell(call: Call) -> Fitted:
    """... i!, ... h! -> ... h!; weights stay whole"""
    names = (name for name, position in call.slots if position is not None)
    ranks = (len(value.shape) for value in call.operands)
    held = ("... _" if name in ("input", "hx") else unread(rank) for name, rank in zip(names, ranks, strict=True))
    return call.fit(f"{', '.join(held)} -> {', '.join('... _' for _ in call.op.results)}")


TABLE: dict[str, Rule] = {
    **{f"aten.{name}.input": rule(recurrent) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"aten.{name}_cell.default": rule(cell) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}

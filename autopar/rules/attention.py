"""Rules of attention: every query needs all keys that it may see."""

from __future__ import annotations

import math

from autopar.rules.call import Call, Local
from autopar.rules.rule import Distributed, Fitted, Rule, Sent, rule


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


TABLE: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": rule(attention, linear="value", distributed=[QUERIES, *RINGS]),
}

"""Rules of attention: every query needs all keys that it may see."""

from __future__ import annotations

import math

from autopar.operators import padding
from autopar.operators.call import Call, Local
from autopar.operators.facts import Autocast, OpKind, says
from autopar.operators.flops import Product, ProductSizes
from autopar.operators.rule import InternalCollective, OpSharding, ParallelForm, Rule, op


def attention(call: Call) -> OpSharding:
    """Queries may be split unless attention is causal; keys and values stay whole. Grouped heads are `(h g)`; keys have h."""
    q = "q!" if call.arguments["is_causal"] else "q"
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    if not call.arguments["enable_gqa"] or query[-3] == key[-3] == value[-3]:
        return call.fit(f"... {q} d!, ... k! d!, ... k! e!, ... {q} m! -> ... {q} e!")
    heads, held, sizes = ("(h g)", "h", {"h": key[-3]}) if key[-3] == value[-3] else ("_", "_", {})
    text = f"... {heads} {q} d!, ... {held} k! d!, ... {held} k! e!, {mask(call, heads, q)} -> ... {heads} {q} e!"
    return call.fit(text, sizes=sizes)


def fused(call: Call) -> bool:
    """Whether attention has the form that fused kernels support: batch, heads, sequence, width."""
    query, value = call.shape("query"), call.shape("value")
    return len(query) == 4 and query[-1] == value[-1]


def looking_back(call: Call) -> bool:
    """Whether attention of that form is causal."""
    return fused(call) and bool(call.arguments["is_causal"]) and call.shape("query")[-2] == call.shape("key")[-2]


def looking_around(call: Call) -> bool:
    """Whether in attention of that form every query sees every key, except those hidden by a mask that needs no gradient."""
    learnt = any(call.operands[p].requires_grad for p in call.positions("attn_mask"))
    return fused(call) and not call.arguments["is_causal"] and not learnt


def keys_and_values(call: Call, local: Local) -> int:
    """Elements of the chunk of keys and values that a rank holds."""
    _, key, value, *_ = local.operands
    return math.prod(key) + math.prod(value)


def others(call: Call, local: Local, ranks: int) -> int:
    """The number of other ranks."""
    return ranks - 1


# For more ranks than heads of keys and values: each rank takes a part of the queries that read one such head.
GROUPED = ParallelForm(name="grouped_query_attention", factors=("h", "g"), nested=True)
QUERIES = ParallelForm(name="query_parallel_attention", factors=("q",), able=looking_back, work=lambda _, ranks: 2 - 1 / ranks)
RINGS = [  # causal: the last rank sees all chunks, half of its own
    ParallelForm(
        name="ring_attention", factors=("q", "k"), able=able, work=work,
        forward=(InternalCollective("all_to_all", keys_and_values, others, wide=False),),
        backward=(
            InternalCollective("all_to_all", keys_and_values, others, wide=False),
            InternalCollective("all_to_all", keys_and_values, lambda call, local, ranks: ranks),  # return of the gradients
        ),
    )
    for able, work in ((looking_back, lambda _, ranks: 2 * ranks - 1), (looking_around, lambda _, ranks: ranks))
]  # fmt: skip


def mask(call: Call, heads: str, q: str) -> str:
    """The dims of an attention mask, which may lack leading ones; it has all keys, even if queries receive them in turn."""
    rank = call.rank("attn_mask")
    return {2: f"{q} m!", 3: f"{heads} {q} m!"}.get(rank, f"... {heads} {q} m!")


def scores_and_values(call: Call, local: Local) -> list[Product]:
    """q k^T is b h q k d, and the weighted sum b h q k e; half of both if causal. The scores are not saved."""
    (*heads, queries, dim), key, value = local.operands[:3]
    count, keys, causal = math.prod(heads), key[-2], bool(call.arguments["is_causal"])
    scores, sums = ProductSizes(count, queries, keys, dim), ProductSizes(count, queries, value[-1], keys)
    return [
        Product(sizes=scores, left=frozenset({0}), right=frozenset({1}), again=True, causal=causal),
        Product(sizes=sums, left=frozenset({0, 1}), right=frozenset({2}), causal=causal),
    ]


TABLE: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": op(
        attention,
        linear="value",
        distributed=[GROUPED, QUERIES, *RINGS],
        flops=scores_and_values,
        random=True,
        rate="dropout_p",
        kind=OpKind.ATTENTION,
        padding=padding.attention,
        autocast=Autocast.LOWER,
        says=says("attention", **{"...0": "heads"}, h="heads", q="sequence"),
    ),
}

"""Collectives: the alpha-beta model of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, for n ranks, messages of latency a, and b bytes in the larger buffer of one rank:

    all_gather      ceil(log2 n) a + b (n - 1)/n / bandwidth      recursive doubling (Bruck where n is not a power of two)
    reduce_scatter  ceil(log2 n) a + b (n - 1)/n / bandwidth      recursive halving
    all_reduce      reduce_scatter + all_gather                   Rabenseifner
    all_to_all      (n - 1) a + b (n - 1)/n / bandwidth           pairwise exchange

A measured link, or one that NCCL drives, has its own line per kind. That of NCCL (`nccl`) is, for n ranks on m nodes, r of them
on each, which share r network cards, at the bus bandwidths and latencies of `autopar.ir.device.Bus`:

    rate             min(bus[r], r card)                           one ring enters each node once through all of its cards
    card             bandwidth (1 - 5% log2 m)                     a card's rate in the network
    all_gather       a + b (n - 1)/n / rate                        a = base + (n - m) hop + (m - 1) net: a ring has n - 1 steps
    reduce_scatter   the same
    all_reduce       base + 2 (n - 1) hop + 2 b (n - 1)/n / bus[r]           in one node, ring
                     base + 2 hop + 2 b (n - 1)/n / bus[r]                   in one node, summed by the switch
                     base + 2 ((r - 1) hop + ceil(log2 m) net) + 2 b (n - 1)/n / min(0.92 bus[r], r card)     double tree
    all_to_all       base + (r - 1) hop + (n - r) net + b max((r - 1)/n / bus[r], (n - r)/n / card)

Two nodes exchange a sum in one step, so the tree has twice a card's rate there. NCCL also chooses by size; here the algorithm
depends only on ranks and nodes, since the integer program needs one line per axis: weights of a bucket share one latency
(`autopar.formulation.fixed_charges`). A tree is never later than a ring for small messages, at most 8% for large ones. Every
device has its own card, so groups that leave a node at the same time do not slow each other down.

The arithmetic of a reduction is not counted: it keeps pace with the link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.ir.device import Link, Seconds

# Of any collective: until it runs at its rate. NCCL's protocols change with size (8 to 30 microseconds for a few bytes on eight
# GPUs, 150 for 32 MiB); 40 is within a median of 4% of nccl-tests on V100, A100 and H100 from 1 MiB on
# (`tests/cost_models/test_nccl.py` has the rows).
BASE: Seconds = 40e-6
TREE = 0.92  # of the bus bandwidth: NCCL 2.19, src/graph/tuning.cc, bandwidth of trees
# What the network takes from a card's rate with every doubling of the nodes: reduce_scatter on H100 with NDR reaches 360, 345,
# 320, 300, 280, 260 GB/s on 4 to 128 nodes, where eight cards have 400 (NVIDIA/nccl issue 1229); at most half of it.
LOSS, WORST = 0.05, 0.5

_Number = TypeVar("_Number", float, NDArray[np.float64])


def seconds(kind: str, size: _Number, n: int, link: Link) -> _Number:
    """Seconds of one collective among `n` ranks of a mesh axis; `size` may be an array of sizes.

    `size` is the larger side's buffer on one rank: what is gathered, what is scattered, what is reduced, what is exchanged.
    An axis of one rank costs nothing.

    >>> link = Link(name="wire", latency=1e-6, bandwidth=1e9, source="made up")
    >>> round(seconds("all_gather", 4e9, 4, link), 6)
    3.000002
    """
    if n > 1 and kind in link.lines:
        empty, per_byte = link.lines[kind]
        return size * per_byte + empty
    if kind == "all_reduce":
        return seconds("reduce_scatter", size, n, link) + seconds("all_gather", size, n, link)
    if n == 1:
        return size * 0.0
    return size * ((n - 1) / n / link.bandwidth) + messages(kind, n) * link.latency


def messages(kind: str, n: int) -> int:
    """The number of messages that a rank sends in sequence."""
    doubling = (n - 1).bit_length()  # ceil(log2 n)
    return {"all_gather": doubling, "reduce_scatter": doubling, "all_reduce": 2 * doubling, "all_to_all": n - 1}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """The placement of a group: its number of ranks, of nodes, and at least `local` ranks on each node."""

    ranks: int
    nodes: int
    local: int


def nccl(group: RankGroup, inner: Link, outer: Link) -> dict[str, tuple[Seconds, Seconds]]:
    """The line of each kind of collective in a group: seconds of an empty message, and per byte of the larger buffer.

    `inner` connects the devices of a node, `outer` is the network; both have a `bus`. The formulas are those of this module's
    docstring, after NCCL's tuning model (src/graph/tuning.cc).
    """
    bus, network = inner.bus, outer.bus
    assert bus, "NCCL's lines need what it reaches inside a node"
    assert network, "NCCL's lines need what it reaches between nodes"
    n, m, r = group.ranks, group.nodes, group.local
    hop, net = bus.hop, network.hop
    share = (n - 1) / n
    card = outer.bandwidth * max(1 - LOSS * math.log2(m), WORST) if m > 1 else math.inf
    ring = BASE + (n - m) * hop + (m - 1) * net, share / min(_rate(bus.ring, r), r * card)
    switch = r > 1 and bus.switch
    summed = _rate(bus.all_reduce or bus.ring, r) * (TREE if m > 1 and not switch else 1)
    inside = 1 if switch else r - 1
    latency = BASE + 2 * (inside * hop + (m - 1).bit_length() * net)
    direct = _rate(bus.all_to_all or bus.ring, r)
    return {
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_reduce": (latency, 2 * share / min(summed, r * card * (2 if m == 2 else 1))),
        "all_to_all": (BASE + (r - 1) * hop + (n - r) * net, max((r - 1) / n / direct, (n - r) / n / card)),
    }


def _rate(rates: Mapping[int, float], local: int) -> float:
    """The rate of a group with so many devices in a node; a single one sends nothing inside."""
    if local == 1:
        return math.inf
    return rates[max((size for size in rates if size <= local), default=min(rates))]

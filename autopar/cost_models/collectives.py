"""Collectives: the alpha-beta model of R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, for n ranks, messages of latency a, and b bytes in the larger buffer of one rank:

    all_gather      ceil(log2 n) a + b (n - 1)/n / bandwidth      recursive doubling (Bruck where n is not a power of two)
    reduce_scatter  ceil(log2 n) a + b (n - 1)/n / bandwidth      recursive halving
    all_reduce      reduce_scatter + all_gather                   Rabenseifner
    all_to_all      (n - 1) a + b (n - 1)/n / bandwidth           pairwise exchange

A link that was measured has a line of its own per kind.

Adding up the numbers of a reduction is not counted: it keeps pace with the link.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.ir.mesh import Link

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
    """How many messages a rank sends one after the other."""
    doubling = (n - 1).bit_length()  # ceil(log2 n)
    return {"all_gather": doubling, "reduce_scatter": doubling, "all_reduce": 2 * doubling, "all_to_all": n - 1}[kind]

"""Weight buckets: which weights are communicated in one collective, decided before layouts are.

    h.0.ln.weight  h.0.ln.bias  h.0.fc.weight  h.0.fc.bias      one bucket
    h.1.ln.weight  h.1.ln.bias  h.1.fc.weight  h.1.fc.bias      one bucket
    ln.weight  ln.bias  head.weight                             one bucket

A bucket has at most `LIMIT` bytes; a larger weight is a bucket of its own. Gathered weights take memory from the first use of
the bucket to the last, so a bucket stays within a block: the ops under one index of a container ("h.0"), or those between two
blocks. Where only gradients are communicated, a bucket may span blocks.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from autopar.analysis.repeated_blocks import block_of
from autopar.analysis.weights import copies, reduce_dtypes
from autopar.ir.mesh import Bytes
from autopar.ir.program import Program, Value, remembered

LIMIT: Bytes = 25 * 2**20  # of whole weights: the bucket of torch's DistributedDataParallel (bucket_cap_mb)


@remembered
def weight_buckets(program: Program, *, moved: bool) -> tuple[tuple[str, ...], ...]:
    """The parameters that ops read, and copies of them in other dtypes, grouped into buckets in the order of first use.

    `moved` if the weights themselves are communicated, not only their gradients.
    """
    cast, sums = copies(program), reduce_dtypes(program)
    weights = {name: program.values[name] for name in (*(p.value.name for p in program.parameters), *cast)}
    seen: set[str] = set()
    found: list[list[str]] = []
    for _, ops in itertools.groupby(program.ops, lambda op: block_of(op.name) if moved else ""):
        read = dict.fromkeys(name for op in ops for name in op.operands if name in weights and name not in seen)
        seen |= read.keys()
        alike: dict[object, list[Value]] = defaultdict(list)
        for name in read:
            value = weights[name]
            alike[value.dtype, value.requires_grad, sums.get(name), name in cast].append(value)
        found += [part for values in alike.values() for part in _filled(values)]
    return tuple(map(tuple, found))


def _filled(values: list[Value]) -> Iterator[list[str]]:
    """The names of the values in order, cut where a bucket is full."""
    held: list[str] = []
    size = 0
    for value in values:
        if held and size + value.bytes > LIMIT:
            yield held
            held, size = [], 0
        held.append(value.name)
        size += value.bytes
    if held:
        yield held

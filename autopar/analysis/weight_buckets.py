"""Weight buckets: which weights are communicated in one collective, decided before layouts are.

    h.0.ln.weight  h.0.ln.bias  h.0.fc.weight  h.0.fc.bias      one bucket
    h.1.ln.weight  h.1.ln.bias  h.1.fc.weight  h.1.fc.bias      one bucket
    ln.weight  ln.bias  head.weight                             one bucket

The weights of a block are one bucket, whatever their size: they are gathered while the block before it computes. A *block* is
what stands under an index of a container of which two children have weights of equal names and shapes ("h.0"), the outermost
such container. Outside of blocks, and where only gradients are communicated, weights are taken in the order of their first use
until a bucket is full: it holds `LIMIT` bytes, or one larger weight, and a little more for the biases beside it.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from autopar.analysis.repeated_blocks import INDEX
from autopar.analysis.weights import copies, reduce_dtypes
from autopar.ir.device import Bytes
from autopar.ir.program import Program, Value, remembered

LIMIT: Bytes = 25 * 2**20  # of whole weights: the bucket of torch's DistributedDataParallel (bucket_cap_mb)
SPARE = 1 / 64  # of a full bucket, for biases: alone they would cost a latency each


@remembered
def weight_buckets(program: Program, *, moved: bool) -> tuple[tuple[str, ...], ...]:
    """The parameters that ops read, and copies of them in other dtypes, grouped into buckets in the order of first use.

    `moved` if the weights themselves are communicated, not only their gradients.
    """
    cast, sums = copies(program), reduce_dtypes(program)
    weights = {name: program.values[name] for name in (*(p.value.name for p in program.parameters), *cast)}
    containers = _containers(program) if moved else frozenset()
    seen: set[str] = set()
    found: list[list[str]] = []
    for block, ops in itertools.groupby(program.ops, lambda op: _block(op.name, containers)):
        read = dict.fromkeys(name for op in ops for name in op.operands if name in weights and name not in seen)
        seen |= read.keys()
        alike: dict[object, list[Value]] = defaultdict(list)
        for name in read:
            value = weights[name]
            alike[value.dtype, value.requires_grad, sums.get(name), name in cast].append(value)
        for values in alike.values():
            found += [[value.name for value in part] for part in ([values] if block else _filled(values))]
    return tuple(map(tuple, found))


def _containers(program: Program) -> frozenset[str]:
    """The containers, each with its last dot, of which two children have the same weights."""
    children: dict[tuple[str, str], list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for parameter in program.parameters:
        for container, index, rest in _indices(parameter.value.name):
            children[container, index].append((rest, parameter.value.shape))
    kinds = Counter((container, tuple(weights)) for (container, _), weights in children.items())
    return frozenset(container for (container, _), count in kinds.items() if count > 1)


def _block(name: str, containers: frozenset[str]) -> str:
    """The outermost child of one of these containers in which an op stands; empty if there is none."""
    return next((container + index for container, index, _ in _indices(name) if container in containers), "")


def _indices(name: str) -> Iterator[tuple[str, str, str]]:
    """Every index in a name, outermost first: what stands before it, the index, and what follows."""
    before = ""
    while match := INDEX.match(name):
        container, index, name = match.groups()
        yield before + container, index, name
        before, name = f"{before}{container}{index}.", name.removeprefix(".")


def _filled(values: list[Value]) -> Iterator[list[Value]]:
    """The values in order, cut where a bucket is full."""
    held: list[Value] = []
    for value in values:
        sizes = [each.bytes for each in (*held, value)]
        if held and sum(sizes) > max(LIMIT, *sizes) * (1 + SPARE):
            yield held
            held = []
        held.append(value)
    if held:
        yield held

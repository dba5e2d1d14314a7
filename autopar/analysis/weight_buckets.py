"""Weight buckets: which weights share one collective, decided before layouts.

    h.0.ln.weight  h.0.ln.bias  h.0.fc.weight  h.0.fc.bias      one bucket
    h.1.ln.weight  h.1.ln.bias  h.1.fc.weight  h.1.fc.bias      one bucket
    ln.weight  ln.bias  head.weight                             one bucket

The weights of a block form one bucket, whatever their size: they are gathered while the block before it computes. In addition
to the modules that a model repeats (`block_names`), blocks here are the children of lists in which two have weights of equal
names and shapes, however few products they have and in whatever order they run. Outside of blocks, and if only gradients are
communicated, weights are taken in the order of first use until a bucket is full: it holds `LIMIT` bytes, or one larger weight,
plus a little more for the biases beside it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

from autopar.analysis.block_names import block_names, children, weights_of_children
from autopar.analysis.weights import copies, reduce_dtypes
from autopar.ir.device import Bytes
from autopar.ir.program import Program, Value, remembered

LIMIT: Bytes = 25 * 2**20  # bytes of whole weights: the bucket size of torch's DistributedDataParallel (bucket_cap_mb)
SPARE = 1 / 64  # of a full bucket, extra room for biases: alone each would cost a latency


@remembered
def weight_buckets(program: Program, *, moved: bool) -> tuple[tuple[str, ...], ...]:
    """The parameters that ops read, and copies of them in other dtypes, grouped into buckets in the order of first use.

    `moved` says whether the weights themselves are communicated, not only their gradients.
    """
    cast, sums = copies(program), reduce_dtypes(program)
    weights = {name: program.values[name] for name in (*(p.value.name for p in program.parameters), *cast)}
    block_of = _blocks(program) if moved else lambda name: ""
    seen: set[str] = set()
    found: list[list[str]] = []
    for block, ops in itertools.groupby(program.ops, lambda op: block_of(op.name)):
        read = dict.fromkeys(name for op in ops for name in op.operands if name in weights and name not in seen)
        seen |= read.keys()
        alike: dict[object, list[Value]] = defaultdict(list)
        for name in read:
            value = weights[name]
            alike[value.dtype, value.requires_grad, sums.get(name), name in cast].append(value)
        for values in alike.values():
            found += [[value.name for value in part] for part in ([values] if block else _filled(values))]
    return tuple(map(tuple, found))


def _blocks(program: Program) -> Callable[[str], str]:
    """The block of an op, by the op's name; empty if there is none."""
    names, lists = block_names(program), set[str]()
    for container, kinds in weights_of_children(program).items():
        if len(set(kinds.values())) < len(kinds):
            lists.add(container)

    def block_of(name: str) -> str:
        listed = (child.name for child in children(name) if child.in_list and child.container in lists)
        return names.repeated(name) or next(listed, "")

    return block_of


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

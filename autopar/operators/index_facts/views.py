"""Facts about views: the operand's coordinates in terms of the result's."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.program import Ref
from autopar.ir.shape_inference import broadcast
from autopar.operators.index_facts import affine
from autopar.operators.index_facts.affine import Affine, Fact
from autopar.operators.index_facts.call import IndexCall


def _placed(call: IndexCall, places: Sequence[Affine]) -> Fact | None:
    fact = call.fact()
    return None if fact is None else affine.moved(fact, places, call.shape)


def expand(call: IndexCall) -> Fact | None:
    return call.wide(call.named["self"])


def regroup(call: IndexCall) -> Fact | None:
    """A reshape that only adds or removes dims of size 1, or a reshape of a constant."""
    old, new = call.size(), call.shape
    targets = [d for d, size in enumerate(new) if size > 1]
    rank, fact = len(new), call.fact()
    if [size for size in old if size > 1] != [new[d] for d in targets]:
        same = isinstance(fact, bool) or (isinstance(fact, Affine) and fact.constant)
        return None if not same else _placed(call, [affine.constant(0, rank)] * len(old))
    remaining = iter(targets)
    return _placed(call, [affine.coordinate(next(remaining), rank) if size > 1 else affine.constant(0, rank) for size in old])


def transpose(call: IndexCall) -> Fact | None:
    rank = len(call.shape)
    order = list(range(rank))
    if "dim0" in call.named:
        a, b = call.dim("dim0"), call.dim("dim1")
    else:
        a, b = 0, rank - 1
    order[a], order[b] = order[b], order[a]
    return _placed(call, [affine.coordinate(d, rank) for d in order])


def permute(call: IndexCall) -> Fact | None:
    dims, rank = call.named["dims"], len(call.shape)
    assert isinstance(dims, tuple)
    order = [dim % rank for dim in dims if isinstance(dim, int)]
    return _placed(call, [affine.coordinate(order.index(d), rank) for d in range(rank)])


def cut(call: IndexCall) -> Fact | None:
    dim, rank, step = call.dim(), len(call.shape), call.named["step"]
    assert isinstance(step, int)
    start, _, _ = slice(call.wholenumber("start"), None).indices(call.size()[dim])
    return _placed(call, [affine.coordinate(d, rank, *((step, start) if d == dim else (1, 0))) for d in range(rank)])


def select(call: IndexCall) -> Fact | None:
    size, rank = call.size(), len(call.shape)
    dim, index = call.dim(rank=len(size)), call.named["index"]
    assert isinstance(index, int)
    places = [affine.coordinate(d - (d > dim), rank) for d in range(len(size))]
    places[dim] = affine.constant(index % size[dim], rank)
    return _placed(call, places)


def index(call: IndexCall) -> Fact | None:
    """x[i, j, ...] with adjacent affine indices that stay within x."""
    indices, size, rank = call.named["indices"], call.size(), len(call.shape)
    assert isinstance(indices, tuple)
    used = [d for d, index in enumerate(indices) if index is not None]
    if used != list(range(used[0], used[0] + len(used))):
        return None
    shapes = [call.values[index.name].shape for index in indices if isinstance(index, Ref)]
    block = len(broadcast(*shapes))
    places = []
    for dim in range(len(size)):
        index = indices[dim] if dim < len(indices) else None
        if index is None:
            places.append(affine.coordinate(dim if dim < used[0] else dim - len(used) + block, rank))
            continue
        assert isinstance(index, Ref)
        fact, own = call.known.get(index.name), call.values[index.name].shape
        if not isinstance(fact, Affine) or affine.bounds(fact, own)[0] < 0 or affine.bounds(fact, own)[1] >= size[dim]:
            return None
        spread = [affine.coordinate(used[0] + block - len(own) + d, rank, step=1 if n > 1 else 0) for d, n in enumerate(own)]
        there = affine.moved(fact, spread, call.shape)
        assert isinstance(there, Affine)
        places.append(there)
    return _placed(call, places)

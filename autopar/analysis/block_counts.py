"""Block counts: into how many equal blocks a dim may be divided, each split separately, as a fused projection needs.

c_attn  (768, 2304) -> split in 3 -> (768, 768) x 3          dim 1 of c_attn: 1 block, or 3
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.layout import Layout
from autopar.ir.program import Op, Program
from autopar.operators import OpSharding

Blocks = tuple[tuple[int, ...], ...]  # per dim: how many blocks it may be cut into before each is split (1 among them)


def block_counts(
    program: Program,
    fits: Mapping[str, OpSharding | None],
    alike: Sequence[Sequence[str]] = (),
    arriving: Mapping[str, Blocks] | None = None,
) -> dict[str, Blocks]:
    """The block counts of every dim of every value: 1, and those that a split, chunk or merge of dims needs, or that are
    `arriving`.

    They are propagated along factors to all values that have them, and within each group of `alike`: values of one shape that
    share a decision.
    """
    known: dict[str, list[set[int]]] = {name: [{1} for _ in value.shape] for name, value in program.values.items()}
    for name, dims in (arriving or {}).items():
        for have, counts in zip(known[name], dims, strict=True):
            have.update(counts)
    for op in program.ops:
        fitted = fits[op.name]
        for side, position, dim, factor in fitted.asks if fitted else ():
            name = op.operands[position] if side == "operand" else op.results[position].name
            dims = (fitted.operands if side == "operand" else fitted.results)[position]  # type: ignore[union-attr]
            known[name][dim].add(left_blocks(fitted, dims[dim], factor))  # type: ignore[arg-type]
    shared = [found for op in program.ops if (found := _shared_factors(op, fits[op.name], known))]
    changed = True
    while changed:
        changed = sum(map(_spread, (*shared, *reversed(shared)))) > 0
        changed |= sum(_share([known[name] for name in names]) for names in alike) > 0
    return {name: tuple(tuple(sorted(k)) for k in dims) for name, dims in known.items()}


def blocks_of(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> Blocks:
    """The block counts that a layout needs: a digit that is nested in no other one begins a block.

    >>> from autopar.ir.layout import split
    >>> blocks_of((split(0, 1), split(0, 2)), (16, 4), (2, 2))
    ((1, 4), (1,))
    """
    found: list[set[int]] = [{1} for _ in shape]
    edge: dict[int, int] = {}
    owned = ((state, size) for state, size in zip(layout, sizes, strict=True) if state.kind == "S")
    for state, size in sorted(owned, key=lambda one: -one[0].stride):
        if state.stride * size != edge.get(state.dim):
            found[state.dim].add(shape[state.dim] // (state.stride * size))
        edge[state.dim] = state.stride
    return tuple(tuple(sorted(counts)) for counts in found)


SharedFactor = tuple[int, list[tuple[set[int], int]]]  # its size, and of each dim the counts and the blocks left of it


def _shared_factors(op: Op, fitted: OpSharding | None, known: Mapping[str, Sequence[set[int]]]) -> list[SharedFactor]:
    """The factors of an op that several dims of its operands and results have, with the counts known of these dims."""
    if fitted is None:
        return []
    names = (*op.operands, *(r.name for r in op.results))
    places: dict[int, list[tuple[set[int], int]]] = {}
    for name, dims in zip(names, (*fitted.operands, *fitted.results), strict=True):
        for dim, parts in enumerate(dims):
            for f in parts:
                if not fitted.factors[f].whole:
                    places.setdefault(f, []).append((known[name][dim], left_blocks(fitted, parts, f)))
    return [(fitted.factors[f].size, spots) for f, spots in places.items()]


def _spread(factors: Sequence[SharedFactor]) -> bool:
    """Propagate block counts between dims of an op with a common factor; returns whether any was added."""
    changed = False
    for size, spots in factors:
        counts = {
            k // left for have, left in spots for k in have if k % left == 0 and size % (k // left) == 0 and k // left < size
        }
        for have, left in spots:
            fresh = {count * left for count in counts if count > 1 or left == 1} - have
            if fresh:
                have |= fresh
                changed = True
    return changed


def _share(known: Sequence[list[set[int]]]) -> bool:
    """Give values each other's block counts; returns whether any was added."""
    changed = False
    for dim in zip(*known, strict=True):
        every = set().union(*dim)
        for counts in dim:
            changed |= counts != every
            counts |= every
    return changed


def left_blocks(fitted: OpSharding, parts: tuple[int, ...], factor: int) -> int:
    """The number of blocks into which the factors left of this one cut their dim."""
    left = 1
    for other in parts[: parts.index(factor)]:
        left *= fitted.factors[other].size
    return left

"""Recompute policies: by name, which activations the backward recomputes, overriding the integer program's choice.

    auto        what the integer program chooses, within the budget
    none        nothing
    blocks      everything in a repeated block but its inputs: `torch.utils.checkpoint` around each block, with early stop: only
                what the backward needs
    selective   everything in a block except the results of products with a weight, of fused attention, and of collectives that
                reduce or exchange

`selective` is torchtitan's selective activation checkpointing (its list of ops to save has `aten.mm`, the kernels of
`scaled_dot_product_attention`, `reduce_scatter_tensor`, `all_to_all_single`), with every product kept instead of every second
one. The scores, softmax, dropout and context of unfused attention are recomputed: V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, section 5. All-gathers are repeated in both (section 4.2.2).

The strategy decides on gathers and casts of weights. An op that writes a buffer (batch norm in training) is never recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.analysis.analysis import Analysis
from autopar.analysis.block_names import BLOCK
from autopar.analysis.regions import inner
from autopar.analysis.repeated_blocks import blocks
from autopar.analysis.saved_tensors import fused_attention
from autopar.errors import ConstraintError
from autopar.ir.conversion import Conversion
from autopar.ir.program import Op, Program
from autopar.operators import row_of, view_of
from autopar.operators.facts import OpKind

AUTO, NONE, BLOCKS, SELECTIVE = POLICIES = ("auto", "none", "blocks", "selective")
ADDING = ("all_reduce", "reduce_scatter", "all_to_all")  # collectives whose results `selective` keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """The values to recompute, whatever the cost; `free` if the integer program chooses instead.

    Attributes:
        ops: ops that are recomputed if the backward needs them.
        asked: the ops that it needs under all layouts.
        uses: (op, position) of the operands that the backward needs, for ops that save them or are recomputed.
        views: ops whose results are views of recomputed values.
        inside: values whose conversions are repeated, except the primitives in `kept`.
        read: values whose all-gathers are repeated.
    """

    free: bool = False
    ops: frozenset[str] = frozenset()
    asked: frozenset[str] = frozenset()
    uses: frozenset[tuple[str, int]] = frozenset()
    views: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()

    def repeats(self, value: str, primitive: str) -> bool:
        """Whether a conversion of a value, by its primitive in the forward, is repeated in the backward."""
        if value in self.inside:
            return primitive not in (*self.kept, "identity")
        return value in self.read and primitive == "all_gather"

    def steps(self, routes: Mapping[str, tuple[Conversion, ...]]) -> Iterator[tuple[str, Conversion]]:
        """The repeated conversions on some routes."""
        for name, route in routes.items():
            yield from ((name, step) for step in route if self.repeats(name, step.primitives[0]))


FREE = RecomputePolicy(free=True)


def check_policy(name: object) -> None:
    """Raise ConstraintError for an unknown policy name."""
    if name not in POLICIES:
        raise ConstraintError(f"no recomputation is called {name!r}", fix=f"one of {', '.join(POLICIES)}")


def check_blocks(program: Program, name: str) -> None:
    """Raise ConstraintError if a policy is about repeated blocks, and a whole model has none."""
    if name in (BLOCKS, SELECTIVE) and not blocks(program):
        raise ConstraintError(
            f"recompute={name!r} recomputes repeated blocks, and the model has none",
            block=BLOCK,
            fix="recompute='auto'",
        )


def policy_of(analysis: Analysis, name: str) -> RecomputePolicy:
    """The policy of this name. Raises ConstraintError for an unknown name, or a model without blocks; a stage may have none."""
    check_policy(name)
    program = analysis.program
    if analysis.step.stage is None:
        check_blocks(program, name)
    if name in (AUTO, NONE):
        return FREE if name == AUTO else RecomputePolicy()
    block = {op.name: block for block, ops in blocks(program).items() for op in ops}
    within = inner(program, [block.get(op.name, "") for op in program.ops]) & block.keys()
    able = {name for name in analysis.recomputable & within if not analysis.weights.issuperset(_results(program.op[name]))}
    ops = frozenset(able if name == BLOCKS else (op for op in able if not _dear(program.op[op], analysis)))
    origin = _origins(program)
    views = frozenset(op for op in within - analysis.recomputable if _is_view(program.op[op], program) and origin[op] in ops)
    asked, uses = _asked(analysis, ops)
    made = (result for op in ops | views for result in program.op[op].results)
    inside = frozenset(value.name for value in made if value.requires_grad) - analysis.weights
    read = frozenset(operand for op in block for operand in program.op[op].operands if program.values[operand].requires_grad)
    return RecomputePolicy(
        ops=ops, asked=asked, uses=uses, views=views, inside=inside, read=read - inside - analysis.weights,
        kept=() if name == BLOCKS else ADDING,
    )  # fmt: skip


def _results(op: Op) -> Iterator[str]:
    return (result.name for result in op.results)


def _is_view(op: Op, program: Program) -> bool:
    return view_of(op, program.values)


def _dear(op: Op, analysis: Analysis) -> bool:
    """Whether `selective` keeps an op's results: a product with a weight, fused attention, or a recurrent network."""
    row = row_of(op)
    product = row.contracts and not analysis.weights.isdisjoint(op.operands)
    fused = fused_attention(op, analysis.program.values, cpu=analysis.cpu)
    return product or fused or row.kind is OpKind.RECURRENT


def _origins(program: Program) -> dict[str, str]:
    """For each op the one whose results its own results view; itself if it is not a view."""
    found: dict[str, str] = {}
    for op in program.ops:
        source = program.producer.get(op.operands[0]) if op.operands and _is_view(op, program) else None
        found[op.name] = op.name if source is None else found[source.name]
    return found


def _asked(analysis: Analysis, ops: frozenset[str]) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
    """The recomputed ops that the backward needs, and the operands that it needs."""
    wanted: set[str] = set()
    asked: set[str] = set()
    uses: set[tuple[str, int]] = set()
    for op in reversed(analysis.program.ops):
        saved = analysis.saved.get(analysis.classes.of[op.name])
        if saved is not None and not analysis.backward.isdisjoint(_results(op)):
            wanted.update(op.results[place].name for place in saved.results)
            positions = set(saved.operands)
        else:
            saved, positions = None, set()
        if not wanted.isdisjoint(_results(op)) or (saved is not None and saved.internal_bytes):
            if op.name in ops:
                asked.add(op.name)
                positions |= set(range(len(op.operands)))
            elif _is_view(op, analysis.program) and not wanted.isdisjoint(_results(op)):
                positions.add(0)
        uses.update((op.name, position) for position in positions)
        wanted.update(op.operands[position] for position in positions)
    return frozenset(asked), frozenset(uses)


__all__ = ["AUTO", "FREE", "POLICIES", "RecomputePolicy", "check_blocks", "check_policy", "policy_of"]

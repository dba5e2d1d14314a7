"""What is known of a program on a mesh before any choice is made."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.analysis.block_counts import Blocks, block_counts
from autopar.analysis.fits import fit_of
from autopar.analysis.recomputability import may_run
from autopar.analysis.repeated_blocks import Classes, fold
from autopar.analysis.saved_tensors import SavedTensors, saved
from autopar.analysis.weight_buckets import weight_buckets
from autopar.analysis.weights import copies, summed, views, weights
from autopar.errors import RuleError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program, writes
from autopar.ir.schema import bound
from autopar.operators import OpSharding


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """What is known of a program on a mesh before any choice: rules, block counts, repeated blocks, what autograd saves."""

    program: Program
    sizes: tuple[int, ...]
    classes: Classes
    fits: Mapping[str, OpSharding | None]
    blocks: Mapping[str, Blocks]
    cpu: bool  # whether the device is one: some operators save other things there

    @functools.cached_property
    def saved(self) -> dict[str, SavedTensors]:
        """What autograd saves for each op class."""
        ops = representatives(self.program, self.classes).items()
        return {name: saved(op, self.program.values, cpu=self.cpu) for name, op in ops if op.requires_grad}

    @functools.cached_property
    def may_run(self) -> frozenset[str]:
        """The ops that may run again."""
        return may_run(self.program, self.fits)

    @functools.cached_property
    def readers(self) -> dict[str, list[Op]]:
        """The ops that read each value."""
        found: dict[str, list[Op]] = {name: [] for name in self.program.values}
        for op in self.program.ops:
            for operand in dict.fromkeys(op.operands):
                found[operand].append(op)
        return found

    @functools.cached_property
    def weights(self) -> frozenset[str]:
        """The parameters, their copies and views: once gathered and used they are dropped, and gathered again where the
        backward needs them."""
        return weights(self.program)

    @functools.cached_property
    def copies(self) -> dict[str, str]:
        """The parameter of each copy of one in another dtype."""
        return copies(self.program)

    @functools.cached_property
    def bucketed(self) -> frozenset[str]:
        """The weights that travel with others."""
        return frozenset(itertools.chain(*weight_buckets(self.program, moved=True)))

    @functools.cached_property
    def summed(self) -> dict[str, torch.dtype]:
        """The dtype in which gradients of weights are added up, where it is not their own."""
        return summed(self.program)

    @functools.cached_property
    def casts(self) -> frozenset[str]:
        """The ops that cast a parameter."""
        return frozenset(self.program.producer[copy].name for copy in self.copies)

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """The buffers that ops change in place."""
        return frozenset(name for op in self.program.ops for name in writes(op))

    @functools.cached_property
    def backward(self) -> frozenset[str]:
        """The values that get a gradient in a step: those that a differentiable op reads, and what the user differentiates."""
        program = self.program
        outputs = {o.value for o in program.outputs}
        scalars = {name for name in outputs if not program.values[name].shape and program.values[name].requires_grad}
        found = {name for name in scalars or outputs if program.values[name].requires_grad}
        for op in reversed(program.ops):
            if any(result.name in found for result in op.results):
                found |= {name for name in op.operands if program.values[name].requires_grad}
        return frozenset(found)


def analyse(program: Program, mesh: Mesh, *, apart: Callable[[str], str] = lambda value: "", repeated: bool = True) -> Analysis:
    """Fit rules, spread block counts, fold repeated blocks (`fold` says what `apart` and `repeated` mean).

    Raises RuleError for an op that only one device can run.
    """
    if mesh.size > 1:
        _dense(program)
    classes = fold(program, apart=apart, repeated=repeated)
    by_class = {name: fit_of(program, name) for name in representatives(program, classes)}
    fits = {op.name: by_class[classes.of[op.name]] for op in program.ops}
    return Analysis(
        program=program,
        sizes=mesh.sizes,
        classes=classes,
        fits=fits,
        blocks=block_counts(program, fits),
        cpu=mesh.device is not None and mesh.device.cpu,
    )


def _dense(program: Program) -> None:
    """Raise RuleError for an op whose gradient is a sparse tensor: neither collectives nor DTensors know these."""
    for op in program.ops:
        if op.requires_grad and "sparse" in (named := bound(op)) and named["sparse"] is True:
            raise RuleError(
                f"the gradient of {op.operands[0]} is sparse, which cannot be sent between devices",
                at=op.source,
                fix="sparse=False, or a mesh of one device",
            )


def representatives(program: Program, classes: Classes) -> dict[str, Op]:
    """The first op of each class."""
    return {op.name: op for op in program.ops if classes.of[op.name] == op.name}


def has_gradient(analysis: Analysis, value: str, consumer: str) -> bool:
    """Whether a gradient comes back to a value from an op class, or from an output."""
    if value not in analysis.backward:
        return False
    op = analysis.program.op.get(consumer)
    return op is None or any(r.name in analysis.backward for r in op.results)


def saves(analysis: Analysis, consumer: str, position: int) -> bool:
    """Whether the backward of an op class needs this operand, a weight, again: of its own, or for what reads it as a view."""
    if consumer not in analysis.program.op:
        return False
    if consumer in analysis.saved and position in analysis.saved[consumer].operands:
        return True
    op, of = analysis.program.op[consumer], analysis.classes.of
    return position == 0 and any(
        saves(analysis, of[reader.name], place)
        for result in (op.results if views(op) else ())
        if result.name in analysis.weights
        for reader in analysis.readers[result.name]
        for place, name in enumerate(reader.operands)
        if name == result.name
    )

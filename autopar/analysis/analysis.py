"""Facts about a program on a mesh that hold for every plan."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

import torch

from autopar.analysis.block_counts import Blocks, block_counts, blocks_of
from autopar.analysis.fits import fit_of
from autopar.analysis.fusion import fused
from autopar.analysis.recomputability import recomputable
from autopar.analysis.repeated_blocks import Classes, fold
from autopar.analysis.saved_tensors import SavedTensors, saved, workspace
from autopar.analysis.summed_gradients import with_sums
from autopar.analysis.weight_buckets import weight_buckets
from autopar.analysis.weights import copies, reduce_dtypes, views, weights
from autopar.errors import RuleError
from autopar.ir.layout import Layout, State
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Program
from autopar.ir.schema import bound
from autopar.ir.training_step import TrainingStep
from autopar.operators import OpSharding, writes


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """Facts about a program on a mesh that hold for every plan: rules, block counts, repeated blocks, saved tensors."""

    step: TrainingStep
    sizes: tuple[int, ...]
    classes: Classes
    fits: Mapping[str, OpSharding | None]
    blocks: Mapping[str, Blocks]
    cpu: bool  # whether the device is a CPU, where some operators save other tensors
    places: tuple[State, ...] = ()  # where weights may be stored, on the last axis, beside the device

    @property
    def program(self) -> Program:
        """The program that a step runs, on one micro-batch."""
        return self.step.program

    @functools.cached_property
    def saved(self) -> dict[str, SavedTensors]:
        """What autograd saves for each op class; without gradients what the op needs while it runs."""
        ops = representatives(self.program, self.classes).items()
        if not any(op.requires_grad for op in self.program.ops):
            return {name: workspace(op, self.program.values, cpu=self.cpu) for name, op in ops}
        return {name: saved(op, self.program.values, cpu=self.cpu) for name, op in ops if op.requires_grad}

    @functools.cached_property
    def recomputable(self) -> frozenset[str]:
        """The ops that may be recomputed in the backward."""
        return recomputable(self.program)

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
        """The parameters, their copies and views: gathered ones are freed after use, and gathered again in the backward."""
        return weights(self.program)

    @functools.cached_property
    def copies(self) -> dict[str, str]:
        """The parameter of each copy of a parameter in another dtype, by the name of the copy."""
        return copies(self.program)

    @functools.cached_property
    def bucketed(self) -> frozenset[str]:
        """The weights that belong to a bucket."""
        return frozenset(itertools.chain(*weight_buckets(self.program, moved=True)))

    @functools.cached_property
    def stored_anywhere(self) -> frozenset[str]:
        """The parameters that may be stored on the host or the disk: those that ops read, and none writes."""
        names = frozenset(p.value.name for p in self.program.parameters)
        return (names & self.bucketed) - self.written if self.places else frozenset()

    @functools.cached_property
    def reduce_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which the gradients of a weight are reduced, for weights where it is not their own."""
        return reduce_dtypes(self.program)

    @functools.cached_property
    def casts(self) -> frozenset[str]:
        """The ops that cast a parameter."""
        return self.casts_to(self.copies.keys())

    def casts_to(self, weights: Set[str]) -> frozenset[str]:
        """The ops that cast a parameter to one of these."""
        return frozenset(self.program.producer[copy].name for copy in weights & self.copies.keys())

    @functools.cached_property
    def written(self) -> frozenset[str]:
        """The buffers that ops change in place."""
        return frozenset(name for op in self.program.ops for name in writes(op))

    @functools.cached_property
    def backward(self) -> frozenset[str]:
        """The values that receive a gradient in a step: from scalar outputs, or from all if none is a scalar or all are
        sent.
        """
        program, sends = self.program, self.step.sends
        outputs = {o.value for o in program.outputs}
        ends = set[str]() if sends else outputs
        scalars = {name for name in ends if not program.values[name].shape and program.values[name].requires_grad}
        found = {name for name in scalars or outputs if program.values[name].requires_grad}
        for op in reversed(program.ops):
            if any(result.name in found for result in op.results):
                found |= {name for name in op.operands if program.values[name].requires_grad}
        return frozenset(found)


def analyse(
    step: TrainingStep,
    mesh: Mesh,
    *,
    apart: Callable[[str], str] = lambda value: "",
    repeated: bool = True,
    settled: Mapping[str, Layout] | None = None,
) -> Analysis:
    """Fit rules, propagate block counts, fold repeated blocks; see `fold` for `apart` and `repeated`.

    `settled` has layouts of given values that were chosen elsewhere, such as those that a stage receives.

    Raises RuleError on a mesh of several devices for an op with a sparse gradient, which cannot be reduced.
    """
    compiled = mesh.device is not None and mesh.device.compiled
    step = replace(step, program=fused(step.program) if compiled else with_sums(step.program, sends=step.sends))
    program = step.program
    if mesh.size > 1:
        _dense(program)
    classes = fold(program, apart=apart, repeated=repeated)
    chosen = {**step.received, **(settled or {})}
    arriving = {name: blocks_of(layout, program.values[name].shape, mesh.sizes) for name, layout in chosen.items()}
    by_class = {name: fit_of(program, name) for name in representatives(program, classes)}
    fits = {op.name: by_class[classes.of[op.name]] for op in program.ops}
    return Analysis(
        step=step,
        sizes=mesh.sizes,
        classes=classes,
        fits=fits,
        blocks=block_counts(program, fits, list(_alike(program, classes)), arriving),
        cpu=mesh.device is not None and mesh.device.cpu,
        places=tuple(map(State, mesh.places)),
    )


def _alike(program: Program, classes: Classes) -> Iterator[tuple[str, ...]]:
    """The values at each place of the members of every class, which have the layouts of its one decision."""
    for members in classes.members.values():
        if len(members) > 1:
            ends = [_ends(program.op[name]) if name in program.op else (name,) for name in members]
            yield from (names for names in zip(*ends, strict=True) if len(set(names)) > 1 and names[0] in program.values)


def _ends(op: Op) -> tuple[str, ...]:
    return (*op.operands, *(result.name for result in op.results))


def _dense(program: Program) -> None:
    """Raise RuleError for an op whose gradient is a sparse tensor, which collectives and DTensors do not support."""
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
    """Whether an op class, or an output, passes a gradient to this value."""
    if value not in analysis.backward:
        return False
    op = analysis.program.op.get(consumer)
    return op is None or any(r.name in analysis.backward for r in op.results)


def saves(analysis: Analysis, consumer: str, position: int) -> bool:
    """Whether autograd saves this operand, a weight, for an op class, or for an op that reads a view of it."""
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

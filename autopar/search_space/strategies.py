"""Named strategies: what they ask of stored parameters, inputs and results. The solver fills the rest.

ddp        parameters I, inputs S(0)
zero1      every parameter S on its first dim that divides, gathered at the top, once for all micro-batches; inputs S(0). All
           axes are gathered at once, where a group of all their devices is known, else the outermost first: what crosses the
           network is a shard, not a whole weight
zero2      the same, gathered where it is first used in each
fsdp       the same, gathered once more for the backward, but for those that it begins with (`analysis.dropped_weights`)
hsdp       fsdp on all axes but the first, over which parameters are I
megatron   on the last axis no parameter is gathered, those of matrix products are split, and inputs are I; data parallel
           on the others
fsdp+tp    megatron on the last axis with the sequence split between blocks, fsdp on the others; hsdp+tp likewise
replicate  everything I
zero1+2d   the tensor modes of `schemes`, alone or with a scheme for the data axes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.analysis.weights import copies
from autopar.errors import ConstraintError
from autopar.ir.conversion import WAYS
from autopar.ir.layout import I, Layout, split
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Value
from autopar.ir.training_step import TrainingStep
from autopar.operators import OpSharding, row_of
from autopar.search_space.between_blocks import split_between_blocks
from autopar.search_space.constraints import LayoutPattern, constrained
from autopar.search_space.schemes import STRATEGIES, Scheme, scheme_of

OTHER_NAMES = {"zero3": "fsdp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyConstraints:
    """The constraints of a strategy and of the user.

    `patterns` limits the layouts in which values are produced or stored, `input_layouts` gives inputs that are sliced on
    arrival. Weights are not gathered on `no_gather_axes`, and used unsplit on `whole_axes`. Other values are neither gathered
    nor exchanged on `data_axes` (which makes data parallelism), except those in `may_gather`: outputs, what a stage receives
    split otherwise than by samples, and what an op needs whole; those `scattered` are not all-reduced on `no_gather_axes`. On
    `split_axes` weights are stored split and ops do a part of the work, if they can, on the first of them before the others.
    `invariant`: everything is I. Gathered weights are dropped after their use and gathered again for the backward
    (`reshard_after_forward`), or kept until then (`keep_gathered`); else the solver decides. They are gathered `once` for all
    micro-batches, or in each.
    """

    patterns: Mapping[str, LayoutPattern] = field(default_factory=dict)
    input_layouts: Mapping[str, Layout] = field(default_factory=dict)
    weights: frozenset[str] = frozenset()
    may_gather: frozenset[str] = frozenset()
    no_gather_axes: frozenset[int] = frozenset()
    data_axes: frozenset[int] = frozenset()
    whole_axes: frozenset[int] = frozenset()
    split_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scattered: frozenset[str] = frozenset()
    invariant: bool = False
    reshard_after_forward: bool = False
    keep_gathered: bool = False
    once: bool = False

    def with_memories(self, constrained: Mapping[str, LayoutPattern]) -> StrategyConstraints:
        """The constraints on a mesh with a memory axis: the weights of a strategy may be stored in any memory, unless the user
        has `constrained` them; axes that a constraint leaves free follow the strategy.
        """
        patterns = {name: (*pattern, None) for name, pattern in self.patterns.items()}
        for name, (*others, place) in constrained.items():
            free = name in patterns and all(state is None for state in others)
            patterns[name] = (*patterns[name][:-1], place) if free else (*others, place)
        inputs = {name: (*layout, I) for name, layout in self.input_layouts.items()}
        return replace(self, patterns=patterns, input_layouts=inputs)

    def allows_layout(self, name: str, layout: Layout) -> bool:
        """Whether a value may be produced or stored in this layout."""
        pattern = self.patterns.get(name)
        return pattern is None or all(want is None or want == got for want, got in zip(pattern, layout, strict=True))

    def allows_conversion(self, value: str, axis: int, source: str, target: str) -> bool:
        """Whether a value may be converted on an axis from one kind of state to another."""
        forward, backward = WAYS[source, target]
        if value in self.scattered and axis in self.no_gather_axes and "all_reduce" in (forward, backward):
            return False
        if value not in self.weights:
            return axis not in self.data_axes or value in self.may_gather or forward in ("identity", "slice", "all_reduce")
        if axis in self.whole_axes and target not in "IR":
            return False
        return axis not in self.no_gather_axes or forward in ("identity", "keep", "slice")


def constraints_of(
    step: TrainingStep, mesh: Mesh, strategy: str, constraints: Mapping[str, str], fits: Mapping[str, OpSharding | None]
) -> StrategyConstraints:
    """The constraints of a strategy, with the user's on top; `fits` holds the rule of every op.

    Raises ConstraintError for a strategy that does not exist or does not fit, for a constraint that matches nothing, and for
    two that contradict each other.
    """
    if mesh.has_memories:
        own = {glob: entries for glob, line in constraints.items() if (entries := _on_devices(line, mesh))}
        found = constraints_of(step, mesh.devices, strategy, own, fits)
        return found.with_memories(constrained(step, mesh, constraints))
    if not isinstance(strategy, str):
        raise ConstraintError(f"no strategy is called {strategy!r}", fix=f"one of {', '.join(STRATEGIES)}")
    strategy, program = OTHER_NAMES.get(strategy, strategy), step.program
    scheme = None if strategy in ("auto", "replicate") else scheme_of(strategy, mesh)
    patterns = constrained(step, mesh, constraints)
    sliced = {v.name: tuple(state or I for state in patterns[v.name]) for v in program.inputs if v.name in patterns}
    if strategy == "auto":
        return StrategyConstraints(patterns=patterns, input_layouts=sliced)
    if scheme is None:
        return StrategyConstraints(patterns=patterns, input_layouts=sliced, invariant=True)
    return _of_scheme(step, mesh, strategy, scheme, fits, patterns, sliced)


def _of_scheme(
    step: TrainingStep,
    mesh: Mesh,
    strategy: str,
    scheme: Scheme,
    fits: Mapping[str, OpSharding | None],
    patterns: Mapping[str, LayoutPattern],
    sliced: Mapping[str, Layout],
) -> StrategyConstraints:
    """The constraints of a scheme, with the user's `patterns` and `sliced` inputs on top."""
    count, program = len(mesh.sizes), step.program
    weights = {p.value.name: p.value for p in program.parameters if p.used}
    last = count - scheme.tensor
    data, shards, tensor = range(last), range(scheme.copies, last) if scheme.sharded else range(0), range(last, count)
    taken = _batch(step, mesh, strategy, data)
    samples = {*taken, *(value.name for value in program.inputs if _of_samples(step, value))}
    parts = [1] if scheme.open else [mesh.sizes[axis] for axis in tensor]
    products = _multiplied(program, weights, fits, parts) if scheme.tensor and not scheme.open else frozenset[str]()
    between, scattered = split_between_blocks(program, mesh, strategy, scheme) if scheme.between else ({}, frozenset[str]())
    if scheme.between and not products:
        raise ConstraintError(
            f"strategy {strategy!r} finds no matrix product that the {mesh.sizes[last]} devices of its last axis can split",
            mesh=mesh,
            fix="another size of the last axis, or a strategy without tensor parallelism",
        )
    split_axes = {name: (*(tensor if name in products else []), *(shards if scheme.tensor else [])) for name in weights}
    ends = frozenset() if step.sends else frozenset(output.value for output in program.outputs)
    split_axes |= {op.name: tuple(tensor) for op in program.ops if scattered.issuperset(result.name for result in op.results)}
    return StrategyConstraints(
        patterns={**_stored(step, mesh, scheme, weights, shards), **between, **patterns},
        input_layouts={**taken, **sliced},
        weights=frozenset((*weights, *copies(program))),
        may_gather=ends | _split_otherwise(step, data) | _wanted_whole(program, fits) | _compared(program, fits, samples),
        data_axes=frozenset(data),
        no_gather_axes=frozenset(() if scheme.open else tensor),
        whole_axes=frozenset(() if strategy == "megatron" else data),
        split_axes=split_axes,
        scattered=scattered,
        reshard_after_forward=scheme.reshard,
        keep_gathered=scheme.keep,
        once=scheme.once,
    )


def _stored(
    step: TrainingStep, mesh: Mesh, scheme: Scheme, weights: Mapping[str, Value], shards: range
) -> dict[str, LayoutPattern]:
    """How weights are stored: whole unless sharded. The solver decides which dims tensor parallelism splits."""
    if not scheme.tensor and not scheme.free:
        return {name: _first_dim(step.unpadded.get(name, value.shape), mesh, shards) for name, value in weights.items()}
    free = {*shards, *range(len(mesh.sizes) - scheme.tensor, len(mesh.sizes)), *(range(scheme.copies) if scheme.free else ())}
    return dict.fromkeys(weights, tuple(None if axis in free else I for axis in range(len(mesh.sizes))))


def _first_dim(shape: tuple[int, ...], mesh: Mesh, axes: range) -> Layout:
    """A shape split over some axes on its first dim that divides; whole if none does.

    Axes are in mesh order if one message goes over all of them. Else the first axis is innermost, since only the innermost can
    be gathered by itself: between nodes each device gathers one shard, and the axes inside a node complete it.
    """
    together = any(places == tuple(axes) for places, _ in mesh.flattened)
    parts = math.prod(mesh.sizes[axis] for axis in axes)
    for dim, size in enumerate(shape):
        if axes and size % parts == 0 and size:
            return _nested(dim, size, mesh, axes if together else reversed(axes))
    return (I,) * len(mesh.sizes)


def _nested(dim: int, size: int, mesh: Mesh, axes: Iterable[int]) -> Layout:
    """A dim of this size split over axes, outermost in the dim first."""
    states = [I] * len(mesh.sizes)
    for axis in axes:
        size //= mesh.sizes[axis]
        if mesh.sizes[axis] > 1:
            states[axis] = split(dim, size)
    return tuple(states)


def _batch(step: TrainingStep, mesh: Mesh, strategy: str, axes: range) -> dict[str, Layout]:
    """The inputs that have the batch as dim 0, split over these axes."""
    parts = 1
    for axis in axes:
        parts *= mesh.sizes[axis]
    if parts == 1:
        return {}
    inputs = [value for value in step.program.inputs if value.name not in step.received]
    first = inputs[0] if inputs else step.program.inputs[0]
    if not first.shape and not step.stage:
        raise ConstraintError(
            f"strategy {strategy!r} splits the batch, but {first.name} has no dim",
            fix="give the batch first, or strategy='auto'",
        )
    batch = step.stage.batch if step.stage else first.shape[0]
    if not batch or batch % parts:
        what, fewer = ("micro-batch", "fewer micro-batches, ") if step.loop else ("batch", "")
        whole = f"a global batch that is a multiple of {parts * step.microbatches}"
        multiple = f"micro-batches of a multiple of {parts} samples" if step.stage else whole  # a stage is priced with others
        raise ConstraintError(
            f"strategy {strategy!r} cannot split a {what} of {batch} over {parts} devices",
            mesh=mesh,
            fix=f"{fewer}{multiple}, or strategy='auto'",
        )
    return {value.name: _nested(0, batch, mesh, axes) for value in inputs if value.shape and value.shape[0] == batch}


def _of_samples(step: TrainingStep, value: Value) -> bool:
    """Whether a stage receives this value with the batch as dim 0."""
    return step.stage is not None and value.name in step.received and value.shape[:1] == (step.stage.batch,)


def _split_otherwise(step: TrainingStep, axes: range) -> frozenset[str]:
    """Values that a stage receives split other than by samples over one of these axes: the previous stage had them whole there,
    as after batch norm, and sent a part.
    """
    found = set[str]()
    for value in step.program.inputs:
        states = [step.received[value.name][axis] for axis in axes] if value.name in step.received else []
        if any(state != I and not (_of_samples(step, value) and state.kind == "S" and state.dim == 0) for state in states):
            found.add(value.name)
    return frozenset(found)


def _multiplied(
    program: Program, weights: Mapping[str, Value], fits: Mapping[str, OpSharding | None], parts: Sequence[int]
) -> frozenset[str]:
    """The matrices read only by matrix products that accept each of these splits (a grouped product may not)."""
    read: dict[str, list[bool]] = {name: [] for name, value in weights.items() if len(value.shape) > 1}
    of = copies(program)  # a copy is read for its parameter
    for op in program.ops:
        fitted = fits[op.name]
        for position, name in enumerate(of.get(operand, operand) for operand in op.operands):
            if name in read and op.results[0].name not in of:
                factors = [fitted.factors[f] for dim in fitted.operands[position] for f in dim] if fitted else []
                able = any(not factor.whole and not factor.size % max(parts) for factor in factors)
                read[name].append(able and row_of(op).contracts)
    return frozenset(name for name, able in read.items() if able and all(able))


def _wanted_whole(program: Program, fits: Mapping[str, OpSharding | None]) -> set[str]:
    """The values whose first dim some op cannot split: batch norm needs the whole batch, an op without a rule needs
    everything.
    """
    found = set()
    for op in program.ops:
        fitted = fits[op.name]
        for position, name in enumerate(op.operands):
            first = fitted.operands[position][:1] if fitted else ((),)
            if not fitted or any(fitted.factors[f].whole for f in (first[0] if first else ())[:1]):
                found.add(name)
    return found


def _compared(program: Program, fits: Mapping[str, OpSharding | None], taken: Iterable[str]) -> set[str]:
    """The values by which an op compares samples of the batch: samples occur along two factors, as in a contrastive loss, or
    along one that must be whole, or that lies inside of such a one, as where they are appended to those of a queue.
    """
    found: set[str] = set()
    along = dict.fromkeys(taken, 0)  # the dim of each value along which the samples lie
    for op in program.ops:
        fitted = fits[op.name]
        if fitted is None:
            continue
        met: dict[int, list[str]] = {}  # by factor, the outermost of its dim
        for name, dims in zip(op.operands, fitted.operands, strict=True):
            for factor in dims[along[name]][:1] if name in along else ():
                met.setdefault(factor, []).append(name)
        for factor, names in met.items():
            inside = any(factor in dim[1:] and fitted.factors[dim[0]].whole for dims in fitted.results for dim in dims)
            if len(met) > 1 or fitted.factors[factor].whole or inside:
                found.update(names)
        for result, dims in zip(op.results, fitted.results, strict=True):
            if samples := [dim for dim, factors in enumerate(dims) if met.keys() & set(factors)]:
                along[result.name] = samples[0]
    return found


def _on_devices(line: str, mesh: Mesh) -> str:
    """A constraint without its entry for the memory axis, if any; empty if nothing else is left."""
    entries = line.split(",") if isinstance(line, str) else []
    if len(entries) != len(mesh.sizes):
        return line
    return "" if {entry.strip() for entry in entries[:-1]} == {"*"} else ",".join(entries[:-1])

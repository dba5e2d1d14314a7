"""A plan's price and collectives, recomputed from its text alone: op by op, value by value, nothing folded."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autopar.analysis.saved_tensors import saved
from autopar.cost_models import optimizers
from autopar.cost_models.collectives import seconds as collective_seconds
from autopar.cost_models.compute import pricer
from autopar.formulation.prices import Prices
from autopar.formulation.step_time import StepEvent
from autopar.ir.conversion import COLLECTIVES, Conversion
from autopar.ir.layout import Layout, each_split, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import Op, Value, elements
from autopar.ir.training_step import TrainingStep
from autopar.operators import fit, view_of
from autopar.plan.assignment_text import resolve
from autopar.plan.plan import Plan
from autopar.runtime.collectives import split_position
from autopar.search_space.assignment import Assignment

Issued = tuple[tuple[str, ...], str, str, str, int]
BUCKET = 25 * 2**20  # bytes of whole weights that travel together
TOGETHER = {("forward", "all_gather"), ("recompute", "all_gather"), ("gradient", "all_reduce"), ("gradient", "reduce_scatter")}


def latencies(prices: Prices, events: Iterable[StepEvent]) -> float:
    """Seconds that the messages among these events would take if they were empty."""
    return sum(prices.latency(event.message.kind, event.message.axis) for event in events if event.message is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Seconds of one step by what they are spent on; `issued` lists (values, axis, kind, pass, bytes) of every collective.

    `copied` are the copies of weights and gradients to and from the buffers of gathers and reduce-scatters, `joined` those of
    gradients to the buffers of all-reduces, which micro-batches have added up.
    """

    ops: float
    optimizer: float
    inputs: float
    local: float
    copied: float
    joined: float
    collectives: float
    issued: tuple[Issued, ...]

    @property
    def total(self) -> float:
        return self.ops + self.optimizer + self.inputs + self.local + self.copied + self.joined + self.collectives


def bill(plan: Plan, step: TrainingStep, on: Mesh, optimizer: str = "adamw") -> Bill:
    """What a plan costs on a mesh with device and links."""
    return _Teller(plan, step, on).bill(optimizer)


Sends = list[tuple[str, int, bool]]  # kind, elements, whether in float32 at least
Shapes = Sequence[tuple[int, ...]]


def inside(form: str, operands: Shapes, ranks: int) -> tuple[Sends, Sends]:
    """What a distributed form sends in the forward and in the backward; the normalised dim is the last."""
    if form in ("vocab_parallel_embedding", "vocab_parallel_nll_loss", "query_parallel_attention", "grouped_query_attention"):
        return [], []
    if form == "vocab_parallel_cross_entropy":
        (count,) = operands[1]
        return [("all_reduce", count, True), ("all_reduce", 2 * count, True)], []
    if form == "ring_attention":
        both = math.prod(operands[1]) + math.prod(operands[2])
        held, gradients = ("all_to_all", both, False), ("all_to_all", both, True)
        return [held] * (ranks - 1), [held] * (ranks - 1) + [gradients] * ranks
    if form == "all_to_all_rows":
        picked = operands[1][0] // ranks * math.prod(operands[0][1:])
        return [("all_to_all", picked, False)], [("all_to_all", picked, False)]
    if form in ("sync_batch_norm", "sync_batch_norm_spatial"):
        channels = operands[0][1]
        return [("all_gather", 2 * channels * ranks, True)], [("all_reduce", 2 * channels, True)]
    rows = math.prod(operands[0][:-1])
    once: Sends = [("all_reduce", rows, True)]
    if form == "layer_norm":
        return [("all_gather", 2 * rows * ranks, True)], [("all_reduce", 2 * rows, True)]
    return {"rms_norm": once, "softmax": 2 * once, "log_softmax": 2 * once, "safe_softmax": 2 * once}[form], once


class _Teller:
    def __init__(self, plan: Plan, step: TrainingStep, on: Mesh) -> None:
        assert on.device is not None
        self.program, self.mesh, self.device = step.program, on, on.device
        self.fits = {op.name: fit(op, self.program.values) for op in self.program.ops}
        self.chosen: Assignment = resolve(plan, step, self.fits)
        self.differentiated = self._differentiated()
        self.reread = self._reread()
        self.buckets = {blocks: self._buckets(blocks=blocks) for blocks in (False, True)}

    def bill(self, optimizer: str) -> Bill:
        program, values = self.program, self.program.values
        sent: dict[object, list[tuple[str, Conversion]]] = defaultdict(list)
        local = copied = joined = 0.0
        for name in dict.fromkeys((*(n for op in program.ops for n in op.operands), *values)):  # in the order of first use
            for step, primitive, role in self._work(name):
                large, small = self._sides(values[name], step)
                apart = self._apart(values[name], step, primitive) * max(2 * large / self.device.streaming, self.device.launch)
                if (role, primitive) in TOGETHER and name in self.buckets[True]:
                    moved = {"all_gather": 2 * (small + large), "reduce_scatter": 2 * large}.get(primitive, 0)
                    copied += moved / self.device.streaming + apart
                    joined += 2 * large / self.device.streaming if primitive == "all_reduce" else 0.0
                else:
                    local += apart
                if primitive in COLLECTIVES:
                    sent[primitive, role, self._bundle(name, step, primitive, role)].append((name, step))
                elif primitive != "identity":
                    moved = 2 * small if primitive == "slice" else small + large
                    local += max(moved / self.device.streaming, self.device.launch)
        messages = [self._message(str(primitive), str(role), steps) for (primitive, role, _), steps in sent.items()]
        messages += itertools.chain(*map(self._inside, program.ops))
        trained = [p.value for p in program.parameters if p.value.requires_grad]
        stored = sum(self._bytes(value, self.chosen.given[value.name]) for value in trained)
        return Bill(
            ops=sum(map(self._op, program.ops)),
            optimizer=optimizers.step_seconds(stored, optimizers.optimizer(optimizer), self.device),
            inputs=sum(map(self._arrival, program.inputs)),
            local=local,
            copied=copied,
            joined=joined,
            collectives=sum(seconds for _, seconds in messages),
            issued=tuple(issued for issued, _ in messages),
        )

    def _message(self, primitive: str, role: str, steps: list[tuple[str, Conversion]]) -> tuple[Issued, float]:
        """A collective with what travels in it, and its seconds."""
        axes = steps[0][1].axes
        size = sum(self._sides(self.program.values[name], step)[0] for name, step in steps)
        names = tuple(name for name, _ in steps)
        link = self.mesh.links[axes[0]] if len(axes) == 1 else dict(self.mesh.flattened)[axes]
        seconds = collective_seconds(primitive, float(size), math.prod(self.mesh.sizes[axis] for axis in axes), link)
        return (
            names,
            "_".join(self.mesh.axes[axis] for axis in axes),
            primitive,
            "forward" if role == "forward" else "backward",
            size,
        ), seconds

    def _inside(self, op: Op) -> Iterator[tuple[Issued, float]]:
        """The collectives that an op sends itself."""
        chosen, fitted = self.chosen.ops[op.name], self.fits[op.name]
        values, sizes = self.program.values, self.mesh.sizes
        shapes = [local_shape(values[n].shape, x, sizes) for n, x in zip(op.operands, chosen.operands, strict=True)]
        for axis, (kind, number, _) in enumerate(chosen.forms):
            if kind == "D" and fitted:
                found = inside(fitted.distributed[number].name, shapes, sizes[axis])
                back = any(r.name in self.differentiated for r in op.results)
                for where, sends in (("forward", found[0]), *[("backward", found[1])] * back):
                    for collective, count, wide in sends:
                        itemsize = values[op.operands[0]].dtype.itemsize
                        size = count * (max(4, itemsize) if wide else itemsize)
                        seconds = collective_seconds(collective, float(size), sizes[axis], self.mesh.links[axis])
                        yield ((op.results[0].name,), self.mesh.axes[axis], collective, where, size), seconds

    def _bundle(self, name: str, step: Conversion, primitive: str, role: str) -> object:
        """What two steps have in common that travel in one message; a step that travels alone has it with none."""
        if name not in self.buckets[True] or (role, primitive) not in TOGETHER:
            return name, step
        into = {other.target: other for other in self.chosen.routes[name]}
        path = [step]
        while path[-1].source in into:
            path.append(into[path[-1].source])
        moved = any(other.primitives[0] != "identity" for other in path)
        kinds = {(step.source[axis].kind, step.target[axis].kind) for axis in step.axes}
        assert len(kinds) == 1, "the states of all axes change alike"
        in_turn = not moved and all(min(later.axes) > max(sooner.axes) for later, sooner in itertools.pairwise(path))
        recompute = (name, step) in self.chosen.recompute.steps
        return moved, self.buckets[moved][name], step.axes, *kinds, 0 if in_turn else len(path), recompute

    def _buckets(self, *, blocks: bool) -> dict[str, tuple[int, object, int]]:
        """The bucket of every weight: which run of ops reads it first, what it is like, and the how many-th of these it is.

        With `blocks` a run ends where the outermost repeated module changes, whose weights are one bucket however large.
        """
        weights = {p.value.name: p.value for p in self.program.parameters}
        repeated = _repeated(weights) if blocks else set[str]()
        found: dict[str, tuple[int, object, int]] = {}
        runs = itertools.groupby(self.program.ops, key=lambda op: _block(op, repeated))
        for run, (block, ops) in enumerate(runs):
            filled: dict[object, tuple[int, list[int]]] = {}  # the present bucket of each kind and the bytes of its weights
            for name in (n for op in ops for n in op.operands if n in weights):
                if name not in found:
                    kind = weights[name].dtype, weights[name].requires_grad
                    bucket, sizes = filled.get(kind, (0, []))
                    full = max(BUCKET, *sizes, weights[name].bytes) * (1 + 1 / 64)
                    if sizes and not block and sum(sizes) + weights[name].bytes > full:
                        bucket, sizes = bucket + 1, []
                    filled[kind] = bucket, [*sizes, weights[name].bytes]
                    found[name] = run, kind, bucket
        return found

    def _bytes(self, value: Value, layout: Layout) -> int:
        return elements(local_shape(value.shape, layout, self.mesh.sizes)) * value.dtype.itemsize

    def _sides(self, value: Value, step: Conversion) -> tuple[int, int]:
        sides = self._bytes(value, step.source), self._bytes(value, step.target)
        return max(sides), min(sides)

    def _apart(self, value: Value, step: Conversion, primitive: str) -> int:
        """How often a collective copies: torch's strides say where a part is not contiguous in the whole."""
        dim, blocks, to_dim, to_blocks = split_position(step, value.shape, self.mesh.sizes)
        sides = [(dim, blocks), (to_dim, to_blocks)] if primitive == "all_to_all" else [(dim, blocks)]
        size = math.prod(self.mesh.sizes[axis] for axis in step.axes)
        whole = list(local_shape(value.shape, step.source, self.mesh.sizes))
        if step.source[step.axes[0]].kind == "S":
            whole[step.source[step.axes[0]].dim] *= size
        return sum(
            not torch.empty(whole, device="meta").unflatten(at, (cut, size, -1)).movedim(at + 1, 0).is_contiguous()
            for at, cut in (sides if primitive in ("all_gather", "reduce_scatter", "all_to_all") else ())
        )

    def _op(self, op: Op) -> float:
        values, sizes, chosen = self.program.values, self.mesh.sizes, self.chosen.ops[op.name]
        inside = [local_shape(values[n].shape, x, sizes) for n, x in zip(op.operands, chosen.operands, strict=True)]
        outside = [local_shape(r.shape, x, sizes) for r, x in zip(op.results, chosen.results, strict=True)]
        own = pricer(op, values, self.device)(tuple(inside), tuple(outside))
        added = [self._bytes(values[op.operands[p]], chosen.operands[p]) for p in range(len(inside)) if self._later(op, p)]
        return self._busiest(op) * (own + sum(max(3 * size / self.device.streaming, self.device.launch) for size in added))

    def _later(self, op: Op, position: int) -> bool:
        """Whether an operand's gradient is added to that of a later use."""
        ops, name = [one for one in self.program.ops if one.requires_grad], op.operands[position]
        if op not in ops or not self.program.values[name].requires_grad:
            return False
        return name in (*op.operands[position + 1 :], *(n for one in ops[ops.index(op) + 1 :] for n in one.operands))

    def _busiest(self, op: Op) -> float:
        """What the last rank of a split sequence attends to, in what the local shapes alone would say."""
        fitted = self.fits[op.name]
        for size, (kind, number, _) in zip(self.mesh.sizes, self.chosen.ops[op.name].forms, strict=True):
            form = fitted.distributed[number].name if kind == "D" and fitted else ""
            if form == "query_parallel_attention":
                return 2 - 1 / size
            if form == "ring_attention":
                return 2 * size - 1 if True in op.args or ("is_causal", True) in op.kwargs else size
        return 1.0

    def _arrival(self, value: Value) -> float:
        size, total = value.bytes, 0.0
        for axis, _ in each_split(self.chosen.given[value.name]):
            size //= self.mesh.sizes[axis]
            total += max(2 * size / self.device.streaming, self.device.launch)
        return total

    def _differentiated(self) -> set[str]:
        """The values that get a gradient when the scalar outputs (all, if there is none) are differentiated."""
        values = self.program.values
        ends = [o.value for o in self.program.outputs if values[o.value].requires_grad]
        found = {name for name in ends if not values[name].shape} or set(ends)
        for op in reversed(self.program.ops):
            if found & {r.name for r in op.results}:
                found |= {name for name in op.operands if values[name].requires_grad}
        return found

    def _work(self, name: str) -> Iterator[tuple[Conversion, str, str]]:
        """Each primitive of a value's conversions: "forward", "gradient" where one returns, and what runs "again"."""
        route = self.chosen.routes.get(name, ())
        into = {step.target: step for step in route}
        assert len(into) == len(route), f"{name} has two ways into one layout"
        forward, backward = set(), set()
        for layout, gradient in self._uses(name):
            while layout in into:
                forward.add(layout)
                if gradient:
                    backward.add(layout)
                layout = into[layout].source
        assert forward == set(into), f"{name} is converted for nobody"
        for target, step in into.items():
            yield step, step.primitives[0], "forward"
            if target in backward:
                yield step, step.primitives[1], "gradient"
            if (
                (name, target) in self.reread
                and (name, step) in self.chosen.recompute.steps
                and step.primitives[0] in COLLECTIVES
            ):
                yield step, step.primitives[0], "recompute"

    def _uses(self, name: str) -> Iterator[tuple[Layout, bool]]:
        """Per use of a value: the layout that is wanted, whether a gradient returns."""
        for op in self.program.ops:
            for position, operand in enumerate(op.operands):
                if operand == name:
                    gradient = name in self.differentiated and any(r.name in self.differentiated for r in op.results)
                    yield self.chosen.ops[op.name].operands[position], gradient
        for output in self.program.outputs:
            if output.value == name:
                yield self.chosen.outputs[output.path], name in self.differentiated

    def _reread(self) -> set[tuple[str, Layout]]:
        """The values in the layouts in which the backward reads them, or what is made of them again."""
        found: set[tuple[str, Layout]] = set()
        for op in self.program.ops:
            if any(r.name in self.differentiated for r in op.results):
                kept, chosen = saved(op, self.program.values, cpu=self.device.name == "cpu"), self.chosen.ops[op.name]
                for position in kept.operands:
                    self._read(op.operands[position], chosen.operands[position], found)
                for position in kept.results:
                    self._read(op.results[position].name, chosen.results[position], found)
                if kept.internal_bytes and op.name in self.chosen.recompute.ops:
                    self._read(op.results[0].name, chosen.results[0], found)
        return found

    def _read(self, name: str, layout: Layout, found: set[tuple[str, Layout]]) -> None:
        """Read a value, and what it is made of if it is made again or shares the memory of something."""
        if (name, layout) in found:
            return
        found.add((name, layout))
        step = next((step for step in self.chosen.routes.get(name, ()) if step.target == layout), None)
        op = self.program.producer.get(name)
        recompute = self.chosen.recompute
        if step:
            if (name, step) in recompute.steps or step.primitives[0] == "identity":
                self._read(name, step.source, found)
        elif op and (op.name in recompute.ops or view_of(op, self.program.values)):
            operands = list(zip(op.operands, self.chosen.ops[op.name].operands, strict=True))
            for operand in operands if op.name in recompute.ops else operands[:1]:
                self._read(*operand, found)


def _repeated(weights: dict[str, Value]) -> set[str]:
    """The modules of which two children with numbers have weights of the same names and shapes."""
    children: dict[tuple[str, str], list[object]] = defaultdict(list)
    for name, value in weights.items():
        parts = name.split(".")
        for place in (i for i, part in enumerate(parts) if part.isdigit()):
            children[".".join(parts[:place]), parts[place]].append((parts[place + 1 :], value.shape))
    alike = Counter((module, str(found)) for (module, _), found in children.items())
    return {module for (module, _), number in alike.items() if number > 1}


def _block(op: Op, repeated: set[str]) -> str:
    """The outermost child of a repeated module in which an op stands; empty outside of all."""
    parts = op.name.partition(":")[0].split(".")
    starts = (i for i, part in enumerate(parts) if part.isdigit() and ".".join(parts[:i]) in repeated)
    return next((".".join(parts[: i + 1]) for i in starts), "")

"""One graph under several plans on one mesh: what every rank computes is what the user's module computes sequentially.

The ranks are threads (`autopar.runtime.threaded_ranks`), so a pair of a graph and a plan costs fractions of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.closures import copied_model
from autopar.codegen import ParallelModule
from autopar.errors import AutoparError
from autopar.ir.dynamic_dims import declared, describe_sizes, numbers
from autopar.ir.layout import Layout, shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.operators import writes
from autopar.parallelize import assembled, tensors_of
from autopar.passes.microbatches import microbatches
from autopar.passes.no_dropout import without_dropout
from autopar.passes.padding import PaddingExtent, padded
from autopar.passes.to_float64 import promote
from autopar.plan.assignment_text import as_planned
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan, read_plan
from autopar.planning.planner import connected_mesh, read_program, resolve_program, with_dynamic_sizes
from autopar.planning.respecialize import Respecializer
from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.runtime.world import Context
from autopar.verify.execution import doubled, error, sequential
from autopar.verify.reference import arguments, module_results
from autopar.verify.testing import RandomPlans
from autopar.verify.verification import wide_signature
from tests.support.table import mesh as slow_mesh
from tests.support.threads import layout

EXACT = 1e-9  # the largest error in double precision
COARSE = 8  # how many times the error of the sequential run in bfloat16, or its rounding, that of the parallel run may be
BATCH, LONGER = 4, 12  # of the sample that is planned, and of the one that its plan is carried over to
ROUNDING = 2.0**-8
ROUNDED = 4  # sequential runs in bfloat16 with parameters that are rounded otherwise
Sample = Callable[[int], dict[str, torch.Tensor]]  # of a batch size


class WrongNumber(AssertionError):
    """A rank computed something else than the user's module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a graph is tried under; `plans` are seeds of random plans and names of strategies."""

    sizes: tuple[int, ...] = (2,)
    plans: tuple[int | str, ...] = (0,)
    microbatches: int = 1
    precision: str | None = None
    dynamic: bool = False
    padded: bool = False  # what the mesh does not divide, in random plans

    def text(self) -> str:
        """The arguments that make it, where they are not the default."""
        named = [(one.name, getattr(self, one.name), one.default) for one in fields(self)]
        return ", ".join(f"{name}={value!r}" for name, value, default in named if value != default)

    @property
    def options(self) -> Options:
        """The options of a random plan."""
        return Options(strategy="random", outputs="sharded", precision=self.precision, microbatches=self.microbatches)


@dataclass(slots=True)
class Outcome:
    """How many pairs were equal, and the first lines of the errors with which the others were refused."""

    equal: int
    refused: list[str]


def check(model: Callable[[], nn.Module], sample: Sample, setting: Setting, world: ThreadedRanks) -> Outcome:
    """Try a graph; raises WrongNumber, or whatever it crashes with. What is refused in house style before a rank runs is none.

    Args:
        model: makes the module, in float32.
        sample: the arguments of its call, by batch size.
        setting: the mesh, the plans, and what is asked for.
        world: where the ranks run.
    """
    torch.manual_seed(0)
    module, batch = model(), _batch(sample, BATCH)
    try:
        captured = read_program(module, batch, setting.options)
    except AutoparError as refusal:
        return Outcome(0, [_line(refusal)] * len(setting.plans))
    tried = Tried(module, batch, captured, setting, world)
    tried.sequentially()
    planner, outcome = Planner(module, batch, captured, setting), Outcome(0, [])
    for plan in setting.plans:
        try:
            resolved = planner.plan(plan)
        except AutoparError as refusal:
            outcome.refused.append(_line(refusal))
            continue
        tried.under(resolved)
        outcome.equal += 1
        if setting.dynamic and (longer := _longer(module, _batch(sample, LONGER), resolved, setting, world)):
            longer[0].under(longer[1])
            outcome.equal += 1
    return outcome


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _batch(sample: Sample, size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(size)
    return sample(size)


class Planner:
    """Makes plans of seeds and of strategies' names."""

    def __init__(self, module: nn.Module, batch: object, captured: Captured, setting: Setting) -> None:
        self.module, self.batch, self.captured, self.setting = module, batch, captured, setting
        self.mesh = connected_mesh(slow_mesh(setting.sizes), setting.options)
        self.random: RandomPlans | None = None

    def plan(self, plan: int | str) -> ResolvedPlan:
        """The plan, for sizes that vary where they are to."""
        program, options = self.captured.program, self.setting.options
        if isinstance(plan, str):
            found = resolve_program(program, self.mesh, replace(options, strategy=plan))
        else:
            if self.random is None:
                step = microbatches(program, self.setting.microbatches)
                extent = PaddingExtent.PARTS if self.setting.padded else PaddingExtent.NONE
                self.random = RandomPlans(padded(step, extent.rooms(step.program, self.mesh)), self.mesh, options)
            found = self.random.draw(plan)
        sizes = declared({"batch": 0} if self.setting.dynamic else {}, self.captured.signature.shapes)
        return with_dynamic_sizes(found, sizes, self.module, self.batch)


def _longer(
    module: nn.Module, batch: dict[str, torch.Tensor], resolved: ResolvedPlan, setting: Setting, world: ThreadedRanks
) -> tuple[Tried, ResolvedPlan] | None:
    """The plan carried over to another batch, if it allows its size."""
    sizes = resolved.plan.dynamic
    try:
        other = read_program(module, batch, setting.options)
        called = describe_sizes(sizes, numbers(sizes, other.signature.shapes))
        moved = Respecializer(resolved).plan_for(other.program, called)
    except AutoparError:
        return None
    return Tried(module, batch, other, setting, world), moved


class Tried:
    """A module and a batch with the numbers that are expected of them, in double precision and in the program's own."""

    def __init__(
        self,
        module: nn.Module,
        batch: dict[str, torch.Tensor],
        captured: Captured,
        setting: Setting,
        world: ThreadedRanks,
        around: AbstractContextManager[object] | None = None,
    ) -> None:
        """`around` is what the user's module runs in."""
        self.setting, self.world, self.tensors = setting, world, tensors_of(module)
        self.loss = _Loss(scalars=setting.microbatches > 1)
        self.own = replace(captured, program=without_dropout(captured.program))
        self.wide = replace(self.own, program=promote(self.own.program), signature=wide_signature(captured.signature))
        self.inputs = [x.detach() for x in captured.signature.bind(*arguments(batch))]
        self.wide_inputs, self.wide_tensors = (
            [doubled(x) for x in self.inputs],
            {n: doubled(t) for n, t in self.tensors.items()},
        )
        user = in_double(module)
        given = {name: doubled(x).requires_grad_(x.requires_grad) for name, x in batch.items()}
        with around or nullcontext():
            self.expected = module_results(user, given, captured, self.loss.whole)
        self.exact = dict.fromkeys(self.expected, EXACT)
        self.coarse: dict[tuple[str, str], float] | None = None
        for value, x in zip(captured.program.inputs, self.wide.signature.bind(*arguments(given)), strict=True):
            if value.requires_grad and x.grad is not None:
                self.expected["gradient", value.name] = x.grad

    def sequentially(self) -> None:
        """Compare the captured program with the module."""
        found = self._results(sequential(self.wide, self.wide_tensors), self.wide.program, self.wide_inputs)
        for key, tensor in self.expected.items():
            _equal(key, found.get(key, torch.zeros_like(tensor)), tensor, self.exact.get(key, EXACT), "the captured program")

    def under(self, resolved: ResolvedPlan) -> None:
        """Compare what every rank computes under a plan."""
        self._compared(
            self.wide, resolved, self.wide_tensors, self.wide_inputs, {key: self.exact.get(key, EXACT) for key in self.expected}
        )
        if self.setting.precision:
            if self.coarse is None:
                self.coarse = self._coarse()
            self._compared(self.own, resolved, self.tensors, self.inputs, self.coarse)

    def _coarse(self) -> dict[tuple[str, str], float]:
        """The errors that a parallel run in the program's own precision may have.

        A multiple of those of the sequential run, or what as many roundings of every parameter do there: a gradient through a
        maximum or a sort jumps where another element becomes the largest.
        """
        allowed = {key: COARSE * (error + ROUNDING) for key, error in self._errors(self.tensors).items()}
        for seed in range(ROUNDED):
            drawn = torch.Generator().manual_seed(seed)
            for key, wrong in self._errors({name: _rounded(tensor, drawn) for name, tensor in self.tensors.items()}).items():
                allowed[key] = max(allowed[key], wrong)
        return allowed

    def _errors(self, tensors: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], float]:
        """The errors of a sequential run with these parameters and buffers."""
        found = self._results(sequential(self.own, tensors), self.own.program, self.inputs)
        return {key: _wrong(found[key], expected) if key in found else 0.0 for key, expected in self.expected.items()}

    def _compared(
        self,
        captured: Captured,
        resolved: ResolvedPlan,
        tensors: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        tolerances: Mapping[tuple[str, str], float],
    ) -> None:
        program, mesh = captured.program, resolved.plan.mesh
        step = as_planned(resolved.plan, program)
        if step != resolved.step:  # in another precision, or without dropout: under the text of the plan
            text = replace(Plan.from_json(resolved.plan.to_json()), hash=step.hash)
            resolved = read_plan(text, program, mesh)

        def rank(context: Context) -> dict[tuple[str, str], tuple[torch.Tensor, Layout]]:
            module = assembled(captured, tensors, resolved, context)
            found = self._results(module, program, inputs)
            return {key: (tensor, layout(key, module, resolved)) for key, tensor in found.items()}

        plain = Mesh(axes=mesh.axes, sizes=mesh.sizes)
        for place, results in enumerate(self.world.run(plain, rank)):
            where = np.unravel_index(place, mesh.sizes)
            for key, tensor in self.expected.items():
                found, split = results.get(key, (None, ()))
                part = shard(tensor, split, mesh.sizes, tuple(map(int, where))) if split else tensor
                found = torch.zeros_like(part) if found is None else found
                _equal(key, found, part, tolerances[key], f"rank {place}")

    def _results(
        self, module: ParallelModule, program: Program, inputs: Sequence[torch.Tensor]
    ) -> dict[tuple[str, str], torch.Tensor]:
        """Outputs, gradients and written buffers of this rank: its parts of them."""
        given = [x.clone().requires_grad_(value.requires_grad) for x, value in zip(inputs, program.inputs, strict=True)]
        ends, context = module.autopar.outputs, module.autopar.context

        def loss(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
            layouts = [end.layout if end.split else None for end in ends]
            return self.loss.of_parts(outputs, [end.shape for end in ends], layouts, context)

        if module.autopar.steps is None:
            outputs = module.run(given)
            if (total := loss(outputs)) is not None:
                total.backward()
        else:
            found: list[list[torch.Tensor]] = []

            def kept(outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
                found.append([output.detach() for output in outputs])
                return loss(outputs)

            module.accumulate(given, kept)
            outputs = module.joined(found)
        result = {("output", o.path): tensor.detach() for o, tensor in zip(program.outputs, outputs, strict=True)}
        held = {p.names[0]: p for p in program.parameters if p.value.requires_grad}
        result |= {("gradient", n): t.grad for n, t in module.named_parameters() if n in held and t.grad is not None}
        result |= {("gradient", v.name): x.grad for v, x in zip(program.inputs, given, strict=True) if x.grad is not None}
        buffers = dict(module.named_buffers())
        written = {name for op in program.ops for name in writes(op)} & buffers.keys()  # others are temporaries
        return result | {("buffer", name): buffers[name] for name in written}


def _rounded(tensor: torch.Tensor, drawn: torch.Generator) -> torch.Tensor:
    """The tensor with every element larger or smaller by as many roundings of bfloat16 as a parallel run may have."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.rand(tensor.shape, generator=drawn, dtype=torch.float64)
    found = (tensor.detach() * (1 + COARSE * ROUNDING * (2 * noise - 1))).to(tensor.dtype)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def in_double(module: nn.Module) -> nn.Module:
    """A copy in double precision, with what it has kept as plain attributes: results of earlier calls."""
    made = copied_model(module).double()
    for part in made.modules():
        for name, held in vars(part).items():
            if isinstance(held, torch.Tensor) and held.is_floating_point():
                vars(part)[name] = doubled(held)
    return made


@dataclass(frozen=True, slots=True)
class _Loss:
    """A fixed weighted sum of the differentiable outputs, or of their scalars alone (of micro-batches others are parts)."""

    scalars: bool

    def whole(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The loss of whole outputs."""
        return self._sum(outputs, [weights(tuple(o.shape), place) for place, o in enumerate(outputs)])

    def of_parts(
        self,
        outputs: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        layouts: Sequence[Layout | None],
        context: Context,
    ) -> torch.Tensor | None:
        """This rank's part of the loss."""
        own = [
            weights(shape, place)
            if layout is None
            else shard(weights(shape, place), layout, context.mesh.sizes, context.coordinates)
            for place, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
        ]
        return self._sum(outputs, own)

    def _sum(self, outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        terms = [
            (o.double() * w).sum()
            for o, w in zip(outputs, weights, strict=True)
            if o.requires_grad and not (self.scalars and o.ndim)
        ]
        return torch.stack(terms).sum() if terms else None


def weights(shape: tuple[int, ...], place: int) -> torch.Tensor:
    """What the elements of output number `place` count for in the loss."""
    return torch.arange(place + 1, place + 1 + math.prod(shape), dtype=torch.float64).reshape(shape).cos()


def _wrong(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error; the user's own NaN is to be NaN, the rest equal."""
    if found.shape == expected.shape:
        both = found.isnan() & expected.isnan()
        found, expected = found.masked_fill(both, 0), expected.masked_fill(both, 0)
    return error(found, expected)


def _equal(key: tuple[str, str], found: torch.Tensor, expected: torch.Tensor, tolerance: float, who: str) -> None:
    wrong = _wrong(found, expected)
    if not wrong <= tolerance:
        raise WrongNumber(f"{' '.join(key)} of {who} is wrong by {wrong:.1e}: {list(found.shape)} for {list(expected.shape)}")

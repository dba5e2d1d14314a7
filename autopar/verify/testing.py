"""Helpers for tests: random plans, and measured peak memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from autopar.analysis.analysis import Analysis, analyse
from autopar.analysis.recomputability import is_alias
from autopar.capture import Captured
from autopar.codegen.module import ParallelModule
from autopar.cost_models import optimizers
from autopar.formulation.formulate import formulate
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.ir.dynamic_dims import DimSizes, Dynamic, declared
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.training_step import TrainingStep
from autopar.passes.microbatches import microbatches as parts
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.plan.resolved import ResolvedPlan
from autopar.planning.optimize import Optimized, sharded
from autopar.planning.planner import connected_mesh, read_program, resolved_plan, with_dynamic_sizes
from autopar.runtime.memory_tracker import MemoryTracker, Peak
from autopar.runtime.storage import to_local
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.solver.problem import Problem, Solution, price
from autopar.solver.routes import joined, tree


def peak(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Iterable[torch.Tensor],
    step: Callable[[], object],
    *,
    steps: int = 3,
) -> Peak:
    """Measure the peak memory of tensors on this rank in a step, after a first step has created the optimizer's state.

    Returns the least of several measurements: gloo's threads sometimes keep the buffers of a collective for a moment after it
    is done.
    """
    step()
    gc.collect()
    kept = optimizer.state.values() if optimizer else ()
    states = [tensor for state in kept for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    away = {id(tensor) for tensor in _elsewhere(module, optimizer)}
    held: list[torch.Tensor] = []
    elsewhere: list[torch.Tensor] = []
    for tensor in (*module.parameters(), *module.buffers(), *states):
        (elsewhere if id(tensor) in away else held).append(to_local(tensor.detach()))
    found = list[Peak]()
    for _ in range(steps):
        with MemoryTracker([*held, *batch], (held or elsewhere)[0].device.type, elsewhere) as live:
            step()
        found.append(live.peak())
    return min(found, key=lambda peak: peak.bytes)


def _elsewhere(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """The parameters that a module's plan stores on the host or the disk, and their optimizer state."""
    if not isinstance(module, ParallelModule):
        return
    for name, parameter in module.named_parameters():
        if module.autopar.place(name) != I:
            yield parameter
            state = optimizer.state[parameter].values() if optimizer else ()
            yield from (tensor for tensor in state if isinstance(tensor, torch.Tensor))


def random_plan(
    model: nn.Module,
    sample_input: object,
    mesh: object,
    seed: int = 0,
    *,
    precision: str | None = None,
    microbatches: int = 1,
    dynamic: Mapping[str, DimSizes | Dynamic] | None = None,
) -> Plan:
    """Draw a random plan that can run: any candidate per op, any route per value, any recomputation.

    Only for tests of rules and conversions: memory and price are arbitrary, and are those of the mesh's own device if it has
    one.
    """
    priced = isinstance(mesh, Mesh) and mesh.device is not None
    options = Options(
        device=None if priced else "h100", strategy="random", outputs="sharded", precision=precision, microbatches=microbatches
    )
    captured = read_program(model, sample_input, options)
    drawn = _random(parts(captured.program, microbatches), connected_mesh(mesh, options), seed, options)
    return with_dynamic_sizes(drawn, declared(dynamic or {}, captured.signature.shapes), model, sample_input).plan


def random_plan_of(captured: Captured, mesh: Mesh, seed: int, options: Options) -> Plan:
    """A random plan for a captured model, on a mesh with device and links."""
    return _random(TrainingStep(program=captured.program), mesh, seed, options).plan


def _random(step: TrainingStep, mesh: Mesh, seed: int, options: Options) -> ResolvedPlan:
    return RandomPlans(step, mesh, options).draw(seed)


class RandomPlans:
    """Random plans for one step on a mesh with device and links; the candidates are computed once."""

    def __init__(self, step: TrainingStep, mesh: Mesh, options: Options) -> None:
        self.options, self.host = options, bool(mesh.device and mesh.device.host)
        self.optimizer = optimizers.optimizer(options.optimizer)
        self.analysis = analyse(step, mesh, repeated=False)
        split = sharded(step.program, options.outputs)
        self.formulated = formulate(self.analysis, mesh, self.optimizer, sharded_outputs=split)

    def draw(self, seed: int) -> ResolvedPlan:
        """Draw the plan of a seed."""
        draw = random.Random(seed)
        solution = random_solution(self.formulated.problem, draw)
        chosen = assignment(self.formulated, solution)
        chosen = replace(chosen, recompute=random_again(self.analysis, chosen, draw, host=self.host))
        found = Optimized(
            memory_model=MemoryModel(self.formulated, self.optimizer), solution=solution, optimizer=self.optimizer
        )
        return resolved_plan(found, self.options, chosen)


def random_again(analysis: Analysis, chosen: Assignment, draw: random.Random, *, host: bool = True) -> RecomputeChoice:
    """Draw recomputation and offloading: random subsets, of random size, of ops, conversions and values."""
    program = analysis.program
    allowed, ops, steps, offload = analysis.recomputable, draw.random(), draw.random(), host * draw.random()
    results = [(name, chosen.produced(name, program)) for name in program.producer if name not in analysis.weights]
    moved = [(name, step) for name, route in chosen.routes.items() for step in route if not is_alias(step)]
    return RecomputeChoice(
        ops=frozenset(op.name for op in program.ops if op.name in allowed and draw.random() < ops),
        steps=frozenset(one for one in moved if draw.random() < steps),
        offload=frozenset(one for one in results if draw.random() < offload),
    )


def random_solution(problem: Problem, draw: random.Random) -> Solution:
    """Random picks, with routes that are cheapest under random prices."""
    drawn = [draw.randrange(len(choice.seconds)) for choice in problem.choices]
    again = joined(problem, drawn, range(len(drawn)), lambda choice, left: draw.choice(np.flatnonzero(left).tolist()))
    drawn = [0] * len(drawn) if again is None else again
    for edge in reversed(problem.edges):
        if tree(edge, drawn) is None:  # it is stored otherwise than its consumers can have it: whole, which is first, they can
            drawn[edge.producer] = 0
    picks = tuple(drawn)
    arcs = []
    for edge in problem.edges:
        weights = np.array([draw.random() for _ in edge.seconds])
        found = tree(replace(edge, seconds=weights), picks)
        assert found is not None, f"{edge.name}: a conversion leads there"
        arcs.append(found)
    seconds = price(problem, picks, tuple(arcs))
    return Solution(picks=picks, arcs=tuple(arcs), seconds=seconds, bound=0.0, status="feasible")

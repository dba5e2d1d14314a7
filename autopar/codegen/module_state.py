"""The state of a parallel module besides its parameters: plan, signature, and the objects that emitted code uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import fx

from autopar.capture import Signature
from autopar.capture.decided import Decided
from autopar.capture.python_state import Settings
from autopar.codegen.names import identifiers
from autopar.codegen.steps import Steps
from autopar.codegen.variants import Variants
from autopar.ir.dynamic_dims import Size
from autopar.ir.layout import AWAY, I, Layout, State
from autopar.plan.plan import Plan
from autopar.runtime.call_agreement import CallAgreement
from autopar.runtime.deferred_products import DeferredProducts
from autopar.runtime.gradient_accumulation import GradientAccumulator
from autopar.runtime.input_parts import InputParts
from autopar.runtime.random import RngState
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.steps_in_backward import StepsInBackward
from autopar.runtime.world import Context

if TYPE_CHECKING:
    from autopar.codegen.module import ParallelModule


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """One output: its global shape, its layout, and whether the user gets it as a DTensor."""

    shape: tuple[int, ...]
    layout: Layout
    split: bool


class ModuleState:
    """The state of a parallel module besides its parameters: `axes.NAME`, and three objects that emitted code uses.

    `steps` cuts the batch into micro-batches; None if there is one.
    """

    def __init__(
        self,
        plan: Plan | None,
        signature: Signature,
        context: Context,
        seed: int,
        outputs: Sequence[OutputLayout],
        steps: Steps | None = None,
        inputs: InputParts | None = None,
    ) -> None:
        self.plan, self.signature, self.context, self.outputs, self.steps = plan, signature, context, outputs, steps
        self.inputs = inputs or InputParts(context=context, shapes=signature.shapes, layouts={}, sharded=False)
        if self.inputs.sharded:
            tensors = (replace(planned, parts=self.inputs.counts(planned.path)) for planned in signature.tensors)
            self.signature = replace(signature, tensors=tuple(tensors))
        self.rng_state, self.rematerializer, self.accumulator = RngState(seed), Rematerializer(), GradientAccumulator()
        self.deferred = DeferredProducts()
        self.agreement = CallAgreement(context, {path: self.inputs.owners(path) for path in self.inputs.split})
        self.alike = True  # whether all ranks store the same parameters
        self.storage = context  # the mesh over which these are stored
        self.filled = False  # whether all tensors are known to have data
        self.constant: frozenset[str] = frozenset()  # the parameters and buffers that get no gradient, under every name
        self.settings = Settings(())  # attributes of the modules that were captured
        self.decided = Decided()  # buffers that decided a branch
        # Builds the module for the other of training and evaluation.
        self.other: Callable[[ParallelModule], ParallelModule | None] | None = None
        self.mode = True  # `training` when the model was captured
        self.scaler: torch.amp.GradScaler | None = None  # of the loss of a step
        self.stepped: StepsInBackward | None = None  # steps some weights before the optimizer does
        self.draws = False  # whether the emitted program draws random numbers
        self.recomputes = False  # whether the emitted program marks what its backward recomputes
        self.traceable = True  # whether torch.compile can trace it
        self.shared_weights: fx.Graph | None = None  # what is made ahead of compiled micro-batches
        self.compiled_step: Callable[..., torch.Tensor] | None = None  # once `compile` was called
        self.program: Callable[..., list[torch.Tensor]]  # runs a module's emitted program
        self.compiled_program: Callable[..., list[torch.Tensor]] | None = None  # of a pipeline's stage, then
        self.twin: ParallelModule | None = None
        self.sized: Callable[[ParallelModule, tuple[int, ...]], ParallelModule] | None = None  # builds it for other sizes
        self.variants = Variants()
        self.axes = SimpleNamespace(**{axis_names(context)[axis.name]: axis for axis in context.known_axes})

    def place(self, name: str) -> State:
        """Where the plan stores a parameter: H, in the host's memory, D, on the disk, or I, on the device."""
        last = self.plan.layouts.get(name, "").rpartition(", ")[2] if self.plan and self.plan.mesh.has_memories else ""
        return next((there for there in AWAY if there.kind == last), I)

    def vary(self, sized: Callable[[ParallelModule, tuple[int, ...]], ParallelModule], sizes: tuple[Size, ...]) -> None:
        """Allow these dynamic sizes to differ from the sample's; `sized` builds the module for given sizes."""
        self.sized, self.signature = sized, replace(self.signature, sizes=sizes)

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleState:
        """A copy with its own random state, and without the state of a forward in progress."""
        copied = copy.copy(self)
        own = self.rng_state, self.rematerializer, self.accumulator, self.deferred
        copied.rng_state, copied.rematerializer, copied.accumulator, copied.deferred = copy.deepcopy(own, memo)
        copied.variants, copied.stepped = Variants(), None
        copied.compiled_step = copied.compiled_program = None  # those of the other module
        return copied


def axis_names(context: Context) -> dict[str, str]:
    """Identifiers of axes in emitted code, plain and flattened, by name."""
    return identifiers(axis.name for axis in context.known_axes)


__all__ = ["ModuleState", "OutputLayout"]

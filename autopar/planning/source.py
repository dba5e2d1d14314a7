"""The source of a parallel module, for capturing its model again at other sizes or in its other mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from autopar.capture import Captured
from autopar.capture.meta_copy import skeleton
from autopar.capture.signature import on_meta
from autopar.ir.dynamic_dims import InputDim
from autopar.ir.program import Program
from autopar.passes import normalise
from autopar.passes.no_dropout import switched, without_training
from autopar.plan.options import Options
from autopar.planning.planner import read_program


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model, the sample and the options; `buffers` are the values of a meta model's buffers.

    With `lent` its tensors belong to another module, and it has only those that it reads.
    """

    model: nn.Module
    sample: object
    options: Options
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    lent: bool = False

    def read(self, places: Mapping[InputDim, int]) -> Captured:
        """Capture the model with these sizes at dims of its sample."""
        captured = read_program(self.model, self.sample, self.options, places, self.buffers)
        return replace(captured, program=_read_alone(captured.program)) if self.lent else captured

    def program_at(self, places: Mapping[InputDim, int]) -> Program:
        """The program of the model with these sizes."""
        return self.read(places).program

    def hollow(self, captured: Captured) -> ModelSource:
        """A source without weights and batch, for a captured model."""
        made = skeleton(self.model)
        sample = on_meta(self.sample, captured.signature)
        return replace(self, model=made.module, sample=sample, buffers=made.values)

    def in_mode(self, training: bool) -> ModelSource:
        """A source of the model in training or evaluation mode, for a module over another one's tensors."""
        return replace(self, model=skeleton(self.model).module.train(training), lent=True)


def _read_alone(program: Program) -> Program:
    """A program with only the parameters and buffers that it reads."""
    parameters, buffers = (tuple(one for one in held if one.used) for held in (program.parameters, program.buffers))
    return replace(program, parameters=parameters, buffers=buffers)


def serves(planned: Captured, other: Captured, training: bool) -> bool:
    """Whether the planned program also serves the model's other mode, up to flags, with results of the same form."""
    if training or planned.signature.returned != other.signature.returned or any(map(switched, other.program.ops)):
        return False
    quiet, found = (normalise(without_training(_read_alone(one.program))).hash for one in (planned, other))
    return quiet == found


__all__ = ["ModelSource", "serves"]

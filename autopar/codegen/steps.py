"""Steps of several micro-batches: inputs are cut, outputs joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from autopar.ir.layout import P, State, shard
from autopar.ir.training_step import MicrobatchLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How a step runs the emitted graph once per micro-batch, after `hoisted`, the graph of what is computed once per step."""

    loop: MicrobatchLoop
    hoisted: fx.Graph | None

    def parts(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The inputs of every micro-batch; `module` has the buffers that `hoisted` reads."""
        with torch.no_grad():
            found = fx.Interpreter(module, graph=self.hoisted).run(*inputs) if self.hoisted else ()
        given, runs = [*zip((*inputs, *found), self.loop.inputs, strict=True)], self.loop.count
        return [[shard(tensor, (state,), (runs,), (run,)) for tensor, state in given] for run in range(runs)]

    def join(self, outputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs for the whole batch from those of all micro-batches."""
        return [_joined(parts, state) for parts, state in zip(zip(*outputs, strict=True), self.loop.outputs, strict=True)]


def _joined(parts: Sequence[torch.Tensor], state: State) -> torch.Tensor:
    if state.kind == "S":
        return torch.cat([*parts], state.dim)
    return torch.stack([*parts]).sum(0) if state == P else parts[0]

"""Steps of several micro-batches: inputs are cut, outputs joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from autopar.ir.layout import P, State, shard
from autopar.ir.training_step import MicrobatchLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How a step runs the emitted graph once per micro-batch, after `hoisted`, the graph that runs once per step.

    The inputs at the indices `gathered` are whole for that: all ranks gather the same ones, whatever they hoist.
    """

    loop: MicrobatchLoop
    hoisted: fx.Graph | None
    gathered: frozenset[int]

    def parts(
        self, module: nn.Module, inputs: Sequence[torch.Tensor], whole: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> list[list[torch.Tensor]]:
        """The inputs of every micro-batch; `module` has buffers that `hoisted` reads, `whole(n, part)` makes input n whole."""
        with torch.no_grad():
            taken = [whole(n, part) if n in self.gathered else part for n, part in enumerate(inputs)]
            found = fx.Interpreter(module, graph=self.hoisted).run(*taken) if self.hoisted else ()
        given, runs = [*zip((*inputs, *found), self.loop.inputs, strict=True)], self.loop.count
        return [[shard(tensor, (state,), (runs,), (run,)) for tensor, state in given] for run in range(runs)]

    def join(self, outputs: Sequence[Sequence[torch.Tensor | None]]) -> list[torch.Tensor | None]:
        """Join the outputs of all micro-batches for the whole batch; None for those that were not kept."""
        return [_joined(parts, state) for parts, state in zip(zip(*outputs, strict=True), self.loop.outputs, strict=True)]


def _joined(parts: Sequence[torch.Tensor | None], state: State) -> torch.Tensor | None:
    kept = [part for part in parts if part is not None]
    if len(kept) <= 1 or (state.kind != "S" and state != P):
        return kept[0] if kept else None
    return torch.cat(kept, state.dim) if state.kind == "S" else torch.stack(kept).sum(0)

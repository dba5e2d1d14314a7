"""Bytes on the host and the disk: weights with their gradients and optimizer state, and offloaded activations.

Bytes of one rank, everything that a step stores there at the fullest moment: after the backward, with all gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.analysis.analysis import Analysis
from autopar.cost_models.optimizers import Optimizer
from autopar.ir.device import Bytes
from autopar.ir.layout import H, State, away, place
from autopar.memory.recompute_closure import reruns
from autopar.search_space.assignment import Assignment

GRADIENTS, STATE = "gradients", "optimizer state"


def tensors_of(analysis: Analysis, optimizer: Optimizer, name: str) -> dict[str, int]:
    """How many tensors of a weight's size are stored with it, by purpose."""
    trained = name in analysis.backward
    return {"parameters": 1, **({GRADIENTS: 1, STATE: optimizer.states} if trained else {})}


def bytes_away(analysis: Analysis, optimizer: Optimizer, chosen: Assignment) -> Mapping[State, Mapping[str, Bytes]]:
    """Bytes on the host (H) and on the disk (D), by purpose."""
    program, found = analysis.program, {there: dict[str, Bytes]() for there in {H: None, **dict.fromkeys(analysis.places)}}
    for parameter in program.parameters:
        name = parameter.value.name
        layout = chosen.given[name]
        if away(layout):
            size, there = parameter.value.local_bytes(layout, analysis.sizes), found[place(layout)]
            for purpose, count in tensors_of(analysis, optimizer, name).items():
                there[purpose] = there.get(purpose, 0) + count * size
    offloaded = reruns(analysis, chosen).offload
    saved = sum(program.values[name].local_bytes(layout, analysis.sizes) for name, layout in offloaded)
    found[H]["saved activations"] = analysis.step.flights * saved
    return {there: {kind: size for kind, size in sizes.items() if size} for there, sizes in found.items()}


__all__ = ["bytes_away", "tensors_of"]

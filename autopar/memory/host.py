"""What a plan has on the host: weights that are stored there, with their gradients and the optimizer's state, and saved
activations that are offloaded.

Bytes of one rank, all that a step has there at some moment: after the backward all gradients are there.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.analysis.analysis import Analysis
from autopar.cost_models.optimizers import Optimizer
from autopar.ir.layout import hosted
from autopar.ir.mesh import Bytes
from autopar.memory.recompute_closure import reruns
from autopar.search_space.assignment import Assignment

GRADIENTS, STATE = "gradients", "optimizer state"


def tensors_on_host(analysis: Analysis, optimizer: Optimizer, name: str) -> dict[str, int]:
    """How many tensors of a weight's size the host has if it stores the weight, by what they are for."""
    trained = name in analysis.backward
    return {"parameters": 1, **({GRADIENTS: 1, STATE: optimizer.states} if trained else {})}


def host_bytes(analysis: Analysis, optimizer: Optimizer, chosen: Assignment) -> Mapping[str, Bytes]:
    """Bytes on the host by what they are for."""
    program, found = analysis.program, dict[str, Bytes]()
    for parameter in program.parameters:
        name = parameter.value.name
        if hosted(chosen.given[name]):
            size = parameter.value.local_bytes(chosen.given[name], analysis.sizes)
            for purpose, count in tensors_on_host(analysis, optimizer, name).items():
                found[purpose] = found.get(purpose, 0) + count * size
    offloaded = reruns(analysis, chosen).offload
    saved = sum(program.values[name].local_bytes(layout, analysis.sizes) for name, layout in offloaded)
    return {kind: size for kind, size in {**found, "saved activations": analysis.step.flights * saved}.items() if size}


__all__ = ["host_bytes", "tensors_on_host"]

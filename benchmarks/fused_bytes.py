"""The memory traffic of kernels that torch.compile makes, beside what Inductor says of them.

    python -m benchmarks.fused_bytes          every model of the benchmarks, for results/fused_bytes.txt

Inductor counts what each kernel of its schedule reads and writes (`torch._inductor.metrics`). It schedules for a CPU, where
a norm or a loss that it cannot vectorise across its statistics is two kernels, which read their operand twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch._inductor import async_compile, metrics
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.utils import fresh_cache

from autopar.analysis.fusion import fused
from autopar.cost_models import catalog
from autopar.cost_models.compute import pricer
from autopar.ir.program import Program
from autopar.planning.planner import read_program

Ways = tuple[int, int]  # bytes of the forward and of the backward
COLUMNS = f"{'eager':>9}{'Inductor':>10}{'ratio':>7}"
HEAD = f"{'model':<12}{'forward MB':>12}{COLUMNS}{'backward MB':>14}{COLUMNS}"


def inductor_bytes(model: nn.Module, batch: Mapping[str, torch.Tensor] | torch.Tensor) -> tuple[Ways, Ways]:
    """What the kernels that Inductor generates read and write, and those that it calls; they are scheduled but not compiled."""
    torch._dynamo.reset()
    with _scheduled_only(), fresh_cache():
        metrics.reset()
        found = torch.compile(model)(**batch) if isinstance(batch, Mapping) else torch.compile(model)(batch)
        there = _counted()
        metrics.reset()
        loss = found if isinstance(found, torch.Tensor) else found.loss
        loss.backward(torch.ones_like(loss))
        back = _counted()
    return (there[0], back[0]), (there[1], back[1])


def _counted() -> Ways:
    """Bytes of the generated kernels, and of the others, of what was scheduled last."""
    called = [isinstance(node, ExternKernelSchedulerNode) for node, _ in metrics.nodes_num_elem]
    sizes = [4 * count for _, count in metrics.nodes_num_elem]  # which it gives in elements of four bytes
    others = sum(size for size, by_hand in zip(sizes, called, strict=True) if by_hand)
    return sum(sizes) - others, others


def _nothing(*buffers: object) -> None:
    """A kernel."""


@contextmanager
def _scheduled_only() -> Iterator[None]:
    """Inductor counts, and its kernels do nothing."""
    log = torch._logging.getArtifactLogger("torch._inductor.compile_fx", "inductor_metrics")
    level, propagate, log.propagate = log.level, log.propagate, False
    log.setLevel(logging.INFO)
    try:
        with mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", return_value=_nothing):
            yield
    finally:
        log.setLevel(level)
        log.propagate = propagate


def our_bytes(program: Program) -> tuple[Ways, Ways]:
    """What the kernels of memory traffic of a program are priced by, and those of products and attention."""
    device, found = catalog.device("h100", processes=1), [[0, 0], [0, 0]]
    for op in program.ops:
        price = pricer(op, program.values, device)
        shapes = [program.values[name].shape for name in op.operands], [result.shape for result in op.results]
        kind = found[price.operations is not None or price.attention]
        kind[0] += price.forward(*shapes).bytes
        kind[1] += price.gradient(*shapes).bytes
    (there, back), (others, others_back) = found
    return (there, back), (others, others_back)


def row(name: str, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> str:
    """One line of the table: all bytes of a step, forward and backward."""
    program = read_program(model, batch).program
    ours, eager, theirs = (
        _whole(found) for found in (our_bytes(fused(program)), our_bytes(program), inductor_bytes(model, batch))
    )
    parts = (
        f"{a / 1e6:>{width}.1f}{b / 1e6:>9.1f}{c / 1e6:>10.1f}{a / c:>7.2f}"
        for a, b, c, width in zip(ours, eager, theirs, (12, 14), strict=True)
    )
    return f"{name:<12}{''.join(parts)}"


def _whole(found: tuple[Ways, Ways]) -> Sequence[int]:
    return [sum(way) for way in zip(*found, strict=True)]


def main() -> None:
    from benchmarks.models import EVERY, make

    print(HEAD)
    for name in EVERY:
        print(row(name, *make(name)), flush=True)


if __name__ == "__main__":
    main()

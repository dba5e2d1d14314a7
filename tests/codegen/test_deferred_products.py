"""Weight gradients that a schedule defers: what I and W compute, by torch's own counter, and how they are priced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.analysis.deferrable import deferrable
from autopar.operators.registry import RULES
from autopar.plan.plan import Plan
from autopar.planning.planner import read_program
from autopar.runtime import deferred_products
from autopar.runtime.deferred_products import DeferredProducts, deferred_addmm, deferred_linear, deferred_mm
from tests.support.pipeline_checkpoints import batch, model
from tests.support.pipelines import SLOW

COMPUTES = replace(SLOW, bandwidth=1e30)  # a device on which operations alone take time


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("linear", [True, False])
def test_products_have_the_values_and_gradients_of_torch(linear: bool, bias: bool) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(6, 5), torch.randn(*((4, 5) if linear else (5, 4))), torch.randn(4)
    leaves = [one.double().requires_grad_() for one in (x, w, b)][: 2 + bias]
    deferred = DeferredProducts()

    def ours(x: torch.Tensor, w: torch.Tensor, *b: torch.Tensor) -> torch.Tensor:
        if linear:
            return deferred_linear(deferred, x, 2 * w, *b)
        return deferred_addmm(deferred, b[0], x, 2 * w) if b else deferred_mm(deferred, x, 2 * w)

    expected = torch.nn.functional.linear(leaves[0], 2 * (leaves[1] if linear else leaves[1].t()), *leaves[2:])
    gradients = torch.autograd.grad(expected.sin().sum(), leaves)
    found = ours(*leaves)
    torch.testing.assert_close(found, expected)
    with deferred.collecting(3):
        found.sin().sum().backward()
    assert leaves[1].grad is None
    torch.testing.assert_close([one.grad for one in (leaves[0], *leaves[2:])], [gradients[0], *gradients[2:]])
    deferred.run(3)
    torch.testing.assert_close(leaves[1].grad, gradients[1])
    deferred.run(3)  # nothing is left
    torch.testing.assert_close(leaves[1].grad, gradients[1])


def test_a_backward_outside_of_a_schedule_is_an_error() -> None:
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="runs in its schedule alone"):
        deferred_mm(DeferredProducts(), x, w).sum().backward()


def test_what_is_deferred_are_products_of_activations_with_weights() -> None:
    program = read_program(model(), batch()).program
    found = deferrable(program)
    blocks = [
        f"transformer.h.{n}.{part}" for n in range(4) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert sorted(name.partition(":")[0] for name in found) == sorted([*blocks, "lm_head"])
    assert found["lm_head:linear#0"][1] == "transformer.wte.weight"


def planned(schedule: str) -> Plan:
    return autopar.plan(model(), batch(), {"pp": 1}, pipeline="pp", schedule=schedule, microbatches=4, device=COMPUTES)


def test_w_is_priced_as_what_it_computes_and_the_rest_of_a_backward_is_i(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, int] = {"I": 0, "W": 0}

    @contextmanager
    def counting(kind: str) -> Iterator[None]:
        with FlopCounterMode(display=False) as counter:
            yield
        counted[kind] += counter.get_total_flops()

    run, collecting = DeferredProducts.run, DeferredProducts.collecting

    def counted_run(self: DeferredProducts, microbatch: int) -> None:
        with counting("W"):
            run(self, microbatch)

    @contextmanager
    def counted_collecting(self: DeferredProducts, microbatch: int) -> Iterator[None]:
        with counting("I"), collecting(self, microbatch):
            yield

    monkeypatch.setattr(DeferredProducts, "run", counted_run)
    monkeypatch.setattr(DeferredProducts, "collecting", counted_collecting)
    plan = planned("zb-h1")
    parallel = autopar.parallelize(model(), batch(), {"pp": 1}, plan=plan, pipeline="pp")
    parallel.step(**batch())
    assert plan.pipeline is not None
    (seconds,) = plan.pipeline.seconds
    peak = COMPUTES.flops["float32"]
    assert seconds.backward_weight * peak * plan.microbatches == pytest.approx(counted["W"])
    assert seconds.backward_input * peak * plan.microbatches == pytest.approx(counted["I"], rel=0.02)  # attention is estimated
    whole = planned("1f1b").pipeline
    assert whole is not None
    assert seconds.backward_input + seconds.backward_weight == pytest.approx(
        whole.seconds[0].backward_input + whole.seconds[0].backward_weight
    )


def test_every_row_that_defers_has_a_function_that_runs_it() -> None:
    rows = {target: row for target, row in RULES.items() if row.defers}
    assert rows
    for target, row in rows.items():
        assert row.contracts
        assert callable(getattr(deferred_products, f"deferred_{target.split('.')[1]}"))

"""A recomputed op's result is freed after use and recomputed in the backward, and no gradient changes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from autopar.runtime.rematerialize.manager import Rematerializer, recompute_op
from tests.support.ops import Ops

aten = torch.ops.aten


def gradients(loss: torch.Tensor, parameters: list[nn.Parameter], **options: bool) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, parameters, **options))  # type: ignore[arg-type]


def weights(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(6, 6, dtype=torch.float64)) for _ in range(count)]


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)


Function = Callable[..., torch.Tensor]
Run = Callable[..., torch.Tensor]


def plain(function: Function, *args: object, **kwargs: object) -> torch.Tensor:
    return function(*args, **kwargs)


def recomputing(rematerializer: Rematerializer) -> Run:
    return lambda function, *args, **kwargs: recompute_op(rematerializer, function, *args, **kwargs)  # type: ignore[return-value]


def layers(run: Run, x: torch.Tensor, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Ops that save operands, results, views of them, statistics and masks of their own, and nothing."""
    for weight in parameters:
        y = run(aten.linear.default, x, weight)
        y = run(aten.gelu.default, y, approximate="tanh")
        y = run(aten.layer_norm.default, y, [6])
        heads = run(aten.reshape.default, run(aten.transpose.int, run(aten.reshape.default, y, [4, 2, 3]), 0, 1), [2, 12])
        y = run(aten.reshape.default, run(aten.softmax.int, heads, -1), [4, 6])
        x = run(aten.add.Tensor, run(aten.mul.Tensor, x, y), run(aten.cat.default, [y[1:], y[:1]], 0))
    return x.square().sum()


def test_ops_run_once_more_and_give_the_same_gradients() -> None:
    x, parameters, rematerializer = batch(), weights(4), Rematerializer()
    expected_counts, counts = Ops(), Ops()
    expected = gradients(layers(plain, x, parameters), parameters)
    with expected_counts:
        loss = layers(plain, x, parameters)
        forward = expected_counts.counts.copy()
        gradients(loss, parameters)
    with counts:
        with rematerializer.active():
            loss = layers(recomputing(rematerializer), x, parameters)
        assert counts.counts == forward | Counter(detach=counts.counts["detach"])
        found = gradients(loss, parameters)
    assert all(map(torch.equal, found, expected))
    extra = counts.counts - expected_counts.counts
    assert {name: extra[name] for name in ("mm", "gelu", "native_layer_norm", "_softmax")} == {
        "mm": 4,
        "gelu": 4,
        "native_layer_norm": 4,
        "_softmax": 4,
    }


def test_nothing_but_the_first_operand_is_alive_between_forward_and_backward() -> None:
    x, parameters, rematerializer = batch(), weights(4), Rematerializer()
    kept, dropped = Ops(), Ops()
    with kept:
        loss = layers(plain, x, parameters)
    assert kept.alive > 4 * x.nbytes
    del loss
    assert kept.alive == 0
    with dropped:
        with rematerializer.active():
            loss = layers(recomputing(rematerializer), x, parameters)
        assert dropped.alive == loss.nbytes
        gradients(loss, parameters)
    del loss
    assert dropped.alive == 0


def test_a_kept_operand_goes_with_the_last_that_is_made_of_it() -> None:
    """No garbage collection is needed, with a backward or without."""
    (w,), rematerializer = weights(1), Rematerializer()
    run = recomputing(rematerializer)
    gc.disable()
    try:
        for backward in (True, False):
            with Ops() as ops:
                x = torch.ones(4, 6, dtype=torch.float64)
                with rematerializer.active():
                    output = run(aten.gelu.default, run(aten.linear.default, x, w))
                    loss = F.linear(output, w).sum()
                del x
                if backward:
                    gradients(loss, [w])
            del loss
            if backward:
                assert ops.alive == output.nbytes, "what the user keeps of the results holds nothing else"
            else:
                assert ops.alive == output.nbytes + 24 * 8, "and its own graph the operand"
            del output
            assert ops.alive == 0
    finally:
        gc.enable()


def test_a_second_backward_runs_the_ops_again() -> None:
    x, parameters, rematerializer = batch(), weights(3), Rematerializer()
    with Ops() as ops:
        with rematerializer.active():
            loss = layers(recomputing(rematerializer), x, parameters)
        first = gradients(loss, parameters, retain_graph=True)
        assert ops.counts["gelu"] == 6
        assert all(map(torch.equal, gradients(loss, parameters), first))
        assert ops.counts["gelu"] == 9


def test_a_gradient_of_a_gradient_is_exact() -> None:
    x, parameters, rematerializer = batch(), weights(2), Rematerializer()
    found = []
    for run in (plain, recomputing(rematerializer)):
        with rematerializer.active():
            loss = layers(run, x, parameters)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        found.append(gradients(torch.stack([g.square().sum() for g in first]).sum(), parameters))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_chain_may_be_longer_than_pythons_stack_is_deep() -> None:
    rematerializer, start = Rematerializer(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    run = recomputing(rematerializer)
    with rematerializer.active():
        y = start
        for _ in range(2 * sys.getrecursionlimit()):
            y = run(aten.sin.default, y)
    x, expected = start.detach(), torch.ones(2, dtype=torch.float64)
    for _ in range(2 * sys.getrecursionlimit()):
        expected, x = expected * x.cos(), x.sin()
    torch.testing.assert_close(torch.autograd.grad(y.sum(), start)[0], expected)


def test_without_gradients_an_op_is_just_called() -> None:
    rematerializer, x = Rematerializer(), torch.randn(4, requires_grad=True)
    with torch.no_grad(), rematerializer.active():
        y = recompute_op(rematerializer, aten.exp.default, x)
        assert not rematerializer.tracked
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y, x.exp())
    assert not y.requires_grad


def test_complex_values_come_back_conjugated_and_as_pairs() -> None:
    rematerializer = Rematerializer()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2).requires_grad_()
    found = []
    for run in (plain, recomputing(rematerializer)):
        with rematerializer.active():
            z = run(aten.mul.Tensor, torch.view_as_complex(x), torch.view_as_complex(x).conj() + 1j)
            loss = torch.view_as_real(run(aten.mul.Tensor, z.conj(), z.exp())).square().sum() + z.imag.exp().sum()
        found.append(torch.autograd.grad(loss, x)[0])
    assert torch.equal(*found)


def test_a_backward_under_autocast_runs_the_op_as_it_was() -> None:
    x, rematerializer = batch().float(), Rematerializer()
    parameters = [nn.Parameter(w.detach().float()) for w in weights(2)]
    expected = layers(plain, x, parameters)
    with rematerializer.active():
        found = layers(recomputing(rematerializer), x, parameters)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, parameters[0]).dtype == torch.bfloat16
        assert all(map(torch.equal, gradients(found, parameters), gradients(expected, parameters)))

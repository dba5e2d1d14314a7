"""A gathered weight is freed after use and gathered again in the backward, and gradients are unchanged."""

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.runtime.rematerialize.manager import Rematerializer, recompute_op


class Counted:
    """A conversion that counts how many tensors it makes: by default twice the source, in memory of its own."""

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight * 2) -> None:
        self.convert, self.runs = convert, 0
        self.alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.started: list[int] = []  # how many weights at a time

    def start(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.started.append(len(weights))
        return []

    def wait(
        self, indices: Sequence[int], weights: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        self.runs += len(weights)
        values = [self.convert(weight) for weight in weights]
        self.alive += [weakref.ref(value.untyped_storage()) for value in values]
        return values

    def run(self, rematerializer: Rematerializer, *weights: torch.Tensor) -> list[torch.Tensor]:
        values = self.wait(range(len(weights)), weights, self.start(weights))
        rematerializer.convert(values, self, weights)
        return values


def gradients(loss: torch.Tensor, parameters: list[nn.Parameter], **options: bool) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, parameters, **options))  # type: ignore[arg-type]


def weights(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(6, 6, dtype=torch.float64)) for _ in range(count)]


def network(parameters: list[nn.Parameter], weight: Callable[[nn.Parameter], torch.Tensor]) -> torch.Tensor:
    """Layers that save a weight as it is, transposed, sliced and as an addend's factor; the first weight is used twice."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    first = weight(parameters[0])
    x = F.linear(x, first).tanh()
    for parameter in parameters[1:]:
        gathered = weight(parameter)
        x = F.linear(x, gathered)
        x = (x * gathered[1:5]).relu() @ gathered[:, ::2].repeat(1, 2)
    return F.linear(x, first).square().sum()


def test_the_gradients_are_exact_and_each_weight_is_gathered_twice() -> None:
    parameters, counted, rematerializer = weights(6), Counted(), Rematerializer()
    expected = gradients(network(parameters, lambda w: w * 2), parameters)
    with rematerializer.active():
        loss = network(parameters, lambda w: counted.run(rematerializer, w)[0])
    assert counted.runs == 6
    found = gradients(loss, parameters)
    assert counted.runs == 12
    assert all(map(torch.equal, found, expected))


def test_a_second_backward_gathers_again() -> None:
    parameters, counted, rematerializer = weights(3), Counted(), Rematerializer()
    with rematerializer.active():
        loss = network(parameters, lambda w: counted.run(rematerializer, w)[0])
    first = gradients(loss, parameters, retain_graph=True)
    assert counted.runs == 6
    assert all(map(torch.equal, gradients(loss, parameters), first))
    assert counted.runs == 9


def test_a_chain_of_conversions_runs_once_each_and_keeps_nothing_between() -> None:
    parameters, inner, outer, rematerializer = weights(4), Counted(), Counted(lambda w: w * 3), Rematerializer()

    def twice(w: nn.Parameter) -> torch.Tensor:
        return outer.run(rematerializer, inner.run(rematerializer, w)[0].t())[0]

    expected = gradients(network(parameters, lambda w: (w * 2).t() * 3), parameters)
    with rematerializer.active():
        loss = network(parameters, twice)
    found = gradients(loss, parameters)
    assert (inner.runs, outer.runs) == (8, 8)
    assert all(map(torch.equal, found, expected))


def test_the_gathered_memory_is_free_after_the_forward_and_after_the_backward() -> None:
    parameters, counted, rematerializer = weights(5), Counted(), Rematerializer()
    alive = counted.alive
    with rematerializer.active():
        loss = network(parameters, lambda w: counted.run(rematerializer, w)[0])
    assert len(alive) == 5
    assert not any(storage() for storage in alive)
    most = []

    def watch(_: torch.Tensor) -> None:
        most.append(sum(storage() is not None for storage in alive))

    for parameter in parameters:
        parameter.register_hook(watch)
    loss.backward()
    assert max(most) <= 2  # the layer at work, and the first weight, which the last layer uses too
    assert len(alive) == 10
    assert not any(storage() for storage in alive)


def test_a_storage_is_forgotten_when_it_is_freed() -> None:
    rematerializer = Rematerializer()
    for _ in range(200):  # freed addresses are used again at once
        w = nn.Parameter(torch.randn(8, 8))
        with rematerializer.active():
            Counted().run(rematerializer, w)
            assert not rematerializer.tracked
            other = nn.Parameter(torch.randn(8, 8) * 1)
            x = torch.randn(8, 8, requires_grad=True)
            loss = (F.linear(x, other) ** 2).sum()
        expected = gradients((F.linear(x, other) ** 2).sum(), [other])
        assert torch.equal(gradients(loss, [other])[0], expected[0])


def test_part_of_a_backward_leaves_the_rest_intact() -> None:
    (a,) = weights(1)
    counted, rematerializer = Counted(), Rematerializer()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    with rematerializer.active():
        (w,) = counted.run(rematerializer, a)
        one, two = F.linear(x, w).sum(), F.linear(x * 3, w).square().sum()
        del w
        assert not rematerializer.tracked
    torch.autograd.grad(one, x)
    torch.testing.assert_close(torch.autograd.grad(two, x)[0], torch.autograd.grad(F.linear(x * 3, a * 2).square().sum(), x)[0])


def test_nothing_is_recomputed_without_gradients_or_when_the_value_views_its_source() -> None:
    (w,), rematerializer = weights(1), Rematerializer()
    with rematerializer.active(), torch.no_grad():
        kept = Counted().run(rematerializer, w)
        assert not rematerializer.tracked
    with rematerializer.active():
        rematerializer.convert([w.t()], Counted(), [w])
        assert not rematerializer.tracked
    assert kept


def test_saved_tensors_of_a_bucket_come_back_together_one_bucket_ahead() -> None:
    parameters, rematerializer = weights(9), Rematerializer()
    buckets = [Counted() for _ in range(3)]

    def layers(bucket: Callable[[int], list[torch.Tensor]]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
        for number in range(3):
            up, down, bias = bucket(number)
            x = (F.linear(x, up).tanh() @ down + bias[:4]).tanh()
        return x.square().sum()

    def of(number: int) -> list[nn.Parameter]:
        return parameters[3 * number : 3 * number + 3]

    expected = gradients(layers(lambda number: [w * 2 for w in of(number)]), parameters)
    with rematerializer.active():
        loss = layers(lambda number: buckets[number].run(rematerializer, *of(number)))
    sent_ahead = []
    parameters[3].register_hook(lambda _: sent_ahead.append([len(one.started) for one in buckets]))
    found = gradients(loss, parameters)
    assert all(map(torch.equal, found, expected))
    assert [one.started for one in buckets] == [[3, 1], [3, 2], [3, 2]], "no bias is saved, nor what the input is multiplied by"
    assert sent_ahead == [[2, 2, 2]], "the first bucket is prefetched before the backward of the second has ended"


def test_a_value_that_is_not_a_gathered_weight_is_saved_as_it_is() -> None:
    rematerializer = Rematerializer()
    x = torch.randn(4, requires_grad=True)
    with rematerializer.active():
        y = x.exp()
    assert y.grad_fn is not None
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_gathered_value_may_be_cast_on_the_way(dtype: torch.dtype) -> None:
    (w,), counted, rematerializer = weights(1), Counted(), Rematerializer()
    cast = Counted(lambda w: w.to(dtype))
    x = torch.randn(4, 6, dtype=dtype, requires_grad=True)
    with rematerializer.active():
        (whole,) = counted.run(rematerializer, w)
        loss = F.linear(x, cast.run(rematerializer, whole)[0]).square().sum()
        del whole
    assert not counted.alive[0]()
    expected = F.linear(x, (w * 2).to(dtype)).square().sum()
    assert torch.equal(gradients(loss, [w])[0], gradients(expected, [w])[0])
    assert counted.runs == 2


def test_a_bucket_that_the_backward_has_read_is_not_gathered_again() -> None:
    """A norm reads its bias, which was gathered first, before its weight: nothing is left to send for when it has both."""
    bias, weight = (nn.Parameter(torch.randn(6, dtype=torch.float64)) for _ in range(2))
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6).requires_grad_()
    first, second, rematerializer = Counted(), Counted(), Rematerializer()
    with rematerializer.active():
        (b,), (w,) = first.run(rematerializer, bias), second.run(rematerializer, weight)
        loss = F.layer_norm(x, [6], w, b).square().sum()
    del b, w
    gradients(loss, [bias, weight])
    assert (first.started, second.started) == ([1, 1], [1, 1])


def test_recomputing_an_op_gathers_its_weight_again() -> None:
    (w,), counted, rematerializer = weights(1), Counted(), Rematerializer()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    with rematerializer.active():
        (whole,) = counted.run(rematerializer, w)
        y = recompute_op(rematerializer, torch.ops.aten.linear.default, x, whole)
        assert isinstance(y, torch.Tensor)
        del whole
        loss = y.sin().sum()
        del y
    assert not counted.alive[0]()
    assert torch.equal(gradients(loss, [w])[0], gradients(F.linear(x, w * 2).sin().sum(), [w])[0])
    assert counted.runs == 2


def test_a_copy_in_another_dtype_and_what_is_gathered_from_it_are_freed_after_use() -> None:
    parameters, counted, rematerializer = weights(4), Counted(), Rematerializer()
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def narrow(weight: nn.Parameter) -> torch.Tensor:
        copied = recompute_op(rematerializer, torch.ops.aten.to.dtype, weight, torch.float32)
        assert isinstance(copied, torch.Tensor)
        alive.append(weakref.ref(copied.untyped_storage()))
        return copied

    def deep(weight: Callable[[nn.Parameter], torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 24).reshape(4, 6)
        for parameter in parameters:
            x = F.linear(x, weight(parameter)).tanh()
        return x.square().sum()

    expected = gradients(deep(lambda w: w.float()), parameters)
    with rematerializer.active():
        loss = deep(narrow)
    assert not any(storage() for storage in alive)
    assert all(map(torch.equal, gradients(loss, parameters), expected))
    with rematerializer.active():
        loss = deep(lambda w: counted.run(rematerializer, narrow(w))[0])
    assert not any(storage() for storage in (*alive, *counted.alive))
    assert all(map(torch.equal, gradients(loss, parameters), gradients(deep(lambda w: w.float() * 2), parameters)))

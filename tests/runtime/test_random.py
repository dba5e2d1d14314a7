"""Random operators draw equal numbers for replicated values and independent ones for parts; the caller's draws are kept."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.nn import functional as F

from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.runtime.drawing import drawing
from autopar.runtime.random import RngState, agreed_seed, dropout_rate, seeded
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Axis, connect

dropout = torch.ops.aten.dropout.default


def axis(name: str, index: int) -> Axis:
    return Axis(name=name, size=4, index=index, group="")


def drop(draws: RngState, index: int = 0, axes: tuple[Axis, ...] = (), training: bool = True) -> torch.Tensor:
    return seeded(dropout, draws, index, axes, torch.ones(1000), 0.5, training)


def test_what_a_draw_depends_on() -> None:
    def first(seed: int, call: int, index: int, *axes: Axis) -> torch.Tensor:
        draws = RngState(seed)
        for _ in range(call):
            draws.advance()
        return drop(draws, index, axes)

    keys = list(itertools.product((0, 1), (0, 1), (0, 1), (axis("a", 0), axis("a", 1), axis("b", 1))))
    found = [first(*key) for key in keys]
    assert all(map(torch.equal, found, (first(*key) for key in keys)))
    for one, other in itertools.combinations(found, 2):
        share = (one == other).double().mean()
        assert 0.4 < share < 0.6, "independent draws agree about half of the time"


def test_the_callers_random_state_is_neither_used_nor_changed() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = drop(RngState(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(drop(RngState(0)), one)


def test_the_state_comes_back_after_an_error() -> None:
    before = torch.get_rng_state()
    try:
        with drawing(0, torch.device("cpu")):
            torch.rand(3)
            raise KeyError
    except KeyError:
        assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_holds_the_state_and_draws_go_on_as_they_would_have(tmp_path: Path) -> None:
    saved, other = RngState(7), RngState(0)
    for _ in range(3):
        saved.advance()
    with pytest.warns(UserWarning, match="single process"):  # as is meant
        checkpoint.save({"random": saved}, checkpoint_id=tmp_path)
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load({"random": other}, checkpoint_id=tmp_path)
    for draws in (saved, other):
        draws.advance()
    assert torch.equal(drop(saved), drop(other))
    assert (other.seed, other.call) == (7, 4)


@pytest.mark.parametrize(
    "state", [{}, {"seed": 1}, {"seed": -1, "call": 0}, {"seed": True, "call": 0}, {"seed": 1.0, "call": 0}, 3]
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: object) -> None:
    draws = RngState(5)
    with pytest.raises(InputError, match="not the random state of a parallel model"):
        draws.load_state_dict(state)  # type: ignore[arg-type]
    assert draws.state_dict() == {"seed": 5, "call": 0}


def test_nothing_is_dropped_when_not_training() -> None:
    assert torch.equal(drop(RngState(0), training=False), torch.ones(1000))
    assert dropout_rate(0.1, False) == 0.0
    assert dropout_rate(0.1, True) == 0.1


def test_attention_draws_its_dropout_from_the_seed_too() -> None:
    q = torch.randn(1, 2, 8, 4)

    def attend() -> torch.Tensor:
        return seeded(F.scaled_dot_product_attention, RngState(5), 1, (), q, q, q, None, 0.5)

    assert torch.equal(attend(), attend())
    assert not torch.equal(attend(), F.scaled_dot_product_attention(q, q, q))


def test_a_copy_goes_on_where_the_original_is() -> None:
    draws = RngState(1)
    draws.advance()
    assert torch.equal(drop(copy.deepcopy(draws)), drop(draws))


def draw(_: None) -> tuple[int, torch.Tensor, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    context = connect(Mesh.of({"dp": 2, "tp": 2}))
    draws = RngState(agreed_seed(context))
    return draws.seed, drop(draws, 0, (context.axis("dp"),)), drop(draws, 1)


def test_ranks_draw_alike_unless_an_axis_splits_the_operator(pool: WorkerPool) -> None:
    seeds, split, same = zip(*pool.run(f"{__name__}:draw", ranks=4, keep=True), strict=True)  # type: ignore[misc]
    assert len(set(seeds)) == 1
    assert all(torch.equal(mask, same[0]) for mask in same)
    assert torch.equal(split[0], split[1])
    assert torch.equal(split[2], split[3])
    assert not torch.equal(split[0], split[2])


@pytest.mark.parametrize(
    "operator, arguments",
    [
        (torch.ops.aten.dropout.default, (0.25, True)),
        (torch.ops.aten.feature_dropout.default, (0.5, True)),
        (torch.ops.aten.scaled_dot_product_attention.default, ("x", "x", None, 0.25, False)),
        (torch.ops.aten.rrelu.default, (0.1, 0.3, True)),
    ],
    ids=str,
)
def test_what_is_traced_draws_and_differentiates_as_what_is_called(
    operator: torch._ops.OpOverload, arguments: tuple[object, ...]
) -> None:
    x, state = torch.randn(2, 3, 8, 4, dtype=torch.float64, requires_grad=True), RngState(5)
    axes = [Axis(name="dp", size=2, index=1, group="")]
    state.advance()
    torch._dynamo.reset()

    def draw(x: torch.Tensor) -> torch.Tensor:
        return seeded(operator, state, 3, axes, x, *(x if given == "x" else given for given in arguments))

    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        results, gradients = [], []
        for run in (draw, compiled):
            results.append(run(x))
            gradients += torch.autograd.grad(results[-1].sin().sum(), x)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients)
        state.advance()


def test_a_traced_recurrent_layer_draws_and_differentiates_as_one_that_is_called() -> None:
    """Its tensors come in lists."""
    layer = nn.LSTM(4, 4, 2, dropout=0.5, dtype=torch.float64)
    x, state, results = torch.randn(3, 2, 4, dtype=torch.float64), RngState(5), []
    weights = [*layer.parameters()]
    torch._dynamo.reset()

    def draw(x: torch.Tensor) -> object:
        start = [torch.zeros(2, 2, 4, dtype=torch.float64)] * 2
        return seeded(torch.ops.aten.lstm.input, state, 3, [], x, start, weights, True, 2, 0.5, True, False, False)

    for call in (draw, torch.compile(draw, backend="aot_eager", fullgraph=True)):
        found: Any = call(x)
        found[0].square().sum().backward()
        results.append([*found, *(weight.grad for weight in weights)])
        layer.zero_grad()
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], layer(x)[0])

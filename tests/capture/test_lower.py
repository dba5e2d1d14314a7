"""Names, gradients, regions and in-place writes in the lowered program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture, source_location
from autopar.operators import row_of
from autopar.passes import normalise
from tests.capture import interpreter


class Does(nn.Module):
    """A linear layer, and then what a test says."""

    def __init__(self, body: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = body

    def forward(self, x: torch.Tensor) -> object:
        return self.body(self.lin(x))


X = torch.linspace(-1, 1, 24).reshape(4, 6)


def through_a_slice(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[1:, ::2] = 0
    return y


def through_views_of_views(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    rows = y.view(2, 2, 6).transpose(0, 1)
    rows[0].mul_(3)
    y.t()[2] += 1
    return y + rows.permute(1, 0, 2).reshape(4, 6)


def through_splits(x: torch.Tensor) -> torch.Tensor:
    y = x.detach() * 1  # torch itself refuses this where a gradient is needed
    first, second = y.split([2, 4], dim=1)
    first.add_(second[:, :2])
    y.unbind(0)[1].zero_()
    y.chunk(3, dim=1)[2].fill_(7)
    return x * y + second.sum()


def shift_right(y: torch.Tensor) -> torch.Tensor:
    new = y.new_zeros(y.shape)
    new[:, 1:] = y[:, :-1].clone()
    new[:, 0] = 5
    new.masked_fill_(new == 5, 2)
    return new


def before_and_after(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = y * 1
    old = y * 2
    y.add_(1).relu_()
    return old, y


def other_dtype(y: torch.Tensor) -> torch.Tensor:
    whole = y.bfloat16()
    whole.add_(y[:1].expand(4, 6))
    return whole.float()


def diagonal(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y.diagonal().copy_(torch.full((4,), 3.0, device=y.device))
    return y


def whole_diagonal(y: torch.Tensor) -> torch.Tensor:
    square = y @ y.T
    return square.fill_diagonal_(3)


def into_another(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, new = y.detach(), torch.empty_like(y)
    torch.add(x, 1, out=new)
    new += 1
    return x * y, new


def made_into(y: torch.Tensor) -> torch.Tensor:
    square, steps = torch.empty(6, 6, device=y.device), torch.empty(6, dtype=torch.float64, device=y.device)
    torch.eye(6, out=square)
    torch.linspace(0, 1, 6, out=steps)
    return (y @ square) * steps


def complex_part(y: torch.Tensor) -> torch.Tensor:
    waves = torch.zeros(4, 6, dtype=torch.complex64, device=y.device)
    waves[:2, -3:] = torch.view_as_complex(y[:2].reshape(2, 3, 2))
    return torch.view_as_real(waves)


def turned(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = y[0]
    part = y[1:3]
    part.t_().unsqueeze_(0)
    part.mul_(2)
    y.transpose_(0, 1)
    y[:, 0] = 1
    row = y[:1] + 2
    row.squeeze_(0)
    y.swapaxes_(0, 1).squeeze_()
    return before + y[0], part, row, y


def turned_twice(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mask = (y > 0).float()
        mask.unsqueeze_(1)
    return (y.unsqueeze(1) * mask).squeeze_(1).swapdims_(0, 1)


def halved(y: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(6.0, device=y.device)
    steps //= 2  # the variant in place is called Tensor, the one that returns its result default
    return y * steps


WRITES = (
    halved,
    turned,
    turned_twice,
    through_a_slice,
    through_views_of_views,
    through_splits,
    shift_right,
    before_and_after,
    other_dtype,
    diagonal,
    whole_diagonal,
    into_another,
    made_into,
    complex_part,
)


@pytest.mark.parametrize("body", WRITES)
def test_writes_in_place_become_values(body: Callable[[torch.Tensor], object]) -> None:
    program = interpreter.check(Does(body), X).program
    assert not [op.target for op in program.ops if op.target.split(".")[1].endswith("_")]


def no_grad(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        still = y * 2
        with torch.enable_grad():
            moved = y * 3
        both = still + moved
    return y + still, moved, both


def given_back(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    vector, turned = y.sum(0), y.t()
    with torch.no_grad():
        same = y.to(y.dtype).contiguous().float()
        row, kept = vector.flatten(), F.dropout(y, 0.5, training=False)
        new = y.view(4, 6), turned.contiguous(), y.double()
        largest = same.argmax(-1)
    return same * y.sin(), row * 2, kept + same, largest, *new[1:], y * new[0], y + new[1].t()


def detached(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return y.detach() * y, y.argmax(-1), (y > 0).float(), torch.zeros_like(y), y.round()


def written_detached(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    zeros, table = torch.zeros(6, device=y.device), torch.zeros(2, 6, device=y.device)
    zeros.data.add_(y.sum(0))
    other = table.detach()
    other[1].add_(y.sum(0))
    return zeros * y, table * y[:2], other * y[:2]


def unheard(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, second, third = y * 2, y * 3, y * 4
    first.detach().clamp_(min=0.1)
    second.detach()[1:3].mul_(3)
    rows = second[1:]
    rows.detach().t()[0] = 0.5
    columns = third[:, 1:]
    with torch.no_grad():
        third[1:3].mul_(3)
        columns[third[:, 1:] > 1] = 0.5
    return first * y, second * y, rows.sin(), third * y, columns.sin()


def checkpointed(y: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.sin, y, use_reentrant=False) * y


def literals(y: torch.Tensor) -> torch.Tensor:
    return y * torch.tensor([[1, 2, 3], [4, 5, 6.5]]).flatten() + torch.tensor(3) * torch.tensor([True, False] * 3)


def lists(y: torch.Tensor) -> torch.Tensor:
    z = y * 1
    z[[0, 2]] = 3
    z[:, []] = 4  # no place at all
    return y[:, [-2, 1]] + z[..., [[0, 1]]].sum((1, 2))[:, None] + y[[True, False, True, True], :1].sum()


def arrays(y: torch.Tensor) -> torch.Tensor:
    rows = torch.as_tensor(np.array([2, 0])), torch.as_tensor([1.0, 2.0])
    return y[rows[0]] * rows[1][:, None] + torch.from_numpy(np.arange(6.0)) + torch.cat([torch.tensor([]), y.detach()[0]])


def ranges(y: torch.Tensor) -> torch.Tensor:
    return y[:, torch.as_tensor(range(1, 5, 2)).to(y.device)] * torch.tensor(range(2))


def identity(y: torch.Tensor) -> torch.Tensor:
    wide = torch.from_numpy(np.eye(64, dtype=np.float32).flatten())  # PointNet's: 4096 numbers in 127 runs
    return y.sum() * wide.view(64, 64) + torch.tensor([0.0, -0.0, 0.0]).reciprocal().view(3, 1, 1)


def of_its_dtype(y: torch.Tensor) -> torch.Tensor:
    places = y.argmax(-1).new_tensor([2, 0])
    return y[places] * y.new_tensor(0.5) + y.new_tensor([[1, 2, 3, 4, 5, 6]]) + y.new_tensor([y.detach().sum(), 2]).sum()


@pytest.mark.parametrize(
    "body",
    [
        no_grad,
        given_back,
        detached,
        written_detached,
        unheard,
        checkpointed,
        literals,
        lists,
        arrays,
        ranges,
        identity,
        of_its_dtype,
    ],
)
def test_gradients_stop_where_they_stop_in_the_module(body: Callable[[torch.Tensor], object]) -> None:
    interpreter.check(Does(body), X)


def test_a_value_whose_gradient_ends_is_detached_once() -> None:
    program = capture(Does(detached), X).program
    (detach,) = [op for op in program.ops if op.target == "aten.detach.default"]
    readers = [op.target for op in program.ops if detach.name in op.operands]
    assert readers == ["aten.mul.Tensor", "aten.argmax.default", "aten.gt.Scalar", "aten.zeros_like.default"]


def test_blocks_that_would_be_rebuilt_are_captured_as_they_are() -> None:
    program = capture(Does(lambda y: checkpoint(torch.sin, y, use_reentrant=True)), X).program
    assert [op.target for op in program.ops] == ["aten.linear.default", "aten.sin.default"]


def test_autocast_becomes_casts() -> None:
    def cast(y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (y @ y.t()).softmax(-1)

    program = capture(Does(cast), X).program
    dtypes = {op.name: op.results[0].dtype for op in program.ops}
    assert dtypes[":matmul#0"] is torch.bfloat16
    assert dtypes[":softmax#0"] is torch.float32
    assert [op.target for op in program.ops].count("aten.to.dtype") == 3


def test_dtypes_under_autocast_are_what_python_sees() -> None:
    """Before, a product was float32 for who asked: on the meta device autocast does nothing."""
    seen: SimpleQueue[list[torch.dtype]] = SimpleQueue()  # a list would be taken back

    def asking(y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = nn.functional.linear(y, y)
            total = product.softmax(-1)
        seen.put([product.dtype, total.dtype])
        return y.to(product.dtype).sum() + total.sum()

    program = capture(Does(asking), X).program
    assert seen.get() == [torch.bfloat16, torch.float32]  # as on GPUs
    assert program.producer[":linear#0"].results[0].dtype is torch.bfloat16


def test_batch_norm_stays_whole_and_counts_its_batches() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    program = interpreter.check(model, X).program
    assert [op.target for op in program.ops] == ["aten.linear.default", "aten.add_.Tensor", "aten.batch_norm.default"]
    assert program.ops[1].operands == ("1.num_batches_tracked",)


class Remembers(nn.Module):
    """Running means, a scale that the backward needs as it was, a count of calls, and a table of which one row is written."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.register_buffer("spread", torch.zeros(6))
        self.register_buffer("calls", torch.tensor(2))
        self.register_buffer("table", torch.ones(3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.lin(x).sin() * self.scale
        self.scale = 0.5 * self.scale[:1] + self.scale
        with torch.no_grad():
            self.mean.mul_(0.9).add_(self.lin(x).mean(0), alpha=0.1)
            torch.mul(self.mean, 2, out=self.table[1])
        self.spread.data.mul_(0.9).add_(before.square().sum(0), alpha=0.1)  # the buffer itself has no gradient
        self.calls += 1
        return self.lin(x - self.mean) * self.calls + self.table.sum() + before + self.spread


def test_buffers_keep_what_is_written_into_them() -> None:
    model = Remembers()
    captured, other = capture(model, X), copy.deepcopy(model)
    for program in (captured.program, normalise(captured.program)):
        for _ in range(2):
            (found,) = interpreter.outputs(program, model, [X])
            expected = other(X)
            torch.testing.assert_close(found, expected)
            for total, held in ((found, model), (expected, other)):
                total.sin().sum().backward()  # type: ignore[no-untyped-call]
                assert held.lin.weight.grad is not None
            torch.testing.assert_close(model.lin.weight.grad, other.lin.weight.grad)
            for one, another in zip(model.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(one, another)


class Draws(nn.Module):
    """Numbers that are drawn into memory that nothing was written to."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = x.new_empty(x.shape).bernoulli_(1.0) + torch.empty_like(x).normal_(1.0, 0.0)
        return ones, torch.empty_like(x).bernoulli_(), torch.empty_like(x).uniform_(2, 3)


def test_drawing_in_place_is_drawing() -> None:
    program = capture(Draws(), X).program
    twos, bits, parts = interpreter.outputs(program, Draws(), [X])
    assert torch.equal(twos, torch.full_like(X, 2))
    assert set(bits.unique().tolist()) <= {0.0, 1.0}
    assert ((parts >= 2) & (parts < 3)).all()


def test_ops_are_named_by_module_and_count() -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        left, right = (y * 2 * 3).split(3, dim=-1)
        return left + right

    program = capture(Does(body), X).program
    names = [value.name for op in program.ops for value in op.results]
    assert names == ["lin:linear#0", ":mul#0", ":mul#1", ":split#0.0", ":split#0.1", ":add#0"]
    assert [op.name for op in program.ops][3] == ":split#0"
    assert all("in forward" in op.source and __file__ in op.source for op in program.ops)


def test_beside_a_loss_other_outputs_are_values_of_their_own() -> None:
    def body(y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(y, torch.ones_like(y)), "scores": y, "best": y.argmax(-1)}

    captured = capture(Does(body), X)
    made = {output.path: captured.program.producer[output.value].target for output in captured.program.outputs}
    assert made == {"loss": "aten.mse_loss.default", "scores": "aten.alias.default", "best": "aten.argmax.default"}


def test_evaluation_is_captured_as_such() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).eval()
    assert capture(model, X).program.ops[1].args[2] is False
    assert capture(model.train(), X).program.ops[1].args[2] is True


def test_draws_that_name_no_generator_are_draws() -> None:
    def drawn(y: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(4, 6, generator=None, device=y.device) + torch.rand(4, 6, generator=None, device=y.device)
        noise = noise + torch.randint(9, (4, 6), generator=None, device=y.device)
        return y * noise * torch.randint(2, 9, (4, 6), generator=None, device=y.device)

    program = capture(Does(drawn), X).program
    targets = [op.target for op in program.ops if "rand" in op.target]
    assert targets == ["aten.randn.default", "aten.rand.default", "aten.randint.default", "aten.randint.low"]
    assert all(row_of(op).random for op in program.ops if "rand" in op.target)


def test_the_line_of_an_op_is_the_one_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        return F.gelu(y).square() + checkpoint(F.softplus, y, use_reentrant=False)

    model = nn.Sequential(Does(body), nn.Linear(6, 6), Does(lambda y: F.dropout(y, 0.5)))
    found = [(op.name, op.source) for op in capture(model, X).program.ops]
    monkeypatch.setattr(source_location, "Forwards", lambda original: original)
    assert found == [(op.name, op.source) for op in capture(model, X).program.ops]
    assert len({source for _, source in found}) > 1

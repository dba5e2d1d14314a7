"""Models written in unusual ways have equal numbers on a mesh, and send what their plans list."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from autopar.verify.report import Report
from autopar.verify.verification import verify
from tests.support import planning, table
from tests.support.threads import Threads

Made = tuple[nn.Module, object]
PLANS = ("auto", "fsdp", "megatron", 0, 1, 2)


def verified(made: Made, plan: str | int, threads: Threads, sizes: tuple[int, ...] = (4,)) -> Report:
    """The report of a model under a strategy, or under the random plan of a seed."""
    (model, batch), on = made, table.mesh(sizes)
    if isinstance(plan, int):
        chosen = autopar.testing.random_plan(model, batch, on, seed=plan)
    else:
        chosen = autopar.plan(model, batch, on, strategy=plan)
    return verify(model, batch, on, chosen, Options(), threads)


# --- weights that are used through views ----------------------------------------------------------------------------------

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # products of (16, 8) and (8, 16)
    "transposed twice": lambda x, w: x @ w.t().t(),
    "reshaped": lambda x, w: x @ w.view(2, 4, 16).reshape(8, 16),
    "with a dim more": lambda x, w: (x.unsqueeze(0) @ w.unsqueeze(0)).squeeze(0),
    "in slices": lambda x, w: torch.cat([x @ w[:, :8], x @ w[:, 8:]], 1),
    "in chunks": lambda x, w: torch.cat([x @ part for part in w.chunk(2, 1)], 1),
    "itself and as a view": lambda x, w: x @ w + x.relu() @ w.t().t(),
    "one view twice": lambda x, w: x @ (v := w.t()).t() + (2 * x) @ v.t(),
}
COPIED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copied by a reshape": lambda x, w: x @ w.t().reshape(8, 16),
}


class Through(nn.Module):
    """A weight between two layers, used in one of the ways."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((USES | COPIED)[self.use](self.first(x).relu(), self.weight)).square().sum()


@pytest.mark.one_in(10)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("use", USES)
def test_a_weight_is_gathered_again_if_the_backward_needs_a_view_of_it(threads: Threads, use: str, plan: str | int) -> None:
    report = verified((Through(use), torch.randn(16, 8)), plan, threads)
    assert report.ok, str(report)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("plan", ["auto", "fsdp", "megatron"])
@pytest.mark.parametrize("use", COPIED)
def test_a_copy_of_a_weight_in_the_model_is_kept_with_equal_numbers(threads: Threads, use: str, plan: str) -> None:
    report = verified((Through(use), torch.randn(16, 8)), plan, threads)
    assert report.ok, str(report)


class Stack(nn.Module):
    """Square layers whose weights stand transposed, or not."""

    def __init__(self, depth: int, width: int, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(width, width)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = (x @ weight.t() if self.transposed else x @ weight).relu()
        return x.sum()


def test_a_weight_takes_time_and_memory_once_whether_it_is_used_itself_or_as_a_view() -> None:
    on = planning.mesh((8,), planning.link(100))
    plans = []
    for transposed in (True, False):
        with torch.device("meta"):
            made = read_program(Stack(6, 1024, transposed=transposed), torch.empty(64, 1024))
        plans.append(planning.plan(made, on, strategy="fsdp"))
    (first, second) = ((plan.step_time, plan.peak_memory, len(plan.collectives)) for plan in plans)
    assert first == pytest.approx(second)


# --- lists of one tensor ----------------------------------------------------------------------------------------------------

LISTS: dict[str, Callable[[torch.Tensor], object]] = {
    "chunk": lambda x: x.chunk(1),
    "split": lambda x: x.split(8),
    "split into sizes": lambda x: x.split([8], 1),
    "split at no place": lambda x: x.tensor_split([]),
    "sections": lambda x: x.tensor_split(1) + x.hsplit(1) + x.vsplit(1),
    "unbind": lambda x: x[:1].unbind(),
    "meshgrid": lambda x: torch.meshgrid(x[0], indexing="ij"),
    "broadcast": lambda x: torch.broadcast_tensors(x),
    "without a rule": lambda x: torch._foreach_exp([x]),
}


class Listed(nn.Module):
    """A layer before an operator that returns a list of one tensor."""

    def __init__(self, makes: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.makes = nn.Linear(8, 8), makes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.square().sum() for part in self.makes(self.layer(x))]).sum()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:no sharding rule")
@pytest.mark.parametrize("makes", LISTS)
def test_an_operator_may_return_a_list_of_one_tensor(makes: str) -> None:
    report = autopar.verify(Listed(LISTS[makes]), torch.randn(8, 8), (1,), device="h100")
    assert report.ok, report


# --- names ------------------------------------------------------------------------------------------------------------------

HIDDEN = ("graph", "code", "meta", "run", "recompile", "autopar", "print_readable", "_graph", "_code", "class", "if", "None")


class Named(nn.Module):
    """A layer, a parameter and a buffer under names that Python or fx uses for something else."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.box = nn.ModuleDict({"inner": nn.Linear(8, 8)})
        self.name = name
        if name in ("class", "if", "None"):  # inside a container too
            self.box[name] = nn.Linear(8, 8)
        self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.box.values():
            x = layer(x).relu()
        return self._modules[self.name](x).square().sum()  # type: ignore[misc]


class Bare(nn.Module):
    """A parameter and a buffer under such names."""

    def __init__(self, parameter: str, buffer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_parameter(parameter, nn.Parameter(torch.randn(8)))
        self.register_buffer(buffer, torch.randn(8))
        self.names = parameter, buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self._parameters[self.names[0]] + self._buffers[self.names[1]]).square().sum()


@pytest.mark.filterwarnings("ignore:.*cannot be reached as an attribute")
@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "model",
    [*(Named(name) for name in HIDDEN), *(Bare(*pair) for pair in zip(HIDDEN, HIDDEN[1:] + HIDDEN[:1], strict=True))],
    ids=lambda model: "-".join(name for name, _ in (*model.named_children(), *model.named_parameters(recurse=False))),
)
def test_names_that_python_or_fx_uses_stay_in_the_state_and_train(model: nn.Module, threads: Threads) -> None:
    batch = torch.randn(8, 8)
    parallel = autopar.parallelize(model, batch, (1,), device="h100")
    assert list(parallel.state_dict()) == list(model.state_dict())
    assert [name for name, _ in parallel.named_modules()][1:] == [name for name, _ in model.named_modules()][1:]
    expected = model(batch)
    for module in (parallel, copy.deepcopy(parallel)):
        module.load_state_dict(model.state_dict())
        loss = module(batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
    report = verified((model, batch), "fsdp", threads)
    assert report.ok, str(report)


NAMES = (
    "torch inf nan device NoneType fx_pytree all_gather__reduce_scatter all_gather__reduce_scatter_start "
    "all_gather__reduce_scatter_wait to_local getitem self_ rematerializer recompute_op axis0"
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", NAMES.split())
def test_an_argument_may_be_named_like_what_emitted_code_uses(threads: Threads, name: str) -> None:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        exec(f"def forward(self, {name}): return self.layer({name}).relu().sum()", globals(), locals())

    report = verified((Called(), torch.randn(8, 8)), "fsdp", threads)
    assert report.ok, str(report)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "megatron"])
def test_a_parameter_that_is_never_used_is_stored_whole_under_every_strategy(threads: Threads, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model.register_parameter("unused", nn.Parameter(torch.randn(8, 8)))
    report = verified((model, torch.randn(8, 8)), strategy, threads)
    assert report.ok, str(report)
    assert report.plan.layouts["unused"] == "I"


# --- operators, dtypes and modules ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer of 8, and a function of the module and its result."""

    def __init__(self, function: Callable[..., object], dtype: torch.dtype = torch.float32, **held: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.layer = nn.Linear(8, 8, dtype=dtype)
        for name, tensor in held.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, self.layer(x.to(self.layer.weight.dtype)))


def complex_of(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(y.unflatten(1, (4, 2)))


def contrast(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Every sample is told from all others, from either side."""
    logits, own = left @ right.t(), torch.arange(len(left))
    return nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.t(), own)


def two_views(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """The batch is concatenated with another view of it: each of both is told from all others."""
    both = m.layer(torch.cat([y, y.tanh()]))
    others = ~torch.eye(len(both), dtype=torch.bool)
    return (both @ both.T)[others].view(len(both), -1).logsumexp(1).mean()


class Complex(nn.Module):
    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(8, 8), loss
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = complex_of(self, self.layer(x)) @ self.weight
        return y.abs().sum() if self.loss else y


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, none: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() + self.layer(none).sum()


def spectral() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


def remembered(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """A running mean that the backward needs as it was, and is written twice."""
    before = y * m.mean
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)  # type: ignore[operator]
    with torch.no_grad():
        m.mean.clamp_(-0.1, 0.1)
    return (before - m.mean).square().sum()


def thinned(_: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Stochastic depth: some rows are left out, the others grow."""
    return (y + y.sin() * y.new_empty(len(y), 1).bernoulli_(0.5).div_(0.5)).square().sum()


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(kind(8, 8, 2, dropout=0.5, batch_first=True))


class Recurrent(nn.Module):
    def __init__(self, cells: nn.RNNBase) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0].square().sum()  # type: ignore[no-any-return]


def queued(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Scores against a queue of keys, which drops its oldest for those of the batch (MoCo)."""
    scores, keys = y @ m.queue.clone(), y.detach().T  # type: ignore[operator]
    m.queue.copy_(torch.cat([keys, m.queue[:, :8]], 1))  # type: ignore[operator, index]
    return scores.logsumexp(1).sum()


X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, Callable[[], Made]] = {
    "a trace": lambda: (Layer(lambda _, y: torch.einsum("ii", y)), X),
    "a diagonal": lambda: (Layer(lambda _, y: torch.einsum("ii->i", y).square().sum()), X),
    "diagonals of a batch": lambda: (Layer(lambda _, y: torch.einsum("bii->b", y.unflatten(1, (2, 4))[:, :, :2]).sum()), X),
    "outputs with one path": lambda: (Layer(lambda _, y: {"a.b": y, "a": {"b": 2 * y}}), X),
    "a contrastive loss": lambda: (Layer(lambda m, y: contrast(y, m.layer(y))), X),
    "two views of each sample compared": lambda: (Layer(two_views), X),
    "a complex loss": lambda: (Complex(loss=True), X),
    "complex results": lambda: (Complex(loss=False), X),
    "no elements inside": lambda: (Layer(lambda m, y: torch.cat([y, m.layer(y[:0])]).square().sum()), X),
    "an input without elements": lambda: (Parts(), (X, torch.zeros(8, 0, 8))),
    "an input with a gradient": lambda: (nn.Sequential(nn.Linear(8, 8)), X.clone().requires_grad_()),
    "counted embedding": lambda: (nn.Embedding(16, 8, scale_grad_by_freq=True), torch.arange(32).reshape(8, 4) % 16),
    "spectral norm": lambda: (spectral(), X),
    "a buffer that is written": lambda: (Layer(remembered, mean=torch.linspace(-1, 1, 8)), X),
    "a queue": lambda: (Layer(queued, queue=torch.linspace(-1, 1, 128).view(8, 16)), X),
    "stochastic depth": lambda: (Layer(thinned), X),
    "LSTM": lambda: (recurrent(nn.LSTM), X.reshape(4, 2, 8)),
    "GRU": lambda: (recurrent(nn.GRU), X.reshape(4, 2, 8)),
    "random slopes": lambda: (nn.Sequential(nn.Linear(8, 8), nn.RReLU()), X),
    "dropout that stays on": lambda: (Layer(lambda _, y: nn.functional.dropout(y, 0.5, True).sum()).eval(), X),
}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_an_unusual_model_has_equal_numbers(threads: Threads, name: str, plan: str | int) -> None:
    made = MODELS[name]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no sharding rule")
        report = verified(made, plan, threads)
    assert report.ok, str(report)
    if name == "outputs with one path":
        assert [row.name for row in report.rows if row.what == "output"] == ["a.b", "a.b#1"]
    if name == "an input with a gradient":
        assert ("gradient", "input") in {(row.what, row.name) for row in report.rows}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_samples_that_are_appended_to_a_queue_are_gathered(threads: Threads, strategy: str) -> None:
    report = verified(MODELS["a queue"](), strategy, threads, (2, 2))
    assert report.ok, str(report)


def entropy(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y, y.argmax(-1), weight=m.weight)  # type: ignore[arg-type]


def probabilities(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y, y.detach().softmax(-1), weight=m.weight)  # type: ignore[arg-type]


def positives(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.binary_cross_entropy_with_logits
    return loss(y, y.detach().sigmoid(), weight=m.weight, pos_weight=m.weight)  # type: ignore[arg-type]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", [entropy, probabilities, positives])
def test_a_mean_loss_in_a_narrow_dtype_takes_weights_and_probabilities(
    threads: Threads, loss: Callable[..., torch.Tensor], dtype: torch.dtype
) -> None:
    model = Layer(loss, dtype, weight=torch.rand(8, generator=torch.Generator().manual_seed(0)).to(dtype))
    report = verified((model, X), "megatron", threads)
    assert report.ok, str(report)


def test_steps_of_a_model_that_writes_a_buffer_are_those_of_the_model() -> None:
    model = MODELS["a buffer that is written"]()[0]
    parallel = autopar.parallelize(model, X, (1,), device="h100")
    for _ in range(3):
        for one in (model, parallel):
            one(X).backward()
        torch.testing.assert_close(parallel.mean, model.mean)
        torch.testing.assert_close(parallel.layer.weight.grad, model.layer.weight.grad)  # type: ignore[union-attr]


# --- modes and copies -------------------------------------------------------------------------------------------------------


def test_what_an_evaluation_leaves_on_stays_on_in_every_mode() -> None:
    for training in (True, False):
        model = MODELS["dropout that stays on"]()[0].train(training)
        parallel = autopar.parallelize(model, X, (1,), device="h100")
        for mode in (False, True, False):
            assert not torch.equal(parallel.train(mode)(X), parallel(X)), (training, mode)


def test_a_copy_of_a_parallel_module_is_one_over_the_same_parameters_or_over_its_own() -> None:
    parallel = autopar.parallelize(nn.Linear(8, 8), X, (1,), device="h100")
    shallow, deep = copy.copy(parallel), copy.deepcopy(parallel)
    assert shallow.weight is parallel.weight
    assert deep.weight is not parallel.weight
    for one in (shallow, deep):
        torch.testing.assert_close(one(X), parallel(X))


class Pair(NamedTuple):
    loss: torch.Tensor
    rest: torch.Tensor


def test_a_model_may_return_a_class_that_workers_cannot_import(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "__module__", "__main__")
    monkeypatch.setattr(__import__("__main__"), "Pair", Pair, raising=False)
    report = verified((Layer(lambda _, y: Pair(y.sum(), y)), X), "auto", threads)
    assert report.ok, str(report)
    assert [row.name for row in report.rows if row.what == "output"] == ["loss", "rest"]


def test_verify_says_what_was_made_certain_and_what_draws_in_spite_of_it() -> None:
    on = table.mesh((1,))
    certain = autopar.verify(*MODELS["dropout that stays on"](), on)
    assert certain.ok
    assert certain.notes == ("dropout was 0 on both sides",)
    fixed = autopar.verify(Layer(lambda _, y: (y * torch.empty_like(y).bernoulli_(0.9) * torch.rand(8, 1)).sum()), X, on)
    assert fixed.ok, str(fixed)
    assert fixed.notes == ("random numbers were 0.5 on both sides",)
    with pytest.warns(UserWarning, match="no sharding rule"):
        drawing = autopar.verify(Layer(lambda _, y: (y * torch.randint_like(y.detach(), torch.tensor(9))).sum()), X, on)
    assert not drawing.ok
    assert "aten.randint_like.Tensor draws random numbers of its own at " in drawing.notes[0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_has_the_numbers_of_its_forward(threads: Threads, reentrant: bool) -> None:
    def again(m: nn.Module, y: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda z: m.drop(z.sin() ** 2).sin(), y, use_reentrant=reentrant).sum()  # type: ignore[operator]

    model = Layer(again)
    model.drop = nn.Dropout(0.5)
    report = verified((model, X), "auto", threads)
    assert report.ok, str(report)


def test_a_sparse_buffer_that_nothing_reads_is_no_part_of_the_plan(threads: Threads) -> None:
    model = Layer(lambda _, y: y.square().sum())
    model.register_buffer("heads", torch.eye(4).bool().to_sparse(), persistent=False)
    report = verified((model, X), "fsdp", threads)
    assert report.ok, str(report)

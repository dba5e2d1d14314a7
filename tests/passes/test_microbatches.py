"""The runs of a micro-batch's program add up to the program of the whole batch, in value and gradient; or there is none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.errors import ConstraintError
from autopar.ir.layout import I, P, shard, split
from autopar.ir.program import Program
from autopar.ir.training_step import TrainingStep
from autopar.passes import normalise
from autopar.passes.microbatches import counts, microbatches
from autopar.passes.no_dropout import without_dropout
from autopar.passes.to_float64 import promote
from autopar.planning.planner import read_program
from tests.capture import interpreter
from tests.passes.programs import program, targets
from tests.support import models

torch.manual_seed(0)
X, W, V = torch.randn(8, 6).double(), torch.randn(5, 6).double(), torch.rand(5).double()
LABELS = torch.tensor([0, -100, -100, 2, 1, -100, 3, 4])  # in two runs two and three count, in four 1, 1, 1, 2
Function = Callable[..., torch.Tensor]


def gradients(loss: torch.Tensor, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    wanted = [tensor for tensor in given if tensor.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def looped(step: TrainingStep, held: dict[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The outputs of every run."""
    made, loop = step.program, step.loop
    assert loop is not None
    hoisted = loop.hoisted
    whole = [*inputs, *(interpreter.run(hoisted, held | named(hoisted, inputs)) if hoisted else [])]
    assert [tuple(tensor.shape) for tensor in whole] == [step.batch_shape(value.name) for value in made.inputs]
    parts = [
        [shard(tensor, (state,), (loop.count,), (run,)) for tensor, state in zip(whole, loop.inputs, strict=True)]
        for run in range(loop.count)
    ]
    return [interpreter.run(made, held | named(made, part)) for part in parts]


def named(made: Program, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {value.name: tensor for value, tensor in zip(made.inputs, inputs, strict=True)}


def check(captured: Program, held: dict[str, torch.Tensor], inputs: Sequence[torch.Tensor], runs: int) -> TrainingStep:
    """Losses and gradients of the runs add up to those of the whole batch, other outputs join."""
    made = microbatches(captured, runs)
    assert made.microbatches == runs
    whole, found = interpreter.run(captured, held | named(captured, inputs)), looped(made, held, inputs)
    given = [*held.values(), *inputs]
    assert made.loop is not None
    for state, expected, parts in zip(made.loop.outputs, whole, zip(*found, strict=True), strict=True):
        joined = torch.cat(parts, state.dim) if state.kind == "S" else sum(parts) if state == P else parts[0]
        torch.testing.assert_close(joined, expected, atol=1e-12, rtol=1e-12)
        if expected.requires_grad and not expected.shape:
            total = [sum(each) for each in zip(*(gradients(part, given) for part in parts), strict=True)]
            torch.testing.assert_close(total, gradients(expected, given), atol=1e-12, rtol=1e-12)
    return made


LOSSES: dict[str, tuple[Function, ...]] = {
    "sum": (lambda x, w: (x @ w.T).square().sum(),),
    "mean": (lambda x, w: (x @ w.T).square().mean(),),
    "mean of means": (lambda x, w: (x @ w.T).square().mean(1).mean(),),
    "rows over their number": (lambda x, w: (x @ w.T).square().sum() / x.shape[0],),
    "with a penalty": (lambda x, w: (x @ w.T).square().mean() + 0.1 * w.square().sum(),),
    "one minus a mean": (lambda x, w: 1 - (x @ w.T).tanh().mean(),),
    "plus and minus numbers": (lambda x, w: torch.rsub((x @ w.T).mean() - 0.5, 3, alpha=2) + 0.25,),
    # In two runs a share of the first number is the second one, which is still to be shared.
    "plus falling numbers": (lambda x, w: torch.stack([(x @ w.T).mean() + 2.0**-k for k in range(4)]).sum(),),
    "plus rising numbers": (lambda x, w: torch.stack([(x @ w.T).mean() + 2.0**k for k in range(4)]).sum(),),
    "times a number": (lambda x, w: 2 * ((x @ w.T).mean(0) + 1).sum(),),
    "with noise of its own": (lambda x, w: (x @ w.T + torch.ones(8, 5, dtype=x.dtype)).square().mean(),),
    "with rows that are made": (lambda x, w: (torch.cat([w[:1].expand(8, -1), x], 1) @ torch.cat([w, w], 1).T).tanh().sum(),),
    "transposed and merged": (lambda x, w: (x.reshape(8, 2, 3).transpose(0, 1).reshape(16, 3) @ w[:, :3].T).exp().mean(),),
}
LABELLED: dict[str, Function] = {
    "cross entropy": lambda x, w, t: F.cross_entropy(x @ w.T, t),
    "smoothed": lambda x, w, t: F.cross_entropy(x @ w.T, t, label_smoothing=0.1),
    "weighted": lambda x, w, t: F.cross_entropy(x @ w.T, t, weight=t.new_ones(5, dtype=x.dtype).cumsum(0)),
    "summed": lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="sum"),
    "over a count of at least one": lambda x, w, t: (
        F.cross_entropy(x @ w.T, t, reduction="sum") / (t != -100).sum().clamp(min=1)
    ),
    "over its root": lambda x, w, t: F.cross_entropy(x @ w.T, t, reduction="sum") / (t != -100).sum().to(x.dtype).sqrt(),
    "with keys that have no gradient": lambda x, w, t: F.cross_entropy(
        (x @ w.T) @ t.to(x.dtype)[:, None].expand(8, 5).T, t % 8
    ),
    "of samples in another order": lambda x, w, t: (x @ w.T)[:, 0] @ t.flip(0).to(x.dtype),
    "weighed by what the batch has": lambda x, w, t: ((x @ w.T).square().sum(1) * (t + 100) / (t + 100).max()).mean(),
}


@pytest.mark.parametrize("runs", [2, 4, 8])
@pytest.mark.parametrize("loss", [*LOSSES, "mse"])
def test_losses_and_gradients_add_up_to_the_whole(loss: str, runs: int) -> None:
    function: Function = LOSSES[loss][0] if loss in LOSSES else lambda x, w: F.mse_loss(x @ w.T, x[:, :5])
    given = X.clone().requires_grad_(), W.clone().requires_grad_()
    check(normalise(program(function, *given)), {}, given, runs)


@pytest.mark.parametrize("runs", [2, 4, 8])
@pytest.mark.parametrize("loss", LABELLED)
def test_what_a_mean_divides_by_is_counted_over_the_whole_batch(loss: str, runs: int) -> None:
    given = X.clone().requires_grad_(), W.clone().requires_grad_(), LABELS
    made = check(normalise(program(LABELLED[loss], *given)), {}, given, runs)
    assert bool(made.hoisted) == (loss != "summed")


ACCURACIES: dict[str, Function] = {
    "over a number": lambda hits, t: hits.sum() / t.numel(),
    "over a count": lambda hits, t: hits.sum().double() / (t != -100).sum(),
    "times a number": lambda hits, t: 100.0 * hits.sum(),
}


@pytest.mark.parametrize("runs", [2, 8])
@pytest.mark.parametrize("accuracy", ACCURACIES)
def test_whole_numbers_that_are_added_up_may_be_divided(accuracy: str, runs: int) -> None:
    """An accuracy beside the loss."""

    def both(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = x @ w.T
        return F.cross_entropy(logits, t), ACCURACIES[accuracy](logits.argmax(1) == t, t)

    given = X.clone().requires_grad_(), W.clone().requires_grad_(), LABELS
    check(normalise(program(both, *given)), {}, given, runs)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("runs", [2, 8])
@pytest.mark.parametrize("name", models.MODELS)
def test_the_runs_of_a_model_are_its_step(name: str, runs: int) -> None:
    model, sample = models.make(name)
    captured = models.captured(name)
    whole = promote(without_dropout(captured.program))
    held = {
        name: (tensor.detach().double() if tensor.is_floating_point() else tensor).requires_grad_(tensor.requires_grad)
        for name, tensor in interpreter.held(captured.program, model).items()
    }
    inputs = [t.double() if t.is_floating_point() else t for t in captured.signature.bind((), sample)]
    check(whole, held, inputs, runs)


def test_the_program_of_a_part_is_the_whole_ones_on_smaller_shapes() -> None:
    given = X.clone().requires_grad_(), W.clone().requires_grad_(), LABELS
    step = microbatches(normalise(program(LABELLED["cross entropy"], *given)), 4)
    made, loop = step.program, step.loop
    assert loop is not None
    assert loop.hoisted is not None
    assert targets(loop.hoisted) == ["ne.Scalar", "sum.default", "to.dtype"]
    assert targets(made) == ["numpy_T.default", "matmul.default", "cross_entropy_loss.default", "div.Tensor"]
    assert [value.shape for value in made.inputs] == [(2, 6), (5, 6), (2,), ()]
    assert [step.batch_shape(value.name) for value in made.inputs] == [(8, 6), (5, 6), (8,), ()]
    assert (loop.inputs, loop.outputs) == ((split(0, 2), I, split(0, 2), I), (P,))
    assert step.hash != microbatches(normalise(program(LABELLED["cross entropy"], *given)), 2).hash


class Normed(nn.Module):
    """Batch norm and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).square().sum()


def over_a_mask(y: torch.Tensor) -> torch.Tensor:
    mask = torch.rand(8, 1, dtype=y.dtype) < 0.5
    return (y * mask).sum() / mask.sum()


class Noisy(nn.Module):
    """A loss under noise that is returned beside it, of every sample or of all of them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, self.layer = sizes, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, noise: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(self.sizes) if noise is None else noise
        return (self.layer(x) * noise).square().mean(), noise


def test_noise_that_is_returned_is_what_the_loss_has_seen() -> None:
    model, x = Noisy(8, 1), torch.randn(8, 6)
    loss, noise = autopar.parallelize(model, x, (1,), device="h100", microbatches=4)(x)
    assert len(noise.unique()) == 8
    torch.testing.assert_close(loss, model(x, noise)[0])


class Diffused(nn.Module):
    """A loss at times that are drawn, and read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.embedded = nn.Linear(6, 6), nn.Embedding(100, 6)

    def forward(self, x: torch.Tensor, at: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(0, 100, (8,)) if at is None else at
        return (self.layer(x * at[:, None] / 100) + self.embedded(at)).square().mean(), at


def test_times_that_are_drawn_may_be_read_twice() -> None:
    model, x = Diffused(), torch.randn(8, 6)
    loss, at = autopar.parallelize(model, x, (1,), device="h100", microbatches=4)(x)
    torch.testing.assert_close(loss, model(x, at)[0])


def test_noise_of_all_samples_is_not_returned() -> None:
    with pytest.raises(ConstraintError, match="a step cannot run in 2 micro-batches: each of them draws another 1"):
        microbatches(read_program(Noisy(6), torch.randn(8, 6)).program, 2)


MIXED: dict[str, tuple[Function, str]] = {
    "contrastive": (lambda x, w: F.cross_entropy(x @ x.T, torch.arange(8)), "aten.matmul.default mixes the samples"),
    "of a norm": (lambda x, w: (x @ w.T).norm(), "mixes the samples of the batch"),
    "of a ratio": (lambda x, w: (x @ w.T).sum() / x.exp().sum(), "aten.sum.default adds up .* by aten.div.Tensor"),
    "the greatest": (lambda x, w: (x @ w.T).max(), "mixes the samples of the batch"),
    "shuffled": (lambda x, w: (x.flip(0) * x).sum(), "mixes the samples of the batch"),
    "over a drawn mask": (lambda x, w: over_a_mask(x @ w.T), "what aten.rand.default draws is needed whole by some operators"),
    "no loss": (lambda x, w: x @ w.T, "the model returns no loss"),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_is_not_a_sum_over_samples_is_refused(name: str) -> None:
    function, said = MIXED[name]
    with pytest.raises(ConstraintError, match=f"a step cannot run in 4 micro-batches: .*{said}"):
        microbatches(normalise(program(function, X.clone().requires_grad_(), W.clone().requires_grad_())), 4)


def test_batch_norm_is_refused_in_training_and_not_in_evaluation() -> None:
    model = Normed()
    with pytest.raises(ConstraintError, match=r"aten\.batch_norm\.default mixes the samples of the batch") as caught:
        microbatches(read_program(model, torch.randn(8, 6)).program, 2)
    assert "test_microbatches.py" in caught.value.details["at"]
    assert microbatches(read_program(model.eval(), torch.randn(8, 6)).program, 2).microbatches == 2


class Routed(nn.Module):
    """A router beside a loss: the share of the samples that each of four experts gets, times the mean of its probability."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probability = self.gate(x).softmax(-1)
        total = F.one_hot(probability.argmax(-1), 4).sum(0) + 0
        balance = total.to(x.dtype) * probability.mean(0)
        return probability.square().sum() + balance.sum()


def test_the_loss_of_a_router_is_refused_by_its_sum_over_the_samples() -> None:
    with pytest.raises(ConstraintError) as caught:
        microbatches(read_program(Routed(), torch.randn(8, 6)).program, 2)
    refused, (_, first) = caught.value, inspect.getsourcelines(Routed.forward)
    why = "what aten.sum.dim_IntList adds up over the samples of the batch is needed whole, by aten.mul.Tensor"
    assert refused.what == f"a step cannot run in 2 micro-batches: {why}"
    assert refused.details["value"] == ":sum#0: int64[4]"
    assert refused.details["module"] == "the model itself"
    assert f"test_microbatches.py:{first + 2} in forward" in refused.details["summed at"]
    assert f"test_microbatches.py:{first + 3} in forward" in refused.details["at"]
    assert refused.details["fix"].startswith("microbatches=1, or a model without that sum")


class Counted(nn.Module):
    """A table, or bags of it, whose gradient is scaled by how often the batch reads a row."""

    def __init__(self, table: type[nn.Embedding | nn.EmbeddingBag]) -> None:
        super().__init__()
        self.table, self.last = table(16, 6, scale_grad_by_freq=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x)).square().mean()


@pytest.mark.parametrize("table, target", [(nn.Embedding, "embedding.default"), (nn.EmbeddingBag, "embedding_bag.padding_idx")])
def test_a_table_that_counts_what_the_batch_reads_is_refused_by_that_name(
    table: type[nn.Embedding | nn.EmbeddingBag], target: str
) -> None:
    """Before, the first was a sum over the samples, such as a router's loss, and the second had no rule."""
    with pytest.raises(ConstraintError) as caught:
        microbatches(read_program(Counted(table), torch.arange(32).reshape(8, 4) % 16).program, 2)
    refused = caught.value
    why = f"aten.{target} scales the gradient of a row by how often the batch reads it (scale_grad_by_freq=True)"
    assert refused.what == f"a step cannot run in 2 micro-batches: {why}"
    assert refused.details["module"] == "table"
    assert refused.details["fix"] == "microbatches=1, or scale_grad_by_freq=False"


def test_the_batch_must_have_equal_parts() -> None:
    captured = normalise(program(LOSSES["sum"][0], X.clone().requires_grad_(), W))
    with pytest.raises(ConstraintError, match="3 micro-batches: the batch is 8") as caught:
        microbatches(captured, 3)
    assert "a divisor of 8" in caught.value.details["fix"]
    assert list(counts(captured)) == [1, 2, 4, 8]
    assert microbatches(captured, 1) == TrainingStep(program=captured)

"""`gathered` turns indexing by coordinates into gathers, with the same numbers, so that the batch can be split."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar.passes.batched_gathers import gathered
from autopar.plan.options import Options
from autopar.verify.verification import verify
from tests.capture import interpreter
from tests.passes.programs import program, targets
from tests.support import table
from tests.support.threads import Threads

Indexed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# How x of (6, 5, 4, 3) is indexed, and by what shape and dtype.
PICKED: dict[str, tuple[Indexed, tuple[int, ...], torch.dtype]] = {
    "a row each": (lambda x, i: x[torch.arange(6), i], (6,), torch.int64),
    "rows each": (lambda x, i: x[torch.arange(6)[:, None], i], (6, 2), torch.int64),
    "a matrix of rows each": (lambda x, i: x[torch.arange(6)[:, None, None], i], (6, 2, 3), torch.int64),
    "the same rows of all": (lambda x, i: x[torch.arange(6)[:, None], i], (2,), torch.int64),
    "short integers": (lambda x, i: x[torch.arange(6), i], (6,), torch.int32),
    "two coordinates": (lambda x, i: x[torch.arange(6)[:, None], torch.arange(5), i], (6, 5), torch.int64),
    "between coordinates": (lambda x, i: x[torch.arange(6)[:, None], i, torch.arange(4)], (6, 4), torch.int64),
    "elements": (lambda x, i: x.flatten(1)[torch.arange(6), i], (6,), torch.int64),
    "of the first dim": (lambda x, i: x[i, torch.arange(5)], (5,), torch.int64),
    "of another tensor's size": (lambda x, i: x[torch.arange(i.shape[0]), i], (6,), torch.int64),
}
OTHER: dict[str, tuple[Indexed, tuple[int, ...], torch.dtype]] = {
    "one index": (lambda x, i: x[i], (6,), torch.int64),
    "backwards": (lambda x, i: x[5 - torch.arange(6), i], (6,), torch.int64),
    "shifted": (lambda x, i: x[torch.arange(4) + 1, i], (4,), torch.int64),
    "fewer": (lambda x, i: x[torch.arange(4), i], (4,), torch.int64),
    "every other": (lambda x, i: x[2 * torch.arange(3), i], (3,), torch.int64),
    "a coordinate before": (lambda x, i: x[torch.arange(6), i], (2, 6), torch.int64),
    "two that pick": (lambda x, i: x[torch.arange(6), i, i], (6,), torch.int64),
    "later dims": (lambda x, i: x[:, torch.arange(5), i], (5,), torch.int64),
}


@pytest.mark.parametrize("name", [*PICKED, *OTHER])
def test_what_coordinates_pick_is_gathered_in_value_and_gradient(name: str) -> None:
    made, shape, dtype = (PICKED | OTHER)[name]
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4, 3, dtype=torch.float64, requires_grad=True)
    i = torch.randint(-3, 3, shape).to(dtype)  # from behind, too
    found = gathered(program(made, x, i))
    assert targets(found).count("gather.default") == (name in PICKED)
    (output,) = interpreter.run(found, {"tensors.0": x, "tensors.1": i})
    expected = made(x, i)
    torch.testing.assert_close(output, expected, atol=0, rtol=0)
    got, wanted = (torch.autograd.grad(one.square().sum(), x) for one in (output, expected))
    torch.testing.assert_close(got, wanted)


def test_an_index_that_reaches_too_far_is_an_error_as_before() -> None:
    x, rows = torch.randn(6, 5), torch.arange(6)
    found = gathered(program(lambda x, i: x[torch.arange(6), i], x, rows % 5))
    for wrong in (rows, -rows - 1):  # 5, and -6, of 5
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            interpreter.run(found, {"tensors.0": x, "tensors.1": wrong})


class Pooled(nn.Module):
    """A classifier of texts by the state of their last token, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states, last = self.body(self.embed(tokens)).relu(), (tokens != 0).sum(1) - 1
        scores = self.head(states[torch.arange(tokens.shape[0]), last])
        return -scores.log_softmax(-1)[torch.arange(tokens.shape[0]), labels].mean()


@pytest.mark.parametrize("options", [Options(strategy="ddp"), Options(strategy="ddp", microbatches=2), Options()])
def test_the_batch_is_split_where_each_sample_picks_from_its_own(options: Options, threads: Threads) -> None:
    torch.manual_seed(0)
    tokens, labels = torch.randint(1, 16, (8, 6)), torch.randint(4, (8,))
    tokens[1, 2:] = tokens[2, :] = 0  # a text without tokens: its last one is -1, from behind
    mesh = table.mesh((2,))
    report = verify(Pooled(), (tokens, labels), mesh, None, options, threads)
    assert report.ok, str(report)
    kinds = {(sent.kind, sent.where) for sent in report.plan.collectives}
    assert options.strategy == "auto" or "all_gather" not in {kind for kind, _ in kinds}


def test_a_pooled_model_runs_in_micro_batches() -> None:
    tokens, labels = torch.randint(1, 16, (8, 6)), torch.randint(4, (8,))
    assert autopar.plan(Pooled(), (tokens, labels), (2,), device="h100", microbatches=4).microbatches == 4

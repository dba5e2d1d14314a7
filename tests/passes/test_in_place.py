"""A cache is written in place, except where its old contents are read or part of it is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import Assumptions, capture
from autopar.passes.pipeline import normalise
from autopar.verify.execution import sequential

PLACE = torch.tensor([1, 2])
WORDS = torch.arange(1.0, 9.0).reshape(2, 4)


class Cache(nn.Module):
    """Rows that calls write, and their sum."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(6, 4))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.kept.index_copy_(0, place, x)
        return self.kept.sum(0)


class ReadBefore(Cache):
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        before = self.kept * 2
        self.kept.index_copy_(0, place, x)
        return self.kept.sum(0) + before.sum(0)


class Returned(Cache):
    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.kept.index_copy_(0, place, x)
        return self.kept.T


class Trained(Cache):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self.kept.index_copy_(0, place, x)
        return (self.kept * self.weight).sum(0)


def targets(model: nn.Module) -> list[str]:
    found = capture(model.eval(), (WORDS, PLACE), assumptions=Assumptions(inference=not isinstance(model, Trained)))
    return [op.target.split(".")[1] for op in normalise(found.program).ops]


def test_it_is_written_in_place() -> None:
    assert targets(Cache()) == ["index_copy_", "sum"]


@pytest.mark.parametrize("model", [ReadBefore, Returned, Trained])
def test_what_it_held_before_and_what_is_kept_of_it_are_copies(model: type[Cache]) -> None:
    found = targets(model())
    assert {"clone", "index_copy", "copy_"} <= set(found)
    assert "index_copy_" not in found


@pytest.mark.parametrize("model", [Cache, ReadBefore, Returned, Trained])
def test_calls_give_what_the_module_gives_one_after_the_other(model: type[Cache]) -> None:
    plain, captured = model().eval(), capture(model().eval(), (WORDS, PLACE))
    program = normalise(captured.program)
    tensors = {**dict(model().named_parameters()), **dict(model().named_buffers())}
    ours = sequential(type(captured)(program=program, signature=captured.signature), tensors)
    first = None
    for call in range(3):
        given = WORDS + call, PLACE + call
        (result,), expected = ours.run(given), plain(*given)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(ours.get_buffer("kept"), plain.kept)
        first = first or (result, result.clone())
    assert first is not None
    torch.testing.assert_close(*first)  # what a call returned stays

"""`as_strided` is interpreted by its operand's dims, whatever the operand's memory layout under a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture
from autopar.capture.strided import _reading
from autopar.errors import CaptureError
from tests.capture import interpreter

X = torch.linspace(-1, 1, 48).reshape(8, 6)


class Reads(nn.Module):
    """A linear layer, and a view of its memory."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(6, 6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x))


def overlapping(y: torch.Tensor) -> torch.Tensor:
    return y.as_strided((3, 4, 6), (12, 6, 1)).sin()


def of_a_transpose(y: torch.Tensor) -> torch.Tensor:
    heads = y.view(8, 2, 3).transpose(0, 1)  # (2, 8, 3), strides (3, 6, 1)
    return heads.as_strided((2, 3, 4, 3), (3, 12, 6, 1)).sin()


def from_the_second_row(y: torch.Tensor) -> torch.Tensor:
    return y.as_strided((2, 6), (12, 1), 6)


def seen_again_after_a_write(y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    diagonal = y.as_strided((6,), (7,))
    y[2] = 5
    return diagonal * 2


READS = [overlapping, of_a_transpose, from_the_second_row, seen_again_after_a_write]


@pytest.mark.parametrize("body", READS)
def test_what_memory_is_read_becomes_an_index(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = interpreter.check(Reads(body), X).program
    assert not [op.target for op in program.ops if "as_strided" in op.target]


def test_memory_beyond_the_operand_is_refused() -> None:
    with pytest.raises(CaptureError, match="as_strided reads memory that does not lie as one block"):
        capture(Reads(lambda y: y[:, ::2].as_strided((4, 3), (12, 1))), X)


@settings(max_examples=200)
@given(st.data())
def test_a_reading_gives_the_elements_that_torch_reads(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    memory = torch.arange(torch.Size(shape).numel()).reshape([shape[dim] for dim in order])
    x = memory.permute([order.index(dim) for dim in range(len(shape))])
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = data.draw(st.lists(st.integers(0, 6), min_size=len(sizes), max_size=len(sizes)))
    if sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) >= x.numel():
        return
    expected = x.as_strided(sizes, strides)
    if (found := _reading(x.shape, x.stride(), sizes, strides, 0)) is None:
        return  # refused
    kept, selected = [sizes[dim] for dim in found.kept], [sizes[dim] for dim in found.selected]
    index = torch.full(selected, found.first)
    for dim, (size, step) in enumerate(zip(selected, found.steps, strict=True)):
        index = index + (torch.arange(size) * step).reshape([-1 if at == dim else 1 for at in range(len(selected))])
    flat = x.permute(found.order).reshape(*kept, found.length)
    spread = flat.index_select(len(kept), index.flatten()).reshape(*kept, *selected)
    back = [(*found.kept, *found.selected).index(dim) for dim in range(len(sizes))]
    assert torch.equal(spread.permute(back), expected)

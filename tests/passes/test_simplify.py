"""`simplify` gives equivalent programs one form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from autopar.passes.simplify import simplify
from tests.passes.programs import program, targets

X = torch.ones(4, 6)

NOTHING = [
    lambda x: x.contiguous(),
    lambda x: x.clone(),
    lambda x: x.float(),
    lambda x: x.to(x.device),
    lambda x: x.type_as(x),
    lambda x: x.view(4, 6),
    lambda x: x.reshape(-1, 6),
    lambda x: x.expand(4, -1),
    lambda x: x[:, :],
    lambda x: x[0:100],
    lambda x: x.detach(),
    lambda x: x * 1.0,
    lambda x: x / 1,
    lambda x: F.dropout(x, 0.0),
    lambda x: x.squeeze(1),
]


@pytest.mark.parametrize("body", NOTHING)
def test_simplification_drops_ops_that_change_nothing(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert targets(simplify(program(lambda x: body(x * 2) + 1, X))) == ["mul.Tensor", "add.Tensor"]


@pytest.mark.parametrize(
    "body, kept",
    [
        (
            lambda x: torch.view_as_complex(torch.fft.irfft(torch.fft.rfft(x, dim=0), n=4, dim=0).contiguous().view(4, 3, 2)),
            True,
        ),
        (lambda x: x.t().contiguous().view(torch.int32), True),
        (lambda x: x.t().contiguous().view(-1, 2), False),
    ],
)
def test_memory_that_is_read_as_another_dtype_lies_as_it_was_made(
    body: Callable[[torch.Tensor], torch.Tensor], kept: bool
) -> None:
    simple = simplify(program(body, X))
    assert ("contiguous.default" in targets(simple)) == kept


def test_integers_are_counted_as_floats() -> None:
    simple = simplify(program(lambda n: torch.histc(n.int(), 4, 0, 3), torch.arange(4)))
    assert targets(simple) == ["to.dtype", "to.dtype", "histc.default", "to.dtype"]
    assert simple.ops[-1].results[0].dtype == torch.int32


SPELLINGS = [
    (lambda x: x.view(-1, 3), "reshape.default", ((8, 3),)),
    (lambda x: x.flatten(), "reshape.default", ((24,),)),
    (lambda x: x.unflatten(1, (2, -1)), "reshape.default", ((4, 2, 3),)),
    (lambda x: x[:1].squeeze(0), "reshape.default", ((6,),)),
    (lambda x: x[None].expand(2, -1, -1), "expand.default", ((2, 4, 6),)),
    (lambda x: x.to(x.device, torch.float64), "to.dtype", (torch.float64,)),
    (lambda x: x.half(), "to.dtype", (torch.float16,)),
    (lambda x: x[1:-1], "slice.Tensor", (0, 1, 3)),
    (lambda x: x[:, -5::2], "slice.Tensor", (1, 1, 6, 2)),
]


@pytest.mark.parametrize("body, target, arguments", SPELLINGS)
def test_views_casts_and_slices_are_spelt_in_one_way(body: Callable[..., torch.Tensor], target: str, arguments: tuple) -> None:
    simple = simplify(program(body, X))
    op = simple.ops[-1]
    assert op.target == f"aten.{target}"
    assert op.args[1:] == arguments
    assert op.kwargs == ()


def test_fills_are_spelt_in_one_way() -> None:
    fills = program(
        lambda x: (x.new_zeros(3), torch.ones(2), x.new_full((1,), 5), torch.full((), 2.0), torch.zeros(1).int()), X
    )
    simple = simplify(fills)
    assert [(op.args, op.results[0].dtype) for op in simple.ops if op.target == "aten.full.default"] == [
        (((3,), 0), torch.float32),
        (((2,), 1), torch.float32),
        (((1,), 5), torch.float32),
        (((), 2.0), torch.float32),
        (((1,), 0), torch.float32),
    ]
    assert targets(simple).count("full.default") == 5


def test_memory_is_made_without_the_tensor_whose_dtype_it_has() -> None:
    simple = simplify(program(lambda x: x.new_empty(len(x), 1).bernoulli_(0.5), X))
    (made,) = (op for op in simple.ops if op.target == "aten.empty.memory_format")
    assert made.operands == ()
    assert (made.results[0].shape, made.results[0].dtype) == ((len(X), 1), torch.float32)


def test_simplification_keeps_ops_that_change_something() -> None:
    def body(x: torch.Tensor) -> object:
        return x + 0, F.dropout(x, 0.5, training=False), x.view(torch.int32), x[::2], x.int() + 0

    kept = targets(simplify(program(body, X)))
    assert kept == ["add.Tensor", "dropout.default", "view.dtype", "slice.Tensor", "to.dtype"]


def test_simplifying_twice_is_simplifying_once() -> None:
    for body, *_ in SPELLINGS:
        once = simplify(program(body, X))
        assert str(simplify(once)) == str(once)

"""What autograd keeps: known cases, and totals against a real run on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from autopar.analysis.saved_tensors import NOTHING, Share, saved
from autopar.ir.program import Op, Ref, Value
from autopar.runtime.memory_tracker import MemoryTracker
from tests.cost_models.cost_ops import Built, call, index, op, tensors, x

ATTENTION = "aten.scaled_dot_product_attention.default"
Q = (x(2, 3, 8, 4), x(2, 3, 8, 4), x(2, 3, 8, 4))
BOOL = torch.bool

CASES = {
    "linear": op("aten.linear.default", x(2, 3, 4), x(5, 4), x(5)),
    "linear, frozen weight": op("aten.linear.default", x(2, 3, 4), x(5, 4, grad=False)),
    "linear, first layer": op("aten.linear.default", x(2, 3, 4, grad=False), x(5, 4)),
    "addmm": op("aten.addmm.default", x(5), x(3, 4), x(4, 5)),
    "matmul": op("aten.matmul.default", x(2, 3, 4), x(2, 4, 5)),
    "add": op("aten.add.Tensor", x(4, 5), x(4, 5)),
    "mul": op("aten.mul.Tensor", x(4, 5), x(4, 5)),
    "mul by a number": op("aten.mul.Tensor", x(4, 5), 2.0),
    "gelu": op("aten.gelu.default", x(4, 5)),
    "silu": op("aten.silu.default", x(4, 5)),
    "relu": op("aten.relu.default", x(4, 5)),
    "tanh": op("aten.tanh.default", x(4, 5)),
    "softmax": op("aten.softmax.int", x(4, 5), -1),
    "pow": op("aten.pow.Tensor_Scalar", x(4, 5), 2),
    "rsqrt": op("aten.rsqrt.default", x(4, 5)),
    "mean": op("aten.mean.dim", x(4, 5), (-1,), True),
    "layer_norm": op("aten.layer_norm.default", x(4, 5), (5,), x(5), x(5)),
    "dropout": op("aten.dropout.default", x(4, 5), 0.5, True),
    "dropout, none": op("aten.dropout.default", x(4, 5), 0.5, False),
    "embedding": op("aten.embedding.default", x(7, 5), index(2, 3)),
    "cross_entropy": op("aten.cross_entropy_loss.default", x(4, 5), index(4)),
    "to bfloat16": op("aten.to.dtype", x(4, 5), torch.bfloat16),
    "transpose": op("aten.transpose.int", x(4, 5), 0, 1),
    "reshape": op("aten.reshape.default", x(4, 6), (8, 3)),
    "slice": op("aten.slice.Tensor", x(4, 6), 0, 0, 2),
    "split": op("aten.split.Tensor", x(4, 6), 2, 1),
    "cat": op("aten.cat.default", (x(4, 6), x(4, 2)), 1),
    "where": op("aten.where.self", x(4, 6, dtype=BOOL), x(4, 6), x(4, 6)),
    "conv2d": op("aten.conv2d.default", x(2, 3, 8, 8), x(5, 3, 3, 3), x(5), (1, 1), (1, 1)),
    "max_pool2d": op("aten.max_pool2d.default", x(2, 3, 8, 8), (2, 2)),
    "attention": op(ATTENTION, *Q),
    "attention, causal": op(ATTENTION, *Q, None, 0.0, True),
    "attention, grouped": op(ATTENTION, x(2, 6, 8, 4), *Q[1:], None, 0.0, True, enable_gqa=True),
    "attention, mask": op(ATTENTION, *Q, x(1, 3, 8, 8, grad=False)),
    "attention, learnt mask": op(ATTENTION, *Q, x(1, 3, 8, 8)),
    "attention, dropout": op(ATTENTION, *Q, None, 0.5),
    "attention, broadcast": op(ATTENTION, x(2, 3, 8, 4), x(2, 1, 8, 4), x(2, 1, 8, 4)),
    "attention, three dims": op(ATTENTION, x(3, 8, 4), x(3, 8, 4), x(3, 8, 4)),
}

VIEWS = ("dropout, none", "transpose", "reshape", "slice", "split")

KNOWN = {
    "linear": ((0, 1), (), 0),
    "linear, frozen weight": ((1,), (), 0),
    "linear, first layer": ((0,), (), 0),
    "add": ((), (), 0),
    "mul": ((0, 1), (), 0),
    "mul by a number": ((), (), 0),
    "gelu": ((0,), (), 0),
    "relu": ((), (0,), 0),
    "softmax": ((), (0,), 0),
    "transpose": ((), (), 0),
    "embedding": ((1,), (), 0),
    "dropout": ((), (), 20),
    "dropout, none": ((), (), 0),
    "attention": ((0, 1, 2), (0,), 2 * 3 * 8 * 4),
    "attention, dropout": ((0, 1, 2), (0,), 2 * 3 * 8 * 4),
    "attention, mask": ((0, 1, 2, 3), (0,), 2 * 3 * 8 * 4),
}


@pytest.mark.parametrize("name", KNOWN)
def test_an_accelerator_keeps_what_is_known(name: str) -> None:
    kept = CASES[name].saved()
    assert (kept.operands, kept.results, kept.internal_bytes) == KNOWN[name]


def test_layer_norm_keeps_its_operand_and_two_statistics_a_row() -> None:
    kept = CASES["layer_norm"].saved()
    assert 0 in kept.operands
    assert kept.internal_bytes == 4 * 2 * 4


def observed(built: Built) -> tuple[set[int], set[int], int]:
    """Operands, results and internal bytes that a real run on the CPU keeps."""
    given = tensors(built.values, "cpu")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = call(built.op, given)
    home = {t.untyped_storage().data_ptr(): ("operand", i) for i, t in enumerate(given.values())}
    for i, t in enumerate(results):
        home.setdefault(t.untyped_storage().data_ptr(), ("result", i))
    inside = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    places = {home[pointer] for pointer in inside if pointer in home}
    return (
        {i for side, i in places if side == "operand"},
        {i for side, i in places if side == "result"},
        sum(size for pointer, size in inside.items() if pointer not in home),
    )


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_keeps_what_is_foretold(name: str) -> None:
    kept = CASES[name].saved(cpu=True)
    assert (set(kept.operands), set(kept.results), kept.internal_bytes) == observed(CASES[name])


def peaks(built: Built) -> tuple[int, int]:
    """The most bytes alive in a real forward on the CPU, and until the end of its backward."""
    given = tensors(built.values, "cpu")
    with MemoryTracker(given.values()) as live:
        results = call(built.op, given)
    forward = live.peak().bytes
    wanted = [tensor for tensor in given.values() if tensor.requires_grad]
    with live:
        incoming = [torch.empty_like(result) for result in results if result.requires_grad]
        made = torch.autograd.grad([r for r in results if r.requires_grad], wanted, incoming, allow_unused=True)
    assert len(made) == len(wanted)
    return forward, live.peak().bytes


def taken(share: Share | None) -> int:
    return share.bytes if share else 0


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_takes_what_is_foretold_while_it_runs(name: str) -> None:
    built, kept = CASES[name], CASES[name].saved(cpu=True)
    operands = sum(value.bytes for value in built.operands)
    results = 0 if name in VIEWS else sum(value.bytes for value in built.op.results)
    forward, most = peaks(built)
    assert forward == operands + results + kept.internal_bytes + taken(kept.forward)
    incoming = sum(value.bytes for value in built.op.results if value.requires_grad)
    fresh = sum(v.bytes for place, v in enumerate(built.operands) if v.requires_grad and place not in kept.through)
    backward = operands + results + kept.internal_bytes + incoming + fresh + taken(kept.backward)
    assert most == max(forward, backward)


@pytest.mark.parametrize("name", CASES)
def test_an_op_that_needs_no_gradient_keeps_nothing(name: str) -> None:
    op = CASES[name].op
    results = tuple(Value(name=v.name, shape=v.shape, dtype=v.dtype) for v in op.results)
    assert saved(dataclasses.replace(op, results=results), CASES[name].values) == NOTHING


@pytest.mark.parametrize("name", ["dropout", "cross_entropy", "layer_norm", "attention"])
def test_half_a_batch_keeps_half_the_internal_bytes(name: str) -> None:
    kept = CASES[name].saved()
    operands, results = CASES[name].shapes
    batch = operands[0][0]

    def half(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        return [(shape[0] // 2, *shape[1:]) if shape and shape[0] == batch else shape for shape in shapes]

    assert kept.local_internal(operands, results) == kept.internal_bytes
    assert kept.local_internal(half(operands), half(results)) == pytest.approx(kept.internal_bytes / 2, abs=4)


def test_a_mask_that_all_heads_share_is_kept_whole_where_heads_are_split() -> None:
    built = op(ATTENTION, x(2, 4, 8, 4), x(2, 4, 8, 4), x(2, 4, 8, 4), x(2, 1, 8, 8, dtype=BOOL))
    kept, half, mask = built.saved(), (2, 2, 8, 4), (2, 1, 8, 8)
    assert kept.local_internal([half, half, half, mask], [half]) == 2 * 2 * 8 * 4 + 2 * 8 * 8 * 4


def test_the_names_of_values_do_not_matter() -> None:
    first = CASES["mul"]
    values = {"a": first.operands[0], "b": first.operands[1]}
    recompute = Op(name="other", target=first.op.target, args=(Ref("a"), Ref("b")), results=first.op.results)
    assert saved(recompute, values) == first.saved()


def test_one_value_used_twice_is_kept_at_both_places_or_at_the_first() -> None:
    square = op("aten.mul.Tensor", x(3), 1)
    twice = Op(name="op", target="aten.mul.Tensor", args=(Ref("v0"), Ref("v0")), results=square.op.results)
    assert 0 in saved(twice, square.values).operands

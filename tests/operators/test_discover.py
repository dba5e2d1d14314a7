"""Rules discovered by running an operator: those of the table, and rules of unknown operators."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import RuleError
from autopar.operators import OpSharding, fit
from autopar.operators.checking.discover import Discovered
from autopar.operators.checking.sample_call import Arguments, Example
from autopar.operators.rule import always
from autopar.operators.rule import op as row
from tests.support import own


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def ints(*shape: int, high: int = 4) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


Split = frozenset[tuple[str, int, int, int, int]]


def splits(fitted: OpSharding) -> set[Split]:
    """Each factor that may be split, as the places where it stands: side, tensor, dim, and what is left and right of it."""
    found = []
    for f, factor in enumerate(fitted.factors):
        if not factor.whole and factor.size > 1:
            places = []
            for side, tensors in (("operand", fitted.operands), ("result", fitted.results)):
                for i, dims in enumerate(tensors):
                    for d, dim in enumerate(dims):
                        if f in dim:
                            left = [fitted.factors[o].size for o in dim[: dim.index(f)]]
                            right = [fitted.factors[o].size for o in dim[dim.index(f) + 1 :]]
                            sides = [torch.Size(sizes).numel() for sizes in (left, right)]
                            places.append((side, i, d, sides[0], sides[1]))
            found.append(frozenset(places))
    return set(found)


def fitted_to(found: Discovered, example: Example) -> OpSharding:
    made = row(found.rule, linear=found.linear, averages=always if found.averages else None)
    fitted = fit(example.op, example.values, rule=made)
    assert fitted is not None
    return fitted


KNOWN: list[tuple[str, Arguments]] = [
    ("aten::relu", (r(4, 6),)),
    ("aten::add.Tensor", (r(4, 6), r(6))),
    ("aten::add.Tensor", (r(2, 4, 6), r(4, 1))),
    ("aten::mul.Tensor", (r(8, 8), r(8, 8))),
    ("aten::where.self", (r(4, 6) > 0, r(4, 6), r(4, 6))),
    ("aten::masked_fill.Scalar", (r(4, 6), r(4, 6) > 0, -9.0)),
    ("aten::matmul", (r(8, 8), r(8, 8))),
    ("aten::matmul", (r(4, 6), r(6))),
    ("aten::bmm", (r(4, 4, 4), r(4, 4, 4))),
    ("aten::linear", (r(2, 4, 6), r(10, 6), r(10))),
    ("aten::linear", (r(8, 8), r(8, 8), r(8))),
    ("aten::addmm", (r(10), r(4, 6), r(6, 10))),
    ("aten::outer", (r(4), r(6))),
    ("aten::embedding", (r(7, 6), ints(4, 10))),
    ("aten::layer_norm", (r(4, 10, 6), (6,), r(6), r(6))),
    ("aten::softmax.int", (r(4, 6), -1)),
    ("aten::cumsum", (r(4, 6, 10), 1)),
    ("aten::sum.dim_IntList", (r(4, 6, 10), (1,))),
    ("aten::mean.dim", (r(4, 6, 10), (1,), True)),
    ("aten::amax", (r(4, 6), (1,))),
    ("aten::max.dim", (r(4, 6), 1)),
    ("aten::transpose.int", (r(4, 6, 10), 0, 2)),
    ("aten::flatten.using_ints", (r(4, 6, 10), 1, 2)),
    ("aten::cat", ((r(4, 6), r(4, 6)), 1)),
    ("aten::stack", ((r(4, 6), r(4, 6)), 1)),
    ("aten::chunk", (r(4, 12), 2, 1)),
    ("aten::glu", (r(4, 12), 1)),
    ("aten::repeat_interleave.self_int", (r(4, 6), 2, 1)),
    ("aten::index_select", (r(4, 6), 1, ints(10))),
    ("aten::gather", (r(4, 6), 1, ints(4, 10))),
    ("aten::scaled_dot_product_attention", (r(2, 4, 6, 3), r(2, 4, 10, 3), r(2, 4, 10, 5))),
    ("aten::scaled_dot_product_attention", (r(4, 4, 4, 4), r(4, 4, 4, 4), r(4, 4, 4, 4))),
    ("aten::conv1d", (r(2, 6, 9), r(4, 6, 3), r(4))),
    ("aten::conv2d", (r(2, 6, 6, 6), r(6, 6, 3, 3), None, (1, 1), (1, 1))),
    ("aten::max_pool1d", (r(2, 4, 6), (2,))),
    ("aten::mse_loss", (r(4, 6), r(4, 6), 2)),
    ("aten::mse_loss", (r(4, 6), r(4, 6), 1)),
    ("aten::topk", (r(4, 6), 2)),
    ("aten::var_mean.correction", (r(4, 6), (1,))),
    ("aten::sort", (r(4, 6), 0)),
]
DIFFERENT: dict[str, set[Split]] = {
    "aten::glu": {frozenset({("operand", 0, 1, 2, 1), ("result", 0, 1, 1, 1)})},  # the table keeps the halves whole
    "aten::scaled_dot_product_attention": {frozenset({("operand", 2, 3, 1, 1), ("result", 0, 3, 1, 1)})},  # as kernels do
    "aten::repeat_interleave.self_int": {frozenset({("result", 0, 1, 6, 1)})},  # the number of repeats, an argument
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op, arguments", KNOWN, ids=[f"{op}{i}" for i, (op, _) in enumerate(KNOWN)])
def test_the_rule_of_the_table_is_found_again(op: str, arguments: Arguments) -> None:
    found, example = autopar.discover_rule(op, arguments), Example.of(op, arguments)
    ours, fitted = fitted_to(found, example), fit(example.op, example.values)
    assert fitted is not None
    assert splits(ours) ^ splits(fitted) == DIFFERENT.get(op, set()), found
    if fitted.summed:
        assert ours.added == fitted.added
    assert set(ours.linear) >= set(fitted.linear), found


def test_what_is_printed_is_the_line_to_paste() -> None:
    arguments = (r(4, 6), r(10, 6), r(10), 0.5)
    found = autopar.discover_rule(own.scaled_linear, arguments)
    assert str(found) == (
        'autopar.register_rule("own::scaled_linear", "... a, b a, +b -> ... b", linear="x bias, weight bias")'
    )
    assert found.factors
    assert autopar.check_rule(own.scaled_linear, arguments, rule=found.rule, linear=found.linear).gradients


def test_a_dim_may_be_made_of_pieces() -> None:
    found = autopar.discover_rule(own.gated, (r(4, 12),))
    assert str(found) == 'autopar.register_rule("own::gated", "... (a! b) -> ... b")'


def test_static_arguments_go_into_the_line() -> None:
    found = autopar.discover_rule(own.centred, (r(4, 6), 1))
    assert str(found) == 'autopar.register_rule("own::centred", "a _ -> a _", linear="x", when={"dim": 1})'


def test_a_number_that_would_be_added_again_belongs_to_the_group() -> None:
    assert autopar.discover_rule("aten::where.ScalarOther", (r(4, 6) > 0, r(4, 6), 0)).linear == "self other"
    assert autopar.discover_rule("aten::add.Scalar", (r(4, 6), 2.0)).linear == "self other"
    assert autopar.discover_rule("aten::mul.Scalar", (r(4, 6), 2.0)).linear == "self"


def test_what_is_linear_near_zero_only_is_not_linear() -> None:
    assert autopar.discover_rule("aten::hardtanh", (r(4, 6), -9.0, 9.0)).linear == ""
    assert autopar.discover_rule("aten::relu", (r(4, 6).abs(),)).linear == ""


def test_discovery_says_so_if_no_dim_can_be_split() -> None:
    found = autopar.discover_rule("aten::linalg_inv", (r(4, 4),))
    assert found.factors == ()
    assert str(found) == "# no dim of aten::linalg_inv can be split, and it is not linear: every device runs all of it"
    found = autopar.discover_rule("aten::fft_fft", (r(6),))
    assert str(found).startswith("# no dim of aten::fft_fft can be split, but it passes addends on\n")


def test_integers_and_probabilities_are_drawn_like_those_given() -> None:
    assert set(autopar.discover_rule("aten::log", (r(4, 6).abs(),)).factors) == {"...0", "...1"}
    given = torch.rand(4, 6, dtype=torch.float64)
    assert len(autopar.discover_rule("aten::binary_cross_entropy", (given, given.flip(0), None, 0)).factors) == 2
    assert len(autopar.discover_rule("aten::bitwise_and.Tensor", (ints(4, 6), ints(4, 6))).factors) == 2


def test_discovery_tries_large_operands_at_small_sizes() -> None:
    found = autopar.discover_rule("aten::matmul", (torch.randn(1024, 2048), torch.randn(2048, 1024)))
    assert found.rule == "... a, a b -> ... b"


def test_what_draws_or_writes_or_does_not_run_is_refused() -> None:
    with pytest.raises(RuleError, match=r"^own::noise returns other results each time"):
        autopar.discover_rule(own.noise, (r(4, 6),))
    with pytest.raises(RuleError, match=r"^own::filled writes into an argument"):
        autopar.discover_rule(own.filled, (r(4, 6),))
    with pytest.raises(RuleError, match=r"^aten::mm does not run on these arguments"):
        autopar.discover_rule("aten::mm", (r(4, 6), r(4, 6)))
    with pytest.raises(RuleError, match=r"^aten::log returns no finite numbers"):
        autopar.discover_rule("aten::log", (-r(4, 6).abs(),))

"""Rules fitted to the operators of real models, and the walk that finds the factors of a view."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.program import Ref
from autopar.operators import fit, localise, scale
from autopar.operators.checking.execution_check import check
from autopar.operators.families.views import regroup
from tests.operators.examples import Example, bools, ex, ints, pos, t

FITTED = [
    ("aten.linear.default", ex(t(2, 4, 6), t(10, 6), t(10)), "...1 ...0 k, n k, +n -> ...1 ...0 n"),
    ("aten.addmm.default", ex(t(10), t(4, 6), t(6, 10)), "+n, m k, k n -> m n"),
    ("aten.matmul.default", ex(t(2, 9, 4, 6), t(9, 6, 10)), "...1 ...0 m k, ...0 k n -> ...1 ...0 m n"),
    ("aten.add.Tensor", ex(t(2, 4, 6), t(4, 1)), "...2 ...1 ...0, ...1 _ -> ...2 ...1 ...0"),
    ("aten.softmax.int", ex(t(4, 6), -1), "d0 n! -> d0 n!"),
    ("aten.embedding.default", ex(t(7, 6), ints(4, 10)), "v! h, ...1 ...0 -> ...1 ...0 h"),
    ("aten.split.Tensor", ex(t(4, 18), 6, 1), "d0 (k! c) -> d0 c, d0 c, d0 c"),
    ("aten.reshape.default", ex(t(2, 6, 10), (12, 2, 5)), "f0 f1 (f2 f3) -> (f0 f1) f2 f3"),
    ("aten.expand.default", ex(t(4, 1), (2, 4, 6)), "...1 _ -> ...2 ...1 ...0"),
    ("aten.cat.default", ex((t(4, 6), t(4, 10)), -1), "d0 _, d0 _ -> d0 _"),
    ("aten.mean.dim", ex(t(4, 6), (-1,), True), "d0 d1 -> d0 _"),
    ("aten.layer_norm.default", ex(t(4, 10, 6), (6,), t(6), t(6)), "...1 ...0 n0!, n0!, n0! -> ...1 ...0 n0!"),
    ("aten.conv2d.default", ex(t(2, 6, 5, 7), t(4, 6, 3, 3), t(4)), "b i _ _, o i _ _, +o -> b o _ _"),
    ("aten.cross_entropy_loss.default", ex(t(4, 6), ints(4)), "n! c!, n! -> ()"),
    ("aten.cross_entropy_loss.default", ex(t(4, 6), ints(4), None, 2), "n c!, n -> ()"),
    ("aten.zeros.default", ex((4, 6)), "-> ...1 ...0"),
    (
        "aten.scaled_dot_product_attention.default",
        ex(t(2, 12, 6, 3), t(2, 4, 6, 3), t(2, 4, 6, 5), None, 0.0, True, enable_gqa=True),
        "...0 (h g) q! d!, ...0 h k! d!, ...0 h k! e! -> ...0 (h g) q! e!",
    ),
    (
        "aten.scaled_dot_product_attention.default",
        ex(t(2, 4, 6, 3), t(2, 4, 10, 3), t(2, 4, 10, 5), t(2, 1, 6, 10)),
        "...1 ...0 q d!, ...1 ...0 k! d!, ...1 ...0 k! e!, ...1 _ q m! -> ...1 ...0 q e!",
    ),
]


@pytest.mark.parametrize("target, example, text", FITTED)
def test_a_rule_names_the_factors_of_every_dim(target: str, example: Example, text: str) -> None:
    op, values, _ = example.build(target)
    assert str(fit(op, values)) == text


LINEAR = [
    ("aten.linear.default", ex(t(4, 6), t(10, 6), t(10)), [{0, 2}, {1, 2}]),
    ("aten.linear.default", ex(t(4, 6), t(10, 6)), [{0}, {1}]),
    ("aten.add.Tensor", ex(t(4, 6), t(6)), [{0, 1}]),
    ("aten.add.Tensor", ex(t(4, 6), 2.0), []),
    ("aten.add.Tensor", ex(t(4, 6), 0.0), [{0}]),
    ("aten.mul.Tensor", ex(t(4, 6), t(6)), [{0}, {1}]),
    ("aten.mul.Tensor", ex(ints(4, 6), ints(6)), []),
    ("aten.masked_fill.Scalar", ex(t(4, 6), bools(4, 6), -9.0), []),
    ("aten.cat.default", ex((t(4, 6), t(4, 6))), [{0, 1}]),
    ("aten.embedding.default", ex(t(7, 6), ints(4)), [{0}]),
]


@pytest.mark.parametrize("target, example, groups", LINEAR)
def test_a_group_is_linear_unless_a_number_is_added(target: str, example: Example, groups: list[set[int]]) -> None:
    op, values, _ = example.build(target)
    fitted = fit(op, values)
    assert fitted is not None
    assert [set(group) for group in fitted.linear] == groups


def test_operands_are_counted_as_the_op_lists_them() -> None:
    op, values, _ = ex(t(4, 6), bias=t(10), weight=t(10, 6)).build("aten.linear.default")
    fitted = fit(op, values)
    assert op.operands == ("x0", "x1", "x2")
    assert str(fitted) == "...0 k, +n, n k -> ...0 n"


def test_a_merge_and_a_cut_ask_for_blocks_and_an_unmerge_does_not() -> None:
    def asks(target: str, example: Example) -> tuple[tuple[str, int, int, int], ...]:
        op, values, _ = example.build(target)
        fitted = fit(op, values)
        assert fitted is not None
        return fitted.asks

    assert asks("aten.reshape.default", ex(t(2, 6, 10), (12, 10))) == (("result", 0, 0, 1),)
    assert asks("aten.reshape.default", ex(t(12, 10), (2, 6, 10))) == ()
    assert asks("aten.split.Tensor", ex(t(4, 18), 6, 1)) == (("operand", 0, 1, 2),)
    assert asks("aten.cat.default", ex((t(4, 6), t(4, 6)), 1)) == (("result", 0, 1, 1),)


def test_an_operator_or_a_use_without_rule_is_none() -> None:
    op, values, _ = ex(t(4, 4)).build("aten.cov.default")
    assert fit(op, values) is None
    op, values, _ = ex(t(4, 6), (bools(4, 6),)).build("aten.index.Tensor")  # as many rows as the mask has ones
    assert fit(op, values) is None


def test_dropout_draws_only_in_training_with_a_rate() -> None:
    for args, random in (((0.5, True), True), ((0.5, False), False), ((0.0, True), False)):
        op, values, _ = ex(t(4, 6), *args).build("aten.dropout.default")
        fitted = fit(op, values)
        assert fitted is not None
        assert fitted.random is random


def test_sizes_become_local() -> None:
    op, values, _ = ex(t(4, 6), (2, 2, -1)).build("aten.reshape.default")
    fitted = fit(op, values)
    assert fitted is not None
    parts = [2 if factor.size == 6 else 1 for factor in fitted.factors]
    assert localise(op, fitted, [(4, 3)], [(2, 2, 3)], parts) == ((Ref("x0"), (2, 2, 3)), ())


def test_a_mean_is_divided_by_the_parts_of_what_it_averages() -> None:
    op, values, _ = ex(t(4, 6), (1,)).build("aten.mean.dim")
    fitted = fit(op, values)
    assert fitted is not None
    assert scale(op, fitted, [1, 3]) == 3
    assert scale(op, fitted, [4, 1]) == 1


WALKS = [
    ((4, 6), (24,), "0 1", "(0 1)"),
    ((24,), (4, 6), "(0 1)", "0 1"),
    ((6, 4), (4, 6), "(0 1!) 2!", "(0 3!) 4!"),
    ((1, 6), (6, 1, 1), "_ 0", "0 _ _"),
    ((2, 3, 5), (3, 10), "0! 1! 2!", "3! 4!"),
    ((), (1,), "", "_"),
]


def shown(groups: list[list[tuple[int, bool]]]) -> str:
    words = [" ".join(f"{number}{'!' if whole else ''}" for number, whole in group) for group in groups]
    return " ".join(f"({w})" if " " in w else w or "_" for w in words)


@pytest.mark.parametrize("before, after, old, new", WALKS)
def test_the_walk_finds_common_factors_from_the_left(
    before: tuple[int, ...], after: tuple[int, ...], old: str, new: str
) -> None:
    left, right, _ = regroup(before, after)
    assert (shown(left), shown(right)) == (old, new)


def shapes(primes: list[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of the product of the primes: the primes in some order, cut somewhere."""
    cuts = st.lists(st.booleans(), min_size=len(primes), max_size=len(primes))

    def build(order: list[int], here: list[bool]) -> tuple[int, ...]:
        dims = [1]
        for prime, cut in zip(order, here, strict=True):
            if cut:
                dims.append(1)
            dims[-1] *= prime
        return tuple(dims)

    return st.builds(build, st.permutations(primes), cuts)


PRIMES = [2, 2, 3, 2, 3]


@settings(max_examples=60)
@given(before=shapes(PRIMES), after=shapes(PRIMES))
def test_a_split_rule_of_any_reshape_obeys_the_law(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    left, right, sizes = regroup(before, after)
    assert [math.prod(sizes[f] for f, _ in group) for group in left] == list(before)
    assert [math.prod(sizes[f] for f, _ in group) for group in right] == list(after)
    op, values, tensors = ex(t(*before), after).build("aten.reshape.default")
    check(op, values, tensors)


def test_a_loss_that_averages_over_ignored_targets_stays_whole() -> None:
    op, values, _ = ex(t(4, 6, 10), ints(4, 10)).build("aten.cross_entropy_loss.default")
    fitted = fit(op, values)
    assert fitted is not None
    assert all(factor.whole for factor in fitted.factors)
    op, values, _ = ex(t(4, 6), pos(4, 6)).build("aten.cross_entropy_loss.default")
    assert str(fit(op, values)) == "n c!, n c! -> ()"

"""The notation: rules survive parsing and printing, and errors say where a rule cannot be parsed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.operators import RULES, fit
from autopar.operators.notation import parse
from autopar.operators.rule import op as row
from tests.operators.examples import Example, ex, ints, t

READABLE = [
    "... k, n k, +n -> ... n",
    "b (h g) q! d!, b h k! d! -> b (h g) q! d!",
    "... _ -> ... _, ...",
    "-> a b",
    "..., () -> ()",
    "b! c ...! -> b! c ...!",
    "... @dim ... -> ... ...",
    "... n@dim! ... -> ... n@dim! ...",
    "... _@dim1 ... _@dim2 ..., ... _ -> ...",
    "... [m] k, ... k [n] -> ... [m] [n]",
    "+[m] [n!], [_] _..., (g=num_groups c!) -> [...]",
]


@pytest.mark.parametrize("text", READABLE)
def test_a_rule_prints_as_it_was_written(text: str) -> None:
    assert str(parse(text)) == text
    assert str(row(text)) == text


def test_spaces_do_not_matter() -> None:
    assert parse("...k,n k,+n->...n") == parse("... k, n k, +n -> ... n")


NAMES = st.permutations("abcdefgh")


@st.composite
def terms(draw: st.DrawFn) -> str:
    """Any dims of one tensor: each name once, at most one place with any number of dims."""
    names = list(draw(NAMES))
    whole = st.sampled_from(["", "!"])

    def word() -> str:
        return names.pop() + draw(st.sampled_from(["", "=size_of", "=n2"])) + draw(whole)

    def dim() -> str:
        kinds = {"word": word, "_": lambda: "_", "(": lambda: f"({word()} {word()})", "[": lambda: f"[{word()}]"}
        return kinds[draw(st.sampled_from(sorted(kinds)))]()

    fixed = [dim() for _ in range(draw(st.integers(0, 3)))]
    at = draw(st.integers(0, len(fixed)))
    mark = draw(whole)
    named = [
        f"{draw(st.sampled_from(['', '_', 'n']))}@{argument}" for argument in draw(st.sampled_from([(), ("dim",), ("a_1",)]))
    ]
    open_ = draw(
        st.sampled_from([[], ["_..."], [f"...{mark}"], [f"...{mark}", *(x for n in named for x in (n, f"...{mark}"))]])
    )
    return " ".join([*fixed[:at], *open_, *fixed[at:]]) or "()"


@settings(max_examples=200)
@given(operands=st.lists(terms(), max_size=3), results=st.lists(terms(), min_size=1, max_size=2), added=st.booleans())
def test_any_pattern_is_read_as_it_is_printed(operands: list[str], results: list[str], added: bool) -> None:
    operands = [f"+{term}" if added else term for term in operands]
    text = f"{', '.join(operands)} -> {', '.join(results)}".lstrip()
    assert str(parse(text)) == text
    assert parse(text.replace(" -> ", "->").replace(", ", " ,")) == parse(text)


UNREADABLE = [
    ("a b", "'->' is missing", "a b<here>"),
    ("a ? -> a", "'?' means nothing here", "a <here>? -> a"),
    ("a, -> a", "a term is empty", "a, <here>-> a"),
    ("a -> +a", "only an operand can be added", "a -> <here>+a"),
    ("a a -> a", "'a' appears twice in one tensor", "a <here>a -> a"),
    ("(a b -> a", "'->' is not the name of a factor", "(a b <here>-> a"),
    ("(a ...) -> a", "'...' cannot be part of a dim", "(a <here>...) -> a"),
    ("a -> b -> c", "'->' cannot follow a term", "a -> b <here>-> c"),
    ("! -> a", "'!' is not the name of a factor", "<here>! -> a"),
    ("(a", "the text ends too early", "(a<here>"),
    ("... @ ... -> ...", "'@' means nothing here", "... <here>@ ... -> ..."),
    ("... @dim -> ...", "'@dim' stands among the dims of '...': write ... @dim ...", "... <here>@dim -> ..."),
    ("@dim k -> k", "'@dim' stands among the dims of '...': write ... @dim ...", "<here>@dim k -> k"),
    ("... @dim k ... -> k", "'@dim' stands among the dims of '...': write ... @dim ...", "... <here>@dim k ... -> k"),
    ("... a ... -> a", "'...' cannot follow '...' in one tensor", "... a <here>... -> a"),
    ("...! @dim ... -> ...", "'...' cannot follow '...!' in one tensor", "...! @dim <here>... -> ..."),
    ("_... ... -> ...", "'...' cannot follow '_...' in one tensor", "_... <here>... -> ..."),
    ("... -> ... ...", "no argument names a dim between", "... -> ... <here>..."),
    ("[a b] -> a", "']' is missing", "[a <here>b] -> a"),
    ("[] -> a", "'[]' names no dim", "[<here>] -> a"),
    ("[@dim] -> a", "'@dim' cannot be part of a dim", "[<here>@dim] -> a"),
]


@pytest.mark.parametrize("text, why, place", UNREADABLE)
def test_an_unreadable_rule_says_where_and_why(text: str, why: str, place: str) -> None:
    with pytest.raises(RuleError) as raised:
        parse(text)
    assert why in raised.value.what
    assert raised.value.details["at"] == place
    assert raised.value.details["fix"]


MISFITS = [
    ("a b, a -> a b", "names 2 dims, a tensor has 3"),
    ("... k, k -> ... k", '"k" names 1 dims, a tensor has 2'),
    ("a b k, n k -> a b n", "(k) has size 10, but 6 elsewhere"),
    ("a b k -> a b k", "it names 1 operands, the op has 2"),
    ("a b k, n m -> a b k, n m", "it names 2 results, the op has 1"),
    ("a b (k l), n k -> a b (k l)", "(k l) has size 6, but"),
    ("a b (k l), n m -> a b (k l)", "the sizes of the factors of (k l) are unknown"),
    ("... @dim ..., _... -> ...", "the op has no argument 'dim'"),
    ("[a] b, k n -> [a] b n", '"[a] b" names 2 dims, a tensor has 3'),
]


@pytest.mark.parametrize("text, why", MISFITS)
def test_a_rule_that_does_not_fit_its_op_says_why(text: str, why: str) -> None:
    op, values, _ = ex(t(2, 4, 6), t(6, 10)).build("aten.matmul.default")
    with pytest.raises(RuleError) as raised:
        fit(op, values, rule=row(text))
    assert why in raised.value.details["why"]
    assert raised.value.details["shapes"] == "(2, 4, 6), (6, 10) -> (2, 4, 10)"


SUM, CUMSUM, ADDMM, LINEAR = "aten.sum.dim_IntList", "aten.cumsum.default", "aten.addmm.default", "aten.linear.default"
WRITTEN_OUT = [
    # an argument names dims: by number, from the right, several, none, all
    (CUMSUM, "... n@dim! ... -> ... n@dim! ...", ex(t(2, 4, 6), 1), "d0 n! d2 -> d0 n! d2"),
    (CUMSUM, "... @dim! ... -> ... @dim! ...", ex(t(2, 4, 6), -1), "d0 d1 d2! -> d0 d1 d2!"),
    (SUM, "... @dim ... -> ... ...", ex(t(2, 4, 6), (0, -1)), "d0 d1 d2 -> d1"),
    (SUM, "... @dim ... -> ... ...", ex(t(2, 4, 6), (1,), True), "d0 d1 d2 -> d0 _ d2"),
    (SUM, "... n@dim ... -> ...", ex(t(2, 4, 6), (2, 0)), "n0 d1 n1 -> d1"),
    (SUM, "... @dim! ... -> ... ...", ex(t(2, 4), None), "d0! d1! -> ()"),
    (SUM, "... @dim ... -> ... ...", ex(t(), None), "() -> ()"),
    # two arguments, dims of the result, dims that stand for others
    ("aten.diagonal.default", "... _@dim1 ... _@dim2 ... -> ... _", ex(t(4, 6, 10), 0, -1, 0), "_ d1 _ -> d1 _"),
    ("aten.select_backward.default", "... -> ... _@dim ...", ex(t(4), (4, 6), 1, 2), "d0 -> d0 _"),
    ("aten.index_select.default", "... _@dim ..., [i] -> ... i@dim ...", ex(t(4, 6), 0, ints(10)), "_ d1, i -> i d1"),
    ("aten.index_select.default", "... _@dim ..., [i] -> ... i@dim ...", ex(t(4, 6), 0, ints()), "_ d1, () -> _ d1"),
    # the largest tensor counts
    ("aten.linalg_vecdot.default", "... @dim ..., ... @dim ... -> ...", ex(t(6), t(4, 6)), "d1, d0 d1 -> d0"),
    # dims that may be lacking, the leftmost first
    (ADDMM, "+[m] [n], m k, k n -> m n", ex(t(10), t(4, 6), t(6, 10)), "+n, m k, k n -> m n"),
    (ADDMM, "+[m] [n], m k, k n -> m n", ex(t(), t(4, 6), t(6, 10)), "+(), m k, k n -> m n"),
    (LINEAR, "... k, [n] k, +[n] -> ... [n]", ex(t(4, 6), t(6)), "...0 k, k -> ...0"),
    (LINEAR, "... k, [n] k, +[n] -> ... [n]", ex(t(4, 6), t(10, 6)), "...0 k, n k -> ...0 n"),
    ("aten.mse_loss.default", "..., ... -> [...]", ex(t(4, 6), t(4, 6), 2), "...1 ...0, ...1 ...0 -> ()"),
    # sizes by arguments, dims that are not read
    (
        "aten.pixel_shuffle.default",
        "... (c r=upscale_factor! s=upscale_factor!) y x -> ... c (y r!) (x s!)",
        ex(t(8, 3, 5), 2),
        "(c r! s!) y x -> c (y r!) (x s!)",
    ),
    (
        "aten.im2col.default",
        "... c _ _ -> ... (c k=kernel_size!) _",
        ex(t(2, 6, 6), (2, 3), (1, 1), (0, 0), (1, 1)),
        "c _ _ -> (c k!) _",
    ),
    ("aten.new_zeros.default", "_... -> ...", ex(t(3, 2), (4,)), "_ _ -> ...0"),
]


@pytest.mark.parametrize("target, text, example, fitted", WRITTEN_OUT)
def test_a_pattern_is_written_out_for_the_shapes_of_a_call(target: str, text: str, example: Example, fitted: str) -> None:
    op, values, _ = example.build(target)
    found = fit(op, values, rule=row(text))
    assert str(found) == fitted
    assert found is not None
    assert found.text == text


@settings(max_examples=60)
@given(rank=st.integers(1, 4), data=st.data(), keepdim=st.booleans(), mark=st.sampled_from(["", "!"]))
def test_dims_that_an_argument_lists_are_as_good_as_written_by_hand(
    rank: int, data: st.DataObject, keepdim: bool, mark: str
) -> None:
    gone = data.draw(st.sets(st.integers(0, rank - 1)))
    listed = tuple(d - rank if data.draw(st.booleans()) else d for d in sorted(gone, reverse=data.draw(st.booleans())))
    op, values, _ = ex(t(*range(2, rank + 2)), listed, keepdim).build(SUM)
    gone = gone or set(range(rank))  # an empty list means all dims
    held = " ".join(f"d{d}{mark if d in gone else ''}" for d in range(rank))
    kept = " ".join("_" if d in gone else f"d{d}" for d in range(rank) if keepdim or d not in gone)
    by_hand = fit(op, values, rule=row(f"{held} -> {kept or '()'}"))
    assert fit(op, values, rule=row(f"... @dim{mark} ... -> ... ...")) == by_hand


def test_two_arguments_cannot_name_one_dim() -> None:
    op, values, _ = ex(t(4, 6), 0, 0).build("aten.transpose.int")
    with pytest.raises(RuleError) as raised:
        fit(op, values, rule=row("... a@dim0 ... b@dim1 ... -> ... b@dim0 ... a@dim1 ..."))
    assert raised.value.details["why"] == "two arguments name dim 0: a@dim0, b@dim1"


def test_every_rule_of_the_table_prints() -> None:
    assert all(str(known) for known in RULES.values())

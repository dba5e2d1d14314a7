"""Candidates: possible layouts, and the forms from which they can be recovered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from autopar.analysis.block_counts import block_counts
from autopar.capture import Captured
from autopar.ir.layout import I, P, R, local_shape, split, valid
from autopar.operators import fit
from autopar.plan.assignment_text import _form, form_text
from autopar.search_space.candidates import candidate, candidates
from autopar.search_space.layout_graph import placeable
from tests.support import planning

MODELS: dict[str, Callable[[], Captured]] = {
    "layers": partial(planning.layers, 64, 32, 48, 32),
    "llama": partial(planning.llama, 8, 32, 128),
    "gpt2": partial(planning.gpt2, 8, 32, 64),
}
SIZES = [(2,), (2, 4), (3, 2)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_layout_of_every_candidate_is_valid(model: Callable[[], Captured], sizes: tuple[int, ...]) -> None:
    program = model().program
    fits = {op.name: fit(op, program.values) for op in program.ops}
    blocks = block_counts(program, fits)
    for op in program.ops:
        names = (*op.operands, *(r.name for r in op.results))
        found = candidates(op, fits[op.name], program.values, sizes, blocks)
        assert any(all(s == I for layout in (*c.operands, *c.results) for s in layout) for c in found)
        assert len({(c.operands, c.results) for c in found}) == len(found)
        for made in found:
            for name, layout in zip(names, (*made.operands, *made.results), strict=True):
                assert valid(layout, program.values[name].shape, sizes), (op, made)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_forms_of_a_candidate_and_their_text_give_it_back(model: Callable[[], Captured], sizes: tuple[int, ...]) -> None:
    program = model().program
    fits = {op.name: fit(op, program.values) for op in program.ops}
    blocks = block_counts(program, fits)
    for op in program.ops:
        fitted = fits[op.name]
        for made in candidates(op, fitted, program.values, sizes, blocks):
            assert candidate(op, fitted, program.values, made.forms) == made
            assert tuple(_form(form_text(form, fitted), fitted) for form in made.forms) == made.forms


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_values_without_a_gradient_are_never_replicated(model: Callable[[], Captured]) -> None:
    program = model().program
    fits = {op.name: fit(op, program.values) for op in program.ops}
    blocks = block_counts(program, fits)
    for op in program.ops:
        for made in candidates(op, fits[op.name], program.values, (2,), blocks):
            for name, layout in zip(op.operands, made.operands, strict=True):
                assert program.values[name].requires_grad or R not in layout


def linear(sizes: tuple[int, ...]) -> set[tuple[str, str, str]]:
    """The candidates of the first linear layer (64, 32) x (48, 32) as states of input, weight and result on one axis."""
    program = MODELS["layers"]().program
    op = next(op for op in program.ops if op.target == "aten.linear.default" and program.values[op.operands[0]].requires_grad)
    fits = {op.name: fit(op, program.values) for op in program.ops}
    found = candidates(op, fits[op.name], program.values, sizes, block_counts(program, fits))
    kind = {I: "I", R: "R", P: "P"}
    return {tuple(kind.get(x[0], f"S{x[0].dim}") for x in (*c.operands, *c.results)) for c in found}  # type: ignore[misc]


def test_a_linear_layer_runs_in_the_ways_of_the_textbooks() -> None:
    assert linear((2,)) == {
        ("I", "I", "I"),
        ("R", "R", "R"),
        ("S0", "R", "S0"),  # data parallel
        ("R", "S0", "S1"),  # column
        ("S1", "S1", "P"),  # row
        ("P", "R", "P"),
        ("R", "P", "P"),
    }


def test_the_fused_projection_of_gpt2_asks_for_three_blocks() -> None:
    program = planning.gpt2(8, 32, 64).program
    fits = {op.name: fit(op, program.values) for op in program.ops}
    blocks = block_counts(program, fits)
    assert blocks["transformer.h.0.attn.c_attn.weight"][1] == (1, 3)
    assert blocks["transformer.h.0.attn.c_attn.bias"][0] == (1, 3)
    assert blocks["transformer.h.0.mlp.c_fc.weight"] == ((1,), (1,))


def test_the_parts_of_a_fused_projection_split_in_blocks_are_splits() -> None:
    program = planning.gpt2(8, 32, 64).program
    fits = {op.name: fit(op, program.values) for op in program.ops}
    blocks = block_counts(program, fits)
    op = next(op for op in program.ops if len(op.results) == 3)
    shape = program.values[op.operands[0]].shape
    found = candidates(op, fits[op.name], program.values, (2,), blocks)
    cut = [c for c in found if c.operands[0] == (split(len(shape) - 1, shape[-1] // 6),)]
    assert cut
    for made in cut:
        for result, layout in zip(op.results, made.results, strict=True):
            assert local_shape(result.shape, layout, (2,))[-1] == result.shape[-1] // 2
            assert placeable(layout, result.shape, (2,), blocks[result.name])

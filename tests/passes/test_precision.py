"""`mixed` casts as autocast does, each value once, and leaves alone numbers that are not the model's."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - its operator
from torch import nn
from torch.nn import functional as F

from autopar.analysis.weights import copies, reduce_dtypes, weights
from autopar.ir.program import Op, Program
from autopar.passes import normalise
from autopar.passes.precision import mixed, received
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from tests.capture import interpreter
from tests.passes.programs import program
from tests.support import models

ROWS, WEIGHTS = torch.linspace(-1, 1, 24).view(3, 8).sin(), torch.linspace(-9, 9, 128).view(2, 8, 8).cos()
ENDS = torch.tensor([2, 3], dtype=torch.int32)  # of the rows of two groups


def dtypes(found: Program) -> dict[str, torch.dtype]:
    """The dtype of the last result of every target."""
    return {op.target.split(".")[1]: op.results[0].dtype for op in found.ops}


def casts(found: Program) -> list[Op]:
    return [op for op in found.ops if op.target == "aten.to.dtype"]


def test_products_are_narrow_and_norms_and_losses_are_not() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.gelu(F.linear(x, w))
        return F.cross_entropy(F.layer_norm(y, (4,)).softmax(-1), torch.arange(3)) + (y * 2).sum()

    found = dtypes(mixed(normalise(program(body, torch.ones(3, 4), torch.ones(4, 4)))))
    single = ("layer_norm", "softmax", "cross_entropy_loss", "sum", "add")
    assert {name: found[name] for name in single} == dict.fromkeys(single, torch.float32)
    assert found["linear"] == found["gelu"] == found["mul"] == torch.bfloat16


def test_a_value_is_cast_to_a_dtype_once() -> None:
    for name in models.MODELS:
        found = models.captured(name, "bf16-mixed").program
        assert max(Counter((op.operands[0], op.args[1]) for op in casts(found)).values()) == 1
        read = {op.operands[0] for op in casts(found)}
        assert all(p.value.dtype == torch.float32 for p in found.parameters)
        assert sum(p.value.name in read for p in found.parameters) == len(copies(found)) > 5


def test_a_tied_weight_has_one_copy() -> None:
    found = models.captured("gpt2", "bf16-mixed").program
    copied = [copy for copy, parameter in copies(found).items() if parameter == "transformer.wte.weight"]
    assert [op.name.partition(":")[0] for op in found.ops if copied[0] in op.operands] == ["transformer.wte", "lm_head"]


def test_outputs_keep_their_dtypes() -> None:
    for name in models.MODELS:
        single, found = models.captured(name).program, models.captured(name, "bf16-mixed").program
        for before, after in zip(single.outputs, found.outputs, strict=True):
            assert found.values[after.value].dtype == single.values[before.value].dtype


def test_rotary_angles_are_computed_as_they_were() -> None:
    found = models.captured("llama", "bf16-mixed").program
    angles = [op for op in found.ops if op.name.startswith("model.rotary_emb:")]
    assert {"cos", "sin"} <= {op.target.split(".")[1] for op in angles}
    assert not any(result.dtype == torch.bfloat16 for op in angles for result in op.results)


def test_the_smallest_float_does_not_become_infinite() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        scores = F.linear(x, w)
        mask = torch.ones(3, 4, dtype=torch.bool)
        filled = scores.masked_fill(mask, torch.finfo(torch.float32).min)
        return torch.where(mask, torch.tensor(torch.finfo(torch.float32).min), filled).softmax(-1)

    found = mixed(normalise(program(body, torch.ones(3, 4), torch.ones(4, 4))))
    (result,) = interpreter.run(found, {"tensors.0": torch.randn(3, 4), "tensors.1": torch.randn(4, 4)})
    torch.testing.assert_close(result, torch.full((3, 4), 0.25))


def test_what_takes_no_mixture_takes_float32() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.lerp(F.linear(x, w), torch.ones(3, 4), 0.5)

    found = mixed(normalise(program(body, torch.ones(3, 4), torch.ones(4, 4))))
    (lerp,) = (op for op in found.ops if "lerp" in op.target)
    assert {found.values[name].dtype for name in (*lerp.operands, lerp.name)} == {torch.float32}


@torch.library.custom_op("precision_tests::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@product.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # which does not say that dtypes must be equal
    return a.new_empty(a.shape[0], b.shape[1])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["autopar::grouped_mm", "transformers::grouped_mm_fallback"])
def test_products_of_groups_are_narrow(name: str, half: torch.dtype) -> None:
    library, _, short = name.partition("::")
    grouped = getattr(getattr(torch.ops, library), short)
    whole = normalise(program(lambda x, w, ends: grouped(F.layer_norm(x, (8,)), w, ends), ROWS, WEIGHTS, ENDS))
    found = mixed(whole, half=half)
    (op,) = (op for op in found.ops if short in op.target)
    assert {found.values[operand].dtype for operand in (*op.operands[:2], op.name)} == {half}
    (result,) = interpreter.run(found, {"tensors.0": ROWS, "tensors.1": WEIGHTS, "tensors.2": ENDS})
    expected = torch.cat([F.layer_norm(x, (8,)) @ w for x, w in zip(ROWS.split([2, 1]), WEIGHTS, strict=True)])
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=5e-2)


def test_an_operator_of_a_library_has_operands_of_the_dtypes_that_it_had() -> None:
    found = mixed(normalise(program(lambda x, w: product(F.layer_norm(x, (8,)), w), torch.ones(3, 8), torch.ones(8, 4))))
    (op,) = (op for op in found.ops if "precision_tests" in op.target)
    assert {found.values[operand].dtype for operand in (*op.operands, op.name)} == {torch.float32}
    interpreter.run(found, {"tensors.0": torch.ones(3, 8), "tensors.1": torch.ones(8, 4)})
    found = mixed(normalise(program(lambda x, w: product(x, w), torch.ones(3, 8), torch.ones(8, 4))))
    (op,) = (op for op in found.ops if "precision_tests" in op.target)
    assert {found.values[operand].dtype for operand in (*op.operands, op.name)} == {torch.bfloat16}


def test_inputs_arrive_in_other_dtypes_and_are_cast_once() -> None:
    single = program(lambda x, y: x * x + y, torch.ones(3), torch.ones(3))
    found = received(single, {"tensors.0": torch.bfloat16, "tensors.1": torch.float32})
    assert [value.dtype for value in found.inputs] == [torch.bfloat16, torch.float32]
    assert [(op.operands, op.results[0].dtype) for op in casts(found)] == [(("tensors.0",), torch.float32)]
    given = {"tensors.0": torch.tensor([1.0, 2.0, 3.0]).bfloat16(), "tensors.1": torch.ones(3)}
    (result,) = interpreter.run(found, given)
    assert result.tolist() == [2.0, 5.0, 10.0]


class Tower(nn.Module):
    """Two parameters, one of them read through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x @ self.w.t(), (4,), self.scale).sum()


def test_copies_and_their_views_are_weights_whose_gradients_are_added_in_float32() -> None:
    model, sample = Tower(), torch.ones(2, 4)
    for reduce, expected in ((None, torch.float32), ("fp32", torch.float32), ("bf16", None)):
        found = read_program(model, sample, Options(precision="bf16-mixed", reduce=reduce)).program
        (copy,) = copies(found)
        derived = weights(found) - {"w", "scale"}
        assert copy in derived
        assert len(derived) == 2, "the copy and its transpose"
        assert reduce_dtypes(found) == (dict.fromkeys(derived, expected) if expected else {})


def test_programs_of_different_precision_have_different_hashes() -> None:
    asked = [(None, None), ("bf16", None), ("bf16-mixed", None), ("bf16-mixed", "bf16")]
    options = [Options(precision=precision, reduce=reduce) for precision, reduce in asked]
    hashes = [read_program(*models.make("gpt2"), one).program.hash for one in options]
    assert all(a != b for a, b in itertools.combinations(hashes, 2))

"""The tensor modes of a declaration: layers send what the papers say, and no mode is priced below the search."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.plan.plan import Plan
from tests.support import planning
from tests.support.planning import NVLINK, mesh

BLOCK = "transformer.h.1."
FORWARD, BACKWARD = "forward", "backward"


def sent(plan: Plan, where: str, *, weights: bool, axis: str | None = None) -> Counter[str]:
    """Bytes of what a block sends in a pass, by kind; messages below a hundredth, of biases and norms' moments, left out."""
    found: Counter[str] = Counter()
    for c in plan.collectives:
        if c.value.startswith(BLOCK) and (":" not in c.value) == weights and c.where == where and axis in (None, c.axis):
            found[c.kind] += c.bytes
    largest = max(found.values(), default=0)
    return Counter({kind: size for kind, size in found.items() if size > largest / 100})


def test_1d_is_megatrons_two_all_reduces_of_the_activations_in_each_pass() -> None:
    plan = planning.plan(planning.gpt2(1, 64, 4096), mesh((8,), NVLINK), strategy="1d")
    for where in (FORWARD, BACKWARD):
        assert sent(plan, where, weights=False) == {"all_reduce": 2 * 64 * 4096 * 2}
        assert not sent(plan, where, weights=True)


def test_sequence_is_each_all_reduce_in_its_two_halves() -> None:
    plan = planning.plan(planning.gpt2(16, 64, 256, depth=3), mesh((4,), NVLINK), strategy="sequence")
    for where in (FORWARD, BACKWARD):
        assert sent(plan, where, weights=False) == dict.fromkeys(("all_gather", "reduce_scatter"), 2 * 16 * 64 * 256 * 2)
    ends = [layout for name, layout in plan.layouts.items() if name.startswith(BLOCK) and "dropout" in name]
    assert ends[-1] == "S(1)"


@pytest.mark.usefixtures("free_copies")
def test_small_messages_of_2d_are_what_summa_broadcasts() -> None:
    """Optimus, table 1: 7 b s h + 12 h^2 elements over q in the forward of a layer."""
    plan = planning.plan(planning.gpt2(16, 64, 256, depth=3), mesh((2, 2), NVLINK), strategy="2d")
    assert sent(plan, FORWARD, weights=False) == {"all_gather": 7 * 16 * 64 * 256 * 2 // 2}
    assert sent(plan, BACKWARD, weights=False) == {"reduce_scatter": 7 * 16 * 64 * 256 * 2 // 2}


@pytest.mark.usefixtures("free_copies")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy, sizes", [("2d", (2, 2)), ("ddp+2.5d", (2, 2, 2))])
def test_large_messages_of_2d_are_less_because_the_second_product_scatters_its_sums(
    strategy: str, sizes: tuple[int, ...]
) -> None:
    """4 b s h over q instead of 7, and 12 h^2 over q of weights; Tesseract: the batch over the depth, and gradients, too."""
    batch, length, width, (*depth, _, side) = 16, 256, 1024, sizes
    on = mesh(sizes, NVLINK)
    plan = planning.plan(planning.gpt2(batch, length, width), on, strategy=strategy)
    copies, row, column = on.axes[:-2], on.axes[-2], on.axes[-1]
    activations = 4 * batch * length * width * 2 // side // (depth[0] if depth else 1)
    for where in (FORWARD, BACKWARD):
        assert sum(sent(plan, where, weights=False).values()) == pytest.approx(activations, rel=0.02)
        assert "all_reduce" not in sent(plan, where, weights=False)
    assert {c.axis for c in plan.collectives if c.value.startswith(BLOCK) and ":" in c.value} == {column}
    weights = 12 * width**2 * 2 // side
    assert sent(plan, FORWARD, weights=True, axis=row)["all_gather"] == pytest.approx(weights, rel=0.02)
    assert sent(plan, BACKWARD, weights=True, axis=row)["reduce_scatter"] == pytest.approx(weights, rel=0.02)
    for axis in copies:
        assert sent(plan, BACKWARD, weights=True, axis=axis)["all_reduce"] == pytest.approx(weights / side, rel=0.03)


def test_3d_sends_no_more_than_its_paper_and_gathers_weights_on_one_axis_only() -> None:
    """Bian et al.: a product of widths a to b gathers and scatters b s (a + b) over p^2: 16 b s h in the forward of a layer."""
    batch, length, width, side = 16, 256, 1024, 2
    on = mesh((side,) * 3, NVLINK)
    plan = planning.plan(planning.gpt2(batch, length, width), on, strategy="3d")
    for where in (FORWARD, BACKWARD):
        activations = sent(plan, where, weights=False)
        assert "all_reduce" not in activations
        assert 0 < sum(activations.values()) <= 16 * batch * length * width * 2 // side**2
    gathered = {
        c.axis for c in plan.collectives if c.kind == "all_gather" and c.value.endswith(("_attn.weight", "ln_1.weight"))
    }
    assert gathered == {on.axes[0]}
    assert sent(plan, FORWARD, weights=True)["all_gather"] == pytest.approx(12 * width**2 * 2 / side**2, rel=0.03)
    assert plan.layouts[f"{BLOCK}mlp.c_fc.weight"].count("S") == 3, "no device stores what another one has"


CASES = [
    ("1d", (4,)), ("sequence", (4,)), ("2d", (2, 2)), ("any", (2, 2)), ("data", (4,)), ("zero1+1d", (2, 2)),
    ("fsdp+sequence", (2, 2)), ("ddp+1d", (2, 2)), ("1d", (2, 2)), ("zero2+2d", (2, 2)),
]  # fmt: skip


@pytest.mark.one_in(6)
@pytest.mark.parametrize("strategy, sizes", CASES)
def test_no_mode_is_priced_below_what_is_searched_on_its_mesh(strategy: str, sizes: tuple[int, ...]) -> None:
    captured, on = planning.gpt2(16, 64, 256, depth=3), mesh(sizes, NVLINK)
    named, best = planning.plan(captured, on, strategy=strategy), planning.plan(captured, on)
    assert best.step_time <= named.step_time * (1 + 1e-6)


def test_a_mode_without_a_first_word_shards_weights_over_data_or_not_as_is_best() -> None:
    captured, on = planning.gpt2(16, 64, 256, depth=3), mesh((2, 2), NVLINK)
    free = planning.plan(captured, on, strategy="1d").step_time
    for data in ("ddp", "zero2", "fsdp"):
        assert free <= planning.plan(captured, on, strategy=f"{data}+1d").step_time * (1 + 1e-6)


def test_the_first_word_says_how_weights_lie_over_the_axis_of_data() -> None:
    captured, on = planning.gpt2(16, 64, 256, depth=3), mesh((2, 2), NVLINK)
    name = f"{BLOCK}mlp.c_fc.weight"
    stored = {
        d: planning.plan(captured, on, strategy=f"{d}+1d").layouts[name].split(", ")[0][0] for d in ("ddp", "zero1", "fsdp")
    }
    assert stored == {"ddp": "I", "zero1": "S", "fsdp": "S"}


@pytest.mark.parametrize(
    "strategy, on, what",
    [
        ("4d", mesh((2, 2)), "no strategy is called '4d'"),
        ("zero9+1d", mesh((2, 2)), "no strategy is called 'zero9.1d'"),
        ("2d", mesh((4,)), "'2d' needs 2 mesh axes, and the mesh has 1"),
        ("3d", mesh((2, 2)), "'3d' needs 3 mesh axes, and the mesh has 2"),
        ("2d", mesh((2, 3)), "cannot split a width of 256 over 3 devices"),
    ],
)
def test_a_strategy_that_the_mesh_or_the_model_does_not_fit_is_refused(strategy: str, on: Mesh, what: str) -> None:
    with pytest.raises(ConstraintError, match=what):
        planning.plan(planning.gpt2(16, 64, 256, depth=3), on, strategy=strategy)

"""Mistakes that planners of this kind have made, each ruled out by a test.

`test_schemes.py` looks for plans that are worse than a named scheme.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from autopar.analysis.analysis import analyse
from autopar.capture import Captured
from autopar.cost_models import optimizers
from autopar.cost_models.collectives import seconds as collective_seconds
from autopar.cost_models.compute import pricer
from autopar.errors import BudgetError
from autopar.formulation.formulate import formulate
from autopar.formulation.read_solution import solution_of
from autopar.ir.device import Device
from autopar.ir.layout import local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import elements
from autopar.ir.training_step import TrainingStep
from autopar.operators import fit, row_of
from autopar.plan.assignment_text import resolve
from autopar.plan.plan import Plan
from tests.support import planning
from tests.support.planning import NETWORK, NVLINK, link, mesh
from tests.support.prices import bill

Model = Callable[[], Captured]

MODELS: dict[str, Model] = {
    "llama": partial(planning.llama, 16, 128, 512, depth=4),
    "gpt2": partial(planning.gpt2, 16, 128, 256, depth=3),
    "layers": partial(planning.layers, 4096, 1024, 4096, 1024, 512),
}
MESHES = {"8": mesh((8,), link(100)), "2x4": mesh((2, 4), NETWORK, NVLINK)}
STRATEGIES = ["auto", "ddp", "fsdp", "megatron", "replicate"]


@pytest.mark.one_in(12)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("on", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_price_of_a_plan_is_the_sum_of_its_operators_and_its_list(model: Model, on: Mesh, strategy: str) -> None:
    plan = planning.plan(model(), on, strategy=strategy)
    own = bill(plan, TrainingStep(program=model().program), on)
    assert plan.step_time == pytest.approx(own.total, rel=1e-9)
    assert sum(c.seconds for c in plan.collectives) == pytest.approx(own.collectives, rel=1e-9)
    assert Counter((planning.names(c), c.axis, c.kind, c.where, c.bytes) for c in plan.collectives) == Counter(own.issued)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("on", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("model", [MODELS["llama"], MODELS["gpt2"]], ids=["llama", "gpt2"])
def test_folding_repeated_blocks_drops_nothing(model: Model, on: Mesh) -> None:
    """The optimum of the folded program is the price of the same decisions in the unfolded one, and not below its optimum."""
    captured = model()
    plan = planning.plan(captured, on)
    apart = formulate(
        analyse(TrainingStep(program=captured.program), on, repeated=False),
        on,
        optimizers.optimizer("adamw"),
        sharded_outputs=planning.beside_scalar,
    )
    chosen = resolve(plan, apart.analysis.step, apart.analysis.fits)
    found = solution_of(apart, chosen, gap=plan.gap, status=plan.status)
    assert found.seconds == pytest.approx(plan.step_time, rel=1e-9)
    folded = analyse(TrainingStep(program=captured.program), on).classes
    assert sum(len(v.members) for v in folded.values) == len(captured.program.values)
    assert len(apart.problem.choices) > 1.5 * len(folded.members)


@pytest.mark.thorough
@pytest.mark.parametrize("model", [MODELS["llama"]], ids=["llama"])
def test_the_optimum_with_folded_blocks_is_that_of_the_deeper_model_less_the_same_blocks(model: Model) -> None:
    """Each block more costs the same: what a class contains is counted as often as it has members."""
    on = MESHES["8"]
    times = [planning.plan(planning.llama(16, 128, 512, depth=depth), on).step_time for depth in (4, 5, 6)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-6)


def test_a_gathered_weight_is_priced_for_two_gathers_and_a_scatter() -> None:
    captured, on = planning.layers(4096, 1024, 4096, 1024, 512), MESHES["8"]
    plan = planning.plan(captured, on, strategy="fsdp")
    first, *others = (parameter.value.bytes for parameter in captured.program.parameters)  # together less than 25 MiB
    whole = first + sum(others)
    again = whole - first  # the input of the first layer has no gradient: its weight is not read again
    expected = [("all_gather", "forward", whole), ("all_gather", "backward", again), ("reduce_scatter", "backward", whole)]
    own = [c for c in plan.collectives if c.value in plan.layouts and "weight" in c.value]
    assert Counter((c.kind, c.where, c.bytes) for c in own) == Counter(expected)
    for c in own:
        assert c.seconds == pytest.approx(collective_seconds(c.kind, float(c.bytes), 8, on.links[0]))


def test_memory_counts_weights_gradients_optimizer_state_and_activations_in_bytes() -> None:
    batch, width = 4096, 1024
    captured, on = planning.layers(batch, width, width, width), MESHES["8"]
    weights, activation = 2 * width * width * 2, batch * width * 2
    peak = {
        name: planning.plan(captured, on, strategy="replicate", optimizer=name).peak_memory
        for name in ("sgd", "sgd-momentum", "adamw")
    }
    assert peak["adamw"] - peak["sgd-momentum"] == peak["sgd-momentum"] - peak["sgd"] == weights
    assert peak["sgd"] >= 2 * weights + 4 * activation  # weights and gradients; the input, and what GELU and linear keep
    assert peak["sgd"] <= 2 * weights + 8 * activation
    twice = planning.plan(planning.layers(2 * batch, width, width, width), on, strategy="replicate").peak_memory
    assert 4 * activation <= twice - peak["adamw"] <= 8 * activation


@pytest.mark.parametrize("states", [1, 2, 3, 4])
def test_a_budget_for_less_than_everything_is_refused(states: int) -> None:
    """Weights alone, with gradients, with optimizer state: the activations still lack room."""
    captured = planning.layers(4096, 1024, 1024, 1024)
    with pytest.raises(BudgetError, match="no plan fits"):
        planning.plan(captured, MESHES["8"], strategy="replicate", budget=states * 2 * 1024 * 1024 * 2)


def test_each_of_two_meshes_in_a_process_has_its_own_prices() -> None:
    captured = planning.gpt2(16, 128, 256, depth=3)
    slow, fast = mesh((2, 4), link(5), link(50)), mesh((2, 4), link(50), link(500))
    other = dataclasses.replace(fast, device=mesh((8,), device="l4").device)
    for first, second in ((slow, fast), (fast, other), (other, slow)):
        plans = [planning.plan(captured, on, strategy="megatron") for on in (first, second)]
        assert plans[0].step_time != plans[1].step_time
        for plan, on in zip(plans, (first, second), strict=True):
            assert plan.step_time == pytest.approx(bill(plan, TrainingStep(program=captured.program), on).total, rel=1e-9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_compute_and_communication_are_added_in_seconds(model: Model) -> None:
    """A machine ten times faster in everything takes a tenth of the time, and runs the same plan."""
    on = MESHES["2x4"]
    plans = [planning.plan(model(), _faster(on, factor)) for factor in (1, 10)]
    assert plans[0].step_time == pytest.approx(10 * plans[1].step_time, rel=1e-6)
    assert plans[0].peak_memory == pytest.approx(plans[1].peak_memory, rel=0.2)


def _faster(on: Mesh, factor: float) -> Mesh:
    links = (
        dataclasses.replace(found, bandwidth=found.bandwidth * factor, latency=found.latency / factor) for found in on.links
    )
    return dataclasses.replace(on, links=tuple(links), device=_quick(on.device, factor))


def _quick(device: Device | None, factor: float) -> Device:
    assert device is not None
    product, attention = device.product, device.attention
    return dataclasses.replace(
        device,
        product=product and dataclasses.replace(product, wave=product.wave / factor),
        attention=attention
        and dataclasses.replace(
            attention,
            forward={dim: rate * factor for dim, rate in attention.forward.items()},
            backward={dim: rate * factor for dim, rate in attention.backward.items()},
        ),
        flops={name: rate * factor for name, rate in device.flops.items()},
        bandwidth=device.bandwidth * factor,
        launch=device.launch / factor,
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_stay_one_in_the_plan(strategy: str) -> None:
    captured = planning.gpt2(16, 128, 256, depth=3)
    tied = next(p for p in captured.program.parameters if p.value.name == "transformer.wte.weight")
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    plan = planning.plan(captured, MESHES["8"], strategy=strategy)
    assert "lm_head.weight" not in plan.layouts
    assert "transformer.wte.weight" in plan.layouts
    if strategy == "ddp":
        (own,) = planning.of(plan, "transformer.wte.weight")
        weights = {p.value.name: p.value.bytes for p in captured.program.parameters}
        assert sorted(planning.names(own)) == sorted(weights)
        assert (own.kind, own.where, own.bytes) == ("all_reduce", "backward", sum(weights.values()))


def test_a_tied_weight_is_stored_and_stepped_once() -> None:
    on, saved = MESHES["8"], 4096 * 512 * 2  # vocabulary, width, bfloat16
    plans = [
        planning.plan(planning.llama(1, 32, 512, vocabulary=4096, tied=tied), on, strategy="replicate")
        for tied in (True, False)
    ]
    assert plans[1].peak_memory - plans[0].peak_memory == pytest.approx(4 * saved, rel=0.3)  # weight, gradient, two moments


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masks_given_by_keyword_are_planned(strategy: str) -> None:
    captured = planning.gpt2(16, 128, 256, depth=3, masked=True)
    plan = planning.plan(captured, MESHES["8"], strategy=strategy)
    assert {"input_ids", "attention_mask", "labels"} <= set(plan.layouts)
    whole = "S(0)" if strategy in ("ddp", "fsdp") else "I"
    assert plan.layouts["attention_mask"] == whole
    assert plan.step_time == pytest.approx(bill(plan, TrainingStep(program=captured.program), MESHES["8"]).total, rel=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_product_is_repeated_where_splitting_is_free(model: Model, sizes: tuple[int, ...]) -> None:
    """On links and memory that cost next to nothing every matrix product takes an eighth of its time on one device."""
    captured = model()
    free = mesh(sizes, link(1e5, 0.0))
    assert free.device is not None
    on = dataclasses.replace(free, device=dataclasses.replace(free.device.at_peak(), launch=0.0, bandwidth=1e15))
    plan = planning.plan(captured, on)
    program = captured.program
    chosen = resolve(plan, TrainingStep(program=program), {op.name: fit(op, program.values) for op in program.ops})
    products = [op for op in program.ops if row_of(op).flops]
    assert products
    for op in products:
        counted, values = pricer(op, program.values, on.device), program.values  # type: ignore[arg-type]
        pick = chosen.ops[op.name]
        whole = counted(tuple(values[n].shape for n in op.operands), tuple(r.shape for r in op.results))
        local = counted(
            tuple(local_shape(values[n].shape, x, sizes) for n, x in zip(op.operands, pick.operands, strict=True)),
            tuple(local_shape(r.shape, x, sizes) for r, x in zip(op.results, pick.results, strict=True)),
        )
        assert local == pytest.approx(whole / 8, rel=0.02), f"{op}: {pick}"


def test_no_operator_is_repeated_in_a_large_batch() -> None:
    """Everything between the input and the loss is split: the batch divides, and no operator is cheaper whole."""
    captured = planning.layers(1 << 16, 1024, 4096, 1024, 512)
    plan = planning.plan(captured, MESHES["8"])
    program = captured.program
    for op in program.ops:
        for result in op.results:
            if elements(result.shape) > 1:
                assert "S" in plan.layouts[result.name] or "P" in plan.layouts[result.name], f"{op} is repeated"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sizes", [(1,), (1, 1)])
def test_a_world_of_one_device_runs_the_model_as_it_is(sizes: tuple[int, ...], strategy: str) -> None:
    captured, on = planning.gpt2(16, 128, 256, depth=3), mesh(sizes, NVLINK)
    plan = planning.plan(captured, on, strategy=strategy)
    assert not plan.collectives
    assert not plan.routes
    assert set(", ".join(plan.layouts.values()).split(", ")) == {"I"}
    own = bill(plan, TrainingStep(program=captured.program), on)
    assert plan.step_time == pytest.approx(own.ops + own.optimizer, rel=1e-9)


def test_an_axis_of_one_device_changes_nothing() -> None:
    captured = planning.gpt2(16, 128, 256, depth=3)
    plans: list[Plan] = [
        planning.plan(captured, mesh((8,), NVLINK)),
        planning.plan(captured, mesh((1, 8), NETWORK, NVLINK)),
        planning.plan(captured, mesh((8, 1), NVLINK, NETWORK)),
    ]
    assert {round(plan.step_time * 1e9) for plan in plans} == {round(plans[0].step_time * 1e9)}
    assert {tuple(Counter((c.kind, c.where) for c in plan.collectives).items()) for plan in plans}

"""Named schemes are found when they are best, and have the textbook collectives."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from autopar.analysis.analysis import analyse
from autopar.analysis.dropped_weights import dropped_weights
from autopar.analysis.weight_buckets import SPARE
from autopar.capture import Captured
from autopar.errors import AutoparError, ConstraintError
from autopar.ir.mesh import Mesh
from autopar.ir.training_step import StageEnds, TrainingStep
from autopar.plan.plan import Plan
from tests.support import planning
from tests.support.planning import GIB, NETWORK, NVLINK, counted, link, mesh

FORWARD, BACKWARD = "forward", "backward"
ONCE = Counter({("all_gather", FORWARD): 1, ("reduce_scatter", BACKWARD): 1})  # what is gathered is kept for the backward
TWICE = ONCE + Counter({("all_gather", BACKWARD): 1})
Model = Callable[[], Captured]
Key = tuple[str, str, str, int]  # axis, kind, pass, bytes


def found(plan: Plan, prefix: str, *, weights: bool) -> Counter[Key]:
    """The collectives of a block: of its weights, or of its activations."""
    inside = [c for c in plan.collectives if c.value.startswith(prefix) and (":" not in c.value) == weights]
    return Counter((c.axis, c.kind, c.where, c.bytes) for c in inside)


def of_matrix(plan: Plan, name: str) -> Counter[tuple[str, str]]:
    return counted(plan, values=lambda value: value == name)


def matrices(captured: Captured, prefix: str = "") -> dict[str, int]:
    """The weights of more than one dim, with their bytes."""
    values = [p.value for p in captured.program.parameters]
    return {v.name: v.bytes for v in values if len(v.shape) > 1 and v.name.startswith(prefix)}


def in_one_all_reduce(plan: Plan, captured: Captured) -> bool:
    """Whether the gradients of all parameters, small as they are, travel in one all-reduce and in nothing else."""
    weights = {p.value.name: p.value.bytes for p in captured.program.parameters}
    (own,) = planning.of(plan, *weights)
    everything = sorted(planning.names(own)), own.bytes
    return everything == (sorted(weights), sum(weights.values())) and (own.kind, own.where) == ("all_reduce", BACKWARD)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_sharded_strategies_send_shards_over_the_outer_axis_and_whole_weights_over_the_inner_one(strategy: str) -> None:
    captured = planning.gpt2(16, 128, 256)
    plan = planning.plan(captured, mesh((2, 4), NETWORK, NVLINK), strategy=strategy)
    assert {plan.layouts[p.value.name] for p in captured.program.parameters} == {"S(0)/2, S(0)/1"}
    whole = sum(p.value.bytes for p in captured.program.parameters)
    for kind, where in (("all_gather", FORWARD), ("reduce_scatter", BACKWARD)):
        sent = {
            axis: sum(c.bytes for c in plan.collectives if (c.axis, c.kind, c.where) == (axis, kind, where))
            for axis in plan.axes
        }
        assert sent == {"axis0": whole / 4, "axis1": whole}


def test_the_weights_of_a_block_are_gathered_in_one_message_whatever_their_size() -> None:
    captured = planning.gpt2(8, 64, 1024, depth=4)
    blocks = [sum(p.value.bytes for p in captured.program.parameters if f".h.{i}." in p.value.name) for i in range(4)]
    assert min(blocks) > 24 * 2**20
    plan = planning.plan(captured, mesh((8,), NVLINK), strategy="fsdp")
    gathers = [c.bytes for c in plan.collectives if (c.kind, c.where) == ("all_gather", FORWARD)]
    assert sorted(gathers)[-4:] == sorted(blocks)
    assert len(gathers) == 4 + 2, "and one before the blocks, one after them"


LLAMA, GPT2 = "model.layers.1.", "transformer.h.1."
BATCHES = [(partial(planning.llama, 256, 1024, 512), LLAMA), (partial(planning.gpt2, 256, 1024, 512), GPT2)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model, block", BATCHES, ids=["llama", "gpt2"])
def test_a_small_model_and_a_large_batch_make_data_parallelism(model: Model, block: str) -> None:
    captured = model()
    plan = planning.plan(captured, mesh((8,), NETWORK))
    weights = matrices(captured, block)
    assert all(plan.layouts[name] == "I" for name in weights)
    assert in_one_all_reduce(plan, captured)
    assert not found(plan, block, weights=False)
    assert all(c.value not in captured.program.producer or c.bytes == 4 for c in plan.collectives if c.where == FORWARD)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model, block", BATCHES, ids=["llama", "gpt2"])
def test_every_gradient_crosses_the_links_once_in_data_parallelism(model: Model, block: str) -> None:
    """A weight that the backward does not read may be stored split: its all-reduce falls into two halves of the same price."""
    captured = model()
    plan = planning.plan(captured, mesh((8,), NETWORK))
    for parameter in captured.program.parameters:
        halves = of_matrix(plan, parameter.value.name)
        assert halves in (
            Counter({("all_reduce", BACKWARD): 1}),
            Counter({("all_gather", FORWARD): 1, ("reduce_scatter", BACKWARD): 1}),
        )
    sizes = {p.value.name: p.value.bytes for p in captured.program.parameters}
    for sent in planning.of(plan, *sizes):
        assert sent.bytes == sum(sizes[name] for name in planning.names(sent))


def test_the_gradients_of_data_parallelism_travel_in_buckets_of_25_mib() -> None:
    """Of weights of 8 MiB three to a bucket, however many layers they come from; one of 32 MiB alone."""
    weights = [2048] * 8
    plan = planning.plan(planning.layers(1 << 14, *weights, 8192, 2048), mesh((8,), NETWORK), strategy="ddp")
    sent = [(c.kind, c.where, c.bytes // 2**20) for c in plan.collectives if c.where == BACKWARD]
    assert Counter(sent) == {("all_reduce", BACKWARD, size): n for size, n in ((24, 2), (8, 1), (32, 2))}


def test_the_forward_of_data_parallelism_adds_up_nothing_but_the_loss() -> None:
    captured = planning.llama(256, 1024, 512)
    plan = planning.plan(captured, mesh((8,), NETWORK), strategy="ddp")
    forward = [c for c in plan.collectives if c.where == FORWARD]
    assert {(c.kind, c.bytes <= 8) for c in forward} == {("all_reduce", True)}
    assert in_one_all_reduce(plan, captured)


def test_weights_that_do_not_fit_are_stored_split_and_gathered() -> None:
    captured, on = planning.layers(1 << 16, *[8192] * 9), mesh((8,), link(100))
    loose, tight = planning.plan(captured, on), planning.plan(captured, on, budget="3.8GiB")
    assert loose.peak_memory > 4.5 * GIB
    assert tight.peak_memory <= 3.8 * GIB
    assert all(layout.startswith("S") for name, layout in tight.layouts.items() if name in matrices(captured))
    gathered = [name for name in matrices(captured) if of_matrix(tight, name)]
    assert len(gathered) >= 7  # the first one multiplies a whole input: it may stay split
    for name in gathered:
        assert of_matrix(tight, name) in (ONCE, TWICE)
        assert {c.bytes for c in planning.of(tight, name)} == {8192 * 8192 * 2}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "model, block",
    [(partial(planning.llama, 32, 1024, 4096), LLAMA), (partial(planning.gpt2, 32, 1024, 4096), GPT2)],
    ids=["llama", "gpt2"],
)
def test_blocks_whose_weights_do_not_fit_are_stored_split(model: Model, block: str) -> None:
    captured = model()
    on = mesh((8,), link(100))
    plan = planning.plan(captured, on, budget=planning.plan(captured, on, strategy="fsdp").peak_memory)
    with pytest.raises(AutoparError, match="no plan fits"):
        planning.plan(captured, on, strategy="ddp", budget=plan.peak_memory)
    names = matrices(captured, block)
    sizes = {p.value.name: p.value.bytes for p in captured.program.parameters}
    assert all("S" in plan.layouts[name] for name in names)
    gathered = [name for name in names if of_matrix(plan, name)]
    assert len(gathered) >= len(names) / 2
    for name in gathered:
        assert of_matrix(plan, name) in (ONCE, TWICE)
        assert all(c.bytes == sum(sizes[other] for other in planning.names(c)) for c in planning.of(plan, name))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "model, block",
    [(partial(planning.llama, 1, 64, 4096), LLAMA), (partial(planning.gpt2, 1, 64, 4096), GPT2)],
    ids=["llama", "gpt2"],
)
def test_a_tiny_batch_on_fast_links_makes_two_all_reduces_a_block_forward_and_backward(model: Model, block: str) -> None:
    captured = model()
    plan = planning.plan(captured, mesh((8,), NVLINK))
    size = 64 * 4096 * 2
    assert found(plan, block, weights=False) == {
        ("axis0", "all_reduce", FORWARD, size): 2,
        ("axis0", "all_reduce", BACKWARD, size): 2,
    }
    assert not found(plan, block, weights=True)


def sequence_parallel(axis: str, size: int) -> dict[Key, int]:
    """What Megatron's pair with split norms exchanges in a block: each all-reduce in its two halves, around the norm."""
    kinds = [(kind, where) for kind in ("all_gather", "reduce_scatter") for where in (FORWARD, BACKWARD)]
    return {(axis, kind, where, size): 2 for kind, where in kinds}


def test_wide_layers_on_fast_links_make_a_scatter_and_a_gather_around_each_norm() -> None:
    captured = planning.llama(4, 512, 8192)
    plan = planning.plan(captured, mesh((8,), NVLINK))
    assert found(plan, LLAMA, weights=False) == sequence_parallel("axis0", 4 * 512 * 8192 * 2)
    norms = found(plan, LLAMA, weights=True)  # stored whole or split, as good one way as the other
    assert sum(number * size for (_, kind, _, size), number in norms.items() if kind != "all_gather") == 2 * 8192 * 2
    assert all(plan.layouts[name].startswith("S") for name in matrices(captured, LLAMA))


def test_where_norms_split_their_features_the_halves_are_as_many_and_the_step_is_no_longer() -> None:
    captured, on, whole = planning.gpt2(4, 512, 8192), mesh((8,), NVLINK), 4 * 512 * 8192 * 2
    plan = planning.plan(captured, on)
    sent = found(plan, GPT2, weights=False)
    for where in (FORWARD, BACKWARD):
        halves = {kind: number for (_, kind, when, size), number in sent.items() if (when, size) == (where, whole)}
        assert set(halves) == {"all_gather", "reduce_scatter"}
        assert sum(halves.values()) == 4
    assert all(size == whole or size < whole / 100 for *_, size in sent)
    assert all(plan.layouts[name].startswith("S") for name in matrices(captured, GPT2))
    rows = {f"transformer.h.{block}.attn.c_proj.weight": "S(0)" for block in range(2)}
    assert plan.step_time <= planning.plan(captured, on, constraints=rows).step_time


def test_the_column_and_the_row_of_the_pair_are_split() -> None:
    plan = planning.plan(planning.llama(4, 512, 8192), mesh((8,), NVLINK))
    names = {f"self_attn.{n}_proj": "S(0)" for n in "qkv"} | {"self_attn.o_proj": "S(1)"}
    names |= {"mlp.gate_proj": "S(0)", "mlp.up_proj": "S(0)", "mlp.down_proj": "S(1)"}
    assert {name: plan.layouts[f"{LLAMA}{name}.weight"] for name in names} == names


def test_the_fused_projection_of_gpt2_is_split_in_three_blocks() -> None:
    plan = planning.plan(planning.gpt2(4, 512, 8192), mesh((8,), NVLINK))
    assert plan.layouts[f"{GPT2}attn.c_attn.weight"] == "S(1/3)"
    assert plan.layouts[f"{GPT2}attn.c_attn.bias"] == "S(0/3)"
    assert plan.layouts[f"{GPT2}attn.c_proj.weight"].startswith("S(")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "model, block, norm",
    [(partial(planning.llama, 16, 1024, 4096), LLAMA, 1), (partial(planning.gpt2, 16, 1024, 4096), GPT2, 2)],
    ids=["llama", "gpt2"],
)
def test_tensor_parallelism_inside_data_parallelism_splits_the_norms_too(model: Model, block: str, norm: int) -> None:
    captured = model()
    plan = planning.plan(captured, mesh((2, 8), NETWORK, NVLINK), strategy="megatron")
    whole = 16 // 2 * 1024 * 4096 * 2
    sent = found(plan, block, weights=False)
    assert not any(kind == "all_reduce" and size == whole for _, kind, _, size in sent)
    for where in (FORWARD, BACKWARD):  # each of two all-reduces in its halves, around the norm
        halves = {key: number for key, number in sent.items() if key[2] == where and key[3] == whole}
        assert {axis for axis, *_ in halves} == {"axis1"}
        assert sum(halves.values()) == 4
    for name, size in matrices(captured, block).items():
        for sent in planning.of(plan, name):
            assert sent.axis == "axis0"
            assert size // 8 <= sent.bytes <= size // 8 * (1 + SPARE), "the matrix, and a bias or norm beside it"
    inner = [c for c in plan.collectives if c.value.startswith(block) and ":" not in c.value and c.axis == "axis1"]
    assert {c.bytes for c in inner} <= {norm * 4096 * 2}


MODELS = {
    "llama": partial(planning.llama, 16, 128, 512),
    "gpt2": partial(planning.gpt2, 16, 128, 256),
    "layers": partial(planning.layers, 4096, 1024, 4096, 1024, 512),
}
MESHES = {
    "8 devices": mesh((8,), link(100)),
    "4 slow devices": mesh((4,), link(5, 20.0)),
    "2 slow by 4 fast": mesh((2, 4), NETWORK, NVLINK),
    "2 by 2 by 2": mesh((2, 2, 2), NETWORK, link(50), NVLINK),
    "4 small cards": mesh((4,), link(12, 6.0), device="rtx3080-10gb"),
}


PAIRS = [pair for pair in itertools.product(MODELS, MESHES) if pair != ("llama", "2 by 2 by 2")]  # a minute of planning


@pytest.mark.one_in(9)
@pytest.mark.parametrize("model, where", PAIRS)
def test_auto_is_never_priced_above_a_strategy_that_has_a_name(model: str, where: str) -> None:
    captured, on = MODELS[model](), MESHES[where]
    best = planning.plan(captured, on)
    for strategy in ("ddp", "fsdp", "megatron", "replicate"):
        named = planning.plan(captured, on, strategy=strategy)
        assert best.step_time <= named.step_time * (1 + 1e-6), strategy


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "model, strategy",
    [("layers", "ddp"), *itertools.product(MODELS, ["fsdp", "megatron", "replicate"])],
)
def test_auto_is_not_priced_above_a_named_strategy_in_the_memory_that_it_needs(model: str, strategy: str) -> None:
    captured = MODELS[model]()
    on = MESHES["8 devices"]
    named = planning.plan(captured, on, strategy=strategy)
    best = planning.plan(captured, on, budget=named.peak_memory)
    assert best.peak_memory <= named.peak_memory
    assert best.step_time <= named.step_time * (1 + 1e-6)


GATHERED = Counter({("all_gather", FORWARD): 1, ("all_gather", BACKWARD): 1, ("reduce_scatter", BACKWARD): 1})


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "strategy, on",
    [("fsdp+tp", mesh((2, 4), NETWORK, NVLINK)), ("hsdp+tp", mesh((2, 2, 2), NETWORK, link(50), NVLINK))],
    ids=["fsdp+tp", "hsdp+tp"],
)
def test_fsdp_with_tensor_parallelism_sends_what_megatron_sequence_parallelism_and_fsdp_send(strategy: str, on: Mesh) -> None:
    captured, block = planning.llama(16, 256, 512, depth=3), LLAMA
    plan = planning.plan(captured, on, strategy=strategy)
    activations = 16 // (on.size // on.sizes[-1]) * 256 * 512 * 2
    assert found(plan, block, weights=False) == sequence_parallel(on.axes[-1], activations)
    for name in matrices(captured, block):
        sent = planning.of(plan, name)
        shards = Counter((c.kind, c.where) for c in sent if c.axis == on.axes[-2])
        assert shards == GATHERED, "weights are gathered, and their gradients reduced, over the axis that shards"
        copies = [(c.kind, c.where) for c in sent if c.axis not in on.axes[-2:]]
        assert copies == [("all_reduce", BACKWARD)] * (len(on.sizes) - 2)
        assert not [c for c in sent if c.axis == on.axes[-1]]
        held = plan.layouts[name].split(", ")
        assert [state[0] for state in held] == ["I"] * (len(on.sizes) - 2) + ["S", "S"]
    boundary = [layout for name, layout in plan.layouts.items() if name.startswith(block) and "add" in name][-1]
    assert boundary.endswith("S(1)")


@pytest.mark.parametrize(
    "model, kept",
    [
        (partial(planning.gpt2, 8, 64, 256), ("transformer.wte.weight", "transformer.ln_f.weight", "transformer.ln_f.bias")),
        (partial(planning.llama, 8, 64, 256), ("model.norm.weight", "lm_head.weight")),
    ],
    ids=["tied", "untied"],
)
def test_fsdp_gathers_the_weights_with_which_the_backward_begins_once_as_fsdp2_does(model: Model, kept: Sequence[str]) -> None:
    captured = model()
    plan = planning.plan(captured, mesh((8,), NETWORK), strategy="fsdp")
    blocks = [name for name in matrices(captured) if ".h." in name or ".layers." in name]
    assert blocks
    assert all(of_matrix(plan, name)["all_gather", BACKWARD] == 1 for name in blocks)
    for where in (FORWARD, BACKWARD):
        gathered = {n for c in plan.collectives if (c.kind, c.where) == ("all_gather", where) for n in planning.names(c)}
        assert gathered.isdisjoint(kept) == (where == BACKWARD)


def test_stages_with_several_micro_batches_in_flight_drop_all_weights() -> None:
    """What each of them kept would be as much again."""
    captured = planning.llama(8, 64, 256)
    stage = StageEnds(received=(), sends=False, batch=8, random_ops=0)
    for flights, kept in ((1, {"model.norm.weight", "lm_head.weight"}), (2, set())):
        step = TrainingStep(program=captured.program, stage=replace(stage, flights=flights))
        found = analyse(step, mesh((8,), NETWORK))
        assert found.weights - dropped_weights(found) == kept


def test_hybrid_sharding_gathers_within_the_inner_axis_and_adds_shards_over_the_outer() -> None:
    captured, on = planning.llama(16, 256, 512, depth=3), mesh((2, 4), NETWORK, NVLINK)
    plan = planning.plan(captured, on, strategy="hsdp")
    assert not found(plan, LLAMA, weights=False)
    for name in matrices(captured, LLAMA):
        assert plan.layouts[name] == "I, S(0)"
        by_axis = {axis: Counter((c.kind, c.where) for c in planning.of(plan, name) if c.axis == axis) for axis in on.axes}
        assert by_axis == {"axis0": Counter({("all_reduce", BACKWARD): 1}), "axis1": GATHERED}
    adding = [c for c in plan.collectives if c.axis == "axis0" and c.where == BACKWARD and ":" not in c.value]
    whole = sum(parameter.value.bytes for parameter in captured.program.parameters)
    assert {c.kind for c in adding} == {"all_reduce"}
    assert sum(c.bytes for c in adding) == pytest.approx(whole / 4, rel=0.01), "of shards, not of whole gradients"


@pytest.mark.parametrize("strategy, sizes, needed", [("hsdp", (8,), 2), ("fsdp+tp", (8,), 2), ("hsdp+tp", (2, 4), 3)])
def test_a_mesh_with_too_few_axes_is_refused(strategy: str, sizes: tuple[int, ...], needed: int) -> None:
    with pytest.raises(
        ConstraintError, match=f"'{re.escape(strategy)}' needs {needed} mesh axes, and the mesh has {len(sizes)}"
    ):
        planning.plan(planning.llama(16, 256, 512), mesh(sizes, NVLINK), strategy=strategy)


def test_what_the_last_axis_does_not_divide_is_refused() -> None:
    on = mesh((2, 3), NETWORK, NVLINK)
    with pytest.raises(ConstraintError, match=r"cannot split a sequence of 256 over 3 devices") as caught:
        planning.plan(planning.llama(16, 256, 512), on, strategy="fsdp+tp")
    assert caught.value.details["fix"] == "a sequence that is a multiple of 3, or strategy='megatron'"
    with pytest.raises(ConstraintError, match="no block returns"):
        planning.plan(planning.layers(64, 32, 32), on, strategy="fsdp+tp")


def test_zero3_is_another_name_of_fsdp() -> None:
    plans = [planning.plan(planning.gpt2(8, 32, 64), mesh((4,), NVLINK), strategy=strategy) for strategy in ("zero3", "fsdp")]
    assert plans[0].collectives == plans[1].collectives
    assert (plans[0].layouts, plans[0].routes, plans[0].recompute) == (plans[1].layouts, plans[1].routes, plans[1].recompute)

"""Models in pipeline stages on gloo processes: the numbers of the original module, the plan's messages, a single error."""

from __future__ import annotations

import functools
import itertools
import math
import socket
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.pipeline.schedule import ActionKind
from autopar.pipeline.transfers import replay, with_messages
from autopar.plan.plan import Plan
from autopar.runtime.workers import WorkerPool
from tests.support import failing_stages
from tests.support.forked import FORKED
from tests.support.pipelines import SLOW, Trained, made

ROOT = Path(__file__).parents[2]
EXACT, SINGLE = 1e-9, 1e-6
REPEATED = {"recompute": "blocks"}
# The library computes norms of T5 in float32: another order of sums shows there.
further = functools.partial(pytest.param, marks=pytest.mark.thorough)
CASES = [
    ("gpt2", {"pp": 2, "dp": 2}, {"strategy": "ddp", "microbatches": 4}, EXACT),
    ("albert", {"pp": 2}, {"stages": 4, "microbatches": 2}, EXACT),
    further("gpt2", {"tp": 2, "pp": 2}, {"strategy": "megatron", "microbatches": 4, "schedule": "gpipe"}, EXACT),
    further("llama", {"pp": 2, "dp": 2}, {"strategy": "fsdp", "microbatches": 2}, EXACT),
    further("t5", {"pp": 4}, {"microbatches": 4}, EXACT),
    further("t5", {"pp": 2}, {"stages": 4, "microbatches": 2}, SINGLE),
    further("t5", {"pp": 2, "tp": 2}, {"strategy": "megatron", "stages": 4, "microbatches": 4}, SINGLE),
    further("gpt2", {"pp": 2, "dp": 2}, {"strategy": "zero1", "stages": ["transformer.h.1"], "microbatches": 2}, EXACT),
    further("bert", {"pp": 2}, {"microbatches": 1}, EXACT),
    further("gpt2", {"pp": 2, "dp": 2}, {"strategy": "fsdp", "microbatches": 4, "schedule": "zb-h1"}, EXACT),
    further("t5", {"pp": 2}, {"microbatches": 4, "schedule": "zb-v"}, EXACT),
    further("t5", {"pp": 2}, {"schedule": "tests/support/v_shaped.csv"}, EXACT),
    further("gpt2", {"pp": 2, "tp": 2}, {"strategy": "megatron", "microbatches": 2, "schedule": "zb-h1", **REPEATED}, EXACT),
    further("gpt2", {"pp": 2, "dp": 2, "tp": 2}, {"strategy": "fsdp+tp", "microbatches": 4}, EXACT),
    further("llama", {"pp": 2, "node": 2, "dp": 2, "tp": 1}, {"strategy": "hsdp+tp", "microbatches": 2}, EXACT),
    ("gpt2", {"node": 4}, {"pipeline": "auto", "strategy": "fsdp", "device": SLOW}, EXACT),
]


def messages(plan: Plan, place: int, sizes: Mapping[str, int]) -> list[tuple[int, int]]:
    """The messages of a rank's step by its plan: to which rank, and how many bytes, those of shared gradients last.

    `sizes` has the bytes of every parameter.
    """
    found, pipeline, mesh = [], plan.pipeline, Mesh(axes=plan.axes, sizes=plan.sizes)
    assert pipeline is not None
    axis = plan.axes.index(pipeline.axis)
    here = mesh.coordinates(place)
    lowered = with_messages(pipeline.order, pipeline.seconds)
    replay(lowered)
    where = {mesh.coordinates(rank): rank for rank in range(mesh.size)}
    for action in lowered.ranks[here[axis]]:
        forward = action.kind == ActionKind.SEND_F
        if forward or action.kind == ActionKind.SEND_B:
            cut = action.stage if forward else action.stage - 1
            peer = lowered.rank_of[cut + forward]
            to = where[(*here[:axis], peer, *here[axis + 1 :])]
            found += [(to, one.bytes) for one in pipeline.crossings if one.stage == cut and (forward or one.gradient)]
    for name, stages in sorted(pipeline.tied.items()):
        ranks = list(dict.fromkeys(lowered.rank_of[stage] for stage in stages))
        own = zip(plan.stages[stages[0]].layouts[name].split(", "), plan.stages[stages[0]].sizes, strict=True)
        size = sizes[name] // math.prod(parts for state, parts in own if state.startswith("S"))
        hops = [*itertools.pairwise(ranks), *itertools.pairwise(reversed(ranks))]
        found += [(where[(*here[:axis], to, *here[axis + 1 :])], size) for source, to in hops if source == here[axis]]
    return found


@pytest.mark.parametrize("model, mesh, options, tolerance", CASES)
def test_stages_have_the_numbers_of_the_whole_model_and_send_what_the_plan_says(
    model: str, mesh: dict[str, int], options: dict[str, Any], tolerance: float, pool: WorkerPool
) -> None:
    case = {"model": model, "mesh": mesh, **options}
    if "csv" in case.get("schedule", ""):
        case["schedule"] = str(ROOT / case["schedule"])
    ranks = Mesh.of(mesh).size
    found: list[Trained] = pool.run("tests.support.pipelines:trained", case, ranks=ranks, keep=True)  # type: ignore[assignment]
    assert {name: error for one in found for name, error in one.errors.items() if not error <= tolerance} == {}
    assert any("logits" in one.errors for one in found)
    plan = Plan.from_json(found[0].plan)
    sizes = {name: parameter.nbytes for name, parameter in made(model)[0].named_parameters()}
    for rank, one in enumerate(found):
        assert one.sent == messages(plan, rank, sizes)
        assert one.sent


@pytest.mark.parametrize("schedule, data", [("zb-h1", 1), further("1f1b", 1), further("zb-h1", 2)])
def test_a_rank_holds_at_its_peak_what_its_stages_say(schedule: str, data: int, pool: WorkerPool) -> None:
    """Deferred gradients of weights keep activations and gradients: more than 1f1b holds, and as much as was planned."""
    case = {"mesh": {"pp": 2, "dp": data}, "schedule": schedule, "strategy": "fsdp" if data > 1 else "auto"}
    found: list[tuple[int, int, int]] = pool.run("tests.support.pipelines:peaks", case, ranks=2 * data, keep=True)  # type: ignore[assignment]
    for measured, planned, _ in found:
        assert measured == pytest.approx(planned, rel=0.05)


TWO, FOUR, BOTH = {"pp": 2}, {"pp": 4}, {"pp": 2, "dp": 2}


@pytest.mark.parametrize(
    "mesh, schedule, budget, options",
    [
        (TWO, "interleaved", 8_200_000, {"stages": 4}),
        (TWO, "zb-v", 7_400_000, {"tied": True}),
        *(further(TWO, *case, {}) for case in (("gpipe", 9_000_000), ("1f1b", 7_000_000), ("zb-h1", 9_000_000))),
        *(further(FOUR, *case, {"layers": 8}) for case in (("gpipe", 9_000_000), ("1f1b", 8_000_000), ("zb-h1", 12_000_000))),
        further(FOUR, "interleaved", 10_000_000, {"layers": 8, "stages": 8}),
        further(FOUR, "zb-v", 9_000_000, {"layers": 8}),
        further(BOTH, "interleaved", 5_000_000, {"stages": 4, "strategy": "fsdp"}),
        further(BOTH, "zb-v", 5_000_000, {"strategy": "fsdp"}),
    ],
)
def test_ranks_hold_what_all_their_stages_hold_together_and_keep_a_budget_that_binds(
    mesh: dict[str, int], schedule: str, budget: int, options: dict[str, Any], pool: WorkerPool
) -> None:
    """Stages of one rank are at their peaks at different actions."""
    case = {"mesh": mesh, "schedule": schedule, "budget": budget, "microbatches": 4, "device": "h100", **options}
    found: list[tuple[int, int, int]] = pool.run("tests.support.pipelines:peaks", case, ranks=math.prod(mesh.values()))  # type: ignore[assignment]
    for measured, planned, _ in found:
        assert measured == pytest.approx(planned, rel=0.05)
        assert max(measured, planned) <= budget


@pytest.mark.parametrize("strategy", ["fsdp", further("auto")])
def test_stages_keep_a_budget_that_recomputes_and_shards(strategy: str, pool: WorkerPool) -> None:
    """Of 2 MB, where the first stage takes 5.3 and the second 3.4 if they may."""
    budget = 2_000_000
    case = {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b", "device": "h100", "budget": budget, "strategy": strategy}
    found: list[tuple[tuple[int, int], list[float], str]] = pool.run(
        "tests.support.pipelines:within_budget", case, ranks=4, keep=True
    )  # type: ignore[assignment]
    plan = Plan.from_json(found[0][2])
    ways = [(bool(stage.recompute), "S(0)" in stage.layouts.values()) for stage in plan.stages]
    assert all(map(all if strategy == "fsdp" else any, ways)), "auto need not do both"
    for (measured, planned), errors, _ in found:
        assert planned <= budget
        assert measured == pytest.approx(planned, rel=0.05)
        assert max(errors) <= 1e-5  # in float32


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, REPEATED, {"strategy": "fsdp", "mesh": {"pp": 2, "dp": 2}}], ids=str)
def test_what_a_rank_holds_does_not_grow_with_the_number_of_micro_batches(options: dict[str, Any], pool: WorkerPool) -> None:
    """But for the batch itself."""
    held = []
    for runs in (4, 32):
        case = {"mesh": {"pp": 2}, "schedule": "1f1b", "microbatches": runs, **options}
        ranks = Mesh.of(case["mesh"]).size
        found: list[tuple[int, int, int]] = pool.run("tests.support.pipelines:peaks", case, ranks=ranks, keep=True)  # type: ignore[assignment]
        assert all(measured == pytest.approx(planned, rel=0.05) for measured, planned, _ in found)
        held.append([measured - batch for measured, _, batch in found])
    assert all(many <= 1.01 * few for few, many in zip(*held, strict=True))


@pytest.mark.parametrize(
    "case",
    [
        {"model": "gpt2", "schedule": "1f1b"},
        *(further({"model": "gpt2", "schedule": schedule}) for schedule in ("gpipe", "1f1b+1", "zb-h1")),
        further({"model": "t5", "schedule": "interleaved", "stages": 4}),
    ],
    ids=str,
)
def test_dropout_draws_what_the_model_draws_without_stages(case: dict[str, Any], pool: WorkerPool) -> None:
    for losses, gradient in pool.run("tests.support.pipelines:with_dropout", case, ranks=2, keep=True):  # type: ignore[misc]
        assert max(losses) <= 1e-12
        assert gradient <= EXACT


@pytest.mark.parametrize(
    "case",
    [
        further({"model": "gpt2", "mesh": {"pp": 2, "dp": 2}, "strategy": "fsdp", "microbatches": 2}),
        {"model": "gpt2", "mesh": {"dp": 2, "pp": 2}, "strategy": "ddp", "microbatches": 2, "inputs": "sharded"},
        further({"model": "gpt2", "mesh": {"pp": 2, "tp": 2}, "strategy": "megatron", "microbatches": 2, "schedule": "zb-h1"}),
        further({"model": "t5", "mesh": {"pp": 2}, "stages": 4, "microbatches": 2}),
        further({"model": "bert", "mesh": {"pp": 2}, "microbatches": 1}),
    ],
    ids=str,
)
def test_stages_evaluate_and_take_other_batches_as_the_model_does(case: dict[str, Any], pool: WorkerPool) -> None:
    ranks, tolerance = math.prod(case["mesh"].values()), SINGLE if case["model"] == "t5" else EXACT
    found: list[dict[str, float]] = pool.run("tests.support.pipelines:other_calls", case, ranks=ranks, keep=True)  # type: ignore[assignment]
    for errors in found:
        assert len(errors) > 4
        assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.parametrize(
    "case",
    [
        {"mesh": {"pp": 2, "dp": 2}, "pipeline": "pp", "strategy": "fsdp", "stages": 4, "microbatches": 2},
        further({"mesh": {"pp": 2}, "pipeline": "pp", "microbatches": 2, "train": False}),
        {"mesh": {"dp": 2}, "strategy": "ddp", "constraints": {"blocks.3.scale": "S(0)"}},  # all that is split
    ],
    ids=str,
)
def test_a_parameter_that_one_mode_alone_reads_is_where_that_reads_it(case: dict[str, Any], pool: WorkerPool) -> None:
    ranks = math.prod(case["mesh"].values())
    for found in pool.run("tests.support.pipelines:in_both_modes", case, ranks=ranks, keep=True):
        assert len(found) > 6
        assert max(found) <= EXACT


def test_a_weight_that_stages_share_and_none_trains_has_no_gradient(pool: WorkerPool) -> None:
    """Gradients of zeros would have an optimizer decay it."""
    for stages, gradient, scale in pool.run("tests.support.pipelines:detached", 2, ranks=2, keep=True):  # type: ignore[misc]
        assert len(stages) == 2
        assert not gradient
        assert torch.equal(scale, torch.ones(8))


@pytest.mark.parametrize("zeroed", [False, True])
def test_a_weight_that_stages_share_keeps_its_gradient_behind_freezing(zeroed: bool, pool: WorkerPool) -> None:
    """It was dropped, where the loop of a plain module keeps it: an optimizer no longer moved the weight by its momentum."""
    for errors in pool.run("tests.support.pipelines:frozen_in_between", zeroed, ranks=2, keep=True):
        assert {name: error for name, error in errors.items() if not error <= EXACT} == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("model, steps", [("gpt2", 4), *(further(model, 20) for model in ("gpt2", "t5", "albert"))])
def test_copies_of_a_tied_parameter_stay_equal_to_the_bit(model: str, steps: int, pool: WorkerPool) -> None:
    case = model, steps
    found: list[list[torch.Tensor]] = pool.run("tests.support.pipelines:copies_of_ties", case, ranks=4, keep=True)  # type: ignore[assignment]
    assert all(torch.equal(first, other) for own in found for first, other in zip(found[0], own, strict=True))


@pytest.mark.parametrize(
    "failing, then, data",
    [
        (0, "exits", 1),
        (1, "lives on", 1),
        *(further(0, then, 1) for then in ("ends", "lives on")),
        *(further(1, then, 1) for then in ("ends", "exits")),
        *(further(failing, then, 2) for failing in (0, 3) for then in ("ends", "lives on", "exits")),
    ],
)
def test_a_stage_that_fails_ends_all_ranks_with_its_name(failing: int, then: str, data: int, tmp_path: Path) -> None:
    """Whether its process holds the store of the others, and whether it ends, by the error or by `sys.exit(0)`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(2 * data), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    logs, ranks = [tmp_path / str(rank) for rank in range(2 * data)], list[BaseProcess]()
    for rank, log in enumerate(logs):
        given = log, common | {"RANK": str(rank)}, failing, then, data
        ranks.append(FORKED.Process(target=failing_stages.step, args=given))
        ranks[-1].start()
    others = [process for rank, process in enumerate(ranks) if rank != failing]
    try:
        others[0].join(timeout=120)
        started = time.monotonic()
        for process in others:
            process.join(timeout=30)
        if then == "lives on":
            assert ranks[failing].is_alive()
        else:
            ranks[failing].join(timeout=30)
        assert time.monotonic() - started < 30
        assert all(process.exitcode for process in others)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert (ranks[failing].exitcode == 0) == (then == "exits")
    stage, reason = failing // data, "SystemExit: 0" if then == "exits" else "ValueError: out of luck"
    for rank, log in enumerate(logs):
        if rank != failing or then == "ends":
            assert f"stage {stage} of the pipeline failed at {stage}F2 on rank {failing}" in log.read_text()
            assert f"{reason} ({failing_stages.__file__}:" in log.read_text()

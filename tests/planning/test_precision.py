"""Precision: what is cast, what is communicated, and numbers equal to the same casts on one device."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import Captured
from autopar.codegen import ParallelModule
from autopar.errors import ConstraintError, PlanError
from autopar.explain import command
from autopar.parallelize import assemble, tensors_of
from autopar.passes.no_dropout import without_dropout
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import make_plan, read_program
from autopar.runtime.recorder import Issued, recorded
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.verify.execution import sequential
from autopar.verify.verification import verify
from tests.support import models, planning, table
from tests.support.planning import Run
from tests.support.threads import Threads

MIXED = "bf16-mixed"
ROUNDING = 2**-8  # of one bfloat16
SIZES = (2, 2)
TIGHT = "tight"  # auto, with nine tenths of the memory that it would take
CASES = [
    ("gpt2", "auto"),
    ("gpt2", TIGHT),
    ("llama", "megatron"),
    ("llama", 3),
    ("bert", 5),
    ("vit", "fsdp"),
    ("vit", "zero2"),
    ("cnn", 1),
    ("cnn", "ddp"),
]


@functools.cache
def made(name: str, how: str | int, **options: str) -> Plan:
    """A plan of a model under a strategy, or a random one."""
    model, sample = models.make(name)
    if isinstance(how, int):
        return autopar.testing.random_plan(model, sample, table.mesh(SIZES), seed=how, **options)
    if how == TIGHT:
        budget = made(name, "auto", **options).peak_memory * 9 // 10
        return autopar.plan(model, sample, table.mesh(SIZES), budget=budget, **options)  # type: ignore[arg-type]
    return autopar.plan(model, sample, table.mesh(SIZES), strategy=how, **options)  # type: ignore[arg-type]


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name, how", CASES)
def test_numbers_are_those_of_the_same_casts_done_sequentially(threads: Threads, name: str, how: str | int) -> None:
    model, sample = models.make(name)
    report = verify(model, sample, table.mesh(SIZES), made(name, how, precision=MIXED), Options(), threads)
    assert report.ok, report


def run_of(name: str, how: str | int, *, reduce: str | None = None, steps: int = 1) -> Run:
    """A model in mixed precision, without dropout, under a plan, with one batch for all steps."""
    options = {"precision": MIXED} | ({"reduce": reduce} if reduce else {})
    model, sample = models.make(name)
    captured = read_program(model, sample, Options(**options))
    program = without_dropout(captured.program)
    plan = replace(made(name, how, **options), hash=program.hash)
    return Run(replace(captured, program=program), plan, tensors_of(model), [captured.signature.bind((), sample)] * steps)


@dataclass(frozen=True)
class Found:
    """What a rank has sent in the first step, its gradients, and the weights after the last, beside the sequential model's."""

    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]]
    weights: dict[str, tuple[torch.Tensor, torch.Tensor]]
    losses: list[tuple[float, float]]
    issued: list[Issued]


def train(run: Run) -> Found:
    """AdamW side by side, in the program's own dtypes."""
    context = connect(run.plan.mesh, device="cpu")
    pair = assemble(run.captured, run.tensors, run.plan, context), sequential(run.captured, run.tensors)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in pair]
    losses: list[tuple[float, float]] = []
    gradients: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    issued: list[Issued] = []
    for batch in run.batches:
        with recorded(context.known_axes) as log:
            left, right = (step(module, batch) for module in pair)
        losses.append((left, right))
        issued = issued or list(log)
        gradients = gradients or beside(*pair, gradient=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stored = {state[moment].dtype for state in optimizers[0].state.values() for moment in ("exp_avg", "exp_avg_sq")}
    assert stored == {torch.float32}
    return Found(gradients=gradients, weights=beside(*pair, gradient=False), losses=losses, issued=issued)


def step(module: ParallelModule, batch: list[torch.Tensor]) -> float:
    """One forward and backward; the loss."""
    loss = module.run(batch)[0]
    assert loss.dtype == torch.float32
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def beside(left: nn.Module, right: nn.Module, *, gradient: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters of two modules, or their gradients, whole."""
    other = dict(right.named_parameters())
    found = {}
    for name, parameter in left.named_parameters():
        ours, theirs = (parameter.grad, other[name].grad) if gradient else (parameter.detach(), other[name].detach())
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype == torch.float32
            found[name] = full_tensor(ours).detach().clone(), theirs.detach().clone()
    return found


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The difference beside the size of the second, both as lengths."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


SAVED = ("c_attn.weight", "c_proj.weight", "c_fc.weight", "wte.weight")  # by the products; of biases autograd keeps nothing
OWN = [
    ("gpt2", "fsdp", None),
    ("gpt2", "fsdp", "bf16"),
    ("gpt2", "zero2", None),
    ("gpt2", "ddp", "bf16"),
    ("gpt2", TIGHT, None),
    ("vit", 2, None),
    ("llama", "megatron", None),
    ("llama", 7, None),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, how, reduce", OWN)
def test_in_its_own_dtypes_a_step_sends_what_its_plan_lists(
    pool: WorkerPool, name: str, how: str | int, reduce: str | None
) -> None:
    run = run_of(name, how, reduce=reduce)
    planned = Counter(Issued(kind=c.kind, axis=c.axis, bytes=c.bytes, where=c.where) for c in run.plan.collectives)
    for found in pool.run(f"{__name__}:train", run, ranks=4, keep=True):
        assert isinstance(found, Found)
        assert Counter(found.issued) == planned
        largest = max(expected.norm() for _, expected in found.gradients.values())
        for weight, (ours, theirs) in found.gradients.items():
            if theirs.norm() > 1e-3 * largest:  # the gradient of a bias of keys is nothing but roundings
                assert distance(ours, theirs) < 8 * ROUNDING, weight


@pytest.mark.parametrize("name, how", [("gpt2", "fsdp"), pytest.param("bert", 12, marks=pytest.mark.thorough)])
def test_what_is_made_again_in_its_own_dtypes_is_what_it_was(pool: WorkerPool, name: str, how: str | int) -> None:
    run = run_of(name, how)
    kept = replace(run, plan=replace(run.plan, recompute={}))
    assert any(":to#" in entry and "run" in lines for entry, lines in run.plan.recompute.items())
    pairs = zip(
        pool.run(f"{__name__}:train", run, ranks=4, keep=True),
        pool.run(f"{__name__}:train", kept, ranks=4, keep=True),
        strict=True,
    )
    for found, expected in pairs:
        assert isinstance(found, Found)
        assert isinstance(expected, Found)
        for weight, (ours, _) in found.gradients.items():
            torch.testing.assert_close(ours, expected.gradients[weight][0], rtol=2 * ROUNDING, atol=1e-6)


@pytest.mark.thorough
def test_three_steps_of_adamw_go_the_sequential_way_and_store_float32(pool: WorkerPool) -> None:
    run = run_of("gpt2", "fsdp", steps=3)
    found = pool.run(f"{__name__}:train", run, ranks=4, keep=True)[0]
    assert isinstance(found, Found)
    for loss, expected in found.losses:
        assert loss == pytest.approx(expected, rel=ROUNDING)
    assert found.losses[2][1] < found.losses[0][1]
    before = {name: run.tensors[name].detach() for name in found.weights}
    ours, theirs = (
        torch.cat([(pair[side] - before[name]).flatten() for name, pair in found.weights.items()]) for side in (0, 1)
    )
    assert distance(ours, theirs) < 4 * ROUNDING


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "opt", "t5", "vit", "cnn"])
def test_loss_and_gradients_are_about_as_exact_as_those_of_autocast(name: str) -> None:
    model, sample = models.make(name)
    captured = read_program(model.eval(), sample, Options(precision=MIXED))
    ours = sequential(captured, tensors_of(model))
    loss = step(ours, captured.signature.bind((), sample))
    exact, exact_gradient = plain(model, sample, autocast=False)
    theirs, their_gradient = plain(model, sample, autocast=True)
    assert loss == pytest.approx(exact, rel=ROUNDING)
    assert theirs == pytest.approx(exact, rel=ROUNDING)
    allowed = 2 * distance(their_gradient, exact_gradient)
    assert 0 < distance(gradient(ours), exact_gradient) < allowed


def plain(model: nn.Module, sample: models.Sample, *, autocast: bool) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the user's own model."""
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(**sample)["loss"]
    loss.backward()
    return float(loss.detach()), gradient(model)


def gradient(model: nn.Module) -> torch.Tensor:
    """The gradients of all parameters in one row."""
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def test_where_gathered_weights_are_dropped_they_are_cast_again_which_takes_time() -> None:
    plan = made("gpt2", "fsdp", precision=MIXED)
    casts = {entry for entry, lines in plan.recompute.items() if "run" in lines}
    head = {"transformer.wte:to#0", "transformer.wpe:to#0"}  # one bucket, with which the backward begins
    assert casts == plan.breakdown.copies.keys() - head
    assert plan.breakdown.recompute.keys() == {entry for entry in casts if plan.breakdown.copies[entry].endswith(SAVED)}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", ["ddp", "zero2", "fsdp"])
@pytest.mark.parametrize("reduce", [None, "bf16"])
def test_a_plan_takes_the_seconds_that_the_solver_paid(how: str, reduce: str | None) -> None:
    options = Options(strategy=how, precision=MIXED, reduce=reduce)
    found = make_plan(*models.make("llama"), table.mesh(SIZES), options)
    assert found.plan.step_time == pytest.approx(found.solved.solution.seconds)


def sent(plan: Plan, kind: str) -> int:
    """Bytes of the blocks' weights and gradients."""
    return sum(c.bytes for c in plan.collectives if c.kind == kind and ".h." in c.value)


def test_half_the_bytes_are_gathered_and_as_many_reduced() -> None:
    single, mixed, rounded = (
        made("gpt2", "fsdp", **options) for options in ({}, {"precision": MIXED}, {"precision": MIXED, "reduce": "bf16"})
    )
    assert sent(mixed, "reduce_scatter") == sent(single, "reduce_scatter")
    assert 0.5 <= sent(mixed, "all_gather") / sent(single, "all_gather") < 0.55, "norms stay float32, but they are small"
    assert 0.5 <= sent(rounded, "reduce_scatter") / sent(single, "reduce_scatter") < 0.55
    assert mixed.peak_memory < single.peak_memory


def test_a_large_model_is_planned_faster_and_smaller() -> None:
    captured = {precision: large(precision) for precision in (None, MIXED)}
    single, mixed = (planning.plan(found, planning.mesh((8,)), strategy="fsdp") for found in captured.values())
    assert mixed.step_time < 0.7 * single.step_time
    assert mixed.peak_memory < single.peak_memory


def large(precision: str | None) -> Captured:
    """Linear layers on meta, wide enough that products and gathers take the time."""
    with torch.device("meta"):
        return read_program(planning.Layers((8192,) * 5), torch.zeros(8192, 8192), Options(precision=precision))


@pytest.mark.parametrize("name, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_whole_model_in_a_dtype_is_what_the_model_in_that_dtype_is(name: str, dtype: torch.dtype) -> None:
    model, sample = models.make("gpt2")
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    asked, plain = read_program(model.to(other), sample, Options(precision=name)), read_program(model.to(dtype), sample)
    assert asked.program == plain.program


def test_floating_inputs_arrive_as_they_are_given() -> None:
    model, sample = models.make("vit")
    for name in ("bf16", MIXED):
        parallel = autopar.parallelize(model, sample, (1,), device="h100", precision=name)
        loss = parallel(**sample)["loss"]
        loss.backward()
        dtypes = {parameter.dtype for parameter in parallel.parameters()}
        assert dtypes == {torch.bfloat16 if name == "bf16" else torch.float32}
        assert {p.grad.dtype for p in parallel.parameters() if p.grad is not None} == dtypes


def test_a_plan_brings_its_precision_with_it() -> None:
    model, sample = models.make("gpt2")
    plan = Plan.from_json(autopar.plan(model, sample, (1,), device="h100", precision=MIXED).to_json())
    autopar.parallelize(model, sample, (1,), plan=plan)(**sample)["loss"].backward()
    with pytest.raises(PlanError, match="precision='bf16' is given, but the plan was made with another"):
        autopar.parallelize(model, sample, (1,), plan=plan, precision="bf16")


def test_in_evaluation_the_precision_is_the_same() -> None:
    model, sample = models.make("gpt2")
    parallel = autopar.parallelize(model, sample, (1,), device="h100", precision=MIXED)
    expected = autopar.parallelize(model.eval(), sample, (1,), device="h100", precision=MIXED)(**sample)["loss"]
    assert torch.equal(parallel.eval()(**sample)["loss"], expected)


def test_what_cannot_be_meant_is_refused() -> None:
    model, sample = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(ConstraintError, match="precision='fp8' is unknown"):
        autopar.plan(model, sample, (1,), device="h100", precision="fp8")
    with pytest.raises(ConstraintError, match="reduce='fp16' is no dtype of precision='bf16-mixed'"):
        autopar.plan(model, sample, (1,), device="h100", precision=MIXED, reduce="fp16")
    with pytest.raises(ConstraintError, match="is the dtype of gradient reductions with a mixed precision only"):
        autopar.plan(model, sample, (1,), device="h100", precision="bf16", reduce="fp32")
    with pytest.raises(ConstraintError, match="a mixed precision is for models in float32: weight is bfloat16"):
        autopar.plan(model.to(torch.bfloat16), sample.to(torch.bfloat16), (1,), device="h100", precision=MIXED)


def test_a_model_on_meta_is_initialised_in_the_dtype_in_which_it_is_stored() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        sample = torch.zeros(2, 4)
    parallel = autopar.parallelize(model, sample, (1,), device="h100", precision="bf16")
    autopar.initialize(parallel, model)
    assert {(p.dtype, p.is_meta) for p in parallel.parameters()} == {(torch.bfloat16, False)}
    assert parallel(torch.randn(2, 4)).dtype == torch.bfloat16


def test_the_command_line_takes_a_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wide_model.py"
    file.write_text("import torch\ndef build(): return torch.nn.Linear(64, 64), torch.zeros(32, 64)\n")
    target = [f"{file}:build", "--mesh", "2,4", "--device", "h100"]
    assert command.main([*target, "--precision", MIXED, "--reduce", "bf16"]) == 0
    said = capsys.readouterr().out
    assert "bf16-mixed" in said
    assert "bfloat16" in said
    assert command.main([*target, "--precision", "fp8"]) == 2
    assert "precision='fp8' is unknown" in capsys.readouterr().err

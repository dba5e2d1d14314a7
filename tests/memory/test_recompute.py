"""Plans that recompute: they run exactly what they say, the memory is freed, and the numbers are unchanged."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar.analysis.analysis import Analysis, analyse
from autopar.analysis.recomputability import is_recomputable, recomputable
from autopar.codegen import ParallelModule
from autopar.codegen.names import identifier
from autopar.errors import PlanError
from autopar.ir.layout import I
from autopar.ir.mesh import Mesh
from autopar.ir.training_step import TrainingStep
from autopar.memory.recompute_closure import reruns
from autopar.operators import view_of
from autopar.parallelize import assemble, tensors_of
from autopar.plan.assignment_text import describe, resolve
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import connected_mesh, plan_program, read_program
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import connect
from autopar.search_space.assignment import Assignment, RecomputeChoice
from autopar.verify.testing import random_again, random_plan_of
from tests.support import models
from tests.support.ops import Ops

ALONE = Mesh.of(1)
OPTIONS = Options(device="h100")
NAMES = ("gpt2", "llama", "vit")
NOTHING = RecomputeChoice()


captured = models.captured


@functools.cache
def analysed(name: str) -> Analysis:
    return replace(analyse(TrainingStep(program=captured(name).program), ALONE), cpu=True)


@functools.cache
def alone(name: str) -> Plan:
    """The plan on one device, where everything is kept."""
    return plan_program(captured(name).program, connected_mesh(ALONE, OPTIONS), OPTIONS)


def chosen(name: str) -> Assignment:
    return resolve(alone(name), analysed(name).step, analysed(name).fits)


def every(name: str) -> RecomputeChoice:
    """All ops that may run again do."""
    return RecomputeChoice(ops=recomputable(captured(name).program))


def some(name: str, seed: int) -> RecomputeChoice:
    """A random part of them does."""
    return random_again(analysed(name), chosen(name), random.Random(seed))


def planned(name: str, recompute: RecomputeChoice) -> Plan:
    texts = describe(captured(name).program, replace(chosen(name), recompute=recompute), analysed(name).fits, ALONE.sizes)
    return replace(alone(name), recompute=texts[-1])


def built(name: str, recompute: RecomputeChoice) -> tuple[ParallelModule, list[torch.Tensor]]:
    """The module on one CPU with its batch; it draws the same every time."""
    plan = planned(name, recompute)
    model, sample = models.make(name)
    torch.manual_seed(0)
    module = assemble(captured(name), tensors_of(model), plan, connect(ALONE, device="cpu"))
    return module, list(captured(name).signature.bind((), dict(sample)))


def gradients(module: ParallelModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    module.run(inputs)[0].backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", NAMES)
def test_the_gradients_stay_what_they_are_and_dropout_drops_the_same(name: str) -> None:
    expected = gradients(*built(name, NOTHING))
    assert expected
    for recompute in (every(name), some(name, 0), some(name, 1)):
        assert all(map(torch.equal, gradients(*built(name, recompute)), expected))


class PerNode(fx.Interpreter):
    """Counts the operators that run for every node of a graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.counts: dict[str, Counter[str]] = {}

    def run_node(self, n: fx.Node) -> object:
        with Ops() as ops:
            found = super().run_node(n)
        self.counts[n.name] = ops.counts
        return found


def in_backward(name: str, recompute: RecomputeChoice) -> Counter[str]:
    """What runs in the backward."""
    module, inputs = built(name, recompute)
    loss = module.run(inputs)[0]
    with Ops() as ops:
        loss.backward()  # type: ignore[no-untyped-call]
    return ops.counts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_the_backward_runs_again_what_the_plan_says_and_nothing_else(name: str, seed: int) -> None:
    program, recompute = captured(name).program, some(name, seed)
    module, inputs = built(name, NOTHING)
    nodes = PerNode(module)
    nodes.run(*inputs)
    views = [op for op in program.ops if view_of(op, program.values)]  # these come back with what they lie in, copied or not
    loose = {"empty", "set_", "detach"}.union(*(nodes.counts[identifier(op.name)] for op in views))
    rerun = reruns(analysed(name), replace(chosen(name), recompute=recompute))
    assert rerun.ops < recompute.ops
    fetched = {source(name, value) for value, _ in rerun.offload}
    expected = sum((nodes.counts[identifier(op)] for op in rerun.ops), Counter({"copy_": len(fetched)}))
    extra = in_backward(name, recompute) - in_backward(name, NOTHING)
    compared = (expected | extra).keys() - loose
    assert compared
    assert {ran: extra[ran] for ran in compared} == {ran: expected[ran] for ran in compared}


def source(name: str, value: str) -> str:
    """The value in whose memory one lies."""
    program = captured(name).program
    op = program.producer.get(value)
    return source(name, op.operands[0]) if op is not None and view_of(op, program.values) else value


def left(name: str, recompute: RecomputeChoice) -> int:
    """Bytes that a forward leaves behind, and what it returns."""
    module, inputs = built(name, recompute)
    with Ops() as ops:
        results = module.run(inputs)
        assert results
        return ops.alive


def test_the_memory_of_what_is_made_again_is_gone_after_the_forward() -> None:
    program = captured("vit").program
    gelus = [op for op in program.ops if op.target == "aten.gelu.default"]
    assert len(gelus) == 2
    saved = left("vit", NOTHING) - left("vit", RecomputeChoice(ops=frozenset(op.name for op in gelus)))
    assert saved == sum(op.results[0].bytes for op in gelus)


def test_the_host_holds_what_goes_there_and_the_device_does_not() -> None:
    program = captured("vit").program
    gelus = [op.results[0] for op in program.ops if op.target == "aten.gelu.default"]
    layout = (I,) * len(ALONE.sizes)
    there = RecomputeChoice(offload=frozenset((gelu.name, layout) for gelu in gelus))
    assert left("vit", NOTHING) - left("vit", there) == sum(gelu.bytes for gelu in gelus)
    assert all(map(torch.equal, gradients(*built("vit", there)), gradients(*built("vit", NOTHING))))


@pytest.mark.parametrize("name", NAMES)
def test_hardly_anything_is_left_where_everything_is_made_again(name: str) -> None:
    """But for what needs no gradient and the results."""
    assert left(name, every(name)) < 0.2 * left(name, NOTHING)


def test_a_second_backward_a_copy_and_a_forward_without_gradients_work() -> None:
    expected = gradients(*built("gpt2", NOTHING))
    module, inputs = built("gpt2", every("gpt2"))
    copied = copy.deepcopy(module)
    loss = module.run(inputs)[0]
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter, once in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * once)
    assert all(map(torch.equal, gradients(copied, inputs), expected))
    with torch.no_grad():
        assert not module.run(inputs)[0].requires_grad


def test_what_runs_again_after_another_call_draws_as_its_own_forward_did() -> None:
    module, inputs = built("gpt2", NOTHING)
    expected = [module.run(inputs)[0] for _ in range(2)]
    assert expected[0] != expected[1], "two calls draw differently"
    rerun, _ = built("gpt2", every("gpt2"))
    state = torch.get_rng_state()
    losses = [rerun.run(inputs)[0] for _ in range(2)]
    for loss, same in zip(losses, expected, strict=True):
        parameters = [list(one.parameters()) for one in (rerun, module)]
        assert all(map(torch.equal, *map(torch.autograd.grad, (loss, same), parameters)))
    assert torch.equal(torch.get_rng_state(), state), "the caller's generator is left alone"


# --- plans ----------------------------------------------------------------------------------------------------------------


def test_what_writes_or_is_a_view_may_not_run_again_and_what_draws_may() -> None:
    program = captured("gpt2").program
    allowed = {op.target for op in program.ops if is_recomputable(op)}
    assert allowed >= {"aten.add.Tensor", "aten.addmm.default", "aten.layer_norm.default", "aten.reshape.default"}
    assert allowed >= {"aten.dropout.default", "aten.scaled_dot_product_attention.default"}
    assert not {target.split(".")[1] for target in allowed} & {"transpose", "split", "arange"}


class Centred(torch.nn.Module):
    """Batch norm, and a use of the mean that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = (y.exp() - self.norm.running_mean).exp()
        return (self.norm(x) * z).sum()


def test_what_reads_a_buffer_that_is_written_may_not_run_again() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    program = read_program(Centred(), (x, x)).program
    able = {op.target for op in program.ops if is_recomputable(op)}
    allowed = {program.op[name].target for name in recomputable(program)}
    assert allowed >= {"aten.exp.default", "aten.mul.Tensor"}
    assert able - allowed == {"aten.sub.Tensor"}


@pytest.mark.parametrize(
    "name, lines, message",
    [
        ("nothing", ("run",), "nothing is not an op that may be recomputed"),
        ("nothing", ("I -> R",), "'I -> R' is not on the route of nothing"),
        ("transformer.wte.weight", ("I -> R",), "'I -> R' is not on the route of transformer.wte.weight"),
        ("transformer.wte.weight", ("host: I",), "transformer.wte.weight is not a result of an op"),
    ],
)
def test_an_entry_that_means_nothing_is_refused(name: str, lines: tuple[str, ...], message: str) -> None:
    wrong = replace(alone("gpt2"), recompute={name: lines})
    with pytest.raises(PlanError, match="the plan is damaged") as caught:
        resolve(wrong, analysed("gpt2").step, analysed("gpt2").fits)
    assert message in str(caught.value)


def test_random_plans_make_ops_and_conversions_again_of_weights_and_of_others() -> None:
    program = captured("llama").program
    plan = random_plan_of(captured("llama"), connected_mesh((2, 4), OPTIONS), 1, OPTIONS)
    step = TrainingStep(program=program)
    recompute = resolve(plan, step, analyse(step, Mesh.of((2, 4))).fits).recompute
    assert recompute.ops
    assert recompute.offload
    assert {name in program.producer for name, _ in recompute.steps} == {True, False}


def dropped_alike(plan: Plan) -> list[torch.Tensor]:
    """The gradients of a plan under dropout."""
    torch.manual_seed(0)
    model, sample = models.make("gpt2")
    module = assemble(captured("gpt2"), tensors_of(model), plan, connect(plan.mesh, device="cpu"))
    inputs = list(captured("gpt2").signature.bind((), dict(sample)))
    return [full_tensor(gradient) for gradient in gradients(module, inputs)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(2))
def test_on_four_devices_dropout_drops_the_same_whether_things_are_made_again_or_not(pool: WorkerPool, seed: int) -> None:
    plan = random_plan_of(captured("gpt2"), connected_mesh((2, 2), OPTIONS), seed, OPTIONS)
    drop = [op.name for op in captured("gpt2").program.ops if op.target == "aten.dropout.default"]
    assert {plan.choices[name].count("/") > 0 for name in drop} == {True, False}, "some are split, some are replicated"
    plan = replace(plan, recompute={**plan.recompute, **{name: ("run", *plan.recompute.get(name, ())) for name in drop}})
    found, expected = (
        pool.run(f"{__name__}:dropped_alike", one, ranks=4, keep=True) for one in (plan, replace(plan, recompute={}))
    )
    for one, other in zip(found[0], expected[0], strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("recompute", ["blocks", "selective"])
def test_on_four_devices_recomputation_by_name_changes_no_gradient(pool: WorkerPool, recompute: str) -> None:
    options = replace(OPTIONS, strategy="megatron", recompute=recompute)
    plan = plan_program(captured("gpt2").program, connected_mesh((2, 2), options), options)
    assert plan.breakdown.recompute
    found, expected = (
        pool.run(f"{__name__}:dropped_alike", one, ranks=4, keep=True) for one in (plan, replace(plan, recompute={}))
    )
    for one, other in zip(found[0], expected[0], strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)

"""Dims that the mesh does not divide, in whole plans: padded inside, with true sizes from outside."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.cost_models.catalog import device
from autopar.errors import ConstraintError, PlanError
from autopar.ir.mesh import Mesh
from autopar.parallelize import tensors_of
from autopar.passes.no_dropout import without_dropout
from autopar.passes.to_float64 import promote
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import connected_mesh, plan_program, read_program
from autopar.runtime.storage import full_tensor
from autopar.runtime.workers import WorkerPool
from autopar.solver.settings import DEFAULTS
from autopar.verify.testing import peak
from autopar.verify.verification import verify
from tests.codegen.test_training import double
from tests.support.planning import Layers, Run
from tests.support.threads import Threads

WORDS, ROWS, LENGTH, WIDTH, HIDDEN = 101, 8, 8, 16, 30
TABLE = "transformer.wte.weight"
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2(words: int = WORDS, *, width: int = WIDTH, heads: int = 4, dropout: float = 0.1) -> Built:
    """GPT-2 with a vocabulary that no mesh divides, which its head shares; some targets are ignored."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=width,
        n_head=heads,
        vocab_size=words,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(words, (ROWS, LENGTH))
    return model, {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(ROWS, LENGTH) < 0.4, -100)}


class Wide(nn.Module):
    """Two layers whose width no mesh divides: rows of the first are chunks, and columns of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(torch.sigmoid(self.rise(x))).square().sum()


def wide() -> Built:
    torch.manual_seed(0)
    return Wide(), {"x": torch.randn(ROWS, WIDTH)}


MODELS: dict[str, tuple[Callable[[], Built], dict[str, str]]] = {  # with what is split on the last axis
    "gpt2": (gpt2, {TABLE: "S(0)", "lm_head:linear": "S(2)"}),
    "wide": (wide, {"rise.*": "S(0)", "fall.weight": "S(1)"}),
}


class Heads(nn.Module):
    """Attention with six heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (f(x).unflatten(-1, (6, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)).square().sum()


def heads(width: int = 24, rows: int = ROWS, length: int = LENGTH) -> Built:
    torch.manual_seed(0)
    return Heads(width), {"x": torch.randn(rows, length, width)}


def constraints(name: str, sizes: tuple[int, ...]) -> dict[str, str]:
    return {what: ", ".join([*["*"] * (len(sizes) - 1), layout]) for what, layout in MODELS[name][1].items()}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("strategy", ["auto", "megatron"])
@pytest.mark.parametrize("sizes", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_dim_that_does_not_divide_is_split_with_equal_numbers(
    threads: Threads, name: str, sizes: tuple[int, ...], strategy: str
) -> None:
    model, sample = MODELS[name][0]()
    plan = autopar.plan(model, sample, sizes, device="h100", strategy=strategy, constraints=constraints(name, sizes))
    assert (
        plan.padded
        == {
            "gpt2": {TABLE: "101 x 16 -> 104 x 16"},
            "wide": {"rise.weight": "30 x 16 -> 32 x 16", "rise.bias": "30 -> 32", "fall.weight": "16 x 30 -> 16 x 32"},
        }[name]
    )
    assert Plan.from_json(plan.to_json()) == plan
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), threads)
    assert report.ok, report


def test_a_vocabulary_is_padded_where_rows_of_matrices_in_half_precision_would_not_be_aligned() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2)).bfloat16()
        model.loss_type = "ForCausalLM"
        sample = dict.fromkeys(("input_ids", "labels"), torch.zeros(8, 1024, dtype=torch.int64))
    for sizes in ((1,), (2, 2), (8,)):
        plan = autopar.plan(model, sample, sizes, device="h100")
        assert plan.padded == {TABLE: "50257 x 768 -> 50264 x 768"}
        assert plan.step_time < 0.9 * autopar.plan(model, sample, sizes, device="h100", strategy="ddp").step_time
    assert not autopar.plan(model, sample, (1,), device="h100", compiled=True).padded  # Inductor pads
    assert not autopar.plan(model, sample, (1,), device="cpu").padded
    assert not autopar.plan(model.float(), sample, (1,), device="h100").padded


@pytest.mark.parametrize("sizes", [(1,), (2, 2)], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_vocabulary_that_is_padded_for_alignment_has_equal_numbers(
    threads: Threads, sizes: tuple[int, ...], precision: str
) -> None:
    model, sample = gpt2(4001, width=64)
    h100 = device("h100")
    slow = replace(h100, flops={name: peak / 1e6 for name, peak in h100.flops.items()})  # so that a small head is worth it
    plan = autopar.plan(
        model, sample, sizes, device=slow, precision=precision, constraints={TABLE: ", ".join("I" for _ in sizes)}
    )
    assert plan.padded == {TABLE: "4001 x 64 -> 4008 x 64"}
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), threads)
    assert report.ok, report


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["wide", "gpt2"])
def test_steps_with_clipping_equal_the_sequential_ones(pool: WorkerPool, name: str) -> None:
    model, sample = MODELS[name][0]()
    captured = read_program(model, sample)
    program = promote(without_dropout(captured.program))
    options = Options(device="h100", constraints=constraints(name, (4,)))
    plan = plan_program(program, connected_mesh((4,), options), options)
    batch = [double(tensor) for tensor in captured.signature.bind((), sample)]
    tensors = {key: double(tensor) for key, tensor in tensors_of(model).items()}
    run = Run(replace(captured, program=program), plan, tensors, [batch] * 3)
    assert plan.padded
    assert max(pool.run("tests.codegen.test_training:three_steps", run, ranks=4, keep=True)) < 1e-9  # type: ignore[type-var, operator]


@dataclass(frozen=True)
class Kept:
    """A checkpoint: the folder, and the plan under which it is written."""

    folder: str
    plan: Plan


def keep(kept: Kept) -> dict[str, torch.Tensor]:
    """Train under a plan that pads and save; load on another mesh, and compare. The true weights."""
    model, sample = gpt2(dropout=0.0)
    parallel = autopar.parallelize(model, sample, kept.plan.mesh, plan=kept.plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel(**sample).loss.backward()
    optimizer.step()
    table = dict(parallel.named_parameters())[TABLE]
    assert isinstance(table, DTensor)
    assert table.shape == optimizer.state[table]["exp_avg"].shape == (WORDS, WIDTH)
    rows = 26 if table.device_mesh.get_local_rank() < 3 else WORDS - 3 * 26
    assert table.to_local().shape == (rows, WIDTH)
    assert table.to_local().untyped_storage().nbytes() == 26 * WIDTH * 4
    weights, moments = get_state_dict(parallel, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=kept.folder)

    other = autopar.parallelize(gpt2()[0].eval(), sample, (2, 2), device="h100", strategy="fsdp")
    recompute = torch.optim.AdamW(other.parameters())
    found, steps = get_state_dict(other, recompute)
    state = {"model": found, "optimizer": steps}
    checkpoint.load(state, checkpoint_id=kept.folder)
    set_state_dict(other, recompute, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = {name: full_tensor(parameter).detach() for name, parameter in parallel.named_parameters()}
    for name, parameter in other.named_parameters():
        assert torch.equal(full_tensor(parameter).detach(), expected[name])
    return expected


def test_a_checkpoint_has_true_shapes_and_loads_on_another_mesh_and_into_the_model(pool: WorkerPool, tmp_path: Path) -> None:
    model, sample = gpt2(dropout=0.0)
    plan = autopar.plan(model, sample, (4,), device="h100", constraints=constraints("gpt2", (4,)))
    folder = str(tmp_path / "checkpoint")
    trained: dict[str, torch.Tensor] = pool.run(f"{__name__}:keep", Kept(folder, plan), ranks=4, keep=True)[0]  # type: ignore[assignment]
    state = {"model": {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}}
    with pytest.warns(UserWarning, match="single process"):  # as is meant
        checkpoint.load(state, checkpoint_id=folder)
    for name, tensor in trained.items():
        assert torch.equal(state["model"][name], tensor)


def measured(plan: Plan) -> int:
    """The peak of this rank."""
    model, sample = gpt2(4001, width=64)
    parallel = autopar.parallelize(model, sample, plan.mesh, plan=plan)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    def step() -> None:
        parallel(**sample).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return peak(parallel, optimizer, sample.values(), step).bytes


def test_a_split_vocabulary_takes_less_memory_as_the_plan_says(pool: WorkerPool) -> None:
    model, sample = gpt2(4001, width=64)
    split = autopar.plan(model, sample, (4,), device="cpu", constraints=constraints("gpt2", (4,)))
    whole_one = autopar.plan(model, sample, (4,), device="cpu", constraints={TABLE: "I"})
    assert split.padded
    assert not whole_one.padded
    assert split.peak_memory < 0.75 * whole_one.peak_memory
    even = autopar.plan(*gpt2(4004, width=64), (4,), device="cpu", constraints=constraints("gpt2", (4,)))
    checked = sample["input_ids"].nbytes  # the ids, those of the padding as -1
    assert even.peak_memory <= split.peak_memory <= even.peak_memory + checked
    *full, last = pool.run(f"{__name__}:measured", split, ranks=4)
    assert last < min(full)  # type: ignore[operator, type-var]  # its chunk of the table is shorter
    assert split.peak_memory == pytest.approx(min(full), rel=0.05)  # type: ignore[type-var]  # gloo may hold what it sent


def out_of_range(strategy: str) -> None:
    """A call with a word that only the padding has, and one with the last word."""
    model, sample = gpt2()
    parallel = autopar.parallelize(model, sample, (4,), device="h100", strategy=strategy, constraints={TABLE: "S(0)"})
    assert TABLE in parallel.autopar.plan.padded
    assert ("vocab_parallel_embedding" in parallel.code) == (strategy == "megatron")
    words = sample["input_ids"]
    with pytest.raises(IndexError, match="index out of range"):
        parallel(**sample | {"input_ids": words.masked_fill(words == words[0, 0], WORDS)})
    parallel(**sample | {"input_ids": words.masked_fill(words == words[0, 0], WORDS - 1)})


@pytest.mark.parametrize("strategy", ["auto", "megatron"])
def test_words_of_the_padding_are_out_of_range_as_in_the_users_module(pool: WorkerPool, strategy: str) -> None:
    pool.run(f"{__name__}:out_of_range", strategy, ranks=4, keep=True)


@pytest.mark.parametrize("strategy", [pytest.param("auto", marks=pytest.mark.thorough), "megatron"])
def test_a_vocabulary_is_padded_where_memory_is_short(strategy: str) -> None:
    model, sample = gpt2(4001, width=64)
    plenty = autopar.plan(model, sample, (4,), device="h100", constraints={TABLE: "I"})
    tight = autopar.plan(model, sample, (4,), device="h100", strategy=strategy, budget=plenty.peak_memory // 2)
    assert tight.padded
    assert tight.layouts[TABLE] == "S(0)"


@pytest.mark.thorough
def test_more_memory_never_makes_a_slower_plan_where_dims_may_be_padded() -> None:
    model, sample = gpt2(4001, width=64)
    free = autopar.plan(model, sample, (4,), device="h100", strategy="megatron")
    budgets = [int(share * free.peak_memory) for share in (0.75, 0.5)]
    plans = [free, *(autopar.plan(model, sample, (4,), device="h100", strategy="megatron", budget=b) for b in budgets)]
    assert all(less.step_time >= more.step_time * (1 - DEFAULTS.gap) for more, less in itertools.pairwise(plans))
    assert all(plan.gap <= DEFAULTS.gap for plan in plans)
    assert plans[-1].padded


VARIANTS = [
    {"microbatches": 2, "precision": "bf16-mixed"},
    {"precision": "bf16-mixed"},
    {"outputs": "whole"},
    {"budget": 76_000},
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(options))
def test_padding_goes_with_the_other_options(threads: Threads, options: dict[str, Any]) -> None:
    model, sample = gpt2()
    plan = autopar.plan(model, sample, (2, 4), device="h100", constraints=constraints("gpt2", (2, 4)), **options)
    assert plan.padded
    report = verify(model, sample, Mesh.of((2, 4)), plan, Options(), threads)
    assert report.ok, report


def begun(plan: Plan) -> None:
    """A model on meta is initialised, trained, evaluated and copied in chunks of its true shapes."""
    with torch.device("meta"):
        model, _ = gpt2()
    _, sample = gpt2()
    parallel = autopar.parallelize(model, sample, plan.mesh, plan=plan)
    autopar.initialize(parallel, model)
    table = dict(parallel.named_parameters())[TABLE]
    assert 0.01 < float(full_tensor(table).detach().std()) < 0.03
    assert full_tensor(table).shape == (WORDS, WIDTH)
    parallel(**sample).loss.backward()
    assert isinstance(table, DTensor)
    assert table.grad is not None
    assert table.grad.shape == table.shape
    assert float(table.to_local().untyped_storage().nbytes()) == 26 * WIDTH * 4  # with room for padding
    with torch.no_grad():
        scores = parallel.eval()(**sample).logits
        assert torch.equal(full_tensor(scores), full_tensor(copy.deepcopy(parallel)(**sample).logits))
    assert scores.shape == (ROWS, LENGTH, WORDS)


def test_a_padded_model_is_initialised_in_chunks_evaluated_and_copied(pool: WorkerPool) -> None:
    plan = autopar.plan(*gpt2(), (4,), device="h100", constraints=constraints("gpt2", (4,)))
    pool.run(f"{__name__}:begun", plan, ranks=4, keep=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [(4,), (2, 4)], ids=str)
def test_six_heads_are_split_over_four_ranks_where_that_is_asked_for(threads: Threads, sizes: tuple[int, ...]) -> None:
    model, sample = heads()
    asked = ", ".join([*["*"] * (len(sizes) - 1), "S(1)"])
    plan = autopar.plan(model, sample, sizes, device="h100", constraints={":scaled_dot_product_attention": asked})
    assert plan.padded == {":scaled_dot_product_attention#0": f"{ROWS} x 6 x {LENGTH} x 4 -> {ROWS} x 8 x {LENGTH} x 4"}
    report = verify(model, sample, Mesh.of(sizes), plan, Options(), threads)
    assert report.ok, report


def test_heads_of_one_fused_projection_are_padded_and_split_over_ranks_that_do_not_divide_them(threads: Threads) -> None:
    model, sample = gpt2(width=24, heads=6)
    plan = autopar.plan(model, sample, (4,), device="h100", constraints={"*:scaled_dot_product_attention": "S(1)"})
    attention = "transformer.h.0.attn:scaled_dot_product_attention#0"
    assert plan.padded[attention] == f"{ROWS} x 6 x {LENGTH} x 4 -> {ROWS} x 8 x {LENGTH} x 4"
    report = verify(model, sample, Mesh.of((4,)), plan, Options(), threads)
    assert report.ok, report


VARYING: dict[str, tuple[Callable[[], Built], dict[str, str]]] = {
    **MODELS,
    "heads": (heads, {":scaled_dot_product_attention": "S(1)"}),
}


def twice(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([tensor, tensor]) for name, tensor in sample.items()}


def both_sizes(asked: tuple[str, Plan]) -> float:
    """One module over one set of weights at the sample's size, at twice that and back; the largest error of its losses."""
    name, plan = asked
    model, sample = VARYING[name][0]()
    model.eval()
    parallel = autopar.parallelize(model, sample, plan.mesh, plan=plan)
    errors = []
    for batch in (sample, twice(sample), sample):
        ours, theirs = (made(**batch) for made in (parallel, model))
        ours, theirs = (found if isinstance(found, torch.Tensor) else found.loss for found in (ours, theirs))
        errors.append(float((full_tensor(ours) - theirs).abs() / (1 + theirs.abs())))
    return max(errors)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["wide", "gpt2", "heads"])
def test_sizes_may_vary_beside_padding(pool: WorkerPool, threads: Threads, name: str) -> None:
    build, asked = VARYING[name]
    model, sample = build()
    dims = {"batch": 0, "length": 1} if name == "gpt2" else {"batch": 0}
    plan = autopar.plan(model, sample, (4,), device="h100", constraints=asked, dynamic=dims)
    assert plan.padded
    other = {key: tensor[:, :4] if "length" in dims else tensor for key, tensor in twice(sample).items()}
    report = verify(model, other, Mesh.of((4,)), plan, Options(), threads)
    assert report.ok, report
    plan = autopar.plan(model.eval(), sample, (4,), device="h100", constraints=asked, dynamic=dims)
    assert max(pool.run(f"{__name__}:both_sizes", (name, plan), ranks=4, keep=True)) < 1e-5


def test_the_price_leaves_heads_out_where_the_batch_can_be_split() -> None:
    with torch.device("meta"):
        few, sample = heads(768, rows=1, length=4096)
        many, batch = heads(768, rows=16, length=4096)
    assert not autopar.plan(many, batch, (4,), device="h100").padded
    assert autopar.plan(few, sample, (4,), device="h100", constraints={":scaled_dot_product_attention": "S(1)"}).padded


def test_what_cannot_be_padded_is_refused_as_before() -> None:
    model, sample = gpt2()
    with pytest.raises(ConstraintError, match=r"cannot be met: cannot split dim 0 of transformer\.wte\.weight"):
        autopar.plan(model, sample, (80,), device="h100", constraints={TABLE: "S(0)"})
    plan = autopar.plan(model, sample, (4,), device="h100", constraints=constraints("gpt2", (4,)))
    data = json.loads(plan.to_json())
    for wrong in ({TABLE: "101 x 16 -> 104 x 20"}, {TABLE: "101 x 16 -> none"}, {"nothing": "1 -> 2"}):
        with pytest.raises(PlanError):
            verify(model, sample, Mesh.of((4,)), Plan.from_json(json.dumps({**data, "padded": wrong})), Options())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sizes", [(13,), (7, 11), (1024,)], ids=str)
def test_where_no_axis_divides_a_dim_the_plan_pads_if_that_is_faster_and_else_the_warning_says_that_it_was_tried(
    sizes: tuple[int, ...],
) -> None:
    with torch.device("meta"):
        model, sample = Layers((1000, 4000, 1000)), torch.zeros(1000, 1000)
    plan, alone = (autopar.plan(model, sample, sizes, device="h100", strategy=name) for name in ("auto", "replicate"))
    assert set(plan.padded) == {"layers.0.weight", "layers.1.weight"}
    assert plan.step_time < alone.step_time / 2

    model, batch = gpt2(97, width=64)
    odd = {name: tensor[:, :7] for name, tensor in batch.items()}
    with pytest.warns(UserWarning, match="can be split over the") as said:
        plan = autopar.plan(model, odd, sizes, device="h100")
    assert not plan.padded
    last = str(said[-1].message)
    assert ("97 -> 104" in last) == (sizes == (13,))
    if sizes == (13,):
        assert "no plan was found that wins 0.5% by it" in last
        forced = autopar.plan(model, odd, sizes, device="h100", constraints={TABLE: "S(0)"})
        assert forced.padded
        assert forced.step_time > plan.step_time * (1 - DEFAULTS.padding_gain)


def test_the_plan_and_its_explanation_say_what_is_padded() -> None:
    model, sample = gpt2()
    found = autopar.explain.explain(model, sample, (4,), device="h100", constraints=constraints("gpt2", (4,)))
    said = "transformer.wte.weight: 101 x 16 -> 104 x 16"
    assert re.search(f"padded +{said}", str(found.plan))
    assert re.search(f"padded +{said}", str(found))
    assert "[26, 16]" in found.code
    assert "-inf" in found.code
    other = autopar.explain.explain(model, sample, (4,), device="h100", constraints={TABLE: "I"})
    assert not other.plan.padded
    split = other.why_not({"lm_head:linear": "S(2)"}).plan
    assert split
    assert TABLE in split.padded
    assert split.step_time > other.plan.step_time
    with pytest.raises(ConstraintError, match="is not a layout"):
        other.why_not({"lm_head:linear": "S(2), I"})

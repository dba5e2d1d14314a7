"""Step time against memory: the joint program beside what others do one after the other.

    python benchmarks/budgets.py                    every model on every mesh
    python benchmarks/budgets.py gpt2 --mesh 2,4    one of them
    python benchmarks/budgets.py --save             the tables and the plot of the results (needs matplotlib)

    joint        layouts, recomputation, second gathers and what the host holds chosen together within the budget
    two stages   the layouts that are best with plenty of memory; then, under them, the best treatments within the budget
    blocks       the same layouts, and every block is computed again whole, its collectives too: one point, whatever the budget

Times and peaks are predicted, for H100s; weights are bfloat16 on meta. Budgets divide the way from the peak of the best plan to
the least memory of any; "found in" are the CPU seconds in which the joint plan was. "half" is a budget of what is alive when a
step of the best plan begins (weights, the optimizer's state) and half of what the step adds, for a plan of as many
micro-batches as are best then.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import transformers
from torch import nn

from autopar import files
from autopar.cost_models import optimizers
from autopar.errors import BudgetError
from autopar.explain.budget_sweep import MARGIN, SHARES
from autopar.formulation.budget_loop import smallest, within
from autopar.formulation.formulate import PlanningProblem
from autopar.formulation.memory_model import MemoryModel
from autopar.formulation.read_solution import assignment
from autopar.ir.training_step import TrainingStep
from autopar.plan.options import AUTO, PLENTY, Options
from autopar.plan.text import size_text
from autopar.planning.optimize import Optimized, analysed, solved
from autopar.planning.plan_search import best_variant
from autopar.planning.planner import connected_mesh, read_program, to_plan
from autopar.search_space.assignment import RecomputeChoice

RESULTS = Path(__file__).with_name("results")
DEVICE = "h100"
MESHES = ((4,), (2, 4))
Made = tuple[nn.Module, dict[str, torch.Tensor], str]  # a model, its batch, and where its blocks are


def gpt2() -> Made:
    """GPT-2 small: 12 layers, 16 sequences of 1024."""
    config = transformers.GPT2Config(n_layer=12, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers warns that it cannot tell this from the name of the class
    return model, _text(16, 1024, config.vocab_size), "transformer.h."


def llama() -> Made:
    """8 layers of Llama's width for a billion weights, 4 query heads to each of keys and values; 4 sequences of 8192."""
    config = transformers.LlamaConfig(
        num_hidden_layers=8, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _text(4, 8192, config.vocab_size), "model.layers."


def vit() -> Made:
    """ViT-B/16 and 128 images."""
    config = transformers.ViTConfig(num_labels=1000)  # type: ignore[call-arg]
    batch = {"pixel_values": torch.empty(128, 3, 224, 224, dtype=torch.bfloat16), "labels": torch.zeros(128, dtype=torch.long)}
    return transformers.ViTForImageClassification(config), batch, "vit.layers."


def _text(rows: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


MODELS: Mapping[str, Callable[[], Made]] = {"gpt2": gpt2, "llama": llama, "vit": vit}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan: seconds of a step, of them computing again and going to the host and back; bytes at the peak; its CPU seconds."""

    seconds: float
    recompute: float
    host: float
    peak: int
    took: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What is alive when a step begins, the budget with half of what it adds, the plan and its micro-batches."""

    begin: int
    budget: int
    plan: Point
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One model on one mesh: per budget the joint plan and the one of two stages, None where there is none."""

    model: str
    mesh: tuple[int, ...]
    blocks: Point
    beside: Point | None  # the joint plan in the memory of the blocks
    half: Half
    rows: Sequence[tuple[int, Point | None, Point | None]]


def swept(name: str, mesh: tuple[int, ...]) -> Sweep:
    """The sweep of a model on a mesh."""
    with torch.device("meta"):
        model, batch, at = MODELS[name]()
    program, options = read_program(model.bfloat16().train(), batch).program, Options(device=DEVICE, budget=PLENTY)
    on = connected_mesh(mesh, options)
    analysis = analysed(TrainingStep(program=program), on, options)
    free = solved(analysis, on, options)
    optimizer = optimizers.optimizer(options.optimizer)
    under = MemoryModel(free.formulated.only(free.solution), optimizer)

    def joint(budget: int) -> Point | None:
        try:
            return _point(solved(analysis, on, replace(options, budget=budget)), options)
        except BudgetError:
            return None

    def staged(budget: int) -> Point | None:
        found = within(under.formulated, under, budget)
        return None if found is None else _point(Optimized(memory_model=under, solution=found, optimizer=optimizer), options)

    least = smallest(free.formulated, free.memory_model)
    assert least is not None
    alive = free.memory_model.walk(free.solution)
    begin, most, fewest = round(alive[0]), float(alive.max()), MARGIN * float(free.memory_model.walk(least).max())
    rows = []
    for share in SHARES:
        budget = round(fewest + share * (most - fewest))
        rows.append((budget, _timed(joint, budget), _timed(staged, budget)))
        print(_line(*rows[-1]), flush=True)
    blocks, half = _blocks(free, options, at), round((begin + most) / 2)
    under_half = best_variant(program, on, replace(options, budget=half, microbatches=AUTO), lambda phase: None)
    return Sweep(
        model=name, mesh=mesh, blocks=blocks, beside=joint(blocks.peak), rows=rows,
        half=Half(
            begin=begin, budget=half, plan=_point(under_half, options), runs=under_half.formulated.analysis.step.microbatches
        ),
    )  # fmt: skip


def _timed(find: Callable[[int], Point | None], budget: int) -> Point | None:
    start = time.process_time()
    found = find(budget)
    return found and replace(found, took=time.process_time() - start)


def _point(found: Optimized, options: Options) -> Point:
    plan = to_plan(found, options)
    breakdown = plan.breakdown
    recompute, host = breakdown.recomputed, sum(breakdown.offload.values())
    return Point(seconds=plan.step_time, recompute=recompute, host=host, peak=plan.peak_memory)


def _blocks(free: Optimized, options: Options, at: str) -> Point:
    """The best layouts with every block computed again."""
    formulated = free.formulated
    chosen = assignment(formulated, free.solution)
    block = {op.name: _block(op.name, at) for op in formulated.program.ops}
    left = {name for op in formulated.program.ops for name in op.operands if _of(name, formulated, block) != block[op.name]}
    inside = [op for op in formulated.program.ops if block[op.name] and left.isdisjoint(r.name for r in op.results)]
    steps = {(r.name, step) for op in inside for r in op.results for step in chosen.routes.get(r.name, ())}
    recompute = RecomputeChoice(ops=frozenset(op.name for op in inside) & formulated.reruns, steps=frozenset(steps))
    chosen = replace(chosen, recompute=recompute)
    plan, peak = to_plan(free, options, chosen), round(float(free.memory_model.liveness.walk(chosen).max()))
    return Point(seconds=plan.step_time, recompute=plan.breakdown.recomputed, host=0.0, peak=peak)


def _block(name: str, at: str) -> str:
    """The number of the block that an op is in."""
    return name.removeprefix(at).split(".")[0].split(":")[0] if name.startswith(at) else ""


def _of(value: str, formulated: PlanningProblem, block: Mapping[str, str]) -> str:
    """The number of the block that a value comes from."""
    op = formulated.program.producer.get(value)
    return block[op.name] if op else ""


WIDTHS = {
    "budget": 10,
    "joint ms": 10,
    "recompute": 8,
    "host": 8,
    "peak": 10,
    "found in": 9,
    "two stages ms": 15,
    "joint is": 13,
}
HEAD = " ".join(f"{name:>{width}}" for name, width in WIDTHS.items())


def _line(budget: int, joint: Point | None, staged: Point | None) -> str:
    line = f"{size_text(budget):>10}"
    if joint:
        line += (
            f" {1e3 * joint.seconds:>10.3f} {1e3 * joint.recompute:>8.3f} {1e3 * joint.host:>8.3f} {size_text(joint.peak):>10}"
        )
        line += f" {joint.took:>7.1f} s"
    else:
        line += f" {'none':>10} {'':>37}"
    line += f" {1e3 * staged.seconds:>15.3f}" if staged else f" {'none':>15}"
    if joint and staged:
        line += f" {1 - joint.seconds / staged.seconds:>6.1%} faster"
    return line


def table(sweep: Sweep) -> str:
    """A sweep as text."""
    blocks = sweep.blocks
    said = [f"{sweep.model} on {'x'.join(map(str, sweep.mesh))}", HEAD, *(_line(*row) for row in sweep.rows)]
    said.append(
        f"blocks: {1e3 * blocks.seconds:.3f} ms, {1e3 * blocks.recompute:.3f} of it again, peak {size_text(blocks.peak)}"
    )
    if best := sweep.beside:
        said.append(
            f"joint within that: {1e3 * best.seconds:.3f} ms, {1e3 * best.recompute:.3f} ms of it again: "
            f"{1 - best.seconds / blocks.seconds:.1%} faster"
        )
    half = sweep.half
    said.append(
        f"half: {size_text(half.begin)} when a step begins, budget {size_text(half.budget)}: {1e3 * half.plan.seconds:.3f} ms, "
        f"peak {size_text(half.plan.peak)}, micro-batches: {half.runs}"
    )
    return "\n".join(said)


def plot(sweeps: Sequence[Sweep], file: Path) -> None:
    """Step time against peak memory, a picture for each sweep."""
    import matplotlib.pyplot as plt

    columns = len(MESHES)
    figure, axes = plt.subplots(math.ceil(len(sweeps) / columns), columns, figsize=(10, 10), squeeze=False)
    for sweep, ax in zip(sweeps, axes.flat, strict=False):
        for label, place, style in (("joint", 1, "o-"), ("two stages", 2, "s--")):
            points = [row[place] for row in sweep.rows if row[place]]
            ax.plot([p.peak / 2**30 for p in points], [1e3 * p.seconds for p in points], style, label=label, markersize=4)
        ax.plot([sweep.blocks.peak / 2**30], [1e3 * sweep.blocks.seconds], "x", label="blocks")
        ax.set(title=f"{sweep.model} on {sweep.mesh}", xlabel="peak, GiB per device", ylabel="step, ms")
        ax.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="default: all")
    parser.add_argument("--mesh", action="append", help="default: 4 and 2,4")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/budgets.txt and budgets.svg")
    options = parser.parse_args()
    meshes = [tuple(int(n) for n in text.split(",")) for text in options.mesh] if options.mesh else MESHES
    sweeps = []
    for name in options.models or MODELS:
        for mesh in meshes:
            sweeps.append(swept(name, mesh))
            print(f"\n{table(sweeps[-1])}\n", flush=True)
    if options.save:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        title = f"{date.today()}, {versions}; device {DEVICE}, predicted"
        files.write(RESULTS / "budgets.txt", "\n\n".join((title, *map(table, sweeps))) + "\n")
        plot(sweeps, RESULTS / "budgets.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())

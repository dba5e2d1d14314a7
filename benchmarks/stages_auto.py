"""Hold the plans of pipeline="auto" against every pipeline that can be forced, and against no stages, by predicted time.

    python benchmarks/stages_auto.py                         six models on four meshes
    python benchmarks/stages_auto.py --model t5 --mesh slow
    python benchmarks/stages_auto.py --save                  and the table of the results

Forced are all numbers of ranks of the outermost axis, of micro-batches and of forwards ahead, every schedule, and one to four
stages a rank, by messages that wait and by those that hide, in the best layouts and by data and tensor parallelism; none is
left out by what is known of others. A line per model and mesh: what is chosen, what is best of the rest, their number. Exit
code 1 where one is faster by more than the gap at which the solver stops. On meta: widths of 2048, four blocks.
"""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from autopar.cost_models import catalog
from autopar.errors import AutoparError, BudgetError, ConstraintError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.passes.microbatches import microbatches
from autopar.plan.options import AUTO, Options
from autopar.plan.plan import Plan
from autopar.planning.pipeline_plan import staged
from autopar.planning.pipeline_search import plan_pipeline
from autopar.planning.pipeline_space import PipelineAxis, cut_mesh
from autopar.planning.pipeline_stages import StageCuts
from autopar.planning.planner import connected_mesh, plan_program, read_program
from autopar.solver.settings import DEFAULTS

RESULTS = Path(__file__).parent / "results" / "stages_auto.txt"
LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 4, 2048, 16, 4096, 8, 1024
CHUNKS = (2, 3, 4)  # stages of a rank, beside one
NAMED = ("ddp", "megatron")  # strategies of stages, beside the best layouts
NONE = math.inf, "none fits"  # seconds of a plan, and what it is
LINE = "{:<8} {:<6} {:>10}  {:<44} {:>10}  {:<44} {:>6} {:>6}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mesh of H100s, in nodes of so many that are joined by a network; the strategy, and the part of the memory that there is
    of what the plan takes that has plenty."""

    sizes: tuple[int, ...]
    per_node: int
    network: str = "ethernet-25g"
    strategy: str = AUTO
    memory: float | None = None


MESHES = {
    "node": Case(sizes=(4,), per_node=8),
    "slow": Case(sizes=(4,), per_node=1),
    "nodes": Case(sizes=(2, 2), per_node=2),
    "tight": Case(sizes=(4,), per_node=1, network="ethernet-100g", strategy="fsdp", memory=0.75),
}


def text(config: type[transformers.PretrainedConfig], kind: str, **sizes: object) -> Program:
    """The program of a language model of this configuration."""
    with torch.device("meta"):
        maker = getattr(transformers, f"AutoModelFor{kind}")
        model = maker.from_config(config(vocab_size=VOCABULARY, **sizes), dtype=torch.bfloat16)
        tokens = torch.empty(BATCH, LENGTH, dtype=torch.long)
    return read_program(model, {"input_ids": tokens, "labels": tokens}).program


def vit() -> Program:
    """Images of 784 patches."""
    config = transformers.ViTConfig(**BLOCKS, image_size=448, patch_size=16, num_labels=1000)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config).to(torch.bfloat16)
        images, labels = torch.empty(BATCH, 3, 448, 448, dtype=torch.bfloat16), torch.empty(BATCH, dtype=torch.long)
    return read_program(model, {"pixel_values": images, "labels": labels}).program


BLOCKS = {
    "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH,
}  # fmt: skip
MODELS: Mapping[str, Callable[[], Program]] = {
    "gpt2": lambda: text(transformers.GPT2Config, "CausalLM", n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH),
    "bert": lambda: text(transformers.BertConfig, "MaskedLM", **BLOCKS, max_position_embeddings=LENGTH),
    "t5": lambda: text(
        transformers.T5Config, "Seq2SeqLM", num_layers=2, num_decoder_layers=2, d_model=WIDTH, d_ff=4 * WIDTH, num_heads=HEADS,
        d_kv=WIDTH // HEADS, decoder_start_token_id=0,
    ),
    "vit": vit,
    "llama": lambda: text(transformers.LlamaConfig, "CausalLM", **BLOCKS, num_key_value_heads=HEADS // 4),
    "mixtral": lambda: text(
        transformers.MixtralConfig, "CausalLM", **BLOCKS | {"intermediate_size": WIDTH}, num_key_value_heads=HEADS // 4,
        num_local_experts=4, num_experts_per_tok=2,
    ),
}  # fmt: skip


def planned(program: Program, mesh: object, options: Options) -> Plan:
    """The plan of a program, with stages if that is asked for."""
    connected = connected_mesh(mesh, options)
    return plan_program(program, connected, options) if options.pipeline is None else plan_pipeline(program, connected, options)


def schedules(ranks: int) -> Iterator[tuple[str, int]]:
    """Every schedule with a name, and how many stages it has."""
    ahead = (f"{name}+{count}" for name in ("1f1b", "zb-h1") for count in range(1, ranks))
    yield from ((name, ranks) for name in ("1f1b", "zb-h1", *ahead, "gpipe"))
    yield from (("interleaved", chunks * ranks) for chunks in CHUNKS)
    yield "zb-v", 2 * ranks


def forced(program: Program, case: Case, options: Options) -> Iterator[tuple[float, str]]:
    """The seconds of the plan without stages, and of every plan in stages that can be forced.

    What was solved of a stage is known to the schedules of one number of ranks and of micro-batches.
    """
    with suppress(BudgetError):
        plain = planned(program, case.sizes, options)
        yield plain.step_time, said(plain.sizes, "no stages", plain.microbatches)
    mesh = connected_mesh(case.sizes, options)
    assert mesh.device is not None
    numbers = [runs for runs in range(1, BATCH + 1) if BATCH % runs == 0]
    for ranks, runs in itertools.product([n for n in range(2, mesh.sizes[0] + 1) if mesh.sizes[0] % n == 0], numbers):
        cut = cut_mesh(mesh, ranks)
        overs = [over for over in over_all(cut, options) for over in (over, over.hiding)]
        with suppress(ConstraintError):  # a batch that cannot be parted
            cuts = StageCuts(microbatches(program, runs), mesh.device)
            for (name, stages), over in itertools.product(schedules(ranks), overs):
                asked = replace(over.options, schedule=name, stages=stages)
                with suppress(AutoparError):  # fewer regions than stages, or nothing that fits
                    chosen = cuts.chosen(cut, over.axis, asked, runs)
                    made = staged(cuts.steps(chosen.starts), cut, over.axis, chosen, over.planner)
                    yield made.seconds, said(cut.sizes, f"{stages} stages by {name}", runs)


def over_all(cut: Mesh, options: Options) -> Iterator[PipelineAxis]:
    """The outermost axis of a mesh, for stages that are planned freely, and by named strategies where they have several
    devices."""
    named = NAMED if options.strategy == AUTO and cut.size > cut.sizes[0] else ()
    for strategy in (options.strategy, *named):
        yield PipelineAxis.of(cut, cut.axes[0], replace(options, pipeline=cut.axes[0], strategy=strategy), DEFAULTS)


def row(model: str, mesh: str) -> tuple[str, bool]:
    """The line of a model on a mesh, and whether nothing is faster than what is chosen."""
    begin, program, case = time.process_time(), MODELS[model](), MESHES[mesh]
    device = replace(catalog.device("h100"), per_node=case.per_node, outer=case.network)
    options = Options(device=device, microbatches=AUTO, strategy=case.strategy)
    auto = replace(options, pipeline=AUTO)
    if case.memory is not None:
        budget = round(case.memory * planned(program, case.sizes, auto).peak_memory)
        options, auto = replace(options, budget=budget), replace(auto, budget=budget)
    chosen, others = NONE, sorted(forced(program, case, options))
    with suppress(BudgetError):
        found = planned(program, case.sizes, auto)
        how = f"{len(found.stages)} stages by {found.pipeline.schedule}" if found.pipeline else "no stages"
        chosen = found.step_time, said(found.sizes, how, found.microbatches)
    best = others[0] if others else NONE
    took = f"{time.process_time() - begin:.0f}"
    line = LINE.format(model, mesh, f"{chosen[0] * 1e3:.3f}", chosen[1], f"{best[0] * 1e3:.3f}", best[1], len(others), took)
    return line, chosen[0] <= best[0] * (1 + DEFAULTS.gap)


def said(sizes: tuple[int, ...], how: str, runs: int) -> str:
    """What a plan is."""
    return f"{'x'.join(map(str, sizes))}, {how}, {runs} micro-batches"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this model (may be repeated)")
    parser.add_argument("--mesh", action="append", choices=list(MESHES), help="only this mesh (may be repeated)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}, a line as it comes")
    options = parser.parse_args()
    lines, slower = [head(), LINE.format("model", "mesh", "auto, ms", "", "forced, ms", "", "plans", "CPU s").rstrip()], 0
    print("\n".join(lines), flush=True)
    for model, mesh in itertools.product(options.model or MODELS, options.mesh or MESHES):
        line, least = row(model, mesh)
        slower += not least
        lines.append(line + ("" if least else "   auto is SLOWER"))
        print(lines[-1], flush=True)
        if options.save:
            RESULTS.write_text("\n".join(lines) + "\n")
    return int(slower > 0)


def head() -> str:
    """When and with what the plans were made."""
    import highspy

    version = highspy.Highs().version()  # type: ignore[no-untyped-call]
    made = f"torch {torch.__version__}, transformers {transformers.__version__}, highspy {version}"
    return f"{datetime.now(tz=UTC):%Y-%m-%d}, Python {platform.python_version()}, {made}; python benchmarks/stages_auto.py"


if __name__ == "__main__":
    sys.exit(main())

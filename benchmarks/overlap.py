"""Plans by prices that overlap beside plans by prices that add up, both judged by the simulator; and what each takes to plan.

    python benchmarks/overlap.py                      every case, each in a process of its own
    python benchmarks/overlap.py gpt2 --mesh 2,4      one model on one mesh

The judge runs the emitted program's order on the device of the catalog, where messages slow computing by beta per second. One
plan is chosen by the same prices with beta = 1, where a step is the sum of what it computes and sends. Times in ms; "price" is
what the integer program's law says of the plan by overlap, "differ" how many weights the two plans store otherwise. CPU seconds
are those of planning alone, one plan after the other in one process; weights are bfloat16 on meta, H100.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import transformers
from torch import nn

from autopar.formulation.prices import Prices
from autopar.formulation.read_solution import assignment
from autopar.formulation.step_time import StepPrices
from autopar.ir.device import Seconds
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.plan.options import Options
from autopar.planning.optimize import Optimized, solution_time
from autopar.planning.plan_search import best_variant
from autopar.planning.planner import connected_mesh, read_program
from autopar.simulator.instructions import simulated

Made = tuple[nn.Module, Mapping[str, torch.Tensor]]


def causal(config: transformers.PretrainedConfig, rows: int, length: int) -> Made:
    """A causal language model with its loss."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    tokens = torch.empty(rows, length, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def llama(layers: int, width: int, inner: int, heads: int) -> Made:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return causal(config, 16, 8192)


def gpt2() -> Made:
    return causal(transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, n_positions=1024, use_cache=False), 64, 1024)


def t5() -> Made:
    """T5-3B: 24 layers in the encoder and in the decoder."""
    config = transformers.T5Config(
        d_model=1024, d_ff=16384, d_kv=128, num_heads=32, num_layers=24, num_decoder_layers=24, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    tokens = torch.empty(64, 512, dtype=torch.long)
    return transformers.T5ForConditionalGeneration(config).bfloat16(), {"input_ids": tokens, "labels": tokens}


def mixtral() -> Made:
    """Eight experts of width 4096 in each of 16 layers."""
    config = transformers.MixtralConfig(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=8,
        num_local_experts=8, vocab_size=32000, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return causal(config, 64, 2048)


def vit() -> Made:
    """ViT-L/16 at 224 x 224."""
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    batch = {"pixel_values": torch.empty(128, 3, 224, 224, dtype=torch.bfloat16), "labels": torch.empty(128, dtype=torch.long)}
    return transformers.ViTForImageClassification(config).bfloat16(), batch


SMALL = ((8,), (2, 4), (8, 8))
CASES: Mapping[str, tuple[Callable[[], Made], tuple[tuple[int, ...], ...]]] = {
    "llama8b": (lambda: llama(32, 4096, 14336, 32), ((8, 8), (16, 8))),
    "llama70b": (lambda: llama(80, 8192, 28672, 64), ((16, 8),)),
    "gpt2": (gpt2, SMALL),
    "t5-3b": (t5, SMALL),
    "mixtral": (mixtral, SMALL),
    "vit-l": (vit, SMALL),
}
HEAD = ("model", 9), ("mesh", 8), ("by sums", 11), ("by overlap", 12), ("change", 8), ("price", 11), ("off", 7), ("differ", 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan with its simulated step on the device as it is, and what it took to find."""

    found: Optimized
    seconds: Seconds
    cpu: Seconds

    @property
    def stored(self) -> Mapping[str, Layout]:
        """How each weight is stored."""
        return assignment(self.found.formulated, self.found.solution).given


def judged(program: Program, mesh: Mesh, options: Options, judge: Mesh) -> Judged:
    """The plan of a program on one mesh, simulated on another of the same shape."""
    start = time.process_time()
    found = best_variant(program, mesh, options, lambda phase: None)
    cpu = time.process_time() - start
    prices = StepPrices(found.formulated.analysis, Prices(mesh=judge, optimizer=found.optimizer))
    chosen = assignment(found.formulated, found.solution)
    return Judged(found=found, seconds=simulated(found.memory_model.liveness, prices, chosen).seconds, cpu=cpu)


def run(name: str, sizes: tuple[int, ...]) -> None:
    """Plan one case in this process, and print its row."""
    with torch.device("meta"):
        model, batch = CASES[name][0]()
    program = read_program(model, batch).program
    options = Options(device="h100")
    mesh = connected_mesh(sizes, options)
    assert mesh.device is not None
    summed = replace(mesh, device=replace(mesh.device, interference=1.0))
    sums, overlap = judged(program, summed, options, mesh), judged(program, mesh, options, mesh)
    price = solution_time(overlap.found.memory_model, overlap.found.solution)
    differ = sum(overlap.stored.get(weight) != layout for weight, layout in sums.stored.items())
    times = f"{sums.seconds * 1e3:>11.3f}{overlap.seconds * 1e3:>12.3f}{overlap.seconds / sums.seconds - 1:>+8.1%}"
    law = f"{price * 1e3:>11.3f}{overlap.seconds / price - 1:>+7.1%}"
    print(f"{name:>9}{'x'.join(map(str, sizes)):>8}{times}{law}{differ:>8}{sums.cpu:>8.1f}{overlap.cpu:>8.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--mesh", help="on this mesh in this process: 2,4")
    options = parser.parse_args()
    unknown = set(options.cases) - CASES.keys()
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.mesh:
        for name in options.cases:
            run(name, tuple(map(int, options.mesh.split(","))))
        return 0
    print("".join(f"{name:>{width}}" for name, width in (*HEAD, ("CPU s", 8), ("CPU s", 8))), flush=True)
    for name in options.cases or CASES:
        for sizes in CASES[name][1]:
            subprocess.run([sys.executable, __file__, name, "--mesh", ",".join(map(str, sizes))], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

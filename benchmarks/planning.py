"""Planning time and memory, phase by phase.

    python benchmarks/planning.py                 every case, each in a process of its own
    python benchmarks/planning.py gpt2 llama8b    these cases
    python benchmarks/planning.py --sums          no message is hidden: without rows for overlap
    python benchmarks/planning.py --peaks         at the prices of before 2026-11-23: peaks, and a step is a sum
    python benchmarks/planning.py --beside PATH   each case by another checkout first
    python benchmarks/planning.py qwen3-next --time-limit 60

CPU seconds count all threads of the process, from its start; memory is its peak resident set up to there. Weights are bfloat16
on meta, the device is an H100.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one mesh: `config` is a transformers configuration class and its arguments."""

    config: str
    arguments: Mapping[str, int]
    batch: tuple[int, int]
    mesh: tuple[int, ...]
    device: str = "h100"
    head: str = "AutoModelForCausalLM"


GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
GPT3 = {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048}
LLAMA8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA70B = LLAMA8B | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
T5_11B = {
    "num_layers": 24,
    "num_decoder_layers": 24,
    "d_model": 1024,
    "d_kv": 128,
    "num_heads": 128,
    "d_ff": 65536,
    "decoder_start_token_id": 0,
}
QWEN3_NEXT = {  # every fourth layer has attention, the others a gated delta rule, in chunks of 64
    "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 64, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}  # fmt: skip

CASES = {
    "gpt2": Case(config="GPT2Config", arguments=GPT2, batch=(16, 1024), mesh=(2, 4)),
    "gpt2-3d": Case(config="GPT2Config", arguments=GPT2, batch=(16, 1024), mesh=(2, 2, 2)),
    "llama8b": Case(config="LlamaConfig", arguments=LLAMA8B, batch=(16, 8192), mesh=(8, 8)),
    "gpt2-2d": Case(config="GPT2Config", arguments=GPT2, batch=(64, 1024), mesh=(8, 8)),
    "gpt2-6d": Case(config="GPT2Config", arguments=GPT2, batch=(64, 1024), mesh=(2,) * 6),
    "qwen3-next": Case(config="Qwen3NextConfig", arguments=QWEN3_NEXT, batch=(8, 1024), mesh=(2, 4)),
    "t5-11b": Case(config="T5Config", arguments=T5_11B, batch=(128, 512), mesh=(8, 8), head="AutoModelForSeq2SeqLM"),
    "llama70b": Case(config="LlamaConfig", arguments=LLAMA70B, batch=(128, 4096), mesh=(16, 8)),
    "gpt3": Case(config="GPT2Config", arguments=GPT3, batch=(256, 2048), mesh=(8, 16, 8)),
}


class Phases:
    """CPU seconds and peak memory at the end of each phase, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float]] = []
        self.spent = 0.0

    def done(self, name: str) -> None:
        now = time.process_time()
        self.rows.append((name, now - self.spent))
        self.spent = now
        print(f"  {name:<12} {self.rows[-1][1]:7.2f} CPU s   {peak_memory() / 2**30:5.2f} GiB", flush=True)


def peak_memory() -> int:
    """The process's peak resident set in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def run(name: str, *, peaks: bool, sums: bool, limit: float | None) -> None:
    """Plan one case in this process and print where the time went."""
    case = CASES[name]
    print(f"{name}: batch {case.batch}, mesh {case.mesh}, {case.device}{', at peaks' * peaks}{', by sums' * sums}")
    phases = Phases()
    import torch
    import transformers

    from autopar.plan.options import Options
    from autopar.planning.planner import connected_mesh, plan_program, read_program

    phases.done("import")
    config = getattr(transformers, case.config)(**case.arguments)
    with torch.device("meta"):
        model = getattr(transformers, case.head).from_config(config, dtype=torch.bfloat16)
        tokens = torch.empty(case.batch, dtype=torch.long)
    phases.done("model")
    captured = read_program(model, {"input_ids": tokens, "labels": tokens})
    phases.done("capture")
    options = Options(device=case.device, time_limit=limit)
    mesh = connected_mesh(case.mesh, options)
    assert mesh.device is not None
    if peaks:
        mesh = replace(mesh, device=mesh.device.at_peak())
    if sums:
        mesh = replace(mesh, device=replace(mesh.device, interference=1.0))
    plan = plan_program(captured.program, mesh, options, phases.done)
    print(f"  {'whole':<12} {phases.spent:7.2f} CPU s   {peak_memory() / 2**30:5.2f} GiB")
    ended = f"{plan.status}, gap {plan.gap:.4%}"
    print(f"  step {plan.step_time:.6e} s, {plan.peak_memory / 2**30:.2f} GiB a device, {ended}", plan.searched)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--here", metavar="CASE", help="run one case in this process")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of the search, without capture")
    parser.add_argument("--sums", action="store_true", help="no message is hidden: a step is a sum")
    parser.add_argument("--peaks", action="store_true", help="kernels run at the device's peaks, and hide no message")
    parser.add_argument(
        "--beside", metavar="PATH", type=Path, help="another checkout, whose own benchmark runs each case first"
    )
    options = parser.parse_args()
    unknown = {*options.cases, *filter(None, [options.here])} - CASES.keys()
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.here:
        run(options.here, peaks=options.peaks, sums=options.sums, limit=options.time_limit)
    else:
        for name in options.cases or CASES:
            if options.beside:
                _run(options.beside.resolve(), name)
            flags = ["--peaks"] * options.peaks + ["--sums"] * options.sums
            limit = [] if options.time_limit is None else ["--time-limit", str(options.time_limit)]
            _run(Path(__file__).resolve().parent.parent, name, *flags, *limit)
    return 0


def _run(checkout: Path, *arguments: str) -> None:
    """One case in a process of its own, by the package of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run(
        [sys.executable, str(checkout / "benchmarks/planning.py"), "--here", *arguments], check=True, env=environment
    )


if __name__ == "__main__":
    sys.exit(main())

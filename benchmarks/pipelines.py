"""Large models on many devices with pipeline="auto", beside the same without stages and beside published configurations.

    python benchmarks/pipelines.py                      every case, each plan in a process of its own
    python benchmarks/pipelines.py gpt3                 one case
    python benchmarks/pipelines.py gpt3 --plan auto     one plan
    python benchmarks/pipelines.py --save               every case, and the table of the results

Exit code 1 if another plan is faster than auto's. All are priced alike. Weights are bfloat16 on meta; CPU seconds count all
threads of the process, from its start. A published configuration is the named strategy "megatron" on the axes that it has, or
the best layouts ("free") there.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planning import GPT3

RESULTS = Path(__file__).parent / "results" / "pipelines.txt"
GPT13B = {"n_layer": 40, "n_embd": 5120, "n_head": 40, "n_positions": 2048}
LLAMA70B = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA8B = LLAMA70B | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a mesh, and what its plans are asked for: `config` is a transformers configuration class and its arguments."""

    config: str
    arguments: Mapping[str, int]
    batch: tuple[int, int]
    mesh: Mapping[str, int]
    plans: Mapping[str, Mapping[str, Any]]
    network: str = "ib-ndr"  # between nodes of H100s


# Four whole layers each, as published.
GPT3_STAGES = [f"transformer.h.{layer}" for layer in range(4, 96, 4)]
LLAMA70B_STAGES = [f"model.layers.{layer}" for layer in range(4, 80, 4)]

# Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, table 3: GPT-3 175B with tensor
# parallel 8, pipeline 8, 3 chunks a rank, micro-batches of one sequence. NVIDIA/NeMo, llama3_70b.py of its recipes: tensor 4,
# pipeline 4, 5 chunks a rank, micro-batches of one sequence, 512 in a batch; its context parallel 2 is left out here.
CASES = {
    "gpt3": Case(
        config="GPT2Config",
        arguments=GPT3 | {"vocab_size": 51200},  # as Megatron has it
        batch=(1024, 2048),
        mesh={"node": 128, "gpu": 8},
        plans={
            "auto": {"pipeline": "auto"},
            "none": {"microbatches": "auto"},
            "published": {
                "mesh": {"pp": 8, "dp": 16, "tp": 8}, "pipeline": "pp", "stages": GPT3_STAGES, "schedule": "interleaved",
                "microbatches": 64, "strategy": "megatron",
            },
            "published, free": {
                "mesh": {"pp": 8, "dp": 16, "tp": 8}, "pipeline": "pp", "stages": GPT3_STAGES, "schedule": "interleaved",
                "microbatches": 64,
            },
        },
    ),
    "llama70b": Case(
        config="LlamaConfig",
        arguments=LLAMA70B,
        batch=(512, 8192),
        mesh={"node": 64, "gpu": 8},
        plans={
            "auto": {"pipeline": "auto"},
            "none": {"microbatches": "auto"},
            "published": {
                "mesh": {"pp": 4, "dp": 32, "tp": 4}, "pipeline": "pp", "stages": LLAMA70B_STAGES, "schedule": "interleaved",
                "microbatches": 16, "strategy": "megatron",
            },
        },
    ),
    "llama8b": Case(
        config="LlamaConfig",
        arguments=LLAMA8B,
        batch=(256, 8192),
        mesh={"pp": 4, "node": 8, "gpu": 8},  # of which the stages have a given axis
        plans={
            "auto": {"pipeline": "pp"},
            "1f1b": {"pipeline": "pp", "schedule": "1f1b", "microbatches": 8},
            "zb-h1": {"pipeline": "pp", "schedule": "zb-h1", "microbatches": 8},
            "zb-v": {"pipeline": "pp", "schedule": "zb-v", "stages": 8, "microbatches": 16},
        },
    ),
    "gpt13b": Case(
        config="GPT2Config",
        arguments=GPT13B,
        batch=(256, 2048),
        mesh={"node": 16, "gpu": 8},
        network="ethernet-25g",
        plans={"auto": {"pipeline": "auto", "microbatches": 16}, "none": {"microbatches": 16}},
    ),
}  # fmt: skip


def run(name: str, which: str) -> None:
    """Make one plan in this process and print what it is and takes."""
    import torch
    import transformers

    import autopar
    from autopar.cost_models import catalog

    case = CASES[name]
    asked = dict(case.plans[which])
    device = replace(catalog.device("h100"), outer=case.network)
    mesh = asked.pop("mesh", dict(case.mesh))
    config = getattr(transformers, case.config)(**case.arguments)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        tokens = torch.empty(case.batch, dtype=torch.long)
    try:
        plan = autopar.plan(model, {"input_ids": tokens, "labels": tokens}, mesh, device=device, **asked)
    except autopar.AutoparError as error:
        print(f"{name:<9} {which:<16} {str(error).splitlines()[0]}   {time.process_time():.0f} CPU s", flush=True)
        return
    pipeline, memory = plan.pipeline, f"{plan.peak_memory / 2**30:.1f} GiB"
    how = f"{len(plan.stages)} stages, {pipeline.schedule}" if pipeline else "no stages"
    print(
        f"{name:<9} {which:<16} {plan.step_time:8.4f} s  {memory:>9}  {plan.mesh}, {how}, {plan.microbatches} micro-batches, "
        f"gap {plan.gap:.1%}   {time.process_time():.0f} CPU s",
        flush=True,
    )
    if plan.searched:
        print(f"{'':<26} {plan.searched}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--plan", metavar="PLAN", help="make one plan of one case in this process")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.parent.name}/{RESULTS.name}, a line as it comes")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    if options.plan:
        run(options.cases[0], options.plan)
        return 0
    lines, slower = [head()], False
    for name in options.cases or CASES:
        case, seconds = CASES[name], dict[str, float]()
        lines.append(f"{name}: batch {case.batch}, mesh {dict(case.mesh)}, h100 over {case.network}")
        print(lines[-1], flush=True)
        for which in case.plans:
            command = [sys.executable, __file__, name, "--plan", which]
            lines.append(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip())
            print(lines[-1], flush=True)
            if found := re.search(r"\d+\.\d+(?= s )", lines[-1]):
                seconds[which] = float(found[0])
            if options.save:
                RESULTS.write_text("\n".join(lines) + "\n")
        slower |= seconds.get("auto", math.inf) > min(seconds.values(), default=math.inf)
    print("another plan is faster than auto's" if slower else "no plan is faster than auto's")
    return int(slower)


def head() -> str:
    """When and with what the plans were made."""
    import highspy
    import torch
    import transformers

    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}, highspy {highspy.Highs().version()}"  # type: ignore[no-untyped-call]
    return f"{datetime.now(tz=UTC):%Y-%m-%d}, Python {platform.python_version()}, {libraries}"


if __name__ == "__main__":
    sys.exit(main())

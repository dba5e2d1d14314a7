"""Planning time and memory, phase by phase, and the cost of known plans.

    python benchmarks/planning.py                 every case, each in a process of its own
    python benchmarks/planning.py gpt2 llama8b    these cases
    python benchmarks/planning.py --check         small cases: fail if a plan costs more than benchmarks/costs.json says
    python benchmarks/planning.py --record        write benchmarks/costs.json

CPU seconds count all threads of the process, from its start; memory is its peak resident set up to there. Weights are bfloat16
on meta, the device is an H100.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

COSTS = Path(__file__).with_name("costs.json")
TOLERANCE = 1e-3  # the solver's own proven gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one mesh: `config` is a transformers configuration class and its arguments."""

    config: str
    arguments: Mapping[str, int]
    batch: tuple[int, int]
    mesh: tuple[int, ...]
    device: str = "h100"
    small: bool = False  # quick enough for every check


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
SMALL_GPT2 = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 512}
SMALL_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}

CASES = {
    "gpt2": Case(config="GPT2Config", arguments=GPT2, batch=(16, 1024), mesh=(2, 4)),
    "gpt2-3d": Case(config="GPT2Config", arguments=GPT2, batch=(16, 1024), mesh=(2, 2, 2)),
    "llama8b": Case(config="LlamaConfig", arguments=LLAMA8B, batch=(16, 8192), mesh=(8, 8)),
    "gpt3": Case(config="GPT2Config", arguments=GPT3, batch=(256, 2048), mesh=(8, 16, 8)),
    "small-gpt2": Case(config="GPT2Config", arguments=SMALL_GPT2, batch=(8, 128), mesh=(2, 4), small=True),
    "small-llama": Case(config="LlamaConfig", arguments=SMALL_LLAMA, batch=(8, 128), mesh=(4,), small=True),
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


def run(name: str) -> None:
    """Plan one case in this process and print where the time went."""
    case = CASES[name]
    print(f"{name}: batch {case.batch}, mesh {case.mesh}, {case.device}")
    phases = Phases()
    import torch
    import transformers

    from autopar.planner import Options, located, plan_program, read_program

    phases.done("import")
    config = getattr(transformers, case.config)(**case.arguments)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        tokens = torch.empty(case.batch, dtype=torch.long)
    phases.done("model")
    captured = read_program(model, {"input_ids": tokens, "labels": tokens})
    phases.done("capture")
    options = Options(device=case.device)
    plan = plan_program(captured.program, located(case.mesh, options), options, phases.done)
    print(f"  {'whole':<12} {phases.spent:7.2f} CPU s   {peak_memory() / 2**30:5.2f} GiB")
    print(f"  step {plan.step_time:.6e} s, {plan.peak_memory / 2**30:.2f} GiB a device, {plan.status}, gap {plan.gap:.4%}")
    print(json.dumps({"case": name, "step_time": plan.step_time, "cpu": phases.spent, "memory": peak_memory()}))


def measured(name: str) -> dict[str, float]:
    """The last line of a case that ran in a process of its own."""
    out = subprocess.run([sys.executable, __file__, "--here", name], check=True, stdout=subprocess.PIPE, text=True).stdout
    *lines, last = out.splitlines()
    print("\n".join(lines), flush=True)
    found: dict[str, float] = json.loads(last)
    return found


def check(costs: Mapping[str, float]) -> bool:
    """Whether no small plan costs more than was recorded."""
    ok = True
    for name, case in CASES.items():
        if case.small:
            cost, known = measured(name)["step_time"], costs.get(name, float("inf"))
            if cost > known * (1 + TOLERANCE):
                print(f"  worse: {cost:.6e} s, recorded {known:.6e} s")
                ok = False
    return ok


def record() -> bool:
    """Write what the small plans cost now."""
    costs = {name: measured(name)["step_time"] for name, case in CASES.items() if case.small}
    COSTS.write_text(json.dumps(costs, indent=2) + "\n")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: all that are not small")
    parser.add_argument("--check", action="store_true", help="small cases against the recorded costs")
    parser.add_argument("--record", action="store_true", help="record the small cases' costs")
    parser.add_argument("--here", metavar="CASE", help="run one case in this process")
    options = parser.parse_args()
    unknown = {*options.cases, *filter(None, [options.here])} - CASES.keys()
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    actions: dict[str, Callable[[], bool]] = {
        "check": lambda: check(json.loads(COSTS.read_text())),
        "record": record,
        "all": lambda: all(map(measured, options.cases or [name for name, case in CASES.items() if not case.small])),
    }
    if options.here:
        run(options.here)
        return 0
    return 0 if actions["check" if options.check else "record" if options.record else "all"]() else 1


if __name__ == "__main__":
    sys.exit(main())

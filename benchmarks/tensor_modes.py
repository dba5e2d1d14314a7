"""Every tensor mode on a GPT-2: its layouts, what a layer sends, equal numbers, and its price beside auto's.

    python -m benchmarks.tensor_modes           some lines for each mode and size
    python -m benchmarks.tensor_modes --save    into benchmarks/results/tensor_modes.txt

Of three layers the middle one is shown; devices are H100s on NVLink. Bytes are those of the activations that the layer sends
in a pass by the plan's list, in units of b s h elements, an all-reduce as the two messages that it is. Beside them stands the
closed form of docs/declaration.md: `=` and `<=` are checked; `~` is where the cheapest plan of so small a model sends
something else, and the form is that of larger ones (tests/planning/test_tensor_modes.py). Numbers are those of
`autopar.verify` in float64, on as many ranks as the mesh has (threads that gloo joins): the largest error of output, loss and
gradients, and whether the collectives that rank 0 was recorded to issue are those of the plan's list.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import nn

import autopar
from autopar import files
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.verify.verification import verify
from tests.support.planning import NVLINK, mesh
from tests.support.threads import Threads

RESULTS = Path(__file__).resolve().parent / "results/tensor_modes.txt"
BLOCK = "transformer.h.1."
WEIGHTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
BATCH, LENGTH, WIDTH = 16, 64, 256


@dataclass(frozen=True, slots=True)
class Case:
    """A mode on a mesh, and what its closed form says."""

    mode: str
    sizes: tuple[int, ...]
    form: str
    units: float
    relation: Literal["=", "<=", "~"]


CASES = (
    *(Case("1d", sizes, "4", 4, "<=") for sizes in ((2,), (4,), (8,))),
    *(Case("sequence", sizes, "4", 4, "=") for sizes in ((2,), (4,), (8,))),
    Case("fsdp+sequence", (2, 4), "4/2", 2, "="),
    Case("zero1+1d", (2, 4), "4/2", 2, "~"),
    Case("2d", (2, 2), "7/q", 7 / 2, "<="),
    *(Case(mode, (2, 2, 2), "7/(d q)", 7 / 4, "<=") for mode in ("ddp+2.5d", "zero1+2.5d", "zero1+2d")),
    Case("3d", (2, 2, 2), "16/p^2", 16 / 4, "~"),
)


def main() -> int:
    """Run all cases; 1 if one has other numbers or messages than it should, or is priced below auto."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    lines, failed = [f"{date.today()}, torch {torch.__version__}, python -m benchmarks.tensor_modes", ""], False
    with ThreadedRanks() as world:
        for case in CASES:
            found, ok = row(case, Threads(world))
            failed |= not ok
            lines += found
            print("\n".join(found), flush=True)
    if options.save:
        files.write(RESULTS, "\n".join(lines) + "\n")
    return int(failed)


def row(case: Case, threads: Threads) -> tuple[list[str], bool]:
    """The lines of one case, and whether it is what it should be."""
    model, words = gpt2()
    on, batch = mesh(case.sizes, NVLINK), {"input_ids": words, "labels": words}
    best = autopar.plan(model, batch, on).step_time
    report = verify(model, batch, on, None, Options(strategy=case.mode), threads)
    plan = report.plan
    sent = [activations(plan, where) for where in ("forward", "backward")]
    low, high = {"=": (0.99, 1.01), "<=": (0.0, 1.01), "~": (0.5, 2.0)}[case.relation]
    formed = all(low * case.units <= size <= high * case.units for size in sent)
    ok = report.ok and formed and best <= plan.step_time * (1 + 1e-6)
    listed = "not as listed" if report.surplus or report.missing else "recorded as listed"
    return [
        f"{case.mode} on {case.sizes}" + ("" if ok else ": NOT WHAT IT SHOULD BE"),
        f"    the layer sends {sent[0]:.2f} and {sent[1]:.2f} b s h, {case.relation} {case.form}; "
        f"{len(plan.collectives)} messages, {listed}; error {report.max_error:.1e}; "
        f"step {plan.step_time * 1e3:.4f} ms, auto {best * 1e3:.4f}",
        *layouts(plan),
        "",
    ], ok


def gpt2() -> tuple[nn.Module, torch.Tensor]:
    """A model of three layers, and words."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=WIDTH, n_head=8, vocab_size=256, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval(), torch.randint(256, (BATCH, LENGTH))


def activations(plan: Plan, where: str) -> float:
    """What activations the layer sends in a pass; small messages, of biases' gradients and norms' moments, are left out."""
    elements = BATCH * LENGTH * WIDTH
    found = [c for c in plan.collectives if c.value.startswith(BLOCK) and ":" in c.value and c.where == where]
    large = [c for c in found if c.bytes > max(c.bytes for c in found) / 30]
    return sum((1 + (c.kind == "all_reduce")) * c.bytes for c in large) / elements / 4


def layouts(plan: Plan) -> Iterator[str]:
    """How the layer's products and their weights are split."""
    for name in WEIGHTS:
        stored = plan.layouts[f"{BLOCK}{name}.weight"]
        *_, made = (layout for value, layout in plan.layouts.items() if value.startswith(f"{BLOCK}{name}:"))
        yield f"    {name:<12} weight {stored:<26} result {made}"


if __name__ == "__main__":
    sys.exit(main())

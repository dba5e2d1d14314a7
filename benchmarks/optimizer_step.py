"""CPU time of an optimizer's step on the host: on DTensors, and on each rank's parts by `autopar.step_locally`.

    torchrun --nproc-per-node 2 benchmarks/optimizer_step.py --save

Weights are small, so that what is left is dispatch: 12 layers of a transformer have 144 parameters, sharded as by FSDP. Steps
alternate between the two; the figure is the median of the process's CPU time per step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import autopar

LAYERS, WIDTH, STEPS = 12, 32, 40
RESULTS = Path(__file__).parent / "results" / "optimizer_step.txt"


def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def seconds(optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, float]:
    """The median CPU time of a step of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(STEPS):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.step()
            found[name].append(time.process_time() - start)
    return {name: statistics.median(times[3:]) for name, times in found.items()}


def main() -> None:
    """Print, and perhaps save, a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(4, 8, WIDTH)
    parallel = autopar.parallelize(model(), x, (2,), strategy="fsdp")
    autopar_parameters = [*parallel.parameters()]
    for parameter in autopar_parameters:
        parameter.grad = torch.ones_like(parameter)
    ways = {"for-loop": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    made: dict[str, torch.optim.Optimizer] = {}
    for way, how in ways.items():
        made[f"DTensor, {way}"] = torch.optim.AdamW(autopar_parameters, **how)
        made[f"local, {way}"] = autopar.step_locally(torch.optim.AdamW(autopar_parameters, **how))
    found = seconds(made)
    lines = [f"AdamW, {len(autopar_parameters)} parameters sharded over 2 processes, CPU ms per step", ""]
    for way in ways:
        dtensor, local = (found[f"{kind}, {way}"] * 1e3 for kind in ("DTensor", "local"))
        lines.append(f"{way:10} DTensor {dtensor:8.2f}   local {local:8.2f}   ratio {local / dtensor:.2f}")
    if dist.get_rank() == 0:
        print("\n".join(lines))
        if options.save:
            RESULTS.write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

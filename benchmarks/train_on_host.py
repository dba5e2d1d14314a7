"""A billion parameters trained in less device memory than they take: `python -m benchmarks.train_on_host [--save]`.

Three steps of torch's fused AdamW on a GPT of 1.0e9 parameters in float32, as the plain module and as a plan that keeps
weights, gradients and optimizer state on the host. The device is a CPU that stands for one: what is on it is counted, and what
the host has apart. Losses and all parameters are compared to the bit. It takes 17 GB of memory and some minutes.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.cost_models import catalog
from autopar.cost_models.links import LINKS
from autopar.verify.testing import peak
from benchmarks.host_memory import GPT

RESULTS = Path(__file__).parent / "results" / "train_on_host.txt"
BUDGET, HOST = 2 * 10**9, 20 * 10**9  # bytes of the device, and of its host
TOKENS = 64


def made() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The model with its weights, and a batch."""
    torch.manual_seed(0)
    tokens = torch.randint(50304, (1, TOKENS + 1))
    return GPT(2048, 16, 16), (tokens[:, :-1], tokens[:, 1:])


def step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> float:
    """One step; returns the loss."""
    optimizer.zero_grad()
    loss: torch.Tensor = module(*batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def digest(module: nn.Module) -> str:
    """One of all parameters."""
    found = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


def plain() -> tuple[list[float], str]:
    """Losses and parameters of the user's module."""
    module, batch = made()
    optimizer = adamw(module)
    return [step(module, optimizer, batch) for _ in range(3)], digest(module)


def rows() -> Iterator[str]:
    """What both did."""
    start = time.perf_counter()
    losses, parameters = plain()
    gc.collect()
    yield f"plain       losses {losses}, {time.perf_counter() - start:.0f} s"
    module, batch = made()
    size = sum(p.nbytes for p in module.parameters())
    device = replace(catalog.device("cpu"), host=LINKS["pcie4"], host_memory=HOST, host_bandwidth=2e10)
    plan = autopar.plan(module, batch, (1,), device=device, offload="host", budget=BUDGET)
    parallel = autopar.parallelize(module, batch, plan=plan)
    del module
    gc.collect()
    optimizer, found, start = adamw(parallel), list[float](), time.perf_counter()
    found.append(step(parallel, optimizer, batch))
    measured = peak(parallel, optimizer, batch, lambda: found.append(step(parallel, optimizer, batch)), steps=1).bytes
    yield f"on the host losses {found}, {time.perf_counter() - start:.0f} s"
    yield f"equal to the bit: losses {found == losses}, parameters {digest(parallel) == parameters}"
    yield f"parameters {size / 1e9:.2f} GB; device {measured / 1e9:.2f} GB counted, {plan.peak_memory / 1e9:.2f} GB planned"
    yield f"host {plan.host_memory / 1e9:.2f} GB planned"


def main() -> None:
    """Print what was seen, and write it with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    lines = []
    for line in rows():
        print(line, flush=True)
        lines.append(line)
    if parser.parse_args().save:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Planning time of models with a loop in `forward`, as users write them, which capture unrolls; of layers that are all
different; and of a GPT-2 of two layers on meshes of three to ten axes, of many devices, and of numbers that divide nothing.

    python -m benchmarks.loops                  every case, each in a process of its own
    python -m benchmarks.loops scan linears     these cases
    python -m benchmarks.loops --beside PATH    a line for each case, by another checkout and by this one

CPU seconds count all threads of the process, from its start; models are float32 on meta, the device is an H100.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.planning import Phases, peak_memory

WORDS = 128
ROOT = Path(__file__).resolve().parent.parent
LIMIT = 180  # CPU seconds of a process beside another
Batch = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
Made = Callable[[int], tuple[nn.Module, Batch]]  # of so many steps or layers


class SelectiveScan(nn.Module):
    """The selective state space of Mamba (Gu and Dao, 2023), step by step: h = exp(dt A) h + dt B u, y = C h."""

    def __init__(self, width: int, states: int = 16) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.dt, self.bc = nn.Linear(width, width), nn.Linear(width, 2 * states)
        self.a = nn.Parameter(torch.rand(width, states))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u, gate = self.enter(x).chunk(2, -1)
        dt, (b, c) = F.softplus(self.dt(u)), self.bc(u).chunk(2, -1)
        kept = torch.exp(dt.unsqueeze(-1) * -self.a)
        added = dt.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        h, found = x.new_zeros(x.shape[0], *self.a.shape), []
        for t in range(x.shape[1]):
            h = kept[:, t] * h + added[:, t]
            found.append((h * c[:, t].unsqueeze(1)).sum(-1))
        result: torch.Tensor = self.leave(torch.stack(found, 1) * F.silu(gate))
        return result


class LinearAttention(nn.Module):
    """The time mixing of RWKV (Peng et al., 2023) step by step, into place: out = r (u k v + state), state = w state + k v."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.rkvg = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.w, self.u = (nn.Parameter(torch.rand(heads, width // heads, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], *self.w.shape[:2])
        r, k, v, gate = (one(self.norm(x)).view(split) for one in self.rkvg)
        state, out = x.new_zeros(x.shape[0], *self.w.shape[:2], self.w.shape[1]), torch.zeros_like(v)
        for t in range(x.shape[1]):
            kv = k[:, t].unsqueeze(-1) @ v[:, t].unsqueeze(-2)
            out[:, t] = (r[:, t].unsqueeze(-2) @ (self.u * kv + state)).squeeze(-2)
            state = torch.exp(-torch.exp(self.w)) * state + kv
        result: torch.Tensor = self.leave((out * torch.sigmoid(gate)).flatten(2))
        return result


class Cell(nn.Module):
    """`nn.RNNCell`, or the same by hand, over all words, which are cut apart before the loop."""

    def __init__(self, width: int, *, by_hand: bool = False) -> None:
        super().__init__()
        self.cell = None if by_hand else nn.RNNCell(width, width)
        self.x, self.h = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = torch.zeros_like(x[:, 0]), []
        for word in x.unbind(1):
            h = self.cell(word, h) if self.cell is not None else torch.tanh(self.x(word) + self.h(h))
            found.append(h)
        return torch.stack(found, 1)


class Recurrent(nn.Module):
    """An embedding, layers of one kind with residual connections, a head, and the loss of the next word."""

    def __init__(self, *layers: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(layers)

    def forward(self, words: torch.Tensor, next_words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), next_words.flatten())


def scan(width: int) -> nn.Module:
    """Two layers of a selective scan."""
    return Recurrent(SelectiveScan(width), SelectiveScan(width), width=width)


def rwkv(width: int) -> nn.Module:
    """Two layers of linear attention with a decay."""
    return Recurrent(LinearAttention(width), LinearAttention(width), width=width)


def cell(width: int) -> nn.Module:
    """A recurrent layer of `nn.RNNCell`."""
    return Recurrent(Cell(width), width=width)


def rnn(width: int) -> nn.Module:
    """A recurrent layer written by hand."""
    return Recurrent(Cell(width, by_hand=True), width=width)


class Linears(nn.Module):
    """Linear layers in a loop, no two of the same shape: nothing repeats."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        widths = [512 + 64 * (7 * place % layers) for place in range(layers + 1)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.square().mean()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its batch on meta, of so many steps or layers, and a mesh."""

    made: Made
    steps: int
    mesh: tuple[int, ...]


def words(model: Callable[[int], nn.Module], rows: int = 32, width: int = 256) -> Made:
    """What makes a recurrent model, and its batch of so many steps."""
    return lambda steps: (model(width), (torch.empty(rows, steps, dtype=torch.long),) * 2)


def linears(layers: int) -> tuple[nn.Module, Batch]:
    """Layers that are all different, and their batch."""
    return Linears(layers), (torch.empty(1024, 512),)


def gpt2(layers: int) -> tuple[nn.Module, Batch]:
    """A GPT-2 of the smallest width, and its batch."""
    from transformers import AutoModelForCausalLM, GPT2Config

    tokens = torch.empty(64, 512, dtype=torch.long)
    return AutoModelForCausalLM.from_config(GPT2Config(n_layer=layers)), {"input_ids": tokens, "labels": tokens}


MANY_OR_ODD = ((1024,), (4096, 8), (13,), (7, 11))
CASES = {
    "scan": Case(made=words(scan), steps=64, mesh=(2, 4)),
    "rnn": Case(made=words(rnn), steps=300, mesh=(2, 4)),
    "cell": Case(made=words(cell), steps=200, mesh=(2, 4)),
    "rwkv": Case(made=words(rwkv), steps=200, mesh=(2, 4)),
    "linears-25": Case(made=linears, steps=25, mesh=(2, 2, 2)),
    "linears-2d": Case(made=linears, steps=100, mesh=(2, 4)),
    "linears": Case(made=linears, steps=100, mesh=(2, 2, 2)),
    **{f"axes-{axes}": Case(made=gpt2, steps=2, mesh=(2,) * axes) for axes in (3, 4, 5, 6, 8, 10)},
    **{f"mesh-{'x'.join(map(str, sizes))}": Case(made=gpt2, steps=2, mesh=sizes) for sizes in MANY_OR_ODD},
}


def run(name: str, limit: float | None = None) -> None:
    """Plan one case in this process and print where the time went."""
    from autopar.plan.options import Options
    from autopar.planning.planner import connected_mesh, plan_program, read_program

    case = CASES[name]
    print(f"{name}: {case.steps} steps, mesh {case.mesh}" + (f", time_limit={limit:g}" if limit else ""))
    phases = Phases()
    with torch.device("meta"):
        model, batch = case.made(case.steps)
    phases.done("model")
    captured = read_program(model, batch)
    phases.done("capture")
    options = Options(device="h100", time_limit=limit)
    plan = plan_program(captured.program, connected_mesh(case.mesh, options), options, phases.done)
    print(f"  {'whole':<12} {phases.spent:7.2f} CPU s   {peak_memory() / 2**30:5.2f} GiB   {len(captured.program.ops)} ops")
    print(f"  step {plan.step_time:.6e} s, {plan.status}, gap {plan.gap:.4%}", plan.searched)


def plain(name: str, checkout: Path) -> None:
    """Plan one case by the package of a checkout, and print a line."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
    sys.path.insert(0, str(checkout))
    import autopar

    assert Path(autopar.__file__).is_relative_to(checkout), autopar.__file__
    case = CASES[name]
    with torch.device("meta"):
        model, batch = case.made(case.steps)
    plan = autopar.plan(model, batch, case.mesh, device="h100")
    print(f"{time.process_time():6.1f} CPU s   step {plan.step_time:.4e} s   {plan.status}, gap {plan.gap:.2%}", flush=True)


def beside(name: str, checkout: Path) -> None:
    """The lines of one case, by another checkout and by this one."""
    for place, title in ((checkout, "before"), (ROOT, "now")):
        print(f"{name:<12}{title:<8}", end="", flush=True)
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.loops", "--here", name, "--beside", str(place)], cwd=ROOT, stderr=subprocess.PIPE
        )
        if ran.returncode < 0:
            print(f"no end within {LIMIT} CPU s", flush=True)
        elif ran.returncode:
            print(ran.stderr.decode(errors="replace").splitlines()[-1], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; default: all")
    parser.add_argument("--here", metavar="CASE", help="run one case in this process")
    parser.add_argument("--beside", metavar="PATH", type=Path, help="another checkout, which plans each case first")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="that of the plan")
    options = parser.parse_args()
    unknown = {*options.cases, *filter(None, [options.here])} - CASES.keys()
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if options.here and options.beside:
        plain(options.here, options.beside.resolve())
        return 0
    if options.here:
        run(options.here, options.time_limit)
        return 0
    if options.beside:
        for name in options.cases or CASES:
            beside(name, options.beside.resolve())
        return 0
    limit = ["--time-limit", str(options.time_limit)] if options.time_limit else []
    for name in options.cases or CASES:
        subprocess.run([sys.executable, "-m", "benchmarks.loops", "--here", name, *limit], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

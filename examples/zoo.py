"""Capture, plan, run and verify the architectures of the zoo on processes of this machine, one row each.

    python examples/zoo.py                               all of them, on four processes
    python examples/zoo.py --only mixtral --only t5      these
    python examples/zoo.py --mesh 8                      on another mesh
    python examples/zoo.py --plan-only                   capture and plan, run nothing
    python examples/zoo.py --save                        write the table to benchmarks/results/zoo.txt as well

A number is the largest error |a - b| / (1 + max |b|) of all outputs, gradients and buffers in float64, in train mode with
dropout 0, beside the same model on one device; under "2x batch" the best plan runs on twice the batch that it was made for.
"planned whole" are the operators without a sharding rule, with their share of the time of a step on one device, as priced (an
operator of a library by its bytes). What fails is said in its row, the reason below the table; exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # some of the models are those of the tests

import autopar
from autopar import files
from autopar.cost_models import catalog
from autopar.cost_models.compute import pricer
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.operators import fit
from autopar.operators.registry import writes
from autopar.plan.options import Options
from autopar.plan.plan import Plan
from autopar.planning.planner import plan_program, read_program
from autopar.runtime.workers import WorkerPool
from autopar.verify.verification import verify
from examples.zoo_models import MODELS, Built, make

STRATEGIES = ("auto", "fsdp", "megatron")
SEEDS = range(5)
RANDOM = f"{len(SEEDS)} random"
TWICE = "2x batch"  # of the sample for which the best plan was made
RESULTS = Path("benchmarks", "results", "zoo.txt")
WIDTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is found of one model: its cells by column, and what went wrong, by column too."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    complaints: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def filling(self, column: str) -> Iterator[None]:
        """Keeps what goes wrong in one column, so that the others are filled all the same."""
        try:
            yield
        except Exception as error:  # whatever it is, the table goes on
            self.cells[column] = "fails"
            self.complaints[column] = f"{type(error).__name__}: {error}"


def main() -> int:
    """Make the table; returns the exit code."""
    options = arguments()
    on, rows = mesh(options.mesh), []
    warnings.filterwarnings("ignore", message="no sharding rule")  # the table says it
    with contextlib.ExitStack() as stack:
        pool = None if options.plan_only else stack.enter_context(WorkerPool(on.size, preload=["autopar.verify.verification"]))
        for name in options.only or MODELS:
            rows.append(row(name, on, pool))
            print(name, *rows[-1].cells.values(), sep="  ", file=sys.stderr, flush=True)
    text = report(rows, on)
    print(text)
    if options.save:
        files.write(Path(__file__).resolve().parent.parent / RESULTS, text + "\n")
    return 1 if any(found.complaints for found in rows) else 0


def mesh(sizes: tuple[int, ...]) -> Mesh:
    """A mesh of slow devices and fast links, the fastest innermost, on which the best plan splits even these models."""
    h100 = catalog.device("h100", processes=1).at_peak()
    made_up = "made up, so that small models are worth splitting"
    slow = replace(h100, name="slow", flops=dict.fromkeys(h100.flops, 1e8), bandwidth=1e9, launch=0.0, source=made_up)
    links = [autopar.Link(name="fast", latency=1e-7, bandwidth=1e9 * 2**axis, source=made_up) for axis in range(len(sizes))]
    return replace(Mesh.of(sizes), links=tuple(links), device=slow)


def row(name: str, on: Mesh, pool: WorkerPool | None) -> Row:
    """One model, as far as it gets; without a pool it is only planned."""
    found = Row(name=name)
    with found.filling("ops"):
        made = make(name)
        begin = time.perf_counter()
        program = read_program(*made).program
        found.cells["ops"], found.cells["kinds"] = str(len(program.ops)), str(len({op.target for op in program.ops}))
        found.cells["planned whole"] = whole(program, on)
        with found.filling("plan s"):
            plan_program(program, on, Options())
            found.cells["plan s"] = f"{time.perf_counter() - begin:.1f}"
        for column, makers in plans(made, on).items() if pool else ():
            with found.filling(column):
                found.cells[column] = compared(found, column, made, on, makers, pool)
    return found


def whole(program: Program, on: Mesh) -> str:
    """The operators without a rule, and their share of the time of a step on one device."""
    assert on.device is not None
    values, missing, seconds, spent = program.values, dict[str, None](), 0.0, 0.0
    for op in program.ops:
        price = pricer(op, values, on.device)([values[name].shape for name in op.operands], [r.shape for r in op.results])
        seconds += price
        if not writes(op) and fit(op, values) is None:
            missing[op.target.removeprefix("aten.").removesuffix(".default")] = None
            spent += price
    return f"{', '.join(missing)}: {spent / seconds:.1%}" if missing else "-"


def plans(made: Built, on: Mesh) -> dict[str, Sequence[Callable[[], Plan]]]:
    """The plans of each column, to be made when it is their turn."""

    def named(strategy: str, **dynamic: int) -> Callable[[], Plan]:
        return lambda: autopar.plan(*made, on, strategy=strategy, dynamic=dynamic)

    def drawn(seed: int) -> Callable[[], Plan]:
        return lambda: autopar.testing.random_plan(*made, on, seed=seed)

    found = {strategy: [named(strategy)] for strategy in STRATEGIES}
    return {**found, RANDOM: [drawn(seed) for seed in SEEDS], TWICE: [named("auto", batch=0)]}


def twice(sample: dict[str, Any]) -> dict[str, Any]:
    """A batch twice as long."""
    return {name: torch.cat([one, one.flip(0)]) if isinstance(one, torch.Tensor) else one for name, one in sample.items()}


def compared(
    found: Row, column: str, made: Built, on: Mesh, makers: Sequence[Callable[[], Plan]], pool: WorkerPool | None
) -> str:
    """The largest error of some plans; what differs is a complaint."""
    model, sample = made
    batch = twice(sample) if column == TWICE else sample
    reports = [verify(model, batch, on, plan(), Options(), pool) for plan in makers]
    for number, report in enumerate(reports):
        if not report.ok:
            wrong = [f"{one.what} {one.name}: {one.error:.1e}" for one in report.rows if not one.ok]
            wrong += [f"issued, but not in the plan: {entry}" for entry in report.surplus]
            wrong += [f"in the plan, but not issued: {entry}" for entry in report.missing]
            found.complaints[f"{column}, plan {number}" if len(makers) > 1 else column] = "\n".join(wrong)
    worst = max(report.max_error for report in reports)
    return f"{worst:.1e}" if all(report.ok for report in reports) else f"DIFFERS {worst:.1e}"


def report(rows: Sequence[Row], on: Mesh) -> str:
    """The table, and below it what went wrong."""
    columns = ["ops", "kinds", "planned whole", "plan s", *STRATEGIES, RANDOM, TWICE]
    title = f"mesh {on}: largest error |a - b| / (1 + max |b|) in float64"
    table = Table("model", *columns, box=None, title=title, title_justify="left")
    for found in rows:
        table.add_row(found.name, *(found.cells.get(column, "") for column in columns))
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    for found in rows:
        lines += [f"\n{found.name}, {column}: {complaint}" for column, complaint in found.complaints.items()]
    failed = sum(1 for found in rows if found.complaints)
    return "\n".join([*lines, "", f"{failed} of {len(rows)} models fail" if failed else f"all {len(rows)} models are right"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Capture, plan, run and verify the architectures of the zoo.")
    parser.add_argument("--only", action="append", choices=list(MODELS), help="only this model (may be repeated)")
    parser.add_argument("--mesh", type=sizes_of, default=(2, 2), help="sizes of the mesh (default: 2,2)")
    parser.add_argument("--plan-only", action="store_true", help="capture and plan, run nothing")
    parser.add_argument("--save", action="store_true", help=f"write the table to {RESULTS}")
    return parser.parse_args()


def sizes_of(text: str) -> tuple[int, ...]:
    """ "2,4" as (2, 4)."""
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())

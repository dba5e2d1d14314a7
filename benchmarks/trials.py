"""One module beside its plans, in a process of its own with limits of time and memory.

It is captured, planned on two devices (the cheapest plan, and one drawn at random), and run on threads as ranks: all outputs,
gradients and buffers beside the user's module in float64, within 1e-9, or what the module itself has of digits. Where capture
refuses, torch.export is asked for the same module and sample.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import multiprocessing
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.capture import Captured
from autopar.errors import AutoparError
from autopar.plan.options import Options
from autopar.planning.planner import read_program
from autopar.runtime.threaded_ranks import ThreadedRanks
from autopar.verify.execution import doubled, error
from autopar.verify.reference import module_results
from benchmarks.hub_report import Record
from tests.fuzz.trial import Planner, Setting, Tried, WrongNumber, in_double

SETTING = Setting(sizes=(2,), plans=("auto", 0))
CPU_SECONDS, WALL_SECONDS, BYTES = 60, 1200, 6 << 30  # of one module
LAST_DIGIT, TIMES = 1e-15, 8


class NotBuilt(Exception):
    """No small model of ours runs in eager mode."""


@dataclass(slots=True)
class Trial:
    """What is found of one module: the record of `found`, which `tell` has after each stage."""

    found: Record
    tell: Callable[[Record], None]

    def done(self, stage: str, **what: Any) -> None:
        """A stage is reached."""
        seconds = {**self.found.get("seconds", {}), stage: round(time.process_time(), 1)}
        self.found.update(what, stage=stage, seconds=seconds)
        self.tell(self.found)

    def run(self, module: torch.nn.Module, sample: Record, options: Options | None = None, **said: Any) -> None:
        """Try a module, of which so much is said; what fails is raised."""
        inputs = {name: list(one.shape) for name, one in sample.items()}
        self.done("built", inputs=inputs, parameters=sum(one.numel() for one in module.parameters()), **said)
        try:
            captured = read_program(module, sample, options or Options())
        except Exception:
            self.done("built", exported=exported(module, sample))
            raise
        self.done("captured", ops=len(captured.program.ops))
        if any("grouped_mm" in op.target for op in captured.program.ops):  # torch has it in no double precision
            for part in module.modules():  # its own set_experts_implementation leaves some out
                if hasattr(part, "config"):
                    part.config._experts_implementation_internal = "eager"
        with _double_by_default(), ThreadedRanks() as world:
            tried = Tried(module, sample, captured, SETTING, world, around=(wide := Wide()))
            self.found["tied"] = wide.tied

            def judged(run: Callable[[], object]) -> None:
                """Run it, and again with as many digits as the module itself has if it has no more."""
                try:
                    run()
                except WrongNumber:
                    if "digits" in self.found:
                        raise
                    found = own_digits(module, sample, captured, tried)
                    tried.exact = {key: max(1e-9, digits) for key, digits in found.items()}
                    self.found["digits"] = max(tried.exact.values())
                    run()

            try:
                judged(tried.sequentially)
            except WrongNumber:
                self.found["traced"] = not exported(module, sample) and exported_differs(module, sample)
                raise
            self.done("same")
            planner = Planner(module, sample, captured, SETTING)
            for plan in SETTING.plans:
                resolved = planner.plan(plan)
                self.done("planned" if self.found["stage"] == "same" else self.found["stage"])
                judged(lambda resolved=resolved: tried.under(resolved))
                self.done("equal" if plan == SETTING.plans[-1] else "planned")


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    """What operators make of integers is in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def ties(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> bool:
    """Whether values that are equal but for rounding decide which are the k largest, or their order: any of them is right."""
    x = x.detach().double().sort(dim=dim, descending=largest).values
    return bool((x.diff(dim=dim).narrow(dim, 0, min(k, x.shape[dim] - 1)).abs() <= 1e-12 * x.abs().max()).any())


class Wide(TorchFunctionMode):
    """Double precision where a module asks for single by name, so that it is compared at the precision of the program.

    `tied` says whether the result is one of several right ones.
    """

    tied = False

    def __enter__(self) -> Wide:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *what: Any) -> None:
        super().__exit__(*what)
        torch.set_default_dtype(self.before)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        self.tied = self.tied or (getattr(func, "__name__", "") == "topk" and ties(*args, **(kwargs or {})))
        change: Callable[[Any], Any] = lambda one: wider.get(one, one) if isinstance(one, torch.dtype) else one  # noqa: E731
        return func(*map(change, args), **{name: change(one) for name, one in (kwargs or {}).items()})


def own_digits(module: torch.nn.Module, sample: Record, captured: Captured, tried: Tried) -> dict[tuple[str, str], float]:
    """How far each result of the user's own module moves, some times over, where its parameters move in the last digit.

    Gradients that are zero but for terms that cancel have fewer digits than double precision.
    """
    torch.manual_seed(5)
    moved = in_double(module)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + LAST_DIGIT * torch.randn_like(parameter))
    with Wide():
        found = module_results(moved, {name: doubled(one) for name, one in sample.items()}, captured, tried.loss.whole)
    return {key: TIMES * error(found[key], expected) for key, expected in tried.expected.items()}


def exported(module: torch.nn.Module, sample: dict[str, torch.Tensor]) -> str:
    """What torch.export says of a module and its sample: "" where it takes them."""
    try:
        torch.export.export(copy.deepcopy(module), (), sample | _uncached(module), strict=False)
    except Exception as error:
        return said(error)
    return ""


def exported_differs(module: torch.nn.Module, sample: dict[str, torch.Tensor]) -> bool:
    """Whether what torch.export makes of a module computes something else too: a library may ask whether it is traced."""
    results, given = [], sample | _uncached(module)
    for called in (module, torch.export.export(copy.deepcopy(module), (), given, strict=False).module()):
        torch.manual_seed(0)
        found = called(**given)
        leaves = torch.utils._pytree.tree_leaves(dict(found) if isinstance(found, Mapping) else found)
        results.append([one for one in leaves if isinstance(one, torch.Tensor)])
    return any(error(ours, theirs) > 1e-4 for ours, theirs in zip(*results, strict=True))


def _uncached(module: torch.nn.Module) -> Record:
    """What has a model of transformers return no cache."""
    return {"use_cache": False} if "use_cache" in inspect.signature(module.forward).parameters else {}


def said(error: BaseException) -> str:
    """An error in a line or two."""
    text = str(error).strip().splitlines()
    kept = text if isinstance(error, AutoparError) else text[:1]
    return f"{type(error).__name__}: {' | '.join(map(str.strip, kept))}"[:600]


Build = Callable[[str, Trial], None]  # builds what has a name, and runs its trial


def outcome(kind: str, build: Build) -> Record:
    """What is found of one module, in a process that is ended at its limits."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(kind, build, its))
    process.start()
    its.close()
    found: Record | None = {"kind": kind, "stage": "", "reason": "ended before it said anything"}
    end = time.monotonic() + WALL_SECONDS
    last = found
    try:
        while found is not None and mine.poll(max(0.0, end - time.monotonic())):
            if (found := mine.recv()) is not None:
                last = found
        finished = found is None
    except EOFError:
        finished = False
    if not finished:
        last |= {"reason": f"ended at a limit: {CPU_SECONDS} s of CPU, {WALL_SECONDS} s, {BYTES >> 30} GiB", "limit": True}
    process.kill()
    process.join()
    return last


def _child(kind: str, build: Build, pipe: Connection) -> None:
    """The process of one module."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: Record = {"kind": kind, "stage": ""}
    try:
        build(kind, Trial(found, pipe.send))
    except BaseException as error:  # whatever it is, the trial goes on
        found |= {
            "reason": said(error),
            "wrong": isinstance(error, WrongNumber) and not (found.get("tied") or found.get("traced")),
        }
        if not isinstance(error, (AutoparError, WrongNumber, NotBuilt)):
            found["where"] = "".join(traceback.format_exception(error)[-4:])
        pipe.send(found)
    pipe.send(None)


def known_of(log: Path) -> dict[str, Record]:
    """What was found before; of what was tried again, the last."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {record["kind"]: record for record in map(json.loads, lines)}
